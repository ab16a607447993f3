"""Which settings combine: a sentence for settings that exclude each other, and none for those that go together."""

from __future__ import annotations

from typing import Any

import pytest
from keyword_options import with_options

from jaxrl.config import Config
from jaxrl.config.checks import NEEDS_WHOLE_BATCH
from jaxrl.mechanisms import composition_problem

ON = {"enable": True}


def streaming(**options: Any) -> Config:
    rollout = {"num_workers": 2, "n": 4}
    return with_options({"model": {"path": "m"}, "rollout": rollout, "trainer": {"stream": ON}}, options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        *(
            (
                {"algorithm": {"adv_estimator": name, "gdpo_reward_keys": ["a", "b"]}},
                f"excludes algorithm.adv_estimator={name}: its advantages",
            )
            for name in sorted(NEEDS_WHOLE_BATCH)
        ),
        ({"reward__score_when": "rollout"}, "reward.score_when must be 'sample' or 'group', found 'rollout'"),
        ({"rollout__num_workers": 3}, "needs rollout.num_workers to be even, found 3: half of the rollout's workers"),
        ({"rollout__num_workers": 6, "trainer__num_devices": 12}, "(trainer.num_devices) must be a power of two"),
        ({"actor__use_kl_loss": True, "actor__offload_reference": True}, "excludes actor.offload_reference"),
        ({"actor__ppo_mini_batch_size": 1}, "ppo_mini_batch_size (1 prompts) must be 0 or data.train_batch_size ("),
        ({"trainer__one_step_off": True, "rollout__num_devices": 4}, "excludes rollout.num_devices (4)"),
        ({"algorithm__teacher": {"endpoint": "http://h/v1", "endpoint_model": "m"}}, "excludes algorithm.teacher.en"),
        ({"algorithm__teacher": {"path": "t", "offload": True}}, "excludes algorithm.teacher.offload"),
        ({"actor__context_parallel_size": 3, "trainer__num_devices": 8}, "must be one of 1, 2, 4: products of the"),
    ],
)
def test_what_the_stream_trainer_excludes(options: dict[str, Any], sentence: str):
    assert sentence in (composition_problem(streaming(**options)) or "")


def ranking(**options: Any) -> Config:
    rollout = {"num_workers": 2, "num_devices": 2, "ranking_groups": ON}
    return with_options({"model": {"path": "m"}, "rollout": rollout, "trainer": {"one_step_off": True}}, options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"trainer__one_step_off": False, "rollout__num_devices": 0, "rollout__num_workers": 1},
            "so the rollout needs devices of its own; and rollout.num_workers to be at least 2",  # all at once
        ),
        ({"rollout__tail_batching": ON}, "excludes rollout.tail_batching: both decide which prompts share"),
        ({"rollout__layout": {"planner": True}}, "excludes rollout.layout.planner and rollout.layout.switch"),
        ({"environment": {"kind": "tools", "path": "a.py"}}, "excludes environment.kind: workers are shared out by"),
    ],
)
def test_what_ranking_groups_exclude(options: dict[str, Any], sentence: str):
    problem = composition_problem(ranking(**options)) or ""
    assert problem.startswith("rollout.ranking_groups.enable ")
    assert sentence in problem


STALE = {"trainer__one_step_off": True, "rollout__stale_tokens": "recorded"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rollout__hosts_per_worker": 2, "hosts__num": 2, "rollout__layout": {"planner": True}}, "tp is all devices"),
        ({"algorithm__filter_groups": ON | {"metric": "seq_final_reward"}}, "metric must not be seq_final_reward"),
        ({"algorithm": {"filter_groups": ON, "adv_estimator": "gae"}, "rollout__n": 1}, "needs rollout.n >= 2, found"),
        (STALE | {"algorithm__rollout_correction__rollout_is": "token"}, "needs rollout.stale_tokens=recompute, found"),
    ],
)
def test_what_others_exclude(options: dict[str, Any], sentence: str):
    assert sentence in (composition_problem(with_options({"model": {"path": "m"}}, options)) or "")
