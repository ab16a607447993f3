"""Small simulated runs with each rule, for tests of which several hosts decide what one process decides."""

from __future__ import annotations

from typing import Any

from simulated_runs import make_config

from jaxrl.config import Config

ON = {"enable": True}
FACTORS = {"enable": True, "prompt_factor": 1.5, "response_factor": 1.5}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "capped": {"rollout.max_active_requests": 3, "rollout.n": 3},
    "over-provisioning": {"rollout.over_provisioning": FACTORS},
    "tail batching": {"rollout.tail_batching": FACTORS, "algorithm.filter_groups": ON},
    "partial rollout": {"rollout.partial_rollout": ON},
    "partial rollout, filtered": {"rollout.partial_rollout": ON, "algorithm.filter_groups": ON},
    "partial rollout, one step off": {
        "rollout.partial_rollout": ON,
        "trainer.one_step_off": True,
        "trainer.test_freq": 2,
    },
    "prompts stay together": {"rollout.deal": "prompts", "algorithm.filter_groups": ON, "rollout.n": 3},
}


def config_of(rule: str, seed: int, num_workers: int, **more: Any) -> Config:
    """Rounds of many plans, in which rows wait, are preempted, and run ahead of the lookahead."""
    sizes: dict[str, Any] = {
        "trainer.num_devices": num_workers,
        "rollout.num_workers": num_workers,
        "rollout.max_num_batched_tokens": 16,
        "rollout.decode_steps": 1 + seed % 3,
        "rollout.max_num_seqs": 2 + seed % 4,
        "rollout.num_blocks": 24 + seed % 20,
    }
    return make_config(RULES[rule], **{**sizes, **more})
