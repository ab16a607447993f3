"""The benchmark of the rules predicts what its machine does: on a modelled machine, whose rounds are known."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import pytest
from bench import rules

from jaxrl.models.shapes import named_shape
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Measurement, ProfileIdentity, ProfilePoint
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Capacity, Request
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.cost_model import CostModel, TableCost
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.sim.hardware import H200
from jaxrl.types import SampleKey, SamplingParams

ROWS = np.array((16, 64, 256))
"""Of the decode programs on a GPU: no point of a decode step has fewer rows, and most chunks of a prefill do."""


class PaddedCost(CostModel):
    def decode_step_s(self, tp: int, batch: int, context: float) -> float:
        return super().decode_step_s(tp, int(ROWS[np.searchsorted(ROWS, batch)]), context) if batch else 0.0

    def decode_steps_s(self, tp: int, batch_S: np.ndarray, context_S: np.ndarray) -> np.ndarray:
        return super().decode_steps_s(tp, ROWS[np.searchsorted(ROWS, batch_S)], context_S)


@dataclass
class ModelledProfiler:
    """Measures as `jaxrl.rollout.profiler.Profiler` does; a prefill goes through the engine in chunks."""

    cost: CostModel
    sizes: Capacity

    def decode(self, point: ProfilePoint) -> Measurement:
        seconds = self.cost.decode_step_s(point.tp, point.batch, point.batch * point.context)
        return Measurement(point.tp, point.batch, point.context, seconds)

    def prefill(self, point: ProfilePoint) -> Measurement:
        clock, params = SimulatedClock(), SamplingParams(max_tokens=1)
        engine = Engine(SimulatedExecutor(self.sizes, 1, lambda *_: 1, self.cost, clock), BatcherConfig())
        engine.generate([Request(i, SampleKey(0, i, 0), (1,) * point.context, params) for i in range(point.batch)])
        return Measurement(point.tp, point.batch, point.context, clock.now_s)


def test_a_table_predicts_every_rule():
    """At the sizes at which an H200 ran partial rollout at 1.46 of plain, and a look-up by rows had said 0.33: resumed
    responses come back as chunks of a few long rows, which no decode program has."""
    words = {"prompts": 16, "samples": 8, "prompt": 32, "median_length": 128, "max_length": 1024, "decode_steps": 16}
    options = argparse.Namespace(**words, sigma=1.0, correlation=0.5, seed=0, shape="Qwen2.5-1.5B", model=None)
    truth = PaddedCost(named_shape("Qwen2.5-1.5B"), H200)
    sizes = Capacity(1, 256, 16 * 1056 + 1, 16, max_prefill_tokens=256)
    table = rules.measured(
        ModelledProfiler(truth, sizes), sizes, 1, ROWS.tolist(), 1056, ProfileIdentity("", "", "", 1, "", "")
    )
    looked_up = TableCost(truth.model, H200, predictor=LatencyPredictor(table))
    seconds: dict[str, list[float]] = {}
    for name in rules.rules(16, 8):
        for cost in (truth, looked_up):
            rule = rules.rules(16, 8)[name]
            rounds = rules.simulated_rounds(options, rule, sizes, 1, cost, rules.modelled(options))
            seconds.setdefault(name, []).append(rules.per_sample([rounds(0) for _ in range(4)]))
    for name, (real_s, predicted_s) in seconds.items():
        assert predicted_s == pytest.approx(real_s, rel=0.1), f"{name}: {predicted_s / real_s:.3f} of the truth"
