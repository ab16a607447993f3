"""Which settings combine: a sentence for settings that exclude each other, and none for those that go together."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from jaxrl.config import Config, from_mapping
from jaxrl.scheduling.rounds.composition import composition_problem

ON = {"enable": True}


def config(
    rollout: Any, *, off: bool = False, filtering: bool = False, score_when: str = "sample", level: str = "none"
) -> Config:
    return from_mapping(
        {
            "model": {"path": "m"},
            "rollout": rollout,
            "trainer": {"one_step_off": off},
            "algorithm": {"filter_groups": {"enable": filtering}, "rollout_correction": {"rollout_is": level}},
            "reward": {"score_when": score_when},
        }
    )


@pytest.mark.parametrize(
    ("rollout", "others", "sentence"),
    [
        (
            {"tail_batching": ON, "partial_rollout": ON},
            {},
            "tail batching and partial rollout exclude each other: each decides what becomes of unfinished responses",
        ),
        ({"tail_batching": ON, "over_provisioning": ON}, {}, "tail batching and over-provisioning exclude each other"),
        ({"partial_rollout": ON, "over_provisioning": ON}, {}, "partial rollout and over-provisioning exclude each"),
        ({"partial_rollout": ON}, {"score_when": "rollout"}, "'sample' or 'group' (which mean the same there)"),
        ({"tail_batching": ON}, {"filtering": True, "score_when": "rollout"}, "dynamic sampling with tail batching"),
        ({"over_provisioning": ON}, {"filtering": True, "score_when": "rollout"}, "sampling with over-provisioning"),
        ({"stale_tokens": "mask"}, {"off": True}, "rollout.stale_tokens=mask excludes trainer.one_step_off"),
        (
            {},
            {"off": True, "level": "token"},
            "rollout_correction.rollout_is=token with trainer.one_step_off needs rollout.stale_tokens=recompute, found "
            "recorded",
        ),
    ],
)
def test_settings_that_exclude_each_other(rollout: Any, others: dict[str, Any], sentence: str):
    problem = composition_problem(config(rollout, **others))
    assert problem is not None
    assert re.search(re.escape(sentence), problem)


@pytest.mark.parametrize("rule", [{}, {"tail_batching": ON}, {"partial_rollout": ON}, {"over_provisioning": ON}])
def test_compositions_of_the_design_go_together(rule: Any):
    for off, filtering, score_when in product((False, True), (False, True), ("sample", "group")):
        assert composition_problem(config(rule, off=off, filtering=filtering, score_when=score_when)) is None


def test_scores_after_the_rollout_go_with_what_does_not_need_them_during_it():
    assert composition_problem(config({}, filtering=True, score_when="rollout")) is None
    assert composition_problem(config({"tail_batching": ON}, score_when="rollout")) is None
    assert composition_problem(config({"stale_tokens": "mask", "partial_rollout": ON})) is None


@pytest.mark.parametrize("stale_tokens", ["recorded", "recompute", "mask"])
def test_weights_go_with_tokens_of_any_version_where_not_all_are_recorded(stale_tokens: str):
    assert composition_problem(config({"stale_tokens": stale_tokens, "partial_rollout": ON}, level="token")) is None
    assert composition_problem(config({"stale_tokens": "recompute"}, off=True, level="sequence")) is None
