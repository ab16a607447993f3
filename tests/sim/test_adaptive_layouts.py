"""Layouts that change on modelled devices: no token differs, time is charged, and the rule of real runs decides."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from adaptive_runs import LARGE, config, run
from sim_machine import STOP, ConstantCost, sizes
from simulated_runs import samples_of

from jaxrl.scheduling.layouts.latency import LatencyPredictor, causal_pairs
from jaxrl.scheduling.layouts.latency_profile import SwitchCost
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.cost_model import CostModel, modelled_profile
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.sim.hardware import H100
from jaxrl.types import SampleKey, SamplingParams

LAYOUTS = {
    tp: sizes(num_groups=4 // tp, num_slots=4 * tp, num_blocks=16 * tp, max_prefill_tokens=24) for tp in (1, 2, 4)
}


class Charging(ConstantCost):
    """Weights 1 s, everything else 3 s, and 0.1 s a token of the fullest group; the switches are kept in `asked`."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def switch_cost(self, tp: int, new_tp: int) -> SwitchCost:
        self.asked.append((tp, new_tp))
        return SwitchCost(tp, new_tp, 1.0, 0.1, 3.0)


@pytest.mark.parametrize("how", ["migrate", "recompute"])
def test_a_switch_takes_what_the_cost_model_says(how: str):
    """Two rows in two groups: the longer one's tokens move, or none."""
    cost, clock = Charging(), SimulatedClock()
    lengths = {SampleKey(0, i, 0): 30 for i in range(2)}
    executor = SimulatedExecutor(LAYOUTS[2], 2, lambda of, _: lengths[of], cost, clock, layouts=LAYOUTS)
    engine = Engine(executor, BatcherConfig(decode_steps=4))
    params = SamplingParams(max_tokens=40, stop_token_ids=(STOP,))
    for i, length in enumerate((9, 3)):
        engine.add(Request(i, SampleKey(0, i, 0), (0,) * length, params))
    engine.step()
    engine.settle()
    before = clock.now_s
    contexts = [engine.batcher.progress(i).num_prompt + engine.batcher.progress(i).num_tokens for i in range(2)]
    done = engine.switch(4, how)  # pyright: ignore[reportArgumentType]
    fullest = float(max(contexts)) if how == "migrate" else 0.0
    assert cost.asked == [(2, 4)]
    assert done.times.state_s == pytest.approx(0.1 * fullest)
    assert clock.now_s - before == pytest.approx(4.0 + 0.1 * fullest)
    assert (executor.tp, executor.sizes.num_groups, executor.sizes.num_slots) == (4, 1, 16)


def test_the_profile_of_modelled_devices_says_what_the_model_says():
    cost = CostModel(LARGE, H100)
    profile = modelled_profile(cost, "8 x H100", (1, 2, 4, 8), 8, 64, 4096)
    assert profile.source == "synthetic"
    assert {(each.from_tp, each.to_tp) for each in profile.switches} >= {(2, 8), (8, 2), (1, 4)}
    predictor = LatencyPredictor(profile)
    for tp in (1, 2, 4, 8):
        for batch, context in ((1, 300), (8, 2000), (3 * tp, 700)):
            real = cost.decode_step_s(tp, batch, batch * context)
            assert predictor.decode_step_s(tp, batch, batch * context) == pytest.approx(real, rel=0.1)
        load = 1000, causal_pairs(1000)
        assert predictor.prefill_s(tp, *load) == pytest.approx(cost.prefill_s(tp, *load), rel=0.02)


# ---------------------------------------------------------------- runs


@cache
def run_once(**layout: Any) -> Any:
    return run(config(**layout))


def test_a_run_that_switches_gains_time_and_changes_nothing_else():
    _, fixed, still, _ = run_once()
    _, adaptive, moved, saved = run_once(switch=True)
    assert samples_of(moved) == samples_of(still)
    assert all(1 <= step["rollout/layout/switches"] <= 3 for step in adaptive.values())
    for step, measured in adaptive.items():
        assert measured["timing_s/gen"] < 0.9 * fixed[step]["timing_s/gen"]
        assert measured["rollout/layout/cost_s"] == pytest.approx(measured["rollout/layout/predicted_cost_s"], rel=0.1)
        assert measured["rollout/layout/step_s"] == pytest.approx(measured["rollout/layout/predicted_step_s"], rel=0.1)
    _, again, _, _ = run(config(switch=True), saved[2])
    assert {step: again[step] for step in (3, 4)} == {step: adaptive[step] for step in (3, 4)}
