"""Runs with gradients beside the rollout that are killed, fail, and go on: each group is learnt from once, and a step
that runs again adds up the same in the same order.

The whole loop over replayed devices (tests/support/streamed_runs.py); the same on real ones is in
tests/commands/test_equal_runs.py and tests/faults/test_kills.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streamed_runs import Run, replayed, whole

from jaxrl.types import RunFailed

RACES = ("tail_batching", "partial_rollout", "over_provisioning")
ON = {"enable": True}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one step off": {"trainer.one_step_off": True},
    "dynamic sampling": {"algorithm.filter_groups": ON},
    "tail batching": {"rollout.tail_batching": ON, "data.train_batch_size": 6},
    "short rounds too": {
        "rollout.tail_batching": ON,
        "data.train_batch_size": 6,
        "trainer.stream": {"enable": True, "short_rounds": True, "max_done": 0.7},
    },
    "partial rollout": {"rollout.partial_rollout": ON, "data.train_batch_size": 6},
    "four workers, dealt by prompt": {"rollout.num_workers": 4, "rollout.deal": "prompts"},
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Unbroken runs, each made once: of a rule, with a clock of its own, and without streaming if that is said."""

    @cache
    def run(rule: str, chance: int = 1, streams: bool = True) -> Run:
        values = RULES[rule] | ({} if streams else {"trainer.stream": {}})
        return whole(tmp_path_factory.mktemp("straight"), values, seed=3, chance=chance)

    return run


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    rule = draw(st.sampled_from(["", *RACES]))
    values: dict[str, Any] = {} if not rule else {f"rollout.{rule}": ON}
    stream = {
        "enable": True,
        "min_done": draw(st.sampled_from([0.05, 0.2])),
        "max_done": draw(st.sampled_from([0.5, 0.9])),
        "trigger": draw(st.sampled_from(["adaptive", "fixed"])),
        "short_rounds": draw(st.booleans()),
    }
    return values | {
        "algorithm.filter_groups": {"enable": draw(st.booleans()), "max_num_gen_batches": 1000},
        "data.train_batch_size": draw(st.sampled_from([2, 5])),
        "reward.score_when": draw(st.sampled_from(["sample", "group"])),
        "rollout.deal": draw(st.sampled_from(["tokens", "prompts"])),
        "rollout.num_workers": draw(st.sampled_from([2, 4])),
        "trainer.one_step_off": draw(st.booleans()),
        "trainer.save_freq": draw(st.sampled_from([0, 1, 2])),
        "trainer.stream": stream,
    }


MOMENTS = st.one_of(
    st.tuples(st.just("look"), st.integers(1, 150)),
    st.tuples(st.sampled_from(["before", "after"]), st.integers(1, 12)),
)


@settings(max_examples=8)
@given(options(), st.integers(0, 1 << 20), st.sampled_from([0.0, 0.1]), st.lists(MOMENTS, max_size=4))
def test_a_killed_run_is_the_unbroken_one_with_its_journal(values, seed, timeouts, moments):
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), values, seed, timeouts)
        for chance, moment in enumerate(moments):
            if run.go(chance, moment):
                break
        else:
            assert run.go(len(moments))
        run.check()
        again = replayed(Path(folder) / "again", run, 1000)
        assert again.parts == run.parts, "the same additions in the same order"
        assert again.streamed == run.streamed
        assert again.digest == run.digest
        assert again.batches() == run.batches()


def test_every_entry_of_the_journal_may_be_the_last(straight: Callable[..., Run], tmp_path: Path):
    """A process ends at each entry of a run, before or after it is on the disk; the next one has another clock."""
    unbroken = straight("plain")
    assert unbroken.num_freed()
    assert sum(map(len, unbroken.streamed.values()))
    for number in range(1, len(unbroken.told) + 1):
        for when in ("before", "after"):
            folder = tmp_path / f"{when} {number}"
            folder.mkdir()
            run = Run(folder, RULES["plain"], 3)
            assert not run.go(1, (when, number))
            begun = dict(run.told)
            assert begun == dict(list(unbroken.told.items())[: number - (when == "before")])
            assert run.go(1 + number)
            run.check()
            assert run.told.items() >= begun.items()
            assert run.digest == unbroken.digest, "the clock of the next process decides nothing"


@pytest.mark.parametrize("rule", RULES)
def test_no_clock_decides(rule: str, straight: Callable[..., Run]):
    """Verdicts come later and earlier, and so does room in the stream: what is added up, and how, is the same. Where
    all are waited for, it is the groups of a run without streaming. In a race, and with dynamic sampling, others may
    end first once fewer workers decode; there each group counts once (`whole` checks it)."""
    plain, first = straight(rule, streams=False), straight(rule, 10)
    assert not plain.told
    assert sum(map(len, first.streamed.values()))
    for chance in range(3):
        run = straight(rule, chance)
        assert run.parts == first.parts
        assert run.digest == first.digest
        if rule in ("plain", "one step off", "four workers, dealt by prompt"):
            assert run.batches() == plain.batches()
        for measured in run.metrics.values():
            stream = run.config.trainer.stream
            assert stream.min_done <= measured.get("rollout/scale_down/done_share", stream.min_done) <= stream.max_done


def nth(call: str, number: int) -> Callable[[str], bool]:
    """True once, at the nth call of that name."""
    seen = 0

    def fails(name: str) -> bool:
        nonlocal seen
        seen += name == call
        return name == call and seen == number

    return fails


@pytest.mark.parametrize(
    ("rule", "call", "number"),
    [
        ("plain", "open", 1),
        ("one step off", "give", 3),
        ("partial rollout", "poll", 5),
        ("one step off", "finish", 2),
        ("plain", "close", 1),
    ],
)
def test_a_failure_on_the_freed_devices_repeats_the_step(
    rule: str, call: str, number: int, straight: Callable[..., Run], tmp_path: Path
):
    """As any failure of an update: the boundary before it stands, and nothing of the step has been trained on."""
    run = Run(tmp_path, RULES[rule] | {"trainer.save_freq": 0}, seed=3)
    run.fails = nth(call, number)
    with pytest.raises(RunFailed) as caught:
        run.go(1)
    step = max(run.saves) + 1
    assert len(run.saves) == 1
    assert f"step {step}: gradients beside the rollout have failed on the devices of workers " in str(caught.value)
    assert f"(RESOURCE_EXHAUSTED: no memory in {call}): run again, with trainer.stream.enable off" in str(caught.value)
    assert str(caught.value).endswith(f"; saved after step {step - 1}")
    assert sorted(run.groups) == list(range(1, step)), "nothing after the boundary"
    assert run.go(2)
    run.check()
    assert replayed(tmp_path / "again", run, 1000).digest == run.digest
    assert run.batches() == straight(rule).batches()


@pytest.mark.parametrize(("rule", "worker", "number"), [("plain", 0, 6), ("one step off", 1, 14), ("plain", 1, 1)])
def test_a_device_that_is_lost_in_the_rollout(rule: str, worker: int, number: int, tmp_path: Path):
    """With its worker freed or not: the error is what it is without streaming, and the step runs again."""
    run, seen = Run(tmp_path, RULES[rule] | {"trainer.save_freq": 1}, seed=3), []

    def breaks(which: int) -> bool:
        seen.append(which)
        return seen.count(worker) == number and which == worker

    run.break_collect = breaks
    with pytest.raises(RuntimeError, match=f"^the device of worker {worker} is lost$"):
        run.go(1)
    last = max(run.saves, default=0)
    assert max(run.groups, default=0) <= last + 1
    assert run.go(2)
    run.check()
    assert replayed(tmp_path / "again", run, 1000).digest == run.digest
