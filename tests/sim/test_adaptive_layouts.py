"""Layouts that change on modelled devices: no token differs, time is charged, and the rule of real runs decides."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from adaptive_runs import LARGE, config, requests, run
from checked_blocks import check_blocks
from sim_machine import STOP, ConstantCost, sizes
from simulated_runs import samples_of

from jaxrl.config import ConfigError
from jaxrl.scheduling.layouts.latency import LatencyPredictor, causal_pairs
from jaxrl.scheduling.layouts.latency_profile import SwitchCost
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.configured import layout_sizes, worker_predictor
from jaxrl.sim.cost_model import CostModel, modelled_profile
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.sim.hardware import H100
from jaxrl.types import Sample, SampleKey, SamplingParams

LAYOUTS = {
    tp: sizes(num_devices=4, tp=tp, num_slots=4 * tp, num_blocks=16 * tp, max_prefill_tokens=24) for tp in (1, 2, 4)
}


def generate(executor: Any, asked: list[Request], how: str | None, seed: int = 0) -> list[Any]:
    """Samples of a batch during which the layout changes at random; None: it stays."""
    engine, rng = Engine(executor, BatcherConfig(decode_steps=4)), random.Random(seed)
    for request in asked:
        engine.add(request)
    done: dict[int, Sample] = {}
    while not engine.is_idle:
        done |= {one.request_id: one.sample for one in engine.step()}
        check_blocks(engine.batcher.blocks)
        if how is not None and rng.random() < 0.15 and engine.unfinished():
            engine.switch(rng.choice([tp for tp in LAYOUTS if tp != executor.tp]), how)
    assert engine.counters.preemptions > 0, "pools were to run dry"
    return [(s.key, s.token_ids.tolist(), s.finish_reason) for s in (done[request.request_id] for request in asked)]


@pytest.mark.parametrize("how", ["migrate", "recompute"])
@pytest.mark.parametrize("seed", range(2))
def test_a_walk_changes_no_token_and_no_decision(seed: int, how: str):
    """Pools run dry, so some rows were preempted before and have another seat."""
    asked, lengths = requests(seed)

    def simulated() -> SimulatedExecutor:
        return SimulatedExecutor(
            LAYOUTS[1], lambda of, _: lengths[of], ConstantCost(), SimulatedClock(), layouts=LAYOUTS
        )

    assert generate(simulated(), asked, how, seed) == generate(simulated(), asked, None)


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
    executor = SimulatedExecutor(LAYOUTS[2], lambda of, _: lengths[of], cost, clock, layouts=LAYOUTS)
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
    assert (executor.tp, executor.num_groups, executor.num_slots) == (4, 1, 16)


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
    """A run that tests only read."""
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


def test_a_switch_needs_its_degrees_in_the_table_and_pools_that_hold_a_request(tmp_path: Path):
    cost = CostModel(LARGE, H100)
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(modelled_profile(cost, "4 x H100", (1, 2, 4), 4, 32, 4196).to_json()))
    table = {"profile": str(file), "num_prompts": 100}
    adaptive = config(switch=True)
    section = adaptive.simulate.replace(**table)
    with pytest.raises(ConfigError, match=r"holds tp 1, 2, 4, and rounds may use 8 as well"):
        worker_predictor(adaptive.replace(simulate=section), cost, (1, 2, 4, 8))
    predictor = worker_predictor(adaptive.replace(simulate=section), cost, (1, 2, 4))
    assert predictor is not None
    assert predictor.num_devices == 8
    small = config(switch=True, degrees=[1, 4])
    small = small.replace(rollout=small.rollout.replace(tensor_model_parallel_size=4, num_blocks=600))
    with pytest.raises(ConfigError, match=r"rollout.num_blocks \(150 at tp 1, .*: at least 264 blocks"):
        layout_sizes(small, cost)


def test_the_planner_chooses_where_rounds_start():
    """Pools that run dry: preemptions double tp for the next round."""
    tight = config(planner=True)
    tight = tight.replace(rollout=tight.rollout.replace(num_blocks=300, max_num_seqs=4))
    _, metrics, _, _ = run(tight)
    rounds = [(m["rollout/preemptions"], m["rollout/layout/final_tp"]) for m in metrics.values()]
    assert rounds[0][1] == 1
    first = next(i for i in range(1, len(rounds)) if rounds[i][0] > rounds[i - 1][0])
    assert rounds[first + 1][1] == 2 * rounds[first][1]
