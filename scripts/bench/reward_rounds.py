"""Rounds with real reward workers beside modelled devices that take real time.

The scoring is a run's own: the pool of processes, the backend, the rule of the round. The devices are the simulator's
on the machine's clock, so that a rollout takes as long as it would on them, and leaves the processors to the rewards as
an accelerator does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxrl.mechanisms.reward_timeouts.rule import AdaptiveTimeouts
from jaxrl.mechanisms.reward_timeouts.session import TimeoutSession
from jaxrl.models.shapes import named_shape
from jaxrl.rewards.pool import RewardPool
from jaxrl.runtime.backend import RolloutBackend, Surroundings
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.batches import FreshBatches, RoundTime
from jaxrl.scheduling.rounds.events import SampleFinished, Verdict
from jaxrl.scheduling.rounds.race import BatchSettings
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.executor import MachineSizes, SimulatedExecutor
from jaxrl.sim.hardware import hardware
from jaxrl.sim.lockstep import LockstepBatcher
from jaxrl.sim.workload import Workload
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams

ScoreWhen = Literal["sample", "rollout"]
BLOCK_SIZE = 16
STOP_TOKEN = 1  # of a response that is shorter than the limit, as the simulator draws it


class MachineClock(SimulatedClock):
    """The machine's time as a simulation's, `speed` times as fast: what waits for a moment, sleeps."""

    def __init__(self, speed: float) -> None:
        self._began_ns, self._speed = time.monotonic_ns(), speed

    @property
    def now_ns(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return int((time.monotonic_ns() - self._began_ns) * self._speed)

    def advance(self, seconds: float) -> None:
        time.sleep(seconds / self._speed)

    def reach(self, at_ns: int) -> None:
        time.sleep(max(at_ns - self.now_ns, 0) / 1e9 / self._speed)


@dataclass(frozen=True, slots=True)
class Devices:
    """What rolls out: one data-parallel group of a model on a device, everything `speed` times as fast."""

    model: str
    device: str
    rows: int
    speed: float

    def executor(self, workload: Workload, clock: SimulatedClock, longest: int) -> SimulatedExecutor:
        """Its executor, with blocks for all rows at `longest` tokens."""
        blocks = self.rows * -(-longest // BLOCK_SIZE) + 1
        sizes = MachineSizes(1, 1, self.rows, blocks, BLOCK_SIZE, 8192)
        cost = CostModel(named_shape(self.model), hardware(self.device))
        return SimulatedExecutor(sizes, workload.length, cost, clock)


@dataclass(slots=True)
class Timed:
    """When things happened in a round, in seconds since its start; unscaled, as if `speed` were 1."""

    speed: float
    step_s: float = 0.0
    ended_s: dict[SampleKey, float] = field(default_factory=dict)
    verdicts: dict[SampleKey, Verdict] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def rollout_s(self) -> float:
        """When the last response had ended."""
        return max(self.ended_s.values())

    @property
    def bound_s(self) -> float:
        """When the last verdict would have come if each had been begun when its response ended: what no schedule can
        beat."""
        return max(at + self.verdicts[key].duration_s * self.speed for key, at in self.ended_s.items())

    @property
    def scoring_s(self) -> float:
        """Seconds of scoring, all together."""
        return self.speed * sum(verdict.duration_s for verdict in self.verdicts.values())


class RewardRounds:
    """Rounds of plain batches with a pool.

    Args:
      workload, cap: how long responses are, and their limit.
      text_of: makes a response's text.
      problems: makes a prompt from its index.
    """

    def __init__(
        self,
        devices: Devices,
        workload: Workload,
        cap: int,
        pool: RewardPool,
        text_of: Callable[[Sample], str],
        problems: Callable[[int], Prompt],
        num_prompts: int,
        group_size: int,
    ) -> None:
        self._made = devices, workload, cap
        self._pool, self._text_of, self._problems = pool, text_of, problems
        self._num_prompts, self._group_size = num_prompts, group_size

    def run(self, score_when: ScoreWhen, epoch: int = 0, timeouts: AdaptiveTimeouts | None = None) -> Timed:
        """One round over the same prompts; their responses in another `epoch` are other ones. `timeouts`: limits the
        test cases; None: nothing does."""
        (devices, workload, cap), clock = self._made, MachineClock(self._made[0].speed)
        executor = devices.executor(workload, clock, cap + 512)
        engine = Engine(executor, BatcherConfig(decode_steps=16), batcher=LockstepBatcher)
        scored = self._pool, self._text_of, lambda: None
        mechanisms = () if timeouts is None else (TimeoutSession(timeouts),)
        backend = RolloutBackend(engine, executor, *scored, mechanisms, Surroundings(clock=lambda: clock.now_s))
        rule = FreshBatches(BatchSettings(self._num_prompts, self._group_size, score_when))
        backend.enter_rollout(0)
        current = rule.plan(_Problems(self._problems, epoch), RoundTime(1, 0))
        timed, began_s = Timed(devices.speed), clock.now_s
        backend.begin(RoundInfo(1), SamplingParams(max_tokens=cap, stop_token_ids=(STOP_TOKEN,)))
        while not current.done:
            event = backend.wait()
            if isinstance(event, SampleFinished):
                timed.ended_s[event.sample.key] = event.time_s - began_s
            elif isinstance(event, Verdict):
                timed.verdicts[event.key] = event
            for command in current.handle(event):
                backend.apply(command)
        timed.step_s = clock.now_s - began_s
        timed.metrics = backend.end(rule.settle(current))
        return timed


class _Problems:
    """The problems of an epoch, from the first on (`jaxrl.scheduling.rounds.batches.PromptStream`)."""

    def __init__(self, problem: Callable[[int], Prompt], epoch: int) -> None:
        self._problem, self._epoch, self._next = problem, epoch, 0

    def next(self, num_prompts: int) -> list[Prompt]:
        first, self._next = self._next, self._next + num_prompts
        return [self.get(self._epoch, index) for index in range(first, self._next)]

    def get(self, epoch: int, index: int) -> Prompt:
        return replace(self._problem(index), epoch=epoch)
