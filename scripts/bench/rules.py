"""Seconds per trained sample of the rollout rules on the real engine, against what the simulator had predicted.

    python scripts/bench.py rules [--repetitions 10] [--dtypes float32] [--json]

Plain batches, tail batching and partial rollout with their default factors, over responses with forced lengths:
lognormal, seeded, capped; a prompt decides part of its responses' lengths, so a long prompt is long again. First the
machine is profiled, as `jaxrl profile` does. From that table, and lengths by identity, the simulator predicts every
round; the predictions are printed before anything is measured. Then the real rounds run, the rules in turns.

- s_per_sample: a rule's seconds of rollout, all rounds together, over the samples that its batches hold. Weight syncs
  and updates are left out, which are the same for every rule.
- speed: the plain rounds' seconds per sample over the rule's. Above 1 the rule is faster.
- error: the measured speed over the predicted one, less 1.

On a CPU a decode step's time nearly follows its rows, so rules that launch more than they keep may well be slower.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.engines import build_executor, build_params, layout_of
from bench.harness import Bench, Case, Values, model_of, say
from jaxrl.config import SimulatedLengths, SimulatedTask, from_mapping
from jaxrl.mechanisms.partial_rollout import PartialRollout
from jaxrl.mechanisms.tail_batching import TailBatching
from jaxrl.models.config import ModelConfig
from jaxrl.record.journal import Journal
from jaxrl.record.timeline import Timeline
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.profiler import Profiler
from jaxrl.run.backend import RolloutBackend
from jaxrl.run.run import Run
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import (
    Measurement,
    Profile,
    ProfileIdentity,
    ProfilePoint,
    RowSizes,
    prefill_points,
    profile_points,
)
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.batches import BatchRule, FreshBatches, RoundTime
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.scheduling.rounds.round import BatchSettings
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.scheduling.tokens.plan import Capacity, Executor, Request
from jaxrl.sim.clock import SimulatedClock, SimulatedPhases
from jaxrl.sim.cost_model import CostModel, TableCost
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.sim.hardware import hardware
from jaxrl.sim.scoring import ScoringWorkers
from jaxrl.sim.workload import ModelledWorkload
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


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    model, layout = model_of(options).config(), layout_of(options)
    workload = modelled(options)
    launched = 2 * options.prompts * options.samples  # partial rollout's, the most of all
    sizes = {"num_slots": -(-launched // layout.dp), "max_length": options.prompt + options.max_length}
    for dtype in options.dtypes:
        params = build_params(model_of(options), model, layout.mesh, dtype, options.seed)
        executor = build_executor(options, params, **sizes, max_prefill_tokens=8 * options.prompt, dtype=dtype)
        say(f"{dtype}: {executor.warm_up()} programs")
        cost = measured_cost(executor, model, model_of(options).name)
        predicted: dict[str, list[Values]] = {}
        for name, rule in rules(options.prompts, options.samples).items():
            rounds = simulated_rounds(options, rule, executor.sizes, executor.tp, cost, workload)
            predicted[name] = [rounds(0) for _ in range(options.repetitions)]
            say(f"predicted, {name}: {per_sample(predicted[name]):.4f} s a sample")
        speeds = Speeds(predicted)
        with ExitStack() as stack:
            group = [
                Case(
                    {"case": name, "dtype": dtype},
                    real_rounds(options, rule, executor, params, workload, stack),
                    lambda average, ceilings, runs, name=name, speeds=speeds: speeds(name, runs),
                )
                for name, rule in rules(options.prompts, options.samples).items()
            ]
            executor.release(weights=True)
            yield group


def per_sample(rounds: Sequence[Mapping[str, float]]) -> float:
    return sum(each["rollout_s"] for each in rounds) / sum(each["samples"] for each in rounds)


@dataclass(slots=True)
class Speeds:
    """Figures of a rule's rounds, beside those of the plain rule, which comes first.

    Raises ValueError if real and simulated rounds kept different samples: then they cannot be compared.
    """

    predicted: Mapping[str, list[Values]]
    plain_s: float = 0.0

    def __call__(self, name: str, measured: list[Values]) -> dict[str, Any]:
        foretold = self.predicted[name]
        for number, (a, b) in enumerate(zip(measured, foretold, strict=True), start=1):
            if (a["samples"], a["long"]) != (b["samples"], b["long"]):
                raise ValueError(f"{name}, round {number}: the simulator predicted another round ({b}) than ran ({a})")
        own_s, foretold_s = per_sample(measured), per_sample(foretold)
        self.plain_s = self.plain_s or own_s
        speed, predicted = self.plain_s / own_s, per_sample(self.predicted["plain"]) / foretold_s
        found: dict[str, Any] = {"s_per_sample": own_s, "predicted_s_per_sample": foretold_s}
        found |= {"speed": speed, "predicted_speed": predicted, "error": speed / predicted - 1}
        found |= {"long_rounds": sum(each["long"] for each in measured), "rounds": len(measured)}
        return found | {
            "round_s": [a["rollout_s"] for a in measured],
            "predicted_s": [b["rollout_s"] for b in foretold],
        }


# -- rounds, of which only the devices differ --------------------------------------------------------------------------


def modelled(options: argparse.Namespace) -> ModelledWorkload:
    """Lognormal lengths with a cap; a prompt decides `correlation` of its responses' scores."""
    task = SimulatedTask(
        name="forced",
        response=SimulatedLengths(median=options.median_length, sigma=options.sigma),
        correlation=options.correlation,
        prompt_median=options.prompt,
        prompt_sigma=0.0,
    )
    return ModelledWorkload(options.seed, (task,), options.max_length, options.prompt)


class Prompts:
    """Random tokens, a prompt for each index without end (`jaxrl.scheduling.rounds.batches.PromptStream`)."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._seed, self._length, self._next = options.seed, options.prompt, 0
        self._vocab_size = model_of(options).config().vocab_size

    def next(self, num_prompts: int) -> list[Prompt]:
        first, self._next = self._next, self._next + num_prompts
        return [self.get(0, index) for index in range(first, self._next)]

    def get(self, epoch: int, index: int) -> Prompt:
        drawn = np.random.default_rng((self._seed, index)).integers(self._vocab_size, size=self._length)
        return Prompt(epoch, index, tuple(drawn.tolist()), f"prompt {index}", "forced")


class ForcedLengths(Engine):
    """An engine that ends each request at the length that the workload gives its identity: every rule meets the same
    long prompts, and a response of a later attempt has a length of its own."""

    def __init__(self, executor: Executor, decode_steps: int, workload: ModelledWorkload) -> None:
        super().__init__(executor, BatcherConfig(decode_steps=decode_steps))
        self._workload = workload

    def add(self, request: Request) -> None:
        length = min(self._workload.length(request.key), request.params.max_tokens)
        super().add(replace(request, params=replace(request.params, max_tokens=length)))


class InstantScoring:
    """Verdicts at once (`jaxrl.run.backend.Scoring`): the bench is about rollouts."""

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

    def __call__(self, turn: int) -> Values:
        """One round: its seconds without the weights' sync, samples to train on, and whether it was a long one."""
        self.step += 1
        self.backend.enter_rollout(self.step - 1)
        current = self.rule.plan(self.prompts, RoundTime(self.step, self.step - 1))
        began = self.now_s()
        self.backend.begin(RoundInfo(self.step), SamplingParams(max_tokens=self.cap))
        while not current.done:
            self.backend.apply(current.handle(self.backend.wait()))
        self.backend.end()
        seconds, result = self.now_s() - began, self.rule.settle(current)
        samples = float(sum(len(group.samples) for group in result.groups))
        return {"rollout_s": seconds, "samples": samples, "long": float(result.kind == "long")}


def real_rounds(
    options: argparse.Namespace,
    rule: BatchRule,
    executor: MeshExecutor,
    params: Any,
    workload: ModelledWorkload,
    stack: ExitStack,
) -> Rounds:
    """Rounds on the mesh, with journal and timeline as a run has them."""
    engine = ForcedLengths(executor, options.decode_steps, workload)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    journal = stack.enter_context(closing(Journal(folder / "journal.jsonl", 0)))
    timeline = stack.enter_context(Timeline(folder / "timeline.json"))
    parts = {"weights": lambda: params, "journal": journal, "timeline": timeline}
    backend = _backend(engine, executor, InstantScoring(), **parts)
    return Rounds(rule, Prompts(options), backend, time.perf_counter, options.max_length)


def simulated_rounds(
    options: argparse.Namespace, rule: BatchRule, sizes: Capacity, tp: int, cost: CostModel, workload: ModelledWorkload
) -> Rounds:
    """The same rounds with time from a cost model."""
    clock = SimulatedClock()
    executor = SimulatedExecutor(sizes, tp, workload.length, cost, clock)
    engine = ForcedLengths(executor, options.decode_steps, workload)
    scoring = ScoringWorkers(workload, clock, SimulatedPhases(clock))
    backend = _backend(engine, executor, scoring, weights=lambda: None, clock=lambda: clock.now_s)
    return Rounds(rule, Prompts(options), backend, lambda: clock.now_s, options.max_length)


def _backend(engine: Engine, executor: Any, scoring: Any, **parts: Any) -> RolloutBackend:
    """A backend without mechanisms, whose responses are never read."""
    config = from_mapping({"model": {"path": "none"}})
    placed: Any = {"workers": LocalWorkers([engine]), "executors": executor, "machine": None}
    return RolloutBackend(Run(config=config, scoring=scoring, text_of=lambda sample: "", **placed, **parts))


def measured_cost(executor: MeshExecutor, model: ModelConfig, name: str) -> TableCost:
    """The cost model that `jaxrl profile` would measure for an executor's one layout.

    What a table does not hold (training, syncs, switches) comes from a roofline; no round of the bench asks for it.
    """
    config, devices = executor.config, executor.layout.mesh.devices
    identity = ProfileIdentity(name, name, devices.flat[0].device_kind, devices.size, "", config.dtype)
    rows = executor.row_sizes(executor.tp)
    table = measured(Profiler(executor), executor.sizes, executor.tp, rows, config.max_length, identity)
    return TableCost(model, hardware("A100"), predictor=LatencyPredictor(table))


class Measures(Protocol):
    """`Profiler`, or what stands for one."""

    def decode(self, point: ProfilePoint, /) -> Measurement: ...

    def prefill(self, point: ProfilePoint, /) -> Measurement: ...


def measured(
    profiler: Measures, sizes: Capacity, tp: int, rows: Sequence[int], longest: int, identity: ProfileIdentity
) -> Profile:
    """The table of a machine with these sizes, whose decode programs have `rows`."""
    groups = sizes.num_groups
    tokens = groups * (sizes.num_blocks - 1) * sizes.block_size
    points = profile_points(groups * sizes.num_slots, tokens, (tp,), groups * tp, longest, row_sizes={tp: rows})
    decode = tuple(profiler.decode(point) for point in points)
    short = [point for point in prefill_points(points) if point.batch * point.context <= PREFILL_BUDGET]
    prefill = tuple(profiler.prefill(point) for point in short)
    return Profile(identity, decode, prefill, row_sizes=(RowSizes(tp, tuple(rows)),))


OPTIONS = {
    "repetitions": (10, "rounds of each rule, in turns"),
    "prompts": (4, "prompts of a batch"),
    "samples": (4, "responses to each"),
    "prompt": (32, "tokens of a prompt"),
    "median_length": (48, "of the lognormal lengths, tokens"),
    "sigma": (1.0, "of the logarithm of a length"),
    "correlation": (0.5, "the part that the prompt decides, 0 to 1"),
    "max_length": (512, "cap on a length, tokens"),
    "decode_steps": (16, "the engine's decode steps per plan"),
    "tp": (1, "tensor parallelism of the engine"),
}
QUICK = {"prompts": 2, "samples": 2, "prompt": 8, "max_length": 24, "median_length": 6, "repetitions": 6,
         "decode_steps": 4}  # fmt: skip
BENCH = Bench(__doc__, cases, OPTIONS, QUICK, warm_up=0)
