"""What the code scorer says of a response, as the adaptive limits of its prompt take it in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxrl.mechanisms.reward_timeouts import AdaptiveTimeouts, TimeoutRule
from jaxrl.rewards.code import CodeScorer
from jaxrl.rewards.request import ScoreRequest
from jaxrl.rewards.reward_pool import verdict_of
from jaxrl.scheduling.mechanism import RoundEnd
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, SampleKey

TESTS = {"inputs": ["1", "2"], "outputs": ["1", "2"]}
RULE = TimeoutRule(1.0, 20.0, 1.5)
RIGHT = "print(input())"
ENDLESS = "import time\nif input() == '2':\n    time.sleep(1000)\nprint(1)"


def said(reward: float, info: dict[str, Any]) -> Verdict:
    return Verdict(0.0, SampleKey(0, 0, 0), reward, info=info)


@pytest.fixture
def limited(scorer: CodeScorer) -> CodeScorer:
    return replace(scorer, code=scorer.code.replace(max_timeout_s=RULE.max_s))


def test_a_program_that_never_ends_is_cut_off_at_what_a_right_one_has_taught(limited: CodeScorer):
    prompt, timeouts = Prompt(0, 0, (1,), "echo", "test", None, TESTS), AdaptiveTimeouts(RULE)
    reward, info = limited(ScoreRequest("test", RIGHT, None, TESTS, timeouts.limits(prompt)))
    assert (reward, info["correct"], len(info["case_s"])) == (1.0, True, 2)
    timeouts.scored(prompt, (), said(reward, info))
    limits = timeouts.limits(prompt)
    assert len(limits) == 2
    assert all(RULE.min_s <= limit < RULE.max_s for limit in limits)
    reward, info = limited(ScoreRequest("test", ENDLESS, None, TESTS, limits))
    assert (reward, info["correct"], info["cut_off"], len(info["case_s"])) == (0.0, False, 1, 2)
    assert limits[1] <= info["case_s"][1] < RULE.max_s
    assert timeouts.is_close(prompt, said(reward, info))
    assert verdict_of(0.0, SampleKey(0, 0, 1), ("ok", reward, info, 1.0)).outside, "a clock decided it"
    timeouts.scored(prompt, limits, said(reward, info))
    counted = timeouts.round_ends(RoundEnd((), None))
    assert counted["reward/code/cut_off"] == 1.0
    assert counted["reward/code/saved_s"] == pytest.approx(RULE.max_s - limits[1])
