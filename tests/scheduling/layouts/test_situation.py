"""Live rows by dp group: their load as they end, and how they regroup."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import SIMPLE, situation

from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity
from jaxrl.scheduling.layouts.situation import LiveRow, load_at, regroup
from jaxrl.scheduling.layouts.switch_rule import remaining_s


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), max_size=5), min_size=1, max_size=4))
def test_load_at(rows: list[list[tuple[int, int]]]):
    groups = situation(1, rows, num_devices=len(rows)).groups
    batch_S, tokens_S = load_at(groups, "max_length", np.arange(32))
    for step in range(32):
        live = [[row.length + step for row in group if row.limit - row.length > step] for group in groups]
        assert batch_S[step] == max(map(len, live))
        assert tokens_S[step] == max(map(sum, live))
    for width in (3, 7):
        some_batch_S, some_tokens_S = load_at(groups, "max_length", np.arange(1, 32, width))
        assert (some_batch_S == batch_S[1::width]).all()
        assert (some_tokens_S == tokens_S[1::width]).all()
    assert remaining_s(SIMPLE, 1, ()) == 0.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(2000, 9000)), min_size=1, max_size=6))
def test_long_sums_are_close(rows: list[tuple[int, int]]):
    """Beyond 2048 steps a part of them stands for all."""
    points = [Measurement(1, b, n, 0.01 + 0.002 * b + 1e-6 * b * n) for b in (1, 3, 6) for n in (8, 512, 20_000)]
    model = LatencyPredictor(Profile(ProfileIdentity("", "", "", 1, "", ""), tuple(points)))
    groups = situation(1, [rows], num_devices=1).groups
    num_steps = max(left for _, left in rows)
    exact = float(np.sum(model.decode_steps_s(1, *load_at(groups, "max_length", np.arange(num_steps)))))
    assert remaining_s(model, 1, groups) == pytest.approx(exact, rel=1e-3)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=8, max_size=8), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])
)
def test_regroup(counts: list[int], before: int, after: int):
    groups = situation(8 // before, [[(1 + 7 * i % 5, 1) for i in range(n)] for n in counts[:before]]).groups
    now = regroup(groups, after)
    assert len(now) == after
    ids = [[row.request_id for row in group] for group in now]
    assert sorted(i for group in ids for i in group) == sorted(row.request_id for group in groups for row in group)
    for i, group in enumerate(now):
        size = max(before, after) // min(before, after)
        sources = groups[i * size : (i + 1) * size] if after <= before else (groups[i // size],)
        assert {row.request_id for row in group} <= {row.request_id for rows in sources for row in rows}
        if after > before:
            siblings = ids[i // size * size : (i // size + 1) * size]
            assert max(map(len, siblings)) - min(map(len, siblings)) <= 1, "dealt evenly"


def test_split_groups_balance_their_tokens():
    """Longest first: 9 | 8, then 5 to the 8, 4 to the 9; in their order 4, 5, 8, 9 they would make 12 and 14."""
    groups = situation(2, [[(4, 1), (9, 1), (5, 1), (8, 1)]], num_devices=2).groups
    assert [[row.length for row in group] for group in regroup(groups, 2)] == [[9, 4], [8, 5]]


def test_rows_are_checked():
    with pytest.raises(ValueError, match=r"row of request 5: length \(9\) must be in \[1, 8\]"):
        LiveRow(5, 9, 8)
