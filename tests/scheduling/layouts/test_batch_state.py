"""Live rows by dp group, and their load as they end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import SIMPLE, batch_state

from jaxrl.scheduling.layouts.batch_state import load_at, remaining_s
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity


@given(st.lists(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), max_size=5), min_size=1, max_size=4))
def test_load_at(rows: list[list[tuple[int, int]]]):
    groups = batch_state(1, rows, num_devices=len(rows)).groups
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


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(2000, 9000)), min_size=1, max_size=6))
def test_long_sums_are_close(rows: list[tuple[int, int]]):
    """Beyond 2048 steps a part of them stands for all."""
    points = [Measurement(1, b, n, 0.01 + 0.002 * b + 1e-6 * b * n) for b in (1, 3, 6) for n in (8, 512, 20_000)]
    model = LatencyPredictor(Profile(ProfileIdentity("", "", "", 1, "", ""), tuple(points)))
    groups = batch_state(1, [rows], num_devices=1).groups
    num_steps = max(left for _, left in rows)
    exact = float(np.sum(model.decode_steps_s(1, *load_at(groups, "max_length", np.arange(num_steps)))))
    assert remaining_s(model, 1, groups) == pytest.approx(exact, rel=1e-3)
