"""The baselines, plain batches and over-provisioning, and what all rules share."""

from __future__ import annotations

from typing import Any

import pytest
from fake_rollout import FakePrompts, through_disk
from rounds import Steps, filtering, fresh_batches, long_every_fifth

from jaxrl.mechanisms.over_provisioning import OverProvisioning
from jaxrl.mechanisms.partial_rollout import PartialRollout
from jaxrl.mechanisms.tail_batching import TailBatching
from jaxrl.scheduling.rounds.batches import RoundTime, room_until_end
from jaxrl.scheduling.rounds.round import BatchSettings


def test_over_provisioning_discards_those_that_lose():
    rule = OverProvisioning(
        BatchSettings(4, 4), OverProvisioning.Options(enable=True, prompt_factor=1.25, response_factor=1.25)
    )
    results = Steps(rule, long_every_fifth).run(3)
    assert [result.left for result in results] == [{(0, p): "filtered"} for p in (4, 9, 14)]
    assert all(result.metrics["rollout/discarded_prompts"] == 1 for result in results)


@pytest.mark.parametrize(
    ("at_end", "steps_left", "num_waiting", "room"),
    [
        ("leave", 1, 9, None),
        ("flush", 3, 0, 8),  # eight can be trained on in the two steps after this one
        ("flush", 2, 3, 1),
        ("flush", 2, 6, -2),  # this round must take two of the six
    ],
)
def test_how_many_prompts_to_spare_a_run_can_still_train_on(
    at_end: Any, steps_left: int | None, num_waiting: int, room: int | None
):
    assert room_until_end(at_end, 4, RoundTime(1, 0, steps_left), num_waiting) == room


def test_a_round_that_is_drawn_ahead_has_the_prompts_that_it_would_have():
    """Also in a run that goes on from the boundary between, and where it goes on with smaller batches."""

    def indices(groups: Any) -> list[int]:
        return [group.prompt.index for group in groups]

    rule = fresh_batches(4, 2)
    steps = Steps(rule, lambda k: 1)
    (result,) = steps.run()
    drawn = rule.ahead(steps.prompts, RoundTime(2, 0))
    assert rule.num_carried == len(drawn) == 4
    assert {(group.first_step, group.first_round) for group in drawn} == {(2, 2)}
    assert indices(rule.ahead(steps.prompts, RoundTime(2, 0))) == indices(drawn), "nothing is drawn twice"
    assert (indices(result.groups), steps.prompts.position) == ([0, 1, 2, 3], 8)
    state = through_disk(rule.state())
    for size, expected in ((4, [4, 5, 6, 7]), (2, [4, 5])):
        later = Steps(fresh_batches(size, 2), lambda k: 1)
        later.prompts.position = 8
        later.rule.load_state(state, later.prompts)
        assert indices(later.run()[0].groups) == expected
        assert (later.rule.num_carried, later.prompts.position) == (4 - size, 8)


@pytest.mark.parametrize(
    "rule",
    [
        OverProvisioning(
            BatchSettings(4, 4), OverProvisioning.Options(enable=True, prompt_factor=1.25, response_factor=1.25)
        ),
        fresh_batches(4, 4, **filtering()),
        TailBatching(BatchSettings(4, 4), TailBatching.Options(enable=True)),
        PartialRollout(BatchSettings(4, 4), PartialRollout.Options(enable=True)),
    ],
)
def test_what_depends_on_which_responses_end_first_is_not_drawn_ahead(rule: Any):
    prompts = FakePrompts(100)
    assert list(rule.ahead(prompts, RoundTime(2, 0))) == []
    assert prompts.position == rule.num_carried == 0
