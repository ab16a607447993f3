"""The latency profile and what is predicted from it: numbers worked out by hand, and properties over any table."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts
from jaxrl.scheduling.layouts.latency import LatencyPredictor, causal_pairs
from jaxrl.scheduling.layouts.latency_profile import (
    Measurement,
    Profile,
    ProfileIdentity,
    RowSizes,
    SwitchCost,
    VerifyMeasurement,
    profile_points,
)

IDENTITY = ProfileIdentity("tiny", "abc", "cpu", 8, "0.10.2", "float32")

# Two batches at tp 2; total contexts 200, 400 (batch 2) and 400, 800 (batch 4).
DECODE = (
    Measurement(2, 2, 100, 0.010),
    Measurement(2, 2, 200, 0.014),
    Measurement(2, 4, 100, 0.020),
    Measurement(2, 4, 200, 0.032),
    Measurement(4, 1, 100, 0.008),
)
PREFILL = (
    Measurement(4, 2, 100, 0.1),
    Measurement(4, 2, 200, 0.3),
    Measurement(4, 4, 100, 0.2),
    Measurement(4, 4, 200, 0.7),
)
SWITCHES = (SwitchCost(2, 4, 1.5, 0.001, 0.5), SwitchCost(4, 2, 2.0, 0.003, 0.25))
PROFILE = Profile(IDENTITY, DECODE, PREFILL, SWITCHES, (RowSizes(2, (1, 2, 3, 4)),))
VERIFY = (
    VerifyMeasurement(2, 4, 100, 0.03, 8),
    VerifyMeasurement(2, 4, 200, 0.05, 8),
    VerifyMeasurement(2, 8, 100, 0.06, 4),
    VerifyMeasurement(2, 8, 200, 0.10, 4),
)
VERIFY_PROFILE = replace(PROFILE, verify=VERIFY, row_sizes=(RowSizes(2, (4, 8, 16)),))


def test_a_prefill_costs_its_tokens_and_its_pairs():
    """A machine whose passes cost 10 ms and 1 ms a token, or 200 ms if that is more, and 1 us a pair."""

    def seconds(tokens: float, pairs: float) -> float:
        return max(0.01 + 0.001 * tokens, 0.2) + 1e-6 * pairs

    points = [(1, 8 << i) for i in range(11)] + [(64, 8), (64, 32), (64, 128)]
    table = tuple(Measurement(4, b, n, seconds(b * n, b * causal_pairs(n))) for b, n in points)
    predictor = LatencyPredictor(replace(PROFILE, prefill=table))
    for rows, context, start in ((1, 1, 0), (1, 8192, 0), (3, 85, 0), (9, 700, 0), (300, 40, 0), (1, 256, 60_000)):
        load = rows * context, rows * causal_pairs(context, start)
        assert predictor.prefill_s(4, *load) == pytest.approx(seconds(*load), rel=0.05), (rows, context, start)


def test_move_and_recompute_by_the_equations():
    predictor = LatencyPredictor(PROFILE)
    assert predictor.move_s(2, 4, 1200) == pytest.approx(1.2)  # 1200 tokens x 1 ms
    assert predictor.move_s(4, 2, 1200) == pytest.approx(3.6)  # the way back costs 3 ms a token
    # Equation 4, over the tokens and pairs of all rows
    lengths = (100, 100, 100, 300)
    pairs = 3 * causal_pairs(100) + causal_pairs(300)
    assert predictor.recompute_s(4, lengths) == predictor.prefill_s(4, 600, pairs)
    assert predictor.recompute_s(4, ()) == 0.0


# Properties


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any table of one degree; time rises with context, and varies in any way with the batch."""
    batches = draw(st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True))
    points = []
    for batch in batches:
        contexts = sorted(draw(st.lists(st.integers(1, 500), min_size=1, max_size=5, unique=True)))
        times = sorted(draw(st.lists(st.floats(1e-4, 1.0), min_size=len(contexts), max_size=len(contexts))))
        points += [Measurement(1, batch, context, s) for context, s in zip(contexts, times, strict=True)]
    return Profile(IDENTITY, tuple(points), tuple(points))


@given(profiles())
def test_exact_at_profiled_points(profile: Profile):
    predictor = LatencyPredictor(profile)
    for point in profile.decode:
        assert predictor.decode_step_s(1, point.batch, point.batch * point.context) == point.seconds


@given(profiles(), st.integers(1, 300), st.floats(1, 1e5))
def test_beyond_the_largest_batch_time_does_not_fall(profile: Profile, more: int, context: float):
    largest = max(point.batch for point in profile.decode)
    last, beyond = (LatencyPredictor(profile).decode_step_s(1, rows, context) for rows in (largest, largest + more))
    assert beyond >= last - 1e-12


@given(profiles(), st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**9)), min_size=1, max_size=6))
def test_a_prefill_of_more_tokens_and_pairs_does_not_take_less(profile: Profile, more: list[tuple[int, int]]):
    """Whatever the table says, and a load that no table has."""
    loads = np.cumsum([(0, 0), *more], axis=0).tolist()
    seconds = [LatencyPredictor(profile).prefill_s(1, tokens, pairs) for tokens, pairs in loads]
    assert seconds[0] >= 0
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(seconds))


@given(
    st.floats(1e-3, 1e-1),
    st.floats(0, 1e-3),
    st.floats(0, 1e-6),
    st.lists(st.tuples(st.integers(1, 40), st.floats(1, 9e4))),
)
def test_a_linear_machine_is_predicted_exactly(
    base: float, per_row: float, per_token: float, loads: list[tuple[int, float]]
):
    """A time that is linear in rows and tokens is predicted as linear, beyond the table as well."""
    points = [Measurement(1, b, n, base + per_row * b + per_token * b * n) for b in (1, 4, 16) for n in (8, 64, 512)]
    predictor = LatencyPredictor(Profile(IDENTITY, tuple(points)))
    for batch, context in loads:
        context = max(context, 16 * 8.0)  # below a batch's first point time stays what it is there
        expected = base + per_row * batch + per_token * context
        assert predictor.decode_step_s(1, batch, context) == pytest.approx(expected, rel=1e-9)


# Correction


def test_correction_by_hand():
    predictor = LatencyPredictor(PROFILE, AdaptiveLayouts.Options(correction_weight=0.5))
    assert predictor.ratio(2) == 1.0
    # Predicted 10 ms, real 12.1: log ratio 0 + 0.5 x log 1.21 = log 1.1.
    assert predictor.observe(2, 2, 200, 0.0121) == pytest.approx(1.1)
    assert predictor.decode_step_s(2, 4, 800) == pytest.approx(0.032 * 1.1)
    assert predictor.ratio(4) == pytest.approx(1.1), "what was not observed is taken to be as slow as the rest"
    # 50 ms instead of 10 count as 20: 0.5 x log 1.1 + 0.5 x log 2 = log sqrt(2.2).
    assert predictor.observe(2, 2, 200, 0.05) == pytest.approx(math.sqrt(2.2))
    # tp 4 goes on from there. Predicted 8 ms, real 8: log sqrt(2.2) / 2.
    assert predictor.observe(4, 1, 100, 0.008) == pytest.approx(2.2**0.25)
    assert predictor.ratio(2) == pytest.approx(math.sqrt(2.2)), "each degree has its own"
    assert LatencyPredictor(PROFILE, AdaptiveLayouts.Options(correction_weight=0.0)).observe(2, 2, 200, 1.0) == 1.0


def test_correction_of_another_profile_is_dropped():
    old = LatencyPredictor(PROFILE)
    old.observe(2, 2, 200, 0.02)
    new = LatencyPredictor(replace(PROFILE, identity=replace(IDENTITY, jax_version="0.11.2")))
    new.observe(2, 2, 200, 0.02)
    new.load_state_dict(old.state_dict())
    assert new.ratio(2) == 1.0
    with pytest.raises(ValueError, match=r"schema 7; this version reads schema 1"):
        new.load_state_dict({**old.state_dict(), "schema": 7})


# The table


@given(profiles(), st.sampled_from(["measured", "synthetic"]))
def test_any_profile_survives_json(drawn: Profile, source: Any):
    profile = replace(VERIFY_PROFILE, decode=drawn.decode, prefill=drawn.prefill, source=source)
    again = Profile.from_json(json.loads(json.dumps(profile.to_json())))
    assert (again, again.digest) == (profile, profile.digest)
    assert (profile.digest == replace(profile, source="measured").digest) == (source == "measured")


def test_a_foreign_table_is_refused():
    PROFILE.check(IDENTITY)
    for field in (each.name for each in fields(ProfileIdentity)):
        with pytest.raises(ValueError, match=r"something else.* make a new one with `jaxrl profile`") as error:
            PROFILE.check(replace(IDENTITY, **{field: "other"}))
        assert f"{field} is {getattr(IDENTITY, field)!r} there and 'other' here" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 1}, r"schema 1: this version reads 3: make a new one with `jaxrl profile`"),
        ({"decode": [{"tp": 1, "batch": 1, "context": 8}]}, r"missing .* 'seconds'"),
        ({"decode": [{"tp": 3, "batch": 1, "context": 8, "seconds": 1.0}]}, r"tp \(3\) must divide .* \(8\)"),
    ],
)
def test_a_malformed_table_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Profile.from_json({**PROFILE.to_json(), **changes})


# What to measure


def test_points_are_the_sizes_of_the_programs_up_to_the_one_that_holds_the_largest_batch():
    sizes = {2: (4, 8, 16), 4: (4, 8, 16, 32)}
    points = profile_points(10, 1 << 20, (2, 4), device_count=4, max_context=16, row_sizes=sizes)
    assert {(point.tp, point.batch) for point in points} == {(2, 4), (2, 8), (4, 4), (4, 8), (4, 16)}
    few = profile_points(2, 1 << 20, (2,), device_count=4, max_context=16, row_sizes=sizes)
    assert {point.batch for point in few} == {4}, "one row runs as four"


def test_a_step_takes_as_long_as_the_rows_that_it_is_padded_to():
    points = tuple(Measurement(2, b, n, 0.01 * b) for b in (4, 16) for n in (8, 64))
    predictor = LatencyPredictor(Profile(IDENTITY, points, row_sizes=(RowSizes(2, (4, 8, 16)),)))
    # 4 and 16 were profiled; 8 was not and is interpolated; beyond the largest programs nothing is padded
    seconds = {1: 0.04, 4: 0.04, 5: 0.08, 8: 0.08, 9: 0.16, 16: 0.16, 18: 0.18}
    for batch, expected in seconds.items():
        assert predictor.decode_step_s(2, batch, 100.0) == pytest.approx(expected), batch
    predictor.observe(2, 9, 100.0, 0.16)
    assert predictor.ratio(2) == pytest.approx(1.0), "observed steps are padded too"
    own = LatencyPredictor(predictor.profile, row_sizes={2: (16,)})
    assert own.decode_step_s(2, 5, 100.0) == pytest.approx(0.16), "the programs that run, not those profiled"


def test_a_step_that_verifies_drafts_takes_what_was_measured_for_so_many_rows():
    predictor = LatencyPredictor(VERIFY_PROFILE)
    assert VERIFY_PROFILE.verify_widths(2) == {4: 8, 8: 4}
    assert VERIFY_PROFILE.verify_widths(4) == {}
    # three rows are padded to four; tokens of all rows together, linear between 400 and 800
    for batch, context, expected in [(4, 400, 0.03), (3, 600, 0.04), (1, 100, 0.03), (5, 800, 0.06), (8, 1600, 0.1)]:
        assert predictor.verify_step_s(2, batch, context) == pytest.approx(expected), (batch, context)
    assert predictor.verify_step_s(2, 9, 800) == predictor.decode_step_s(2, 9, 800), "no room for drafts in 16 rows"
    assert predictor.verify_step_s(4, 1, 100) == predictor.decode_step_s(4, 1, 100)
    predictor.observe(2, 4, 400, 2 * predictor.decode_step_s(2, 4, 400))
    assert predictor.ratio(2) > 1
    assert predictor.verify_step_s(2, 4, 400) == pytest.approx(0.03 * predictor.ratio(2)), "a slower machine is slower"
