"""The planner of tp between rounds: tables by hand, and its state."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.mechanisms.adaptive_layouts.rules import TpPlanner

DEGREES = (1, 2, 4, 8)


def make(degrees: tuple[int, ...] = DEGREES, initial: int = 2) -> TpPlanner:
    return TpPlanner(degrees, initial)


@pytest.mark.parametrize(
    ("preemptions", "degrees"),
    [
        ([10], [2]),  # nothing to compare with
        ([100, 105], [2, 2]),  # 105 is 1.05 x 100, not more
        ([100, 106], [2, 4]),
        ([100, 106, 112, 118], [2, 4, 8, 8]),  # 118 > 117.6, and 8 is the largest
        ([100, 50, 53], [2, 2, 4]),  # against the round before, which had 50: 53 > 52.5
        ([0, 1], [2, 4]),  # from none to some
        ([0, 0, 0, 1, 0, 0, 0, 0], [2, 2, 2, 4, 4, 4, 4, 2]),
        ([5, 6, 0, 0, 0, 0, 0, 0, 0, 0], [2, 4, 4, 4, 4, 2, 2, 2, 2, 1]),  # each halving takes four of its own
        ([7, 7, 7, 7, 7], [2, 2, 2, 2, 2]),
    ],
)
def test_the_papers_rule(preemptions: list[int], degrees: list[int]):
    planner = make()
    assert planner.degree() == 2
    assert [planner.observe(count) for count in preemptions] == degrees
    assert planner.degree() == degrees[-1]


def test_kinds_of_rounds_are_compared_with_their_like_by_the_papers_rule():
    """Short rounds have 1.79 times the preemptions of long ones: that is no rise (RollPacker §4.2)."""
    rounds = [("short", 179), ("short", 179), ("long", 100), ("short", 179), ("long", 120), ("short", 170)]
    planner, mixed = make(), make()
    assert [planner.observe(count, kind) for kind, count in rounds] == [2, 2, 2, 2, 4, 2]
    assert (planner.degree("short"), planner.degree("long"), planner.degree("other")) == (2, 4, 2)
    assert [mixed.observe(count) for _, count in rounds] == [2, 2, 2, 4, 4, 8]


@settings(deadline=None)
@given(
    rounds=st.lists(st.tuples(st.sampled_from(["short", "long"]), st.sampled_from([0, 1, 40, 50, 200])), max_size=40),
    cut=st.integers(0, 40),
)
def test_state_is_saved_and_a_step_is_one_degree(rounds: list[tuple[str, int]], cut: int):
    whole, first, second = (make() for _ in range(3))
    degrees: list[int] = []
    for kind, count in rounds:
        before = whole.degree(kind)
        after = whole.observe(count, kind)
        degrees.append(after)
        assert abs(DEGREES.index(after) - DEGREES.index(before)) <= 1
        assert after >= before or count == 0, "only quiet rounds lower tp"
        assert after <= before or count > 0
    for kind, count in rounds[:cut]:
        first.observe(count, kind)
    second.load_state_dict(first.state_dict())
    assert [second.observe(count, kind) for kind, count in rounds[cut:]] == degrees[cut:]
    assert second.state_dict() == whole.state_dict()
