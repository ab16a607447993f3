"""Runs with gradients beside the rollout, through any number of processes: loop, rules, backend, workers, session and
journal are the real ones. The devices replay lengths, and gradients are a list of what was added up, in order.

What a clock decides is drawn from a seed of the process: when a verdict arrives, whether its scorer timed out, and how
long the stream is busy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fake_rollout import FakePrompts, tangled
from replay_worker import ReplayWorker
from run_parts import Phases, made_run

from jaxrl.config import Config, from_mapping
from jaxrl.loop import Loop
from jaxrl.mechanisms import batch_rule
from jaxrl.mechanisms.one_step_off import OneStepOff
from jaxrl.mechanisms.stream_trainer import FREED, StreamTrainer
from jaxrl.mechanisms.stream_trainer.scale_down import halves
from jaxrl.record.journal import Journal
from jaxrl.record.state import dump_state, load_state
from jaxrl.run.backend import RolloutBackend
from jaxrl.scheduling.mechanism import Mechanism
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.training import batch_preparation
from jaxrl.training.training_step import Models
from jaxrl.types import Group, Prompt, Sample, SampleKey, StreamFailed, TrainBatch

PromptKey = tuple[int, int]
STOP_TOKEN = 2
LONGEST = 40
PACE = 2.0  # tokens of gradients per decode step
Moment = tuple[Literal["look", "before", "after"], int]
"""A process ends at its nth look at the stop signal, or at its nth entry of the journal: before or after writing it."""


class Killed(Exception):
    """The process is gone."""


def make_config(values: Mapping[str, Any]) -> Config:
    """Options by their paths, on top of those of a small run with the stream trainer."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": "tiny"},
        "data": {"train_batch_size": 4, "max_prompt_length": 4, "max_response_length": LONGEST, "task": "leg_counting"},
        "rollout": {"n": 2, "num_workers": 2, "decode_steps": 3},
        "algorithm": {},
        "actor": {},
        "reward": {},
        "trainer": {"total_training_steps": 5, "save_freq": 2, "max_bad_steps": 0, "stream": {"enable": True}},
    }
    for path, value in values.items():
        section, option = path.split(".", 1)
        base[section][option] = value
    return from_mapping(base)


class Prompts(FakePrompts):
    """Eleven of them."""

    def __init__(self) -> None:
        super().__init__(11)

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


class Lengths(dict[SampleKey, int]):
    """A length for every response, mostly short."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __contains__(self, key: object) -> bool:
        return isinstance(key, SampleKey)

    def __missing__(self, key: SampleKey) -> int:
        drawn = tangled(self._seed, key.epoch, key.prompt_index, key.sample_index, key.attempt)
        return 1 + drawn % (8 if drawn % 3 else LONGEST + 10)


class Scorers:
    """Verdicts that arrive after some looks at them, drawn from `chance`, as is whether one times out; `spoils`: whose
    reward is infinite."""

    def __init__(self, seed: int, chance: random.Random, timeouts: float, spoils: Callable[[SampleKey], bool]) -> None:
        self._seed, self._chance, self._timeouts, self._spoils = seed, chance, timeouts, spoils
        self._due: dict[SampleKey, int] = {}

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        self._due[sample.key] = self._chance.choice([0, 0, 1, 3, 12])

    def cancel(self, keys: Collection[SampleKey]) -> None:
        self._due = {key: left for key, left in self._due.items() if key not in keys}

    def completed(self) -> list[Verdict]:
        self._due = {key: left - 1 for key, left in self._due.items()}
        ready = [key for key, left in self._due.items() if left < 0]
        self.cancel(ready)
        return [self._verdict(key) for key in ready]

    def wait(self, timeout_s: float) -> list[Verdict]:
        return self.completed()

    @property
    def num_pending(self) -> int:
        return len(self._due)

    def take_metrics(self) -> dict[str, float]:
        return {}

    def _verdict(self, key: SampleKey) -> Verdict:
        if self._chance.random() < self._timeouts:
            return Verdict(0.0, key, 0.0, "timeout", {"error": "timeout"})
        drawn = tangled(self._seed, 7, key.epoch, key.prompt_index, key.sample_index, key.attempt)
        return Verdict(0.0, key, float("inf") if self._spoils(key) else drawn % 3 / 2)


class Sums:
    """A trainer whose gradients are the keys of what was added up, and whose weights are a digest of all updates."""

    def __init__(self) -> None:
        self.digest = 0
        self.parts: list[list[SampleKey]] = []  # of the minibatch
        self.streamed: list[list[PromptKey]] = []  # of the minibatch, by call
        self.last: list[list[SampleKey]] = []  # of the last update
        self.last_streamed: list[list[PromptKey]] = []

    def token_logprobs(self, batch: TrainBatch, which: str) -> list[np.ndarray]:
        return [np.full((len(sample),), -1.0, np.float32) for sample in batch.samples]

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        self.parts.append([sample.key for sample in batch.samples])
        self.last, self.parts = self.parts, []
        self.last_streamed, self.streamed = self.streamed, []
        self.digest = hash((self.digest, *(tuple(part) for part in self.last if part)))
        return {"actor/skipped_updates": 0.0}


class Lane:
    """A stream with room every now and then. `fails`: whether a call of it (its name is given) ends in a failure."""

    def __init__(self, sums: Sums, config: Config, chance: random.Random, fails: Callable[[str], bool]) -> None:
        self._sums, self._config, self._chance, self._fails = sums, config, chance, fails
        self._is_open, self._busy = False, 0
        self._batches: list[TrainBatch] = []
        self._keys: list[list[PromptKey]] = []

    def _may_fail(self, call: str) -> None:
        if self._fails(call):
            raise StreamFailed(f"RESOURCE_EXHAUSTED: no memory in {call}")

    def open(self) -> None:
        assert not self._is_open
        assert not self._batches
        self._may_fail("open")
        self._is_open = True

    def give(self, groups: Sequence[Group], step: int) -> None:
        assert self._is_open
        assert not self._busy
        assert groups
        self._may_fail("give")
        self._batches.append(prepared(self._config, self._sums, groups, step))
        self._keys.append([group.prompt.key for group in groups])
        self._busy = self._chance.choice([0, 1, 2, 8])

    def poll(self) -> bool:
        self._may_fail("poll")
        self._busy = max(self._busy - 1, 0)
        return not self._busy

    def finish(self) -> None:
        self._may_fail("finish")
        self._busy = 0

    def close(self) -> list[TrainBatch]:
        assert self._is_open
        self._may_fail("close")
        assert not self._sums.parts
        self._sums.parts = [[sample.key for sample in batch.samples] for batch in self._batches]
        self._sums.streamed = self._keys
        batches = self._batches
        self.abandon()
        return batches

    def abandon(self) -> None:
        self._is_open, self._busy, self._batches, self._keys = False, 0, [], []


def prepared(config: Config, trainer: Any, groups: Sequence[Group], step: int) -> TrainBatch:
    """What the loop makes of groups before their gradients."""
    batch = TrainBatch.of(groups)
    current = trainer.token_logprobs(batch, "actor") if batch_preparation.needs_policy(config, batch, step) else None
    batch.old_logprobs = batch_preparation.old_logprobs(config, batch, step, current)
    batch.ref_logprobs = trainer.token_logprobs(batch, "ref") if config.needs_ref else None
    batch.loss_masks = batch_preparation.loss_masks(config, batch, step)
    batch_preparation.set_advantages(config, groups, batch)
    return batch


class Mortal(Journal):
    """A journal whose process may end at an entry. `told` has every entry that any process wrote."""

    def __init__(self, file: Path, last_step: int, told: dict[Any, Any], moment: Moment | None) -> None:
        super().__init__(file, last_step)
        self._told, self._moment, self._num_appended = told, moment, 0

    def append(self, step: int, kind: str, key: tuple[int, ...], decision: Mapping[str, Any]) -> None:
        self._num_appended += 1
        if self._moment == ("before", self._num_appended):
            raise Killed
        assert (step, kind, key) not in self._told, "decided a second time"
        super().append(step, kind, key, decision)
        self._told[step, kind, key] = dict(decision)
        if self._moment == ("after", self._num_appended):
            raise Killed


@dataclass(frozen=True, slots=True)
class Machine:
    """What stands under a run: a trainer, executors one by one and `together`, the streams by the workers that they
    need, what releases these, the trainer's weights, and what a checkpoint keeps of the trainer."""

    trainer: Any
    executors: Sequence[Any]
    together: Any
    streams: Mapping[tuple[int, ...], Any]
    release: Callable[[Sequence[int]], None]
    weights: Callable[[], Any]
    stop_token_ids: tuple[int, ...]
    state: Callable[[], Any]
    load: Callable[[Any], None]


class Run:
    """A run; `groups`, `parts` and `streamed` are those of the steps that count.

    Attributes:
      told: the journal's entries of all processes.
      parts: by step, the keys that each addition to the sums had; `streamed`: the prompts of each call of the stream.
      digest: of all updates.
    """

    def __init__(self, folder: Path, values: Mapping[str, Any], seed: int, timeouts: float = 0.0) -> None:
        self.config = make_config(values)
        self.journal_file = folder / "journal.jsonl"
        self.lengths, self.seed, self.timeouts = Lengths(seed), seed, timeouts
        self.saves: dict[int, tuple[str, Any]] = {}
        self.groups: dict[int, list[Group]] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        self.parts: dict[int, list[list[SampleKey]]] = {}
        self.streamed: dict[int, list[list[PromptKey]]] = {}
        self.told: dict[Any, Any] = {}
        self.fails: Callable[[str], bool] = lambda call: False
        self.spoils: Callable[[SampleKey], bool] = lambda key: False
        self.break_collect: Callable[[int], bool] = lambda worker: False
        self.digest = 0

    def go(self, chance: int, moment: Moment | None = None) -> bool:
        """One process, from the last checkpoint on; whether it has come to the end of the run."""
        last = max(self.saves, default=0)
        for kept in (self.groups, self.metrics, self.parts, self.streamed):
            for step in [step for step in kept if step > last]:
                kept.pop(step)
        self._moment, self._num_looks = moment, 0
        journal = Mortal(self.journal_file, last, self.told, moment)
        try:
            return self._loop(journal, random.Random(chance)).run()
        except Killed:
            return False
        finally:
            self.digest = self._ended()
            journal.close()

    def _loop(self, journal: Mortal, chance: random.Random) -> Loop:
        config, machine = self.config, self._machine(chance)
        self.sums = machine.trainer
        for worker, executor in enumerate(machine.executors):
            executor.collect = self._collecting(worker, executor.collect)
        batcher = BatcherConfig(decode_steps=config.rollout.decode_steps, max_model_len=config.max_model_length)
        workers = LocalWorkers([Engine(each, batcher) for each in machine.executors], config.rollout.deal)
        session = None
        if config.trainer.stream.enable:
            session = StreamTrainer(config.trainer.stream, workers, machine.streams, machine.release, PACE, journal)
        self.session = session
        mechanisms: list[Mechanism] = [] if session is None else [session]
        if config.trainer.one_step_off:
            mechanisms.append(OneStepOff(None, Phases().phase))

        def save(step: int, state: dict[str, Any]) -> None:
            self.saves[step] = dump_state(state), machine.state()
            journal.cut(step)

        run = made_run(
            workers,
            machine.together,
            Scorers(self.seed, chance, self.timeouts, self.spoils),
            config=config,
            weights=machine.weights,
            mechanisms=mechanisms,
            timeline=Phases(),
            clock=lambda: 0.0,
            journal=journal,
            prompts=Prompts(),
            total_steps=config.trainer.total_training_steps,
            stop_token_ids=machine.stop_token_ids,
            num_devices=2,
            rule=batch_rule(config),
            models=Models(machine.trainer),
            on_step=self._stepped,
            save=save,
            stop=self._look,
        )
        loop = Loop(run, RolloutBackend(run))
        if self.saves:
            state, trained = self.saves[max(self.saves)]
            machine.load(trained)
            loop.load_host_state(load_state(state, "test"))
        return loop

    def _machine(self, chance: random.Random) -> Machine:
        sums = Sums()
        executors = [ReplayWorker(self.lengths, num_slots=12) for _ in range(self.config.rollout.num_workers)]

        def load(digest: int) -> None:
            sums.digest = digest

        return Machine(
            sums,
            executors,
            _Together(executors),
            {freed: Lane(sums, self.config, chance, lambda call: self.fails(call)) for freed in halves(len(executors))},
            lambda freed: None,
            lambda: None,
            (STOP_TOKEN,),
            lambda: sums.digest,
            load,
        )

    def _ended(self) -> Any:
        """What the updates of a process have made of the weights."""
        return self.sums.digest

    def _collecting(self, worker: int, collect: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def collected(ticket: Any) -> Any:
            if self.break_collect(worker):
                raise RuntimeError(f"the device of worker {worker} is lost")
            return collect(ticket)

        return collected

    def _look(self) -> bool:
        self._num_looks += 1
        if self._moment == ("look", self._num_looks):
            raise Killed
        return False

    def _stepped(self, step: int, measured: dict[str, float], groups: Sequence[Group]) -> None:
        self.groups[step], self.metrics[step] = list(groups), measured
        self.parts[step], self.streamed[step] = self.sums.last, self.sums.last_streamed

    def check(self) -> None:
        """What holds for every run: each sample of a batch is in one part, and what was streamed is in the batch."""
        assert sorted(self.groups) == list(range(1, self.config.trainer.total_training_steps + 1))
        prompts: set[PromptKey] = set()
        for step, groups in self.groups.items():
            batch = [sample.key for group in groups for sample in group.samples]
            added = [key for part in self.parts[step] for key in part]
            assert sorted(added) == sorted(batch), f"step {step}"
            assert len(set(added)) == len(added)
            given = [key for call in self.streamed[step] for key in call]
            assert len(set(given)) == len(given)
            assert {*given} <= {group.prompt.key for group in groups}
            assert self.metrics[step].get("actor/streamed_share", 0.0) == 1 - (len(groups) - len(given)) / len(groups)
            assert self.metrics[step].get("rollout/scale_down/freed", 0.0) <= 1
            assert not prompts & {group.prompt.key for group in groups}, "trained twice"
            prompts |= {group.prompt.key for group in groups}

    def num_freed(self) -> int:
        return sum(kind == FREED for _, kind, _ in self.told)

    def batches(self) -> dict[int, list[SampleKey]]:
        """The samples of each step."""
        return {step: [s.key for group in groups for s in group.samples] for step, groups in self.groups.items()}


class _Together:
    """The memory phases of several executors."""

    recompiles = 0

    def __init__(self, executors: Sequence[ReplayWorker]) -> None:
        self._executors = executors

    def sync_weights(self, train_params: Any, policy_version: int) -> None:
        for executor in self._executors:
            executor.policy_version = policy_version

    def allocate(self) -> None:
        pass

    def release(self, *, weights: bool = False) -> None:
        pass


def whole(folder: Path, values: Mapping[str, Any], seed: int, chance: int, timeouts: float = 0.0) -> Run:
    """A run of one process."""
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, values, seed, timeouts)
    assert run.go(chance)
    run.check()
    return run


def replayed(folder: Path, run: Run, chance: int) -> Run:
    """An unbroken run that finds all entries of another one in its journal."""
    folder.mkdir(parents=True, exist_ok=True)
    journal = Mortal(folder / "journal.jsonl", 0, {}, None)
    for (step, kind, key), decision in run.told.items():
        journal.append(step, kind, key, decision)
    journal.close()
    again = Run(folder, {}, run.seed)
    again.config = run.config
    assert again.go(chance)
    assert not again.told, "nothing was left to decide"
    again.told, again.timeouts = dict(run.told), run.timeouts
    again.check()
    return again
