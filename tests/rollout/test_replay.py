"""A recorded round and its replay: the real model gives lengths, the replayed lengths give the same schedule.

So a simulated schedule is that of the mesh, and a round on the machine equals one in the simulator.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from known_samples import KnownSample, KnownWorkload
from run_parts import made_run
from sim_machine import Machine

from jaxrl.mechanisms.dynamic_sampling import DynamicSampling
from jaxrl.mechanisms.tail_batching import TailBatching
from jaxrl.models.loading import load_model
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.run.backend import RolloutBackend
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.batches import BatchRule, RoundTime
from jaxrl.scheduling.rounds.events import Event, SampleAborted, Verdict
from jaxrl.scheduling.rounds.round import BatchSettings
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams

SIZES = ExecutorConfig(num_slots=6, num_blocks=10, block_size=8, max_length=64, max_prefill_tokens=16, decode_steps=4)
BATCHER = BatcherConfig(decode_steps=4, max_model_len=64)


@pytest.fixture(scope="module")
def executor(tiny_model: Path) -> MeshExecutor:
    mesh = make_mesh(jax.devices()[:2])
    model, params = load_model(f"random:{tiny_model}", mesh)
    executor = MeshExecutor(model, Layout(mesh, 1), SIZES)
    executor.sync_weights(params, 0)
    executor.allocate()
    return executor


def make_prompts() -> list[Prompt]:
    rng = np.random.default_rng(0)
    sizes = (25, 3, 17, 9, 24, 12, 8, 20)
    ids = [tuple(rng.integers(4, 260, size).tolist()) for size in sizes]
    return [Prompt(0, i, ids[i], f"prompt {i}", "test") for i in range(len(sizes))]


# Every 20th token stops: a random model's responses end at the stop token or the limit of its request.
STOPS = (7, 60, 90, 120, 150, 180, 210, 240)


# ---------------------------------------------------------------- rounds with a rule across them


@dataclass
class SlowPool:
    """A pool in which the k-th sample takes a number of looks that depends on k; `durations` remembers how long."""

    durations: dict[SampleKey, float] = field(default_factory=dict)
    pending: dict[SampleKey, int] = field(default_factory=dict)

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        self.pending[sample.key] = 1 + (7 * len(self.durations)) % 5
        self.durations[sample.key] = float(self.pending[sample.key])

    def cancel(self, keys: Collection[SampleKey]) -> None:
        self.pending = {key: looks for key, looks in self.pending.items() if key not in keys}

    def completed(self) -> list[Verdict]:
        self.pending = {key: looks - 1 for key, looks in self.pending.items()}
        done = [key for key, looks in self.pending.items() if looks <= 0]
        self.pending = {key: looks for key, looks in self.pending.items() if looks > 0}
        return [Verdict(0.0, key, key.sample_index / 3, "ok", {}, self.durations[key]) for key in done]

    def wait(self, timeout_s: float) -> list[Verdict]:
        return self.completed()

    @property
    def num_pending(self) -> int:
        return len(self.pending)

    def take_metrics(self) -> dict[str, float]:
        return {}


def backend_over(executor: MeshExecutor) -> RolloutBackend:
    parts = Engine(executor, BATCHER), executor, SlowPool()
    backend = RolloutBackend(made_run(*parts))
    backend._ready = True  # weights and pool are there already
    return backend


class Cycle:
    """The prompts again and again, each pass an epoch."""

    def __init__(self) -> None:
        self.position, self.prompts = 0, make_prompts()

    def next(self, num_prompts: int) -> list[Prompt]:
        places = range(self.position, self.position + num_prompts)
        self.position += num_prompts
        return [self.get(p // len(self.prompts), p % len(self.prompts)) for p in places]

    def get(self, epoch: int, index: int) -> Prompt:
        return replace(self.prompts[index], epoch=epoch)


@dataclass
class Played:
    """The decisions of rounds, and the records of their responses by identity."""

    kinds: list[str] = field(default_factory=list)
    kept: list[list[tuple[SampleKey, int, float | None]]] = field(default_factory=list)
    aborted: list[list[SampleKey]] = field(default_factory=list)
    left: list[dict] = field(default_factory=list)
    launched: dict[SampleKey, Prompt] = field(default_factory=dict)
    durations: dict[SampleKey, float] = field(default_factory=dict)
    rewards: dict[SampleKey, float] = field(default_factory=dict)

    def play(self, rule: BatchRule, backend: Any, num_rounds: int) -> Played:
        prompts = Cycle()
        for step in range(1, num_rounds + 1):
            current = rule.plan(prompts, RoundTime(step, 0, num_rounds - step + 1))
            backend.begin(RoundInfo(step), PARAMS)
            events: list[Event] = []
            while not current.done:
                events.append(backend.wait())
                backend.apply(current.handle(events[-1]))
            backend.end()
            result = rule.settle(current)
            self.kinds.append(result.kind)
            self.kept.append([(s.key, len(s), s.reward) for g in result.groups for s in g.samples])
            self.aborted.append(sorted(e.sample.key for e in events if isinstance(e, SampleAborted)))
            self.left.append(result.left)
            self.launched |= current.launched
            for event in events:
                if isinstance(event, Verdict):
                    self.durations[event.key], self.rewards[event.key] = event.duration_s, event.reward
        return self


PARAMS = SamplingParams(max_tokens=30, stop_token_ids=STOPS)
BATCH = BatchSettings(3, 2)
FILTERING = replace(BATCH, group_filter=DynamicSampling(DynamicSampling.Options(enable=True, max_unscored_groups=0)))
TAIL = TailBatching.Options(enable=True, prompt_factor=1.5, response_factor=1.5)


@pytest.mark.parametrize("batch", [BATCH, FILTERING], ids=["tail batching", "filter_groups"])
def test_recorded_rounds_of_tail_batching_are_decided_alike_in_the_simulator(
    batch: BatchSettings, executor: MeshExecutor
):
    """The simulator is given lengths by identity, rewards and their durations, and some cost model; nothing else."""
    played = Played().play(TailBatching(batch, TAIL), backend_over(executor), num_rounds=6)
    assert set(played.kinds) == {"short", "long"}
    assert sum(map(len, played.aborted)) > 0

    # a response is a function of its identity: run again without a race, the aborted ones show their lengths as well
    requests = [Request(i, key, p.token_ids, PARAMS, share=p.key) for i, (key, p) in enumerate(played.launched.items())]
    lengths = {sample.key: len(sample) for sample in Engine(executor, BATCHER).generate(requests)}
    assert all(lengths[key] == length for some in played.kept for key, length, _ in some)
    samples = {
        key: KnownSample(length, played.rewards.get(key, 0.0), played.durations.get(key, 1.0))
        for key, length in lengths.items()
    }
    workload = KnownWorkload(samples, {prompt.index: len(prompt.token_ids) for prompt in make_prompts()})
    machine = Machine(workload, executor.sizes, decode_steps=BATCHER.decode_steps, workers=3)
    machine.backend.enter_rollout(0)
    simulated = Played().play(TailBatching(batch, TAIL), machine.backend, num_rounds=6)
    for name in ("kinds", "kept", "aborted", "left"):
        assert getattr(simulated, name) == getattr(played, name), name
