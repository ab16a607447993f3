"""Ticks and moves of several workers by a latency profile: numbers worked out by hand."""

from __future__ import annotations

import pytest
from checking import engine_in, make_request

from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity, SwitchCost
from jaxrl.scheduling.layouts.plan_cost import across_s, cheaper_move, plan_ticks, step_seconds
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Capacity
from jaxrl.scheduling.tokens.progress import PlanTimes

IDENTITY = ProfileIdentity("tiny", "abc", "cpu", 4, "0.10.2", "float32")
DECODE = tuple(
    Measurement(tp, batch, context, seconds / tp)
    for tp in (1, 2)
    for batch, context, seconds in ((1, 100, 0.010), (1, 200, 0.012), (4, 100, 0.020), (4, 200, 0.030))
)
PREFILL = tuple(
    Measurement(tp, 1, context, seconds / tp) for tp in (1, 2) for context, seconds in ((50, 0.04), (100, 0.10))
)
CAPACITIES = {tp: Capacity(4 // tp, 4 * tp, 40 * tp, 4, 64) for tp in (1, 2)}


def profile(kv_s_per_token: float = 0.001, switches: bool = True) -> Profile:
    costs = (SwitchCost(1, 2, 1.0, kv_s_per_token, 0.5), SwitchCost(2, 1, 1.0, kv_s_per_token / 2, 0.5))
    return Profile(IDENTITY, DECODE, PREFILL, costs if switches else ())


def engine(tp: int, lengths: dict) -> Engine:
    return engine_in(tp, lengths, CAPACITIES)[0]


@pytest.mark.parametrize(
    ("worker", "steps", "prefill", "batch", "context", "seconds"),
    [
        (1, 16, 0, 1, 100.0, 16 * 0.005),
        (1, 10, 0, 4, 600.0, 10 * 0.025 / 2),  # halfway between 400 and 800 tokens
        (0, 0, 400, 4, 0.0, 0.10),  # a row of 100 tokens in each of four groups
        (0, 8, 200, 1, 100.0, 0.04 + 8 * 0.010),
        (0, 0, 0, 0, 0.0, 0.0),  # all rows had stopped
    ],
)
def test_ticks_are_predicted_nanoseconds(
    worker: int, steps: int, prefill: int, batch: int, context: float, seconds: float
):
    ticks = plan_ticks(LatencyPredictor(profile()), [engine(1, {}), engine(2, {})])
    for duration_s in (0.0, 7.0):  # what a clock measured does not count
        times = PlanTimes(0, steps, duration_s, prefill, batch, context, was_queued=True)
        assert ticks(worker, times) == pytest.approx(seconds * 1e9, abs=1)


@pytest.mark.parametrize(
    ("kv_s_per_token", "expected"),
    [
        # a row of 50 or so tokens in each of two target groups takes 0.02 s to prefill; a token is sent in three times
        (0.0001, "migrate"),
        (0.001, "recompute"),
    ],
)
def test_what_is_predicted_to_be_cheaper_is_done(kv_s_per_token: float, expected: str):
    requests = [make_request(i, num_prompt=45, max_tokens=100, prompt=i) for i in range(2)]
    lengths = {request.key: 100 for request in requests}
    source, target = engine(1, lengths), engine(2, lengths)
    for request in requests:
        source.add(request)
    source.step()
    source.settle()
    predictor = LatencyPredictor(profile(kv_s_per_token))
    assert cheaper_move(predictor, source, target, [0, 1]) == expected
    with pytest.raises(ValueError, match="no costs of a switch"):
        cheaper_move(LatencyPredictor(profile(switches=False)), source, target, [0])


@pytest.mark.parametrize(
    ("from_tp", "to_tp", "seconds"),
    [
        # a token costs 1 ms where each device sends half of all its KV, and 0.5 ms where it sends half of a half: 2 ms
        # for a whole one over a link
        (2, 2, 100 * 0.001),
        (1, 2, 100 * (0.002 + 0.001)),  # and the change of degree where it lands
        (2, 1, 100 * (0.001 + 0.0005)),
    ],
)
def test_what_kv_takes_between_workers(from_tp: int, to_tp: int, seconds: float):
    assert across_s(LatencyPredictor(profile()), from_tp, to_tp, 100) == pytest.approx(seconds)
    assert across_s(LatencyPredictor(profile()), from_tp, to_tp, 0) == 0


def test_a_step_of_a_worker_spreads_rows_over_its_groups_and_lets_too_many_take_turns():
    step_s = step_seconds(LatencyPredictor(profile()), engine(1, {}))  # four groups of four slots
    assert step_s(4, 800) == pytest.approx(0.012)  # one row of 200 tokens in each
    assert step_s(16, 16 * 200) == pytest.approx(0.030)
    assert step_s(32, 32 * 200) == pytest.approx(2 * 0.030), "twice as many as there are slots"
    assert step_s(0.5, 100) == pytest.approx(0.010), "a share of a row is a row"
    halved = step_seconds(LatencyPredictor(profile()), engine(2, {}))  # two groups of eight slots
    assert halved(2, 400) == pytest.approx(0.006)
