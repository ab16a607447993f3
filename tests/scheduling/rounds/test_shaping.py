"""Reward shaping against DAPO's equations 7 and 13, and what becomes of a verdict."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.scheduling.rounds.shaping import RewardShaping
from jaxrl.types import Sample, SampleKey

KEY = SampleKey(0, 3, 1)


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (80, 0.0), (81, -0.1), (100, -2.0)])
def test_equation_13(length: int, expected: float):
    """With L_max 100 and L_cache 20, ((L_max - L_cache) - y) / L_cache behind token 80; times the factor of 2."""
    assert RewardShaping(100, 20, 2.0).reward(length) == pytest.approx(expected)


def test_a_verdict_is_shaped_and_keeps_what_the_scorer_said():
    penalty = RewardShaping(100, 20, 1.0)
    long = penalty.shaped(Verdict(2.5, KEY, 1.0, info={"extracted": "7"}, duration_s=0.5), 90)
    assert long == Verdict(
        2.5, KEY, 0.5, info={"acc": 1.0, "extracted": "7", "overlong_reward": -0.5, "overlong": True}, duration_s=0.5
    )
    short = penalty.shaped(Verdict(0.0, KEY, 1.0, info={"acc": 0.25}), 80)
    assert (short.reward, short.info) == (1.0, {"acc": 0.25, "overlong_reward": 0.0, "overlong": False})


@pytest.mark.parametrize("status", ["error", "timeout"])
def test_a_sample_that_could_not_be_scored_counts_as_a_wrong_one_of_no_length(status):
    verdict = Verdict(0.0, KEY, 0.0, status, {"error": "x"})
    assert RewardShaping(100, 20, 1.0).shaped(verdict, 100) == verdict
    assert RewardShaping(100, 20, 1.0, -1.0).shaped(verdict, 100).reward == -1.0


@pytest.mark.parametrize(("scored", "expected"), [(0.0, -1.0), (0.25, -0.5), (1.0, 1.0)])
def test_a_wrong_answer_has_the_reward_that_is_asked(scored: float, expected: float):
    """DAPO's equation 7. Weights and parts come on top: what is right or wrong is the scorer's own reward."""
    shaping = RewardShaping(100, 0, 1.0, -1.0)
    found = shaping.shaped(Verdict(0.0, KEY, scored), 100)
    assert (found.reward, found.info) == (expected, {"acc": scored, "wrong_reward": scored - 1})
    weighted = Verdict(0.0, KEY, 2 * scored + 0.5, info={"own_reward": scored})
    assert shaping.shaped(weighted, 100).reward == 2 * scored + 0.5 + scored - 1
    assert shaping.metrics([]) == {}, "no length is penalised"


def test_metrics_of_a_batch():
    def sample(**info: float) -> Sample:
        zeros = np.zeros(1, np.float32)
        return Sample(KEY, zeros.astype(np.int32), zeros, zeros, zeros.astype(np.int32), reward_info=info)

    batch = [sample(overlong_reward=-0.5), sample(overlong_reward=0.0), sample(), sample(overlong_reward=-1.0)]
    assert RewardShaping(100, 20, 1.0).metrics(batch) == {
        "reward/overlong_penalty/mean": 0.375,
        "reward/overlong_penalty/share": 0.5,
    }
