"""Simulated runs with gradients beside the rollout, killed or failed and resumed: each group is learned from once, and
a step that runs again adds up the same in the same order, whatever its clock and that of the step before.

The same on real devices is in tests/commands/test_equal_runs.py and tests/faults/test_kills.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_runs import House, Killed, Metrics, check, make_config, make_workload, samples_of

from jaxrl.mechanisms.stream_trainer import StreamTrainer
from jaxrl.record.journal import Journal
from jaxrl.run.simulation import Simulation
from jaxrl.types import Group, RunFailed, StreamFailed

ON = {"enable": True}
STREAM = {"enable": True, "pace": 0.25, "min_done": 0.2, "max_done": 0.7}
SMALL = {
    **{"data.train_batch_size": 5, "rollout.num_workers": 2, "rollout.max_num_seqs": 16, "rollout.num_blocks": 400},
    **{"trainer.stream": STREAM, "trainer.num_devices": 4, "trainer.total_training_steps": 5, "trainer.save_freq": 2},
    **{"reward.timeout_s": 0.0, "simulate.num_prompts": 11},
}
Moment = tuple[str, int]
"""A process ends at its nth look at the stop signal, or at its nth entry of the journal: before or after writing it."""


class Mortal(Journal):
    """`told` has every entry that any process wrote."""

    def __init__(self, file: Path, last_step: int, told: dict[Any, Any], moment: Moment | None) -> None:
        super().__init__(file, last_step)
        self._told, self._moment, self._num = told, moment, 0

    def append(
        self, step: int, kind: str, key: tuple[int, ...], decision: Mapping[str, Any], *, sync: bool = True
    ) -> None:
        self._num += 1
        if self._moment == ("before", self._num):
            raise Killed
        assert (step, kind, key) not in self._told, "decided a second time"
        super().append(step, kind, key, decision, sync=sync)
        self._told[step, kind, key] = dict(decision)
        if self._moment == ("after", self._num):
            raise Killed


class Watched:
    """A stream whose calls may fail; notes the groups of each call of the step under way."""

    def __init__(self, run: Run, stream: Any) -> None:
        self._run, self._stream = run, stream

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any) -> Any:
            if self._run.fails(name):
                raise StreamFailed(f"no memory in {name}")
            if name == "abandon":
                self._run.given = []
            if name == "give":
                self._run.given.append([group.prompt.key for group in arguments[0]])
            return getattr(self._stream, name)(*arguments)

        return called


class Run(House):
    """`streamed`: by step, the prompts of each call of the stream. `chance` makes a clock of its own for scoring."""

    def __init__(self, folder: Path, values: dict[str, Any], seed: int = 3) -> None:
        config = make_config({**SMALL, **values})
        super().__init__(config, None, None, self._attach, feeding=lambda stream: Watched(self, stream))
        self.file, self.seed, self.told = folder / "journal.jsonl", seed, {}
        self.fails: Callable[[str], bool] = lambda call: False
        self.given: list[Any] = []
        self.streamed: dict[int, list[Any]] = {}

    def go(self, chance: int, moment: Moment | None = None) -> bool:
        self.workload = make_workload(self.seed, hang_share=0.0, scoring_s=(1e-6, 1e-4, 3e-3)[chance % 3])
        self.given = []
        with closing(Mortal(self.file, max(self.saved, default=0), self.told, moment)) as self.journal:
            return self.run(("kill", moment[1]) if moment and moment[0] == "look" else None)

    def _attach(self, simulation: Simulation) -> None:
        simulation.run.mechanism(StreamTrainer)._journal = self.journal

    def on_step(self, step: int, measured: Metrics, groups: Sequence[Group]) -> None:
        super().on_step(step, measured, groups)
        self.streamed[step], self.given = self.given, []
        given = [key for call in self.streamed[step] for key in call]
        assert len({*given}) == len(given)
        assert {*given} <= {group.prompt.key for group in groups}, "what was added up is in the batch"
        assert measured["actor/streamed_share"] == 1 - (len(groups) - len(given)) / len(groups)
        assert measured["rollout/scale_down/freed"] <= 1

    def save(self, step: int, state: dict[str, Any]) -> None:
        super().save(step, state)
        self.journal.cut(step)

    def decides(self) -> Any:
        return self.streamed, samples_of(self.groups)


def replayed(folder: Path, run: Run) -> Run:
    """An unbroken run with another clock that finds all entries of `run` in its journal."""
    folder.mkdir()
    again = Run(folder, {}, run.seed)
    again.config = run.config
    with closing(Journal(again.file, 0)) as journal:
        for (step, kind, key), decision in run.told.items():
            journal.append(step, kind, key, decision)
    assert again.go(2)
    assert not again.told, "nothing was left to decide"
    return again


RULES = ["", "tail_batching", "partial_rollout", "over_provisioning"]
VALUES = st.fixed_dictionaries(
    {
        "rule": st.sampled_from(RULES),
        "algorithm.filter_groups": st.sampled_from([{}, {"enable": True, "max_num_gen_batches": 1000}]),
        "reward.score_when": st.sampled_from(["sample", "group"]),
        "rollout.num_workers": st.sampled_from([2, 4]),
        "trainer.one_step_off": st.booleans(),
        "trainer.save_freq": st.sampled_from([0, 1, 2]),
        "trainer.stream": st.sampled_from([STREAM, STREAM | {"short_rounds": True, "trigger": "fixed"}]),
    }
)
MOMENTS = st.tuples(st.just("look"), st.integers(1, 150)) | st.tuples(
    st.sampled_from(["before", "after"]), st.integers(1, 6)
)


@settings(max_examples=6, deadline=None)
@given(VALUES, st.integers(0, 1 << 20), st.lists(MOMENTS, max_size=4))
def test_a_killed_run_is_the_unbroken_one_with_its_journal(values: dict[str, Any], seed: int, moments: list[Moment]):
    rule = values.pop("rule")
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), values | ({f"rollout.{rule}": ON} if rule else {}), seed)
        ended = (run.go(chance, moment) for chance, moment in enumerate([*moments, None]))
        assert any(ended)
        check(run)
        assert replayed(Path(folder) / "again", run).decides() == run.decides()


@pytest.mark.parametrize("rule", RULES)
def test_no_clock_decides(rule: str, tmp_path: Path):
    """Verdicts come later and earlier: what is streamed, and in which parts, is the same."""
    runs = []
    for chance in range(3):
        (tmp_path / str(chance)).mkdir()
        runs.append(Run(tmp_path / str(chance), {f"rollout.{rule}": ON} if rule else {}))
        assert runs[-1].go(chance)
        check(runs[-1])
    assert sum(map(len, runs[0].streamed.values())) > 1
    assert runs[0].decides() == runs[1].decides() == runs[2].decides()


@pytest.mark.parametrize("call", ["open", "give", "poll", "finish", "close"])
def test_a_failure_on_the_freed_devices_repeats_the_step(call: str, tmp_path: Path):
    """As any failure of an update: the boundary before it stands, and nothing of the step has been trained on."""
    run, seen = Run(tmp_path, {"trainer.save_freq": 0}), list[str]()
    run.fails = lambda name: (seen.append(name), name == call and seen.count(call) == 2)[1]
    sentence = rf"step (\d): gradients beside the rollout have failed on the devices of workers .*no memory in {call}"
    with pytest.raises(RunFailed, match=rf"{sentence}\): run again, with trainer.stream.enable off.*saved after step"):
        run.go(1)
    assert sorted(run.groups) == list(range(1, max(run.saved) + 1)), "nothing after the boundary"
    assert run.go(2)
    check(run)
    assert replayed(tmp_path / "again", run).decides() == run.decides()
