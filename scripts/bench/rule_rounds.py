"""Rounds of the rollout rules on the real engine and on the simulated one: only the devices differ.

Response lengths are forced: a response ends at the length that its identity has in a modelled workload, so every rule
meets the same long prompts, and a response of a later attempt has a length of its own.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config import SimulatedLengths, SimulatedTask, from_mapping
from jaxrl.mechanisms.partial_rollout import PartialRollout
from jaxrl.mechanisms.tail_batching import TailBatching
from jaxrl.models.config import ModelConfig
from jaxrl.record.journal import Journal
from jaxrl.record.timeline import Timeline
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.profiler import Profiler
from jaxrl.runtime.backend import RolloutBackend
from jaxrl.runtime.run import Run
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Profile, ProfileIdentity, RowSizes, prefill_points, profile_points
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.batches import BatchRule, FreshBatches, RoundTime
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.scheduling.rounds.race import BatchSettings
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.scheduling.tokens.plan import Executor, Request
from jaxrl.sim.clock import SimulatedClock, SimulatedPhases
from jaxrl.sim.cost_model import CostModel, TableCost
from jaxrl.sim.executor import MachineSizes, SimulatedExecutor
from jaxrl.sim.hardware import hardware
from jaxrl.sim.scoring import ScoringWorkers
from jaxrl.sim.workload import ModelledWorkload, Workload, check_task
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams

PREFILL_BUDGET = 2048
"""Tokens of the largest prefill that is profiled: rounds start with far fewer."""


def rules(num_groups: int, group_size: int) -> dict[str, BatchRule]:
    """The rules with their default factors, by the names of the docs."""
    batch = BatchSettings(num_groups, group_size)
    return {
        "plain": FreshBatches(batch),
        "tail-batching": TailBatching(batch, TailBatching.Options(enable=True, at_end="leave")),
        "partial-rollout": PartialRollout(batch, PartialRollout.Options(enable=True, at_end="leave")),
    }


def modelled(seed: int, median: float, sigma: float, cap: int, correlation: float, prompt: int) -> Workload:
    """Lognormal lengths with a cap; a prompt decides `correlation` of its responses' scores."""
    lengths = SimulatedLengths(median=median, sigma=sigma)
    task = SimulatedTask(
        name="forced", response=lengths, correlation=correlation, prompt_median=prompt, prompt_sigma=0.0
    )
    check_task(task, cap, math.inf)
    return ModelledWorkload(seed, (task,), cap, prompt)


class Prompts:
    """Random tokens, a prompt for each index without end (`jaxrl.scheduling.rounds.batches.PromptStream`)."""

    def __init__(self, seed: int, length: int, vocab_size: int) -> None:
        self._seed, self._length, self._vocab_size, self._next = seed, length, vocab_size, 0

    def next(self, num_prompts: int) -> list[Prompt]:
        first, self._next = self._next, self._next + num_prompts
        return [self.get(0, index) for index in range(first, self._next)]

    def get(self, epoch: int, index: int) -> Prompt:
        drawn = np.random.default_rng((self._seed, index)).integers(self._vocab_size, size=self._length)
        return Prompt(epoch, index, tuple(drawn.tolist()), f"prompt {index}", "forced")


class ForcedLengths(Engine):
    """An engine that ends each request at the length that the workload gives its identity."""

    def __init__(self, executor: Executor, config: BatcherConfig, workload: Workload) -> None:
        super().__init__(executor, config)
        self._workload = workload

    def add(self, request: Request) -> None:
        length = min(self._workload.length(request.key), request.params.max_tokens)
        super().add(replace(request, params=replace(request.params, max_tokens=length)))


class InstantScoring:
    """Verdicts at once (`jaxrl.runtime.backend.Scoring`): the bench is about rollouts."""

    def __init__(self) -> None:
        self._done: list[Verdict] = []

    def submit(self, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> None:
        self._done.append(Verdict(time.monotonic(), sample.key, float(sample.key.sample_index % 2), "ok", {}, 0.0))

    def cancel(self, keys: Collection[SampleKey]) -> None:
        self._done = [verdict for verdict in self._done if verdict.key not in keys]

    def completed(self) -> list[Verdict]:
        done, self._done = self._done, []
        return done

    def wait(self, timeout_s: float) -> list[Verdict]:
        return self.completed()

    @property
    def num_pending(self) -> int:
        return len(self._done)

    def take_metrics(self) -> dict[str, float]:
        return {}


@dataclass(slots=True)
class Rounds:
    """The rounds of one rule on one backend, one after another, as `jaxrl.loop` would run them."""

    rule: BatchRule
    prompts: Prompts
    backend: Any
    now_s: Callable[[], float]
    cap: int
    step: int = 0

    def __call__(self) -> dict[str, float]:
        """One round: its seconds without the weights' sync, samples to train on, and whether it was a long one."""
        self.step += 1
        self.backend.enter_rollout(self.step - 1)
        current = self.rule.plan(self.prompts, RoundTime(self.step, self.step - 1))
        began = self.now_s()
        self.backend.begin(RoundInfo(self.step), SamplingParams(max_tokens=self.cap))
        while not current.done:
            self.backend.apply(current.handle(self.backend.wait()))
        self.backend.end()
        seconds = self.now_s() - began
        result = self.rule.settle(current)
        samples = sum(len(group.samples) for group in result.groups)
        return {"seconds": seconds, "samples": samples, "long": float(result.kind == "long")}


@contextmanager
def real_rounds(
    rule: BatchRule, prompts: Prompts, executor: MeshExecutor, params: Any, workload: Workload, cap: int
) -> Iterator[Rounds]:
    """Rounds on the mesh, with journal and timeline as a run has them."""
    engine = ForcedLengths(executor, BatcherConfig(decode_steps=executor.config.decode_steps), workload)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        journal = stack.enter_context(closing(Journal(folder / "journal.jsonl", 0)))
        timeline = stack.enter_context(Timeline(folder / "timeline.json"))
        scoring = InstantScoring()
        backend = _backend(engine, executor, scoring, weights=lambda: params, journal=journal, timeline=timeline)
        yield Rounds(rule, prompts, backend, time.perf_counter, cap)


def _backend(engine: Engine, executor: Any, scoring: Any, **parts: Any) -> RolloutBackend:
    """A backend without mechanisms, whose responses are never read."""
    config = from_mapping({"model": {"path": "none"}})
    placed: Any = {"workers": LocalWorkers([engine]), "executors": executor, "machine": None}
    return RolloutBackend(Run(config=config, scoring=scoring, text_of=lambda sample: "", **placed, **parts))


def simulated_rounds(
    rule: BatchRule, prompts: Prompts, sizes: MachineSizes, cost: CostModel, steps: int, workload: Workload, cap: int
) -> Rounds:
    """The same rounds with time from a cost model; `steps`: decode steps per plan."""
    clock = SimulatedClock()
    executor = SimulatedExecutor(sizes, workload.length, cost, clock)
    engine = ForcedLengths(executor, BatcherConfig(decode_steps=steps), workload)
    scoring = ScoringWorkers(workload, clock, SimulatedPhases(clock))
    backend = _backend(engine, executor, scoring, weights=lambda: None, clock=lambda: clock.now_s)
    return Rounds(rule, prompts, backend, lambda: clock.now_s, cap)


def machine_sizes(executor: MeshExecutor) -> MachineSizes:
    """The sizes of a simulated machine that equals an executor's."""
    groups, tp = executor.num_groups, executor.tp
    rest = (executor.num_slots, executor.num_blocks, executor.block_size, executor.max_prefill_tokens, executor.stacks)
    return MachineSizes(groups * tp, tp, *rest)


def measured_cost(executor: MeshExecutor, model: ModelConfig, name: str, say: Callable[[str], None]) -> TableCost:
    """The cost model that `jaxrl profile` would measure for an executor's one layout.

    What a table does not hold (training, syncs, switches) comes from a roofline; no round of the bench asks for it.
    """
    tp, groups = executor.tp, executor.num_groups
    tokens = groups * (executor.num_blocks - 1) * executor.block_size
    longest = executor.config.max_length
    sizes = executor.row_sizes(tp)
    points = profile_points(groups * executor.num_slots, tokens, (tp,), groups * tp, longest, row_sizes={tp: sizes})
    profiler = Profiler(executor)
    decode = tuple(profiler.decode(point) for point in points)
    short = [point for point in prefill_points(points) if point.batch * point.context <= PREFILL_BUDGET]
    prefill = tuple(profiler.prefill(point) for point in short)
    say(f"profile: {len(decode)} decode points, {len(prefill)} prefill points")
    device = executor.layout.mesh.devices.flat[0]
    identity = ProfileIdentity(name, name, device.device_kind, groups * tp, "", executor.config.dtype)
    profile = Profile(identity, decode, prefill, row_sizes=(RowSizes(tp, sizes),))
    return TableCost(model, hardware("A100"), predictor=LatencyPredictor(profile))
