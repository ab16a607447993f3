"""Simulated runs with gradients beside the rollout that are killed at random moments: each group is learnt from once,
whole, and a step that runs again adds up the same, whatever the next process's rule and clock would have said."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from adaptive_runs import LARGE, config

from jaxrl.config import SimulatedLengths, SimulatedScoring, SimulatedTask
from jaxrl.mechanisms.stream_trainer import StreamTrainer
from jaxrl.record.journal import Journal
from jaxrl.record.state import dump_state, load_state
from jaxrl.run.simulation import build
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import H100
from jaxrl.sim.workload import ModelledWorkload
from jaxrl.types import Group

STEPS = 3


class Killed(Exception):
    """The process is gone."""


class Telling(Journal):
    """Its process may end behind an entry, which no later process writes again."""

    told: dict[Any, Any]
    left: int

    def append(self, step: int, kind: str, key: tuple[int, ...], decision: Any) -> None:
        assert (step, kind, key) not in self.told, "decided a second time"
        super().append(step, kind, key, decision)
        self.told[step, kind, key] = decision
        self.left -= 1
        if not self.left:
            raise Killed


class Streamed:
    """A run through any number of processes; `given`: the groups that each step's stream has got, call by call;
    `freed`: after how many ends it was opened."""

    def __init__(self, folder: Path, told: dict[Any, Any] | None = None) -> None:
        self.file, self.told, self.saved = folder / "journal.jsonl", {}, dict[int, str]()
        self.given: dict[int, list[Any]] = {}
        self.trained: dict[int, list[Any]] = {}
        self.freed: dict[int, int] = {}
        with closing(Journal(self.file, 0)) as journal:
            for place, decision in (told or {}).items():
                journal.append(*place, decision)

    def go(self, chance: random.Random, looks: int = 0, entries: int = 0, min_done: float = 0.0) -> bool:
        """One process, killed at its nth look at the stop signal or behind its nth entry. Its rule frees workers at
        another share, and its verdicts come later or earlier, than those of others."""
        scoring = SimulatedScoring(median_s=chance.choice([0.0, 5.0, 60.0]), sigma=1.5)
        task = SimulatedTask(
            name="t", response=SimulatedLengths(median=400, sigma=1.2), prompt_median=60, scoring=scoring
        )
        made, num_looks = config(), 0
        stream = made.trainer.stream.replace(enable=True, min_done=min_done or chance.choice([0.05, 0.2, 0.4]))
        made = made.replace(
            rollout=made.rollout.replace(num_workers=2),
            trainer=made.trainer.replace(stream=stream, total_training_steps=STEPS),
        )
        last = max(self.saved, default=0)
        for kept in (self.given, self.trained, self.freed):
            for step in [step for step in kept if step > last]:
                del kept[step]

        def stop() -> bool:
            nonlocal num_looks
            num_looks += 1
            if num_looks == looks:
                raise Killed
            return False

        def save(step: int, state: dict[str, Any]) -> None:
            self.saved[step] = dump_state(state)
            journal.cut(step)

        def step_ends(step: int, _: Any, groups: Sequence[Group]) -> None:
            self.trained[step] = [(s.key, len(s)) for group in groups for s in group.samples]

        with closing(Telling(self.file, last)) as journal:
            journal.told, journal.left = self.told, entries
            journal.begin()
            workload = ModelledWorkload(5, (task,), max_response_length=4096, max_prompt_length=100, timeout_s=1e6)
            more: Any = {"on_step": step_ends, "save": save, "stop": stop}
            simulation = build(made, CostModel(LARGE, H100), workload, feeding=self._heard, **more)
            self.trainer = simulation.run.mechanism(StreamTrainer)
            self.trainer._journal = journal
            if last:
                simulation.loop.load_host_state(load_state(self.saved[last], "test"))
            try:
                return simulation.loop.run()
            except Killed:
                return False

    def _heard(self, stream: Any) -> Any:
        give, opens = stream.give, stream.open

        def heard(groups: Sequence[Group], step: int) -> None:
            assert all(s.reward is not None for group in groups for s in group.samples), "half a group"
            self.given.setdefault(step, []).append([group.prompt.key for group in groups])
            give(groups, step)

        def opened() -> None:
            self.freed[self.trainer._step] = self.trainer._round.num_finished
            opens()

        stream.give, stream.open = heard, opened
        return stream


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_run_is_the_unbroken_one_with_its_journal(seed: int, tmp_path: Path):
    chance = random.Random(seed)
    run = Streamed(tmp_path)
    for _ in range(3):
        if run.go(chance, **{chance.choice(["looks", "entries"]): chance.randint(1, 3)}):
            break
    if len(run.trained) < STEPS:
        assert run.go(chance)
    assert run.told
    for step, samples in run.trained.items():
        given = [key for call in run.given.get(step, []) for key in call]
        assert len(given) == len(set(given))
        assert set(given) <= {(s.epoch, s.prompt_index) for s, _ in samples}
    (tmp_path / "again").mkdir()
    again = Streamed(tmp_path / "again", run.told)
    assert again.go(chance, min_done=0.5), "the last moment at which a rule may free"
    assert not again.told, "nothing was left to decide"
    assert (again.given, again.trained, again.freed) == (run.given, run.trained, run.freed)
