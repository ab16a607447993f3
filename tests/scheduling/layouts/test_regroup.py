"""Rows by dp group after a change of layout: balanced, none lost, and few tokens away from home."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.scheduling.layouts.batch_state import LiveRow, Rows
from jaxrl.scheduling.layouts.regroup import regroup

DEGREES = st.sampled_from((1, 2, 4, 8))


def rows_of(*lengths: Sequence[int], first_id: int = 0) -> tuple[Rows, ...]:
    """One group of rows for each list of lengths."""
    made = []
    for group, each in enumerate(lengths):
        made.append(tuple(LiveRow(first_id + 100 * group + i, n, n + 10) for i, n in enumerate(each)))
    return tuple(made)


def lengths_of(groups: Sequence[Rows]) -> list[list[int]]:
    return [[row.length for row in rows] for rows in groups]


def far(groups: Sequence[Rows], now: Sequence[Rows]) -> int:
    """Tokens of the rows that are not in a new group of their home."""
    homes = min(len(groups), len(now))
    home_of = {row.request_id: i * homes // len(groups) for i, rows in enumerate(groups) for row in rows}
    return sum(
        row.length for i, rows in enumerate(now) for row in rows if home_of[row.request_id] != i * homes // len(now)
    )


@pytest.mark.parametrize(
    ("before", "dp", "after"),
    [
        ([[6, 5], [7, 3], [8], []], 2, [[7, 6, 5], [8, 3]]),  # 3 and 2, not 4 and 1
        ([[9, 1], [8, 7], [], []], 4, [[9], [8], [7], [1]]),  # of those that leave, the longest first
    ],
)
def test_table(before: list[list[int]], dp: int, after: list[list[int]]):
    assert lengths_of(regroup(rows_of(*before), dp)) == after


def test_tokens_that_are_there_count_among_groups_with_as_many_rows():
    held = rows_of([9], [1], first_id=1000)
    assert lengths_of(regroup(rows_of([5, 3]), 2, held)) == [[3], [5]]
    assert lengths_of(regroup(rows_of([5]), 2, held)) == [[], [5]]


@given(DEGREES, DEGREES, st.lists(st.tuples(st.integers(0, 7), st.integers(1, 60)), max_size=40))
def test_balanced_and_none_lost(before: int, after: int, rows: list[tuple[int, int]]):
    groups = rows_of(*([n for g, n in rows if g % before == i] for i in range(before)))
    now = regroup(groups, after)
    assert len(now) == after
    assert sorted(row.request_id for each in now for row in each) == sorted(row.request_id for g in groups for row in g)
    counts = [len(each) for each in now]
    assert max(counts) - min(counts) <= 1
    assert now == regroup(groups, after)


@given(
    st.sampled_from([(1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (4, 4)]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=6),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_no_balanced_outcome_moves_fewer_tokens(sizes: tuple[int, int], rows: list[tuple[int, int]], own: list[int]):
    """Against every way to deal up to six rows, with rows that are there already."""
    before, after = sizes
    groups = rows_of(*([n for g, n in rows if g % before == i] for i in range(before)))
    held = rows_of(*([1] * count for count in own[:after]), first_id=1000)
    flat = [row for each in groups for row in each]
    best: tuple[list[int], int] | None = None
    for ways in product(range(after), repeat=len(flat)):
        dealt = [tuple(row for row, g in zip(flat, ways, strict=True) if g == i) for i in range(after)]
        counts = sorted((len(each) + len(there) for each, there in zip(dealt, held, strict=True)), reverse=True)
        if best is None or (counts, far(groups, dealt)) < best:
            best = counts, far(groups, dealt)
    now = regroup(groups, after, held)
    counts = sorted((len(each) + len(there) for each, there in zip(now, held, strict=True)), reverse=True)
    assert (counts, far(groups, now)) == best
