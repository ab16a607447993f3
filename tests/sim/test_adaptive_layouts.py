"""Layouts that change on modelled devices: no token differs, time is charged, and the rule of real runs decides."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from sim_machine import STOP, ConstantCost, sizes

from jaxrl.config import from_mapping
from jaxrl.layout_log import read_layouts
from jaxrl.loop import Hooks
from jaxrl.scheduling.batcher import Batcher, BatcherConfig
from jaxrl.scheduling.engine import Engine
from jaxrl.scheduling.latency import LatencyPredictor
from jaxrl.scheduling.plan import Request
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.cost_model import RooflineCost, SwitchTimes
from jaxrl.sim.executor import ReplayExecutor
from jaxrl.sim.hardware import H100
from jaxrl.sim.lockstep import LockstepBatcher
from jaxrl.sim.machine import SimulatedExecutor
from jaxrl.sim.profiled import modelled_profile
from jaxrl.sim.published import MODELS
from jaxrl.sim.workload import LengthDistribution, ModelledWorkload, TaskKind
from jaxrl.simulate import Simulation, build, dump_state, load_state, simulate
from jaxrl.types import Sample, SampleKey, SamplingParams

LAYOUTS = {
    tp: sizes(num_devices=4, tp=tp, num_slots=3 * tp, num_blocks=20 * tp, max_prefill_tokens=24) for tp in (1, 2, 4)
}
WALK = (2, 4, 1, 2, 1, 4)


def requests(seed: int) -> tuple[list[Request], dict[SampleKey, int]]:
    rng = random.Random(seed)
    made = []
    for i in range(14):
        of = SampleKey(0, i // 2, i % 2)
        params = SamplingParams(max_tokens=40, stop_token_ids=(STOP,))
        made.append(Request(i, of, (0,) * (1 + 5 * (i // 2) % 17), params, share=(0, i // 2)))
    return made, {request.key: rng.randint(10, 40) for request in made}


def generate(executor: Any, asked: list[Request], batcher: type[Batcher], how: str | None) -> list[Any]:
    """Samples of a batch in whose middle the layout walks; None: it stays."""
    engine = Engine(executor, BatcherConfig(decode_steps=4), batcher=batcher)
    for request in asked:
        engine.add(request)
    walk, done = list(WALK), {}
    while not engine.is_idle:
        done |= {one.request_id: one.sample for one in engine.step()}
        engine.batcher.blocks.check()
        if how is not None and walk and engine.counters.plans % 2 == 0 and engine.unfinished():
            engine.switch(walk.pop(0), how)
    assert how is None or not walk, "the batch was to outlast the walk"
    return [(s.key, s.token_ids.tolist(), s.finish_reason) for s in (done[request.request_id] for request in asked)]


@pytest.mark.parametrize("how", ["migrate", "recompute"])
@pytest.mark.parametrize("seed", range(4))
def test_a_walk_changes_no_token_and_no_decision(seed: int, how: str):
    """Against one layout, against the executor that goes token by token, and in lockstep."""
    asked, lengths = requests(seed)

    def simulated() -> SimulatedExecutor:
        return SimulatedExecutor(LAYOUTS[1], lengths.__getitem__, ConstantCost(), SimulatedClock(), layouts=LAYOUTS)

    still = generate(simulated(), asked, Batcher, None)
    capacities = {tp: each.capacity for tp, each in LAYOUTS.items()}
    stepping = ReplayExecutor(lengths, 4, 3, 20, 4, 24, layouts=capacities)
    assert generate(stepping, asked, Batcher, how) == still
    assert generate(simulated(), asked, Batcher, how) == still
    assert generate(simulated(), asked, LockstepBatcher, how) == still


class Charging(ConstantCost):
    """Weights 1 s, everything else 3 s, and 0.1 s a token of the fullest group, which is kept in `asked`."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, float]] = []

    def layout_switch(self, tp: int, new_tp: int, context: float, pairs: float) -> SwitchTimes:
        self.asked.append((tp, new_tp, context))
        return SwitchTimes(1.0, 0.1 * context, 50.0, 3.0)


@pytest.mark.parametrize("how", ["migrate", "recompute"])
def test_a_switch_takes_what_the_cost_model_says(how: str):
    """Two rows in two groups: the longer one's tokens move, or none."""
    cost, clock = Charging(), SimulatedClock()
    lengths = {SampleKey(0, i, 0): 30 for i in range(2)}
    executor = SimulatedExecutor(LAYOUTS[2], lengths.__getitem__, cost, clock, layouts=LAYOUTS)
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
    assert cost.asked == [(2, 4, fullest)]
    assert done.times.state_s == pytest.approx(0.1 * fullest)
    assert clock.now_s - before == pytest.approx(4.0 + 0.1 * fullest)
    assert (executor.tp, executor.num_groups, executor.num_slots) == (4, 1, 12)


def test_layouts_that_were_not_given_are_refused():
    executor = SimulatedExecutor(LAYOUTS[1], {}.__getitem__, ConstantCost(), SimulatedClock(), layouts=LAYOUTS)
    with pytest.raises(ValueError, match=r"no layout with tp 8, only \[1, 2, 4\]"):
        Engine(executor, BatcherConfig()).switch(8)


LARGE = MODELS["Llama-3.1-8B"]


def test_the_profile_of_modelled_devices_says_what_the_model_says():
    cost = RooflineCost(LARGE, H100)
    profile = modelled_profile(cost, "8 x H100", (1, 2, 4, 8), 8, 64, 4096)
    assert profile.source == "synthetic"
    assert {(each.from_tp, each.to_tp) for each in profile.switches} >= {(2, 8), (8, 2), (1, 4)}
    predictor = LatencyPredictor(profile)
    for tp in (1, 2, 4, 8):
        for batch, context in ((1, 300), (8, 2000), (3 * tp, 700)):
            real = cost.decode_step_s(tp, batch, batch * context)
            assert predictor.decode_step_s(tp, batch, batch * context) == pytest.approx(real, rel=0.1)
        assert predictor.prefill_s(tp, 1, 1000) == pytest.approx(cost.prefill_s(tp, 1000, 1000 * 1001 / 2), rel=0.3)


# ---------------------------------------------------------------- runs

WORKLOAD = ModelledWorkload(5, (TaskKind("t", LengthDistribution(400, 1.2, 4096), LengthDistribution(60, 0.3, 100)),))


def config(**layout: Any) -> Any:
    return from_mapping(
        {
            "model": {"path": "Llama-3.1-8B"},
            "data": {"train_batch_size": 4, "max_prompt_length": 100, "max_response_length": 4096},
            "rollout": {
                "n": 8,
                "dtype": "bfloat16",
                "num_blocks": 4000,
                "decode_steps": 64,
                "tensor_model_parallel_size": 1,
                "layout": {"profile": "of the modelled devices", **layout},
            },
            "actor": {"offload_optimizer": True, "ppo_max_token_len_per_gpu": 8192},
            "trainer": {"total_training_steps": 4, "save_freq": 1, "num_devices": 8},
            "simulate": {"num_prompts": 100},
        }
    )


def run(
    made: Any, state: str | None = None
) -> tuple[Simulation, dict[int, dict[str, float]], list[Sample], dict[int, str]]:
    metrics: dict[int, dict[str, float]] = {}
    samples: list[Sample] = []
    saved: dict[int, str] = {}

    def on_step(step: int, measured: dict[str, float], groups: Any) -> None:
        metrics[step] = measured
        samples.extend(sample for group in groups for sample in group.samples)

    def save(step: int, host: Any) -> None:
        saved[step] = dump_state(
            host if simulation.layouts is None else host | {"layouts": simulation.layouts.state_dict()}
        )

    hooks = Hooks(lambda *_: None, on_step, lambda *_: None, save, lambda: False)
    simulation = build(made, RooflineCost(LARGE, H100), WORKLOAD, hooks)
    if state is not None:
        found = load_state(state, "test")
        assert simulation.layouts is not None
        simulation.layouts.load_state_dict(found["layouts"])
        simulation.loop.load_host_state(found)
    assert simulation.loop.run()
    return simulation, metrics, samples, saved


def test_a_run_that_switches_gains_time_and_changes_nothing_else():
    _, fixed, still, _ = run(config())
    simulation, adaptive, moved, saved = run(config(switch=True))
    assert [(s.key, s.token_ids.tolist(), s.reward) for s in moved] == [
        (s.key, s.token_ids.tolist(), s.reward) for s in still
    ]
    assert all(1 <= step["rollout/layout/switches"] <= 3 for step in adaptive.values())
    for step, measured in adaptive.items():
        assert measured["timing_s/gen"] < 0.9 * fixed[step]["timing_s/gen"]
        assert measured["rollout/layout/cost_s"] == pytest.approx(measured["rollout/layout/predicted_cost_s"], rel=0.1)
        assert measured["rollout/layout/step_s"] == pytest.approx(measured["rollout/layout/predicted_step_s"], rel=0.1)
    assert simulation.layouts is not None
    _, again, _, _ = run(config(switch=True), saved[2])
    assert {step: again[step] for step in (3, 4)} == {step: adaptive[step] for step in (3, 4)}


def test_the_planner_chooses_where_rounds_start():
    """Pools that run dry: preemptions double tp for the next round."""
    tight = config(planner=True)
    tight = replace(tight, rollout=replace(tight.rollout, num_blocks=300, max_num_seqs=4))
    _, metrics, _, _ = run(tight)
    rounds = [(m["rollout/preemptions"], m["rollout/layout/final_tp"]) for m in metrics.values()]
    assert rounds[0][1] == 1
    first = next(i for i in range(1, len(rounds)) if rounds[i][0] > rounds[i - 1][0])
    assert rounds[first + 1][1] == 2 * rounds[first][1]


def test_a_simulated_run_directory_shows_its_switches(tmp_path: Path):
    values = {
        "model": {"path": "Llama-3.1-8B"},
        "data": {"task": "none", "train_batch_size": 4, "max_prompt_length": 100, "max_response_length": 4096},
        "rollout": {"n": 8, "dtype": "bfloat16", "decode_steps": 64, "layout": {"switch": True, "profile": "modelled"}},
        "actor": {"offload_optimizer": True, "ppo_max_token_len_per_gpu": 8192},
        "trainer": {"total_training_steps": 2, "run_dir": str(tmp_path / "run"), "num_devices": 8},
        "simulate": {"num_prompts": 100, "task": {"response": {"median": 400, "sigma": 1.2}}},
    }
    outcome = simulate(from_mapping(yaml.safe_load(yaml.safe_dump(values))), say=lambda _: None)
    rounds = read_layouts(tmp_path / "run-simulated")
    assert [(each["step"], each["source"]) for each in rounds] == [(1, "synthetic"), (2, "synthetic")]
    assert all(each["switches"] for each in rounds)
    page = outcome.report.read_text(encoding="utf-8")
    assert "switches in 2 of 2 rounds" in page
