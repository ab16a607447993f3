"""The loop on a simulated machine: a step done by hand, and determinism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from keyword_options import with_options
from known_samples import KnownWorkload
from sim_machine import SMALL, TINY, ConstantCost
from simulated_runs import played

from jaxrl.config import Config, SimulatedLengths, SimulatedScoring, SimulatedTask
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import H100
from jaxrl.sim.workload import ModelledWorkload, Workload
from jaxrl.types import Group


def config(**more: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": "tiny"},
        "data": {"train_batch_size": 4, "max_prompt_length": 16, "max_response_length": 40, "val_size": 3},
        "rollout": {"n": 2, "block_size": 4, "num_blocks": 60, "max_num_seqs": 3, "decode_steps": 4},
        "reward": {"num_workers": 2, "timeout_s": 2.0},
        "trainer": {"total_training_steps": 6, "save_freq": 1, "test_freq": 4, "num_devices": 2},
        "simulate": {"num_prompts": 10},
    }
    return with_options(values, more)


MIXED = ModelledWorkload(
    7,
    (
        SimulatedTask(name="short", response=SimulatedLengths(median=6, sigma=0.8), prompt_median=6, prompt_sigma=0.5),
        SimulatedTask(
            name="long",
            response=SimulatedLengths(median=15, sigma=1.0, growth=0.05),
            scoring=SimulatedScoring(median_s=0.5, sigma=1.0, hang_share=0.1),
        ),
    ),
    max_response_length=40,
    max_prompt_length=16,
    timeout_s=2.0,
)


def run_loop(made: Config, cost: CostModel | None = None, workload: Workload = MIXED) -> Any:
    """As `simulated_runs.played`."""
    return played(made, CostModel(SMALL, H100) if cost is None else cost, workload)


def identities(groups: dict[int, list[Group]]) -> dict[int, list[tuple]]:
    return {step: [(s.key, len(s), s.reward) for g in some for s in g.samples] for step, some in groups.items()}


@pytest.mark.parametrize("critic", [{}, {"values": 7, "update_critic": 101}], ids=["without", "with a critic"])
def test_a_step_by_hand(critic: dict[str, int]):
    """Rollout and scoring as in the tiny round (15 s, and 7 s more), then one forward pass, training, and the sync. A
    critic takes a forward pass and training of its own."""
    workload = KnownWorkload(TINY.samples, {0: 4, 1: 4})  # pyright: ignore[reportAttributeAccessIssue]
    made = config(
        data__train_batch_size=2,
        data__shuffle=False,
        rollout__max_num_seqs=4,
        reward__num_workers=1,
        reward__timeout_s=0.0,
        trainer__num_devices=1,
        trainer__total_training_steps=1,
        trainer__test_freq=0,
        rollout__decode_steps=2,
        algorithm__adv_estimator="gae" if critic else "grpo",
    )
    simulation, metrics, _, _ = run_loop(made, cost=ConstantCost(), workload=workload)
    timing = {name: value for name, value in metrics[1].items() if name.startswith("timing_s/")}
    expected = {
        "data": 0,
        "gen": 15,
        "reward": 7,
        "old_log_prob": 7,
        "ref": 0,
        "adv": 0,
        "update_actor": 101,
        "sync": 5,
        **critic,
    }
    step_s = 135 + sum(critic.values())
    assert timing == {f"timing_s/{name}": float(s) for name, s in (expected | {"save": 0, "step": step_s}).items()}
    assert metrics[1]["perf/total_num_tokens"] == 16 + 16
    assert metrics[1]["perf/throughput"] == 32 / step_s
    assert metrics[1]["critic/rewards/mean"] == 0.5
    assert simulation.clock.now_s == 5 + step_s, "the first sync comes before the first step"


def test_two_runs_are_equal_and_seeds_differ():
    first, again = (run_loop(config()) for _ in range(2))
    assert first[1] == again[1]
    assert identities(first[2]) == identities(again[2])
    other = run_loop(config(), workload=replace(MIXED, seed=8))
    assert identities(other[2]) != identities(first[2])
