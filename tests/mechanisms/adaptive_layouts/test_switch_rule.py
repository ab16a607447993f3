"""The layout switch rule: a decision table by hand, the true optimum by brute force, and no oscillation under noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import DEGREES, MOVE, ROOMY, SIMPLE, UP, batch_state

from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts
from jaxrl.mechanisms.adaptive_layouts.rules import LayoutSwitchRule, Switch
from jaxrl.scheduling.layouts.batch_state import BatchState, GroupCapacity, LiveRow
from jaxrl.scheduling.layouts.latency import LatencyPredictor, causal_pairs
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity, SwitchCost
from jaxrl.scheduling.layouts.regroup import regroup

NO_ROW = GroupCapacity(1 << 40, 0)
ONE_ROW = batch_state(1, [[(1000, 500)]])
THREE_ROWS = batch_state(1, [[(5000, 2000)]] * 3)


def room(now: BatchState, **capacities: GroupCapacity) -> BatchState:
    """The same where these layouts alone are possible, of tp 1 and so on as `tp1`."""
    return replace(now, capacities={int(name[2:]): each for name, each in capacities.items()})


@dataclass(frozen=True)
class Case:
    """One row of the decision table: what is expected is (to_tp, how), or None. The choice among degrees by rows and
    steps alone is checked against brute force, below."""

    name: str
    model: LatencyPredictor
    config: AdaptiveLayouts.Options
    now: BatchState
    expected: tuple[int, str] | None


TABLE = [
    # 5000 tokens: migrating takes 0.5 s, a prefill 0.25 s, and 2500 tokens take as long either way.
    Case("recompute is cheaper", SIMPLE, UP, batch_state(1, [[(5000, 1000)]]), (8, "recompute")),
    # 64 rows at tp 8: 4 + 8 x 63 = 508 ms. Down, tp 1 would have eight in each: 10 + 7 = 17 ms.
    Case("down is not allowed", SIMPLE, MOVE, batch_state(8, [[(10, 1000)] * 64]), None),
    Case("requests wait", SIMPLE, MOVE, batch_state(1, [[(1000, 1000)]], num_waiting=1), None),
    Case("no room for a row at tp 8, so tp 4", SIMPLE, MOVE, room(ONE_ROW, tp4=ROOMY, tp8=NO_ROW), (4, "migrate")),
    # 1000 + 32 tokens of headroom, and the row may become 1500 long.
    Case("memory for less than its limit", SIMPLE, MOVE, room(ONE_ROW, tp8=GroupCapacity(1499, 10)), None),
    Case("memory just enough", SIMPLE, MOVE, room(ONE_ROW, tp8=GroupCapacity(1500, 10)), (8, "migrate")),
    # Three rows, 2000 steps: 20 s at tp 1. Two of them together at tp 4: 5 + 4 = 9 ms, 18 s; T_switch 1.5 s. With
    # headroom those two need 2 x (5000 + 32) tokens.
    Case("too small for two with headroom", SIMPLE, MOVE, room(THREE_ROWS, tp4=GroupCapacity(10_063, 10)), None),
    Case("memory for two with headroom", SIMPLE, MOVE, room(THREE_ROWS, tp4=GroupCapacity(10_064, 10)), (4, "migrate")),
]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_decision_table(case: Case):
    switch = LayoutSwitchRule(case.config, case.model.degrees, case.model).decide(case.now)
    assert (None if switch is None else (switch.to_tp, switch.how)) == case.expected


def test_expected_length_from_history():
    """One row, 1000 tokens, at most 5000 more: with the limit a switch pays, with 100 expected steps it does not."""
    known = LiveRow(1, 1000, 6000, expected_remaining=99.5)
    now = batch_state(1, [[(1000, 5000)]])
    for row, bound, expected in [
        (known, "max_length", 8),
        (known, "expected", None),
        (replace(known, expected_remaining=None), "expected", 8),  # history knows nothing: the limit
        (replace(known, expected_remaining=184.0), "expected", 8),
        (replace(known, expected_remaining=183.0), "expected", None),
        (replace(known, expected_remaining=1e9), "expected", 8),  # never beyond the limit
    ]:
        rule = LayoutSwitchRule(MOVE.replace(bound=bound), DEGREES, SIMPLE)
        switch = rule.decide(replace(now, groups=((row,), *now.groups[1:])))
        assert (switch and switch.to_tp) == expected
    left = [replace(known, expected_remaining=x).steps_left("expected") for x in (-5.0, 0.0, 1.2, 9e9)]
    assert left == [1, 1, 2, 5000]


# Several switches, and never back and forth


@dataclass
class Noisy:
    """Answers at random, each time anew: the worst predictor there is."""

    rng: np.random.Generator
    num_devices: int = 8

    def decode_steps_s(self, tp: int, batch_S: np.ndarray, context_S: np.ndarray) -> np.ndarray:
        return np.full(batch_S.shape, 10.0 ** self.rng.uniform(-4, 2))

    def switch_cost(self, from_tp: int, to_tp: int) -> SwitchCost:
        return SwitchCost(from_tp, to_tp, *self.rng.uniform(0, 0.1, 3))

    def move_s(self, from_tp: int, to_tp: int, tokens: int) -> float:
        return float(self.rng.uniform(0, 0.1))

    def recompute_s(self, to_tp: int, lengths: Sequence[int]) -> float:
        return float(self.rng.uniform(0, 0.1))


def run_noisy(config: AdaptiveLayouts.Options, counts: Sequence[int], tp: int, seed: int) -> list[Switch]:
    """A generation that has counts[i] live rows before plan i, with random predictions; returns its switches."""
    rule = LayoutSwitchRule(config, DEGREES, Noisy(np.random.default_rng(seed)))
    switches = []
    for dispatch, count in enumerate(counts):
        groups = [[(10 + dispatch, 100)] * len(part) for part in np.array_split(np.arange(count), 8 // tp)]
        switch = rule.decide(batch_state(tp, groups, dispatch=dispatch))
        if switch is not None:
            assert (switch.dispatch, switch.from_tp) == (dispatch, tp)
            assert switch.to_tp != tp
            switches.append(switch)
            tp = switch.to_tp
    return switches


def directions(switches: Sequence[Switch]) -> list[bool]:
    return [switch.to_tp > switch.from_tp for switch in switches]


def num_turns(switches: Sequence[Switch]) -> int:
    return sum(a != b for a, b in pairwise(directions(switches)))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.sampled_from(DEGREES), st.integers(0, 1 << 32))
def test_a_draining_batch_never_oscillates(counts: list[int], tp: int, seed: int):
    draining = sorted(counts, reverse=True)
    up = run_noisy(UP.replace(cooldown=1), draining, tp, seed)
    assert all(directions(up))
    assert len(up) <= len(DEGREES) - 1
    both = run_noisy(UP.replace(cooldown=1, direction="both"), draining, tp, seed)
    assert num_turns(both) <= 1
    assert directions(both) == sorted(directions(both)), "down first, then up"
    assert len(both) <= 2 * (len(DEGREES) - 1)


# Against brute force


def brute_force(model: LatencyPredictor, now: BatchState, tp: int) -> float:
    """The remaining time of a constant degree, step by step and row by row, with the cost of getting there."""
    dp = 8 // tp
    groups = [[(row.length, row.limit) for row in g] for g in (now.groups if tp == now.tp else regroup(now.groups, dp))]
    total = 0.0
    while any(groups := [[(n, limit) for n, limit in g if n < limit] for g in groups]):
        rows, tokens = max(map(len, groups)), max(sum(n for n, _ in g) for g in groups)
        total += model.decode_step_s(tp, rows, tokens)
        groups = [[(n + 1, limit) for n, limit in g] for g in groups]
    if tp == now.tp:
        return total
    cost = model.switch_cost(now.tp, tp)
    moved = max(sum(row.length for row in g) for g in now.groups) * cost.kv_s_per_token
    again = 0.0
    for g in regroup(now.groups, dp):
        if g:
            tokens, pairs = sum(row.length for row in g), sum(causal_pairs(row.length) for row in g)
            again = max(again, model.prefill_s(tp, tokens, pairs))
    return total + cost.weights_s + cost.fixed_s + min(moved, again)


@st.composite
def machines(draw: st.DrawFn) -> LatencyPredictor:
    """Any machine: any step times that rise with context, for four degrees."""
    seconds = st.floats(1e-4, 0.1)
    decode, prefill = [], []
    for tp in DEGREES:
        for batch in (1, 4, 16):
            base, slope = draw(seconds), draw(st.floats(0, 1e-4))
            decode += [Measurement(tp, batch, n, base + slope * batch * n) for n in (8, 64)]
        base = draw(seconds)
        prefill += [Measurement(tp, b, n, base * b * n / 8) for b in (1, 16) for n in (8, 64)]
    cost = st.floats(0, 0.05)
    pairs = [(a, b) for a in DEGREES for b in DEGREES if a != b]
    switches = [SwitchCost(a, b, draw(cost), draw(cost) / 50, draw(cost)) for a, b in pairs]
    return LatencyPredictor(
        Profile(ProfileIdentity("any", "", "", 8, "", ""), tuple(decode), tuple(prefill), tuple(switches))
    )


@given(
    machines(),
    st.sampled_from(DEGREES),
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 90), st.integers(0, 40)), min_size=1, max_size=12),
)
def test_the_choice_is_the_best_constant_plan(model: LatencyPredictor, tp: int, rows: list[tuple[int, int, int]]):
    groups = [[(n, left) for g, n, left in rows if g % (8 // tp) == i] for i in range(8 // tp)]
    now = batch_state(tp, groups)
    rule = LayoutSwitchRule(UP.replace(direction="both"), DEGREES, model)
    times = {candidate: brute_force(model, now, candidate) for candidate in DEGREES}
    for candidate in rule.evaluate(now):
        assert candidate.total_s == pytest.approx(times[candidate.to_tp], rel=1e-9, abs=1e-12)
        assert candidate.stay_s == pytest.approx(times[tp], rel=1e-9, abs=1e-12)
    switch = rule.decide(now)
    chosen = tp if switch is None else switch.to_tp
    assert times[chosen] <= min(times.values()) * (1 + 1e-9)
    if switch is not None:
        assert times[chosen] < times[tp]
        assert switch.remaining_s + switch.cost_s == pytest.approx(times[chosen], rel=1e-9)
        assert switch.gain_s == pytest.approx(times[tp] - times[chosen], rel=1e-6, abs=1e-9)
