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
    ],
)
def test_what_ranking_groups_exclude(options: dict[str, Any], sentence: str):
    problem = composition_problem(ranking(**options)) or ""
    assert problem.startswith("rollout.ranking_groups.enable ")
    assert sentence in problem
