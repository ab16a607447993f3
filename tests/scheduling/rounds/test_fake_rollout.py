"""Mistakes of a rule that the fake rollout notices."""

from __future__ import annotations

import pytest
from fake_rollout import FakePrompts, FakeRollout
from rounds import fresh_batches

from jaxrl.scheduling.rounds.batches import RoundTime


def test_a_prompt_that_starts_from_scratch_again_needs_a_higher_attempt():
    rule, rollout = fresh_batches(2, 2), FakeRollout(lambda k: 3)
    for version in (0, 1):
        current = rule.plan(FakePrompts(10), RoundTime(version + 1, version))  # the same prompts in both rounds
        if version == 0:
            rollout.play(current, version)
            rule.settle(current)
        else:
            with pytest.raises(AssertionError, match="needs a higher `attempt`"):
                rollout.play(current, version)
