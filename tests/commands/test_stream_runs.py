"""Runs with the stream trainer, with rules, workers, trainer and journal as in `jaxrl train` (tests/support): each
gradient is compared, before its update, with the one that the whole batch gives at once, with the same weights.

`test_equal_runs.py` has runs of the command, compared at their end.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_streamed_runs import RealRun

from jaxrl.types import RunFailed

pytestmark = pytest.mark.slow  # tests/mechanisms/stream_trainer has gradients of parts, quicker
ON = {"enable": True}
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one step off": {"trainer.one_step_off": True},
    "tail batching": {"rollout.tail_batching": ON, "data.train_batch_size": 6},
    "partial rollout": {"rollout.partial_rollout": ON},
    "partial rollout, ratios computed anew": {"rollout.partial_rollout": ON, "rollout.stale_tokens": "recompute"},
    "dynamic sampling, one step off": {"algorithm.filter_groups": ON, "trainer.one_step_off": True},
    "over-provisioning": {"rollout.over_provisioning": ON, "data.train_batch_size": 6},
    "all at once": {
        "rollout.tail_batching": ON,
        "algorithm.filter_groups": ON,
        "trainer.one_step_off": True,
        "trainer.stream": {"enable": True, "short_rounds": True},
        "data.train_batch_size": 6,
    },
}
WAITS_FOR_ALL = ("plain", "one step off", "tail batching")
MACHINES = [  # devices, workers
    *((name, 2, 2) for name in COMPOSITIONS),
    *((name, 4, workers) for name in ("plain", "partial rollout", "all at once") for workers in (2, 4)),
]


@pytest.mark.parametrize(("name", "num_devices", "num_workers"), MACHINES)
def test_compositions(tmp_path: Path, x64: None, name: str, num_devices: int, num_workers: int):
    """Every gradient to 1e-12, in float64. Where the rule waits for all, the groups are those without streaming; races
    and dynamic sampling may find others, because fewer workers decode once some are freed."""
    folder = tmp_path / "streamed"
    folder.mkdir()
    run = RealRun(folder, COMPOSITIONS[name] | {"rollout.num_workers": num_workers}, num_devices=num_devices)
    assert run.go(1)
    run.check_learnt(1e-12)
    assert run.num_freed()
    assert run.streamed_share > 0
    if name in WAITS_FOR_ALL:
        values = COMPOSITIONS[name] | {"rollout.num_workers": num_workers, "trainer.stream": {}}
        plain = RealRun(tmp_path, values, num_devices=num_devices)
        assert plain.go(2)
        assert plain.batches() == run.batches()
        assert np.linalg.norm(plain.weights - run.weights) <= 1e-9 * np.linalg.norm(plain.weights)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("call", ["open", "give", "close"])
def test_a_failure_on_the_freed_devices(tmp_path: Path, x64: None, call: str):
    """The boundary before the step is saved, and another process repeats the step."""
    run, failures = RealRun(tmp_path, COMPOSITIONS["one step off"] | {"trainer.save_freq": 0}), count()
    run.fails = lambda name: name == call and 1 in run.groups and next(failures) == 0
    with pytest.raises(RunFailed, match=f"no memory in {call}.*; saved after step [1-4]$"):
        run.go(1)
    assert max(run.groups) == max(run.saves)
    assert run.go(2)
    run.check_learnt(1e-12)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_device_that_is_lost(tmp_path: Path, x64: None, worker: int):
    run, plans = RealRun(tmp_path, COMPOSITIONS["one step off"] | {"trainer.save_freq": 1}), count()
    run.break_collect = lambda which: which == worker and 2 in run.groups and next(plans) == 2
    with pytest.raises(RuntimeError, match=f"the device of worker {worker} is lost"):
        run.go(1)
    assert max(run.saves)
    assert run.go(2)
    run.check_learnt(1e-12)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of infinite rewards
def test_a_gradient_that_is_not_finite(tmp_path: Path, x64: None):
    """The update is skipped and counted, as without streaming; the next one is right again."""
    skipped = {}
    for stream in ({}, ON):
        folder = tmp_path / str(len(stream))
        folder.mkdir()
        run = RealRun(folder, COMPOSITIONS["one step off"] | {"trainer.stream": stream})
        run.spoils = lambda key: (key.epoch, key.prompt_index) == (0, 4)  # of step 2
        assert run.go(1)
        run.check_learnt(1e-12)
        skipped[len(stream)] = [measured["actor/skipped_updates"] for measured in run.metrics.values()]
        assert run.is_finite[2] == (False, False)
        assert [step for step, finite in run.is_finite.items() if not finite[0]] == [2]
    assert skipped[0] == skipped[1] == [0, 1, 0, 0, 0]
    assert run.streamed[2], "of the batch that was skipped something was streamed"
