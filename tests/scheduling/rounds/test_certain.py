"""Which groups are certain to be in the batch, before the round has ended.

That what is certain stays so, and is what the round yields in the end, is checked after each event of every simulated
run (`tests/support/simulated_runs.py`), for all rules at random.
"""

from __future__ import annotations

from typing import Any

from fake_rollout import FakePrompts
from rounds import START, aborted, filtering, finish, fresh_batches, key, verdict

from jaxrl.scheduling.rounds.batches import RoundTime
from jaxrl.scheduling.rounds.events import Event
from jaxrl.scheduling.rounds.round import BatchSettings, PlannedGroup, RaceLimits, Round
from jaxrl.types import Group

Told = list[tuple[Event, list[int]]]


def race(num_spare: int = 0, num_responses: int = 1, due: tuple[int, ...] = (), size: int = 1, **shared: Any) -> Round:
    """Two groups are needed."""
    limits = RaceLimits(BatchSettings(2, size, **shared), num_responses, num_spare)
    prompts = FakePrompts(100)
    supply = lambda: PlannedGroup.first(*prompts.next(1), num_responses, 1)  # noqa: E731
    return Round(limits, supply, [(0, index) for index in due])


def is_scored(group: Group) -> bool:
    return all(sample.reward is not None for sample in group.samples)


def follow(current: Round, told: Told) -> None:
    """After each event these prompts are certain and scored."""
    for event, expected in told:
        assert not current.done
        current.handle(event)
        assert [group.prompt.index for group in current.certain() if is_scored(group)] == expected, event


def check(current: Round, told: Told, aborts_rest: bool = False) -> None:
    """The same; the round ends with the last event, or when what it aborts then has ended, and yields those."""
    follow(current, told)
    for k in list(current.aborting) if aborts_rest else ():
        current.handle(aborted(k))
    assert current.done
    assert current.certain() == current.groups()
    assert [group.prompt.index for group in current.groups()] == told[-1][1]


def test_a_group_that_is_due_comes_before_others():
    check(
        race(num_spare=2, due=(0,)),
        [
            (START, []),
            (finish(key(1, 0)), []),
            (verdict(key(1, 0)), [1]),
            (finish(key(2, 0)), [1]),
            (verdict(key(2, 0)), [1]),  # one place is left for 0, which the round waits for
            (finish(key(0, 0)), [1]),
            (aborted(key(3, 0)), [1]),
            (verdict(key(0, 0)), [0, 1]),
        ],
    )


def scored(prompt: int, reward: float | None, expected_before: list[int], expected: list[int]) -> Told:
    """A group of two ends and is scored; all rewards equal: it is filtered."""
    ends = [(finish(key(prompt, i)), expected_before) for i in (0, 1)]
    return [*ends, (verdict(key(prompt, 0), reward), expected_before), (verdict(key(prompt, 1), reward), expected)]


def test_a_group_that_is_due_may_be_filtered():
    current = race(2, 2, due=(0,), size=2, **filtering(max_unscored_groups=0))
    told = [
        (START, []),
        *scored(1, None, [], [1]),
        *scored(2, None, [1], [1]),
        *scored(0, 1.0, [1], [1, 2]),  # filtered: there are two others
        *((aborted(key(3, i)), [1, 2]) for i in (0, 1)),
    ]
    check(current, told, aborts_rest=True)


def test_with_dynamic_sampling_the_first_in_the_order_of_launch():
    current = fresh_batches(2, 2, **filtering(max_unscored_groups=0)).plan(FakePrompts(10), RoundTime(1, 0))
    told = [
        (START, []),
        *scored(0, 1.0, [], []),  # filtered, so that 2 and 3 are launched beside 1
        *scored(3, None, [], []),  # 1 and 2 were launched before it
        *scored(2, None, [], [2]),  # at most 1 comes before it
    ]
    follow(current, told)
    assert {k.prompt_index for k in current.launched} >= {0, 1, 2, 3}
    check(current, scored(1, 1.0, [2], [2, 3]), aborts_rest=True)  # filtered
