"""A loop with everything around it: a backend, a trainer and a critic that only note their calls."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from run_parts import made_run

from jaxrl.config import Config, from_mapping
from jaxrl.loop import Loop
from jaxrl.mechanisms import batch_rule
from jaxrl.mechanisms.one_step_off import OneStepOff
from jaxrl.record.timeline import Timeline
from jaxrl.scheduling.mechanism import Mechanism, RoundInfo
from jaxrl.scheduling.rounds.batches import RoundResult
from jaxrl.scheduling.rounds.events import (
    Command,
    Event,
    Interrupted,
    Launch,
    RoundStarted,
    SampleFinished,
    Score,
    Verdict,
)
from jaxrl.training.training_step import Models
from jaxrl.types import Group, Prompt, Sample, SamplingParams, TrainBatch

Build = Callable[..., "House"]


class FakePrompts:
    """Prompt p is problem p % 5 of epoch p // 5."""

    def __init__(self) -> None:
        self.position = 0

    def next(self, num_prompts: int) -> list[Prompt]:
        places = range(self.position, self.position + num_prompts)
        self.position += num_prompts
        return [self.get(p // 5, p % 5) for p in places]

    def get(self, epoch: int, index: int) -> Prompt:
        return Prompt(epoch, index, (1, 2, index), f"prompt {index}", "test")

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state(self, state: Any) -> None:
        self.position = state["position"]


class FakeClock:
    """The timeline's clock. Only the work of the fakes takes time, so that a second which no phase counts is seen."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def work(self) -> None:
        self.seconds += 1.0


class FakeBackend:
    """Finishes samples in the order of launch and scores each at once; an event takes a second of `clock`."""

    def __init__(self, log: list[Any], clock: FakeClock) -> None:
        self.log, self.clock = log, clock
        self.mechanisms: Sequence[Mechanism] = ()
        self.infos: list[RoundInfo] = []
        self.version, self.step = -1, -1
        self.params = SamplingParams()
        self.events: deque[Event] = deque()
        self.num_waits = 0
        self.stop: Callable[[], bool] = lambda: False
        self.broken_scorer = False

    @property
    def generating(self) -> bool:
        return any(not isinstance(event, Verdict) for event in self.events)

    def enter_rollout(self, policy_version: int) -> None:
        self.version = policy_version
        self.log.append(("enter", policy_version))

    def leave_rollout(self) -> None:
        self.log.append("leave")

    def begin(self, info: RoundInfo, params: SamplingParams) -> None:
        assert not self.events
        self.infos.append(info)
        self.step, self.params = info.step, params
        self.log.append(("begin", info.step, params.temperature))
        for each in self.mechanisms:
            each.round_begins(info)
        self.events.append(RoundStarted(0.0))

    def wait(self) -> Event:
        if self.stop():
            raise Interrupted
        self.num_waits += 1
        self.clock.work()
        return self.events.popleft()

    def apply(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._apply(command)

    def _apply(self, command: Command) -> None:
        match command:
            case Launch(prompt=prompt, keys=keys):
                self.log.append(("launch", prompt.key, len(keys)))
                for key in keys:
                    length = 1 + (7 * key.epoch + 3 * key.prompt_index + key.sample_index) % 5
                    zeros = np.zeros((length,), np.float32)
                    versions = np.full((length,), self.version, np.int32)
                    tokens = np.full((length,), 9, np.int32)
                    self.events.append(SampleFinished(0.0, Sample(key, tokens, zeros, zeros, versions, "stop"), 0))
            case Score(sample=sample) if self.broken_scorer:
                self.events.append(Verdict(0.0, sample.key, 0.0, "error", {"error": "no such service"}))
            case Score(sample=sample):
                self.events.append(Verdict(0.0, sample.key, float(sample.key.sample_index % 2)))

    def cancel(self) -> None:
        self.log.append("cancel")
        self.events.clear()

    def end(self, result: RoundResult | None = None) -> dict[str, float]:
        assert not self.events
        return {"rollout/recompiles": 0}


class FakeTrainer:
    """Its "parameters" are a digest of everything it was given, in order."""

    def __init__(self, log: list[Any], clock: FakeClock) -> None:
        self.log, self.clock, self.digest = log, clock, 0.0
        self.skips: Callable[[int], bool] = lambda update: False  # by number, from 1

    def token_logprobs(self, batch: TrainBatch, which: str) -> list[np.ndarray]:
        self.clock.work()
        self.log.append(("logprobs", which))
        return [np.full((len(sample),), -1.0, np.float32) for sample in batch.samples]

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        self.accumulate(batch)
        return self.apply()

    def accumulate(self, batch: TrainBatch) -> None:
        assert batch.old_logprobs is None or len(batch.old_logprobs) == len(batch)
        assert all(len(a) == len(s) for a, s in zip(batch.advantages, batch.samples, strict=True))
        self.log.append(("accumulate", [s.key for s in batch.samples]))
        for sample, values in zip(batch.samples, batch.advantages, strict=True):
            part = hash((sample.key.epoch, sample.key.prompt_index, sample.key.sample_index)) % 1000
            self.digest = math.fmod(self.digest * 31 + part + float(values.sum()), 1e9)

    def apply(self) -> dict[str, float]:
        self.clock.work()
        self.log.append("apply")
        done = sum(entry == "apply" for entry in self.log)
        return {"actor/pg_loss": float(done), "actor/skipped_updates": float(self.skips(done))}


class FakeCritic:
    """Expects nothing, and remembers what it was given."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self.skips = log, False

    def token_values(self, batch: TrainBatch) -> list[np.ndarray]:
        return [np.zeros(len(sample), np.float32) for sample in batch.samples]

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        assert batch.values is not None
        assert batch.returns is not None
        self.log.append(("critic", [s.key for s in batch.samples]))
        return {"critic/vf_loss": 1.0, "critic/skipped_updates": float(self.skips)}


class House:
    """A loop with everything around it; `saves` are the checkpoints."""

    def __init__(self, folder: Path, values: dict[str, Any] | None = None, **more: Any) -> None:
        self.log: list[Any] = []
        self.steps: list[tuple[int, dict[str, float], Sequence[Group]]] = []
        self.evaluations: list[tuple[int, dict[str, float], Sequence[Group]]] = []
        self.phases: list[tuple[int, str]] = []
        self.saves: list[tuple[int, dict[str, Any], float]] = []
        self.stop_after = more.pop("stop_after", None)  # calls of the backend's `wait`
        self.config = make_config(values or {})
        self.prompts = FakePrompts()
        self.clock = FakeClock()
        self.backend = FakeBackend(self.log, self.clock)
        self.backend.stop = self.stop
        self.trainer = FakeTrainer(self.log, self.clock)
        self.critic = FakeCritic(self.log)
        self.timeline = Timeline(folder / "timeline.json", clock=lambda: self.clock.seconds)
        mechanisms: list[Mechanism] = []
        if self.config.trainer.one_step_off:
            mechanisms.append(OneStepOff(more.pop("together", None), self.timeline.phase))
        mechanisms += more.pop("mechanisms", ())
        self.backend.mechanisms = mechanisms
        validation = [Prompt(0, p, (1, p), f"held out {p}", "test") for p in range(more.pop("held_out", 3))]
        run = made_run(
            None,
            None,
            None,
            config=self.config,
            mechanisms=mechanisms,
            timeline=self.timeline,
            prompts=self.prompts,
            validation=validation,
            total_steps=more.pop("total_steps", 3),
            stop_token_ids=(2,),
            num_devices=2,
            rule=batch_rule(self.config),
            models=Models(self.trainer, self.critic if self.config.has_critic else None),
            on_phase=lambda step, name: self.phases.append((step, name)),
            on_step=self.on_step,
            on_eval=self.on_eval,
            save=self.save,
            stop=self.stop,
            beat=more.pop("beat", lambda: None),
        )
        backend: Any = self.backend
        self.loop = Loop(run, backend)
        assert not more, more

    def on_step(self, step: int, measured: dict[str, float], groups: Sequence[Group]) -> None:
        self.log.append(("line", step))
        self.steps.append((step, measured, groups))

    def on_eval(self, step: int, measured: dict[str, float], groups: Sequence[Group]) -> None:
        self.clock.work()
        self.evaluations.append((step, measured, groups))

    def stop(self) -> bool:
        return self.stop_after is not None and self.backend.num_waits >= self.stop_after

    def save(self, step: int, state: dict[str, Any]) -> None:
        self.clock.work()
        self.log.append(("save", step))
        self.saves.append((step, copy.deepcopy(state), self.trainer.digest))

    def resume(self, other: House) -> None:
        """Starts where the last checkpoint of another one ended."""
        _, state, self.trainer.digest = other.saves[-1]
        self.loop.load_host_state(copy.deepcopy(state))


@contextmanager
def houses(folder: Path) -> Iterator[Build]:
    """Builds houses, and closes their files in the end."""
    built: list[House] = []

    def one(*arguments: Any, **more: Any) -> House:
        built.append(House(folder, *arguments, **more))
        return built[-1]

    yield one
    for house in built:
        house.timeline.close()


def make_config(values: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": "m"},
        "data": {"task": "leg_counting", "train_batch_size": 4, "max_response_length": 8},
        "rollout": {"n": 2, "temperature": 0.9, "val_kwargs": {"n": 3, "temperature": 0.5}},
        "actor": {},
        "algorithm": {},
        "critic": {},
        "trainer": {"save_freq": 2},
    }
    for path, value in values.items():
        section, option = path.split(".")
        base.setdefault(section, {})[option] = value
    return from_mapping(base)
