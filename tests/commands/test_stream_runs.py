"""Whole runs of a tiny model with the stream trainer: the updates are those without it, also after SIGKILL.

Two kinds. In this process, with rules, workers, trainer and journal as in `jaxrl train` (tests/support): each gradient
is compared, before its update, with the one that the whole batch gives at once, with the same weights. And runs of the
command itself, compared at their end.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_streamed_runs import RealRun
from runs import MADE_UP_PROFILE, ROOT, WIDE, Runs, assert_same_end, end, num_steps, state_of

from jaxrl.record.metrics import read_metrics
from jaxrl.types import RunFailed

SIZES = (
    *("rollout.num_blocks=260", "rollout.max_num_seqs=16", "rollout.decode_steps=2", "data.max_response_length=96"),
    *("actor.ppo_mini_batch_size=0", "actor.use_kl_loss=true", "trainer.total_training_steps=4"),
    "rollout.stop=[a, b, c, d, e, f]",  # groups end one after another, long before the last: also on a busy machine
)
STREAM = ("trainer.stream.enable=true",)
FAILING = str(ROOT / "tests" / "support" / "failing_jaxrl.py")


def check_same(run_dir: Path, expected: Path) -> None:
    """All that was drawn is the same; gradients and weights up to the order of sums in float64."""
    for ours, theirs in zip(read_metrics(run_dir), read_metrics(expected), strict=True):
        for name in ("critic/rewards/mean", "response_length/mean", "perf/total_num_tokens"):
            assert ours[name] == theirs[name], name
        for name in ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "actor/entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-12, nan_ok=True), name
    (arrays, _), (others, _) = state_of(run_dir), state_of(expected)
    names = [name for name in others if "'params'" in name]
    assert names
    for name in names:
        gap = np.linalg.norm(arrays[name] - others[name])
        assert gap <= 1e-9 * np.linalg.norm(others[name]), name


ON = {"enable": True}
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a reference": {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.3},
    "one step off": {"trainer.one_step_off": True},
    "tail batching": {"rollout.tail_batching": ON, "data.train_batch_size": 6},
    "tail batching, short rounds too": {
        "rollout.tail_batching": ON,
        "data.train_batch_size": 6,
        "trainer.stream": {"enable": True, "short_rounds": True},
    },
    "partial rollout": {"rollout.partial_rollout": ON},
    "partial rollout, ratios computed anew": {"rollout.partial_rollout": ON, "rollout.stale_tokens": "recompute"},
    "dynamic sampling": {"algorithm.filter_groups": ON},
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
WAITS_FOR_ALL = ("plain", "a reference", "one step off", "tail batching")
MACHINES = [  # devices, workers
    *((name, 2, 2) for name in COMPOSITIONS),
    *((name, 4, workers) for name in ("plain", "partial rollout", "all at once") for workers in (2, 4)),
]


def check_composition(
    folder: Path, name: str, num_devices: int, num_workers: int, tolerance: float = 1e-12, **more: Any
) -> RealRun:
    values = COMPOSITIONS[name] | {"rollout.num_workers": num_workers} | more
    folder.mkdir(exist_ok=True)
    run = RealRun(folder, values, num_devices=num_devices)
    assert run.go(1)
    run.check_learnt(tolerance)
    assert run.num_freed()
    assert run.streamed_share > 0
    return run


def test_gradients_beside_the_rollout_are_those_of_the_batch(tmp_path: Path, x64: None):
    check_composition(tmp_path, "plain", 2, 2, **{"trainer.total_training_steps": 2})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_devices", "num_workers"), MACHINES)
def test_compositions(tmp_path: Path, x64: None, name: str, num_devices: int, num_workers: int):
    """Every gradient to 1e-12, in float64. Where the rule waits for all, the groups are those without streaming; races
    and dynamic sampling may find others, because fewer workers decode once some are freed."""
    run = check_composition(tmp_path / "streamed", name, num_devices, num_workers)
    print(f"{name}: {run.streamed_share:.2f} streamed, gaps up to {max(run.gaps.values()):.1e}")
    if name in WAITS_FOR_ALL:
        values = COMPOSITIONS[name] | {"rollout.num_workers": num_workers, "trainer.stream": {}}
        plain = RealRun(tmp_path, values, num_devices=num_devices)
        assert plain.go(2)
        assert plain.batches() == run.batches()
        assert np.linalg.norm(plain.weights - run.weights) <= 1e-9 * np.linalg.norm(plain.weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "one step off"])
def test_in_float32(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    for option in ("actor.dtype", "actor.param_dtype", "rollout.dtype"):
        monkeypatch.setitem(COMPOSITIONS[name], option, "float32")
    check_composition(tmp_path, name, 4, 2, tolerance=1e-5)


# ---------------------------------------------------------------- failures


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "one step off"])
@pytest.mark.parametrize("call", ["open", "give", "close"])
def test_a_failure_on_the_freed_devices(tmp_path: Path, x64: None, name: str, call: str):
    """The boundary before the step is saved, and another process repeats the step."""
    run, failures = RealRun(tmp_path, COMPOSITIONS[name] | {"trainer.save_freq": 0}), count()
    run.fails = lambda name: name == call and 1 in run.groups and next(failures) == 0
    with pytest.raises(RunFailed, match=f"no memory in {call}.*; saved after step [1-4]$"):
        run.go(1)
    assert max(run.groups) == max(run.saves)
    assert run.go(2)
    run.check_learnt(1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "one step off"])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_device_that_is_lost(tmp_path: Path, x64: None, name: str, worker: int):
    run, plans = RealRun(tmp_path, COMPOSITIONS[name] | {"trainer.save_freq": 1}), count()
    run.break_collect = lambda which: which == worker and 2 in run.groups and next(plans) == 2
    with pytest.raises(RuntimeError, match=f"the device of worker {worker} is lost"):
        run.go(1)
    assert max(run.saves)
    assert run.go(2)
    run.check_learnt(1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of infinite rewards
@pytest.mark.parametrize("name", ["plain", "one step off"])
def test_a_gradient_that_is_not_finite(tmp_path: Path, x64: None, name: str):
    """The update is skipped and counted, as without streaming; the next one is right again."""
    skipped = {}
    for stream in ({}, ON):
        folder = tmp_path / str(len(stream))
        folder.mkdir()
        run = RealRun(folder, COMPOSITIONS[name] | {"trainer.stream": stream})
        run.spoils = lambda key: (key.epoch, key.prompt_index) == (0, 4)  # of step 2
        assert run.go(1)
        run.check_learnt(1e-12)
        skipped[len(stream)] = [measured["actor/skipped_updates"] for measured in run.metrics.values()]
        assert run.is_finite[2] == (False, False)
        assert [step for step, finite in run.is_finite.items() if not finite[0]] == [2]
    assert skipped[0] == skipped[1] == [0, 1, 0, 0, 0]
    assert run.streamed[2], "of the batch that was skipped something was streamed"


# ---------------------------------------------------------------- the command


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "workers"), [(2, 2), (4, 4)])
def test_a_run_with_streaming_trains_the_same(tmp_path: Path, tiny_model: Path, devices: int, workers: int):
    runs = Runs(tmp_path, tiny_model)
    options = (*WIDE, *SIZES, f"rollout.num_workers={workers}")
    plain, streamed, cut = (tmp_path / name for name in ("plain", "streamed", "cut"))
    runs.finish(plain, *options, devices=devices)
    runs.finish(streamed, *options, *STREAM, devices=devices)
    check_same(streamed, plain)
    lines = read_metrics(streamed)
    assert any(line["rollout/scale_down/freed"] for line in lines)
    assert any(line["actor/streamed_share"] > 0 for line in lines)
    assert all(0.2 <= line.get("rollout/scale_down/done_share", 0.2) <= 0.5 for line in lines)
    runs.kill_after(3, cut, *options, *STREAM, devices=devices)
    runs.finish(cut, *options, *STREAM, devices=devices)
    check_same(cut, plain)


@pytest.mark.slow
def test_workers_that_switch_their_layouts(tmp_path: Path, tiny_model: Path):
    """By a made-up profile: what is freed moves its KV, which is predicted to be faster than computing it again."""
    runs, profile = Runs(tmp_path, tiny_model), tmp_path / "profile.json"
    layout = f"rollout.layout={{switch: true, profile: {profile}, allow_synthetic: true, min_gain: 0.0, cooldown: 2}}"
    options = (*WIDE, *SIZES, "rollout.num_workers=2")
    plain, streamed = tmp_path / "plain", tmp_path / "streamed"
    runs.finish(plain, *options, devices=4)
    made_up = (MADE_UP_PROFILE, f"--out={profile}")
    with runs.start(plain, *options, layout, devices=4, program=made_up) as process:
        end(process)
    runs.finish(streamed, *options, *STREAM, layout, devices=4)
    check_same(streamed, plain)
    lines = read_metrics(streamed)
    assert sum(line["actor/streamed_share"] for line in lines) > 0
    assert sum(line["rollout/layout/switches"] for line in lines) > 0
    assert sum(line.get("rollout/scale_down/copied_tokens", 0) for line in lines) > 0


@pytest.mark.slow
@pytest.mark.parametrize("off", [False, True])
def test_two_runs_that_nothing_stops_are_the_same(tmp_path: Path, tiny_model: Path, off: bool):
    """Bit for bit, in float32, whenever the host looks for verdicts and for room in the stream."""
    runs = Runs(tmp_path, tiny_model)
    sizes = (*SIZES, "data.train_batch_size=6", "trainer.total_training_steps=6")
    options = (*sizes, *STREAM, "rollout.num_workers=2", f"trainer.one_step_off={off}")
    failing = (FAILING, "late", "train")
    runs.finish(tmp_path / "plain", *options, devices=2)
    for name in ("late", "late again"):
        with runs.start(tmp_path / name, *options, devices=2, program=failing) as process:
            end(process)
        assert_same_end(tmp_path / name, tmp_path / "plain")
    assert sum(line["actor/streamed_share"] for line in read_metrics(tmp_path / "plain")) > 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stream", "device"])
@pytest.mark.parametrize("off", [False, True])
def test_a_run_that_fails_beside_its_rollout_goes_on(tmp_path: Path, tiny_model: Path, fault: str, off: bool):
    runs, cut = Runs(tmp_path, tiny_model), tmp_path / "cut"
    options = (*WIDE, *SIZES, "rollout.num_workers=2", f"trainer.one_step_off={str(off).lower()}")
    runs.finish(tmp_path / "plain", *options, devices=2)
    failing = (FAILING, fault, "train")
    with runs.start(cut, *options, *STREAM, devices=2, program=failing) as process:
        output = end(process, status=1)
    said = " ".join(output.split())
    if fault == "stream":
        assert "gradients beside the rollout have failed on the devices of workers" in said
        assert "(RESOURCE_EXHAUSTED: out of memory): run again, with trainer.stream.enable off" in said
        assert f"saved after step {num_steps(cut)}" in said
        assert "Traceback" not in said
    else:
        assert "INTERNAL: the device is lost" in said
    assert num_steps(cut) < 4
    runs.finish(cut, *options, *STREAM, devices=2)
    check_same(cut, tmp_path / "plain")
    assert sum(line["actor/streamed_share"] for line in read_metrics(cut)) > 0


@pytest.mark.slow
def test_updates_are_skipped_as_without_streaming(tmp_path: Path, tiny_model: Path):
    runs, skipped = Runs(tmp_path, tiny_model), {}
    options = (*WIDE, *SIZES, "rollout.num_workers=2", "trainer.max_bad_steps=0")
    failing = (FAILING, "nan", "train")
    for name, stream in (("plain", ()), ("streamed", STREAM)):
        with runs.start(tmp_path / name, *options, *stream, devices=2, program=failing) as process:
            end(process)
        skipped[name] = [line["actor/skipped_updates"] for line in read_metrics(tmp_path / name)]
    assert skipped["streamed"] == skipped["plain"]
    assert {0, 1} == set(skipped["plain"])
    lines = read_metrics(tmp_path / "streamed")
    assert any(line["actor/skipped_updates"] and line["actor/streamed_share"] for line in lines)
    check_same(tmp_path / "streamed", tmp_path / "plain")
