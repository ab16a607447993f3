"""A simulated machine of round numbers, for tests: its parts, and how to play a round on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from known_samples import KnownSample, KnownWorkload
from run_parts import made_run

from jaxrl.models.config import ModelConfig
from jaxrl.models.shapes import SHAPES
from jaxrl.run.backend import RolloutBackend
from jaxrl.scheduling.layouts.latency_profile import SwitchCost
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.events import Event, RoundStarted
from jaxrl.scheduling.rounds.round import Round
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Capacity
from jaxrl.scheduling.tokens.progress import TraceEvent
from jaxrl.sim.clock import SimulatedClock, SimulatedPhases
from jaxrl.sim.cost_model import CostModel, Efficiency, TrainLoad
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.sim.scoring import ScoringWorkers
from jaxrl.types import Prompt, SampleKey, SamplingParams

STOP = 1
SMALL = ModelConfig("llama", 1000, 64, 128, 4, 4, 2, 16)


@dataclass(frozen=True)
class ConstantCost:
    """Round numbers: 10 s a prefill, 1 s a decode step whatever its rows, and a sixteenth more for each token that a
    row may draft in it; 7 s a forward pass, 5 s a sync, and 100 s a training step with 1 s for each update; beside the
    rollout 20 s for gradients, 3 s to bring weights or sums across, and 2 s for a swap of weights."""

    model, efficiency = SHAPES["tiny"], Efficiency()

    def decode_step_s(self, tp: int, batch: int, context: float) -> float:
        return 1.0 if batch else 0.0

    def decode_steps_s(self, tp: int, batch_S: np.ndarray, context_S: np.ndarray) -> np.ndarray:
        return np.ones(len(batch_S))

    def verify_steps_s(self, tp: int, batch_S: np.ndarray, width: int, context_S: np.ndarray) -> np.ndarray:
        return np.full(len(batch_S), 1.0 + width / 16)

    def prefill_s(self, tp: int, tokens: int, pairs: float = 0.0) -> float:
        return 10.0 if tokens else 0.0

    def train_step_s(self, load: TrainLoad, num_devices: int) -> float:
        return 100.0 + load.updates

    def forward_s(self, tokens: float, pairs: float, num_devices: int) -> float:
        return 7.0

    def gradients_s(self, tokens: float, pairs: float, num_devices: int) -> float:
        return 20.0

    def regroup_s(self, num_devices: int, part: int) -> float:
        return 3.0

    def swap_s(self, num_devices: int) -> float:
        return 2.0

    def weight_sync_s(self, tp: int, num_devices: int) -> float:
        return 5.0

    def switch_cost(self, tp: int, new_tp: int) -> SwitchCost:
        return SwitchCost(tp, new_tp, 0.0, 0.0, 0.0)

    def move_s_per_token(self, tp: int, new_tp: int, num_devices: int) -> float:
        return 0.25

    def num_kv_blocks(self, tp: int, block_size: int, memory_fraction: float, reserved_bytes: float = 0.0) -> int:
        return 1000


def sizes(**more: int) -> Capacity:
    plain = {"num_groups": 1, "num_slots": 4, "num_blocks": 99, "block_size": 4, "max_prefill_tokens": 64}
    return Capacity(**(plain | more))


@dataclass
class Machine:
    workload: Any
    sizes: Capacity = field(default_factory=sizes)
    tp: int = 1
    cost: CostModel = field(default_factory=ConstantCost)
    decode_steps: int = 2
    workers: int = 1
    timeout_s: float = 0.0
    trace: list[TraceEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = SimulatedClock()
        self.executor = SimulatedExecutor(self.sizes, self.tp, self.workload.length, self.cost, self.clock)
        config = BatcherConfig(decode_steps=self.decode_steps)
        self.engine = Engine(self.executor, config, trace=self.trace.append)
        phases = SimulatedPhases(self.clock)
        self.scoring = ScoringWorkers(self.workload, self.clock, phases, self.workers, self.timeout_s)
        parts = self.engine, self.executor, self.scoring
        self.run = made_run(*parts, clock=lambda: self.clock.now_s, timeline=phases)
        self.backend = RolloutBackend(self.run)

    def begin(self, max_tokens: int = 50, version: int = 0) -> RolloutBackend:
        self.backend.enter_rollout(version)
        self.backend.begin(RoundInfo(version + 1), SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,)))
        assert isinstance(self.backend.wait(), RoundStarted)
        return self.backend


def prompt(index: int, length: int = 4) -> Prompt:
    return Prompt(0, index, (0,) * length, f"prompt {index}", "test")


def key(prompt_index: int, sample_index: int = 0) -> SampleKey:
    return SampleKey(0, prompt_index, sample_index)


def known(
    lengths: dict[SampleKey, int], reward_s: dict[SampleKey, float] | None = None, prompts: int = 4
) -> KnownWorkload:
    times = reward_s or {}
    samples = {k: KnownSample(n, float(k.sample_index), times.get(k, 0.0)) for k, n in lengths.items()}
    return KnownWorkload(samples, {k.prompt_index: prompts for k in lengths})


TINY = known(
    {key(0, 0): 3, key(0, 1): 5, key(1, 0): 2, key(1, 1): 6},
    {key(0, 0): 3.0, key(0, 1): 4.0, key(1, 0): 1.0, key(1, 1): 2.0},
)


def play(round: Round, backend: Any) -> list[Event]:
    events: list[Event] = []
    while not round.done:
        events.append(backend.wait())
        backend.apply(round.handle(events[-1]))
    return events
