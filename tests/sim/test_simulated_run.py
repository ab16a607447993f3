"""The loop on a simulated machine: a step done by hand."""

from __future__ import annotations

import pytest
from known_samples import KnownWorkload
from sim_machine import TINY, ConstantCost
from simulated_runs import make_config, played

HAND = {
    **{"data.train_batch_size": 2, "data.shuffle": False, "rollout.max_num_seqs": 4, "rollout.decode_steps": 2},
    **{"reward.num_workers": 1, "reward.timeout_s": 0.0, "trainer.num_devices": 1, "trainer.total_training_steps": 1},
}


@pytest.mark.parametrize("critic", [{}, {"values": 7, "update_critic": 101}], ids=["without", "with a critic"])
def test_a_step_by_hand(critic: dict[str, int]):
    """Plan 0 prefills (10 s), which samples each first token, and decodes two steps: until 12. Plan 1, submitted at 0,
    runs two more until 14; plan 2, submitted at 12 when the host has seen plan 0, one until 15. The one reward worker
    starts at 12 and needs 10 s. Then one forward pass, training, and the sync. A critic takes those of its own."""
    workload = KnownWorkload(TINY.samples, {0: 4, 1: 4})  # pyright: ignore[reportAttributeAccessIssue]
    made = make_config(HAND, **{"algorithm.adv_estimator": "gae" if critic else "grpo"})
    simulation, metrics, _, _ = played(made, ConstantCost(), workload)
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
