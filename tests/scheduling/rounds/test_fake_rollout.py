"""Mistakes of a rule that the fake rollout notices."""

from __future__ import annotations

from typing import Any

import pytest
from fake_rollout import FakePrompts, FakeRollout, FakeTraining
from rounds import fresh_batches, long_every_fifth

from jaxrl.mechanisms.tail_batching.options import TailBatchingSection
from jaxrl.mechanisms.tail_batching.rule import TailBatching
from jaxrl.scheduling.rounds.batches import RoundTime
from jaxrl.scheduling.rounds.race import BatchSettings


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


class Unnamed(TailBatching):
    """Its state calls the queue by another name."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**{name: value for name, value in state.items() if name != "queue"}, "waiting": state["queue"]}


def test_carried_prompts_that_the_state_does_not_show_are_noticed():
    rule = Unnamed(BatchSettings(4, 4), TailBatchingSection(True))
    training = FakeTraining(rule, FakePrompts(50), FakeRollout(long_every_fifth, num_slots=100), None)
    assert training.carried() == []
    training.run_step()
    with pytest.raises(AssertionError, match=r"carries 1 prompts, and its state .* must have an array 'queue' or"):
        training.carried()
