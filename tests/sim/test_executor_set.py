"""Several workers on modelled devices: no token differs, plans overlap in simulated time, and rows move."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from adaptive_runs import config, run
from checked_workers import run as run_all
from known_samples import KnownSample, KnownWorkload
from sim_machine import STOP, ConstantCost, key, sizes
from simulated_runs import played, samples_of

from jaxrl.config import from_mapping
from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.types import SampleKey, SamplingParams


def with_workers(made: Any, num_workers: int, deal: str = "tokens") -> Any:
    return made.replace(rollout=made.rollout.replace(num_workers=num_workers, deal=deal))


@cache
def fixed_run(num_workers: int, deal: str) -> Any:
    return run(with_workers(config(), num_workers, deal))


# ---------------------------------------------------------------- moves

SMALL = sizes(num_groups=2, num_slots=6, num_blocks=24, max_prefill_tokens=24)


def test_moved_kv_takes_what_the_cost_model_says():
    """Two rows of 9 and 3 prompt tokens in two groups: the longer one's blocks set the time."""
    clock, lengths = SimulatedClock(), {key(0, i): 30 for i in range(2)}
    executors = [SimulatedExecutor(SMALL, 1, lambda of, _: lengths[of], ConstantCost(), clock) for _ in range(2)]
    workers = LocalWorkers([Engine(each, BatcherConfig(decode_steps=4)) for each in executors], "prompts")
    params = SamplingParams(max_tokens=40, stop_token_ids=(STOP,))
    for i, length in enumerate((9, 3)):
        workers.add(Request(i, key(0, i), (0,) * length, params))
    workers.step()
    workers.settle()
    before, engine = clock.now_s, workers.engines[0]
    blocks = [-(-(engine.batcher.progress(i).num_written) // SMALL.block_size) for i in range(2)]
    assert workers.move([0, 1], 1) == SMALL.block_size * sum(blocks)
    assert clock.now_s - before == pytest.approx(0.25 * SMALL.block_size * max(blocks))
    assert [one.request_id for one in run_all(workers)] == [0, 1]


# ---------------------------------------------------------------- time


def rollout_s(lengths: dict[SampleKey, int], num_workers: int, num_devices: int = 2, num_slots: int = 4) -> float:
    """Seconds of a round of these responses, whose prompts are dealt to workers with as many devices each."""
    num_prompts = 1 + max(each.prompt_index for each in lengths)
    made = from_mapping(
        {
            "model": {"path": "tiny"},
            "data": {
                **{"train_batch_size": num_prompts, "shuffle": False, "val_size": 0},
                **{"max_prompt_length": 4, "max_response_length": 100},
            },
            "rollout": {
                **{"n": len(lengths) // num_prompts, "decode_steps": 2, "num_workers": num_workers, "deal": "prompts"},
                **{"block_size": 4, "num_blocks": 99, "max_num_seqs": num_slots},
            },
            "algorithm": {"adv_estimator": "reinforce_plus_plus"},
            "trainer": {"total_training_steps": 1, "save_freq": 0, "num_devices": num_devices},
            "simulate": {"num_prompts": num_prompts},
        }
    )
    samples = {k: KnownSample(n, float(k.sample_index)) for k, n in lengths.items()}
    workload = KnownWorkload(samples, dict.fromkeys(range(num_prompts), 4))
    return played(made, ConstantCost(), workload)[1][1]["timing_s/gen"]


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("num_workers", [2, 8])
@pytest.mark.parametrize("deal", ["tokens", "prompts"])
def test_a_run_of_several_workers_trains_the_same_in_about_the_same_time(num_workers: int, deal: str):
    """Eight groups of one device: whether they run in lockstep or by themselves, the longest response sets the time."""
    _, one, alone, _ = fixed_run(1, "tokens")
    simulation, several, samples, _ = fixed_run(num_workers, deal)
    assert samples_of(samples) == samples_of(alone)
    assert simulation.run.workers.num_open == num_workers
    for step, measured in several.items():
        assert measured["timing_s/gen"] == pytest.approx(one[step]["timing_s/gen"], rel=0.06)
        assert measured["timing_s/gen"] <= one[step]["timing_s/gen"], "no worker waits for another's slowest row"
        assert measured["rollout/prefill_tokens"] >= one[step]["rollout/prefill_tokens"]
    if deal == "prompts":
        shared = sum(step["rollout/shared_tokens"] for step in several.values())
        spread = fixed_run(num_workers, "tokens")[1]
        assert shared > sum(step["rollout/shared_tokens"] for step in spread.values()), "a prompt is prefilled once"


@pytest.mark.parametrize("layout", [{"switch": True}, {"planner": True}], ids=str)
def test_each_worker_has_a_layout_of_its_own(layout: dict[str, Any]):
    """PAT's node by node: two workers of four devices switch by themselves, and a resumed run goes on the same."""
    made = with_workers(config(**layout), 2)
    _, _, alone, _ = fixed_run(1, "tokens")
    _, fixed, _, _ = fixed_run(2, "tokens")
    simulation, adaptive, samples, saved = run(made)
    assert samples_of(samples) == samples_of(alone)
    assert len(simulation.run.mechanism(AdaptiveLayouts).controls) == 2
    if "switch" in layout:
        switches = [control.switches for control in simulation.run.mechanism(AdaptiveLayouts).controls]
        assert all(switches), "both switched in the last round"
        assert switches[0][0].decision.stay_s != switches[1][0].decision.stay_s, "each by its own rows"
        for step, measured in adaptive.items():
            assert measured["timing_s/gen"] < 0.8 * fixed[step]["timing_s/gen"]
            assert measured["rollout/layout/switches"] >= 2
    _, again, _, _ = run(made, saved[2])
    assert {step: again[step] for step in (3, 4)} == {step: adaptive[step] for step in (3, 4)}
