"""The planner between rounds and the switch rule inside them, together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity, SwitchCost
from jaxrl.scheduling.layouts.round_layouts import RoundLayouts
from jaxrl.scheduling.layouts.situation import GroupCapacity, LiveRow, Situation
from jaxrl.scheduling.layouts.switch_rule import LayoutSwitchConfig, LayoutSwitchRule, Switch
from jaxrl.scheduling.layouts.tp_planner import TpPlanner, TpPlannerConfig

CONFIG = TpPlannerConfig((1, 2, 4, 8), initial=2, max_degree=4)


class EightDegrees:
    """A model that answers anything: only the rule's options are looked at."""

    num_devices = 8

    def decode_steps_s(self, tp, batch_S, context_S):
        return batch_S

    def switch_cost(self, from_tp, to_tp):
        return SwitchCost(from_tp, to_tp, 0.0, 0.0, 0.0)

    def move_s(self, from_tp, to_tp, tokens):
        return 0.0

    def recompute_s(self, to_tp, lengths):
        return 0.0


def make_model() -> LatencyPredictor:
    """Four devices. One row takes 10, 8, 4 ms at tp 1, 2, 4; each row more in a dp group costs 4 ms x tp."""
    points = [
        Measurement(tp, rows, context, base + 0.004 * tp * (rows - 1))
        for tp, base in ((1, 0.010), (2, 0.008), (4, 0.004))
        for rows in (1, 33)
        for context in (1, 1 << 20)
    ]
    costs = [SwitchCost(a, b, 0.1, 0.0, 0.0) for a in (1, 2, 4) for b in (1, 2, 4) if a != b]
    return LatencyPredictor(Profile(ProfileIdentity("m", "", "", 4, "", ""), tuple(points), (), tuple(costs)))


SWITCH_CONFIG = LayoutSwitchConfig((1, 2, 4), min_gain=0.0, cooldown=1, state="migrate")


def make_layouts(initial: int = 1, quiet_rounds: int = 4) -> RoundLayouts:
    planner = TpPlanner(TpPlannerConfig((1, 2, 4, 8), initial, max_degree=4, quiet_rounds=quiet_rounds))
    return RoundLayouts(planner, LayoutSwitchRule(SWITCH_CONFIG, make_model()))


def draining(tp: int, dispatch: int, num_rows: int) -> Situation:
    """Rows dealt to dp groups from both ends of the mesh, so that two of them do not share a group before tp 4."""
    order = [0, 2, 1, 3]
    alone = [[LiveRow(i, 10 + dispatch, 1000 + dispatch)] if order.index(i) < num_rows else [] for i in range(4)]
    size = tp
    groups = tuple(tuple(row for rows in alone[i : i + size] for row in rows) for i in range(0, 4, size))
    return Situation(dispatch, tp, groups, dict.fromkeys((1, 2, 4), GroupCapacity(1 << 30, 64)))


def run_round(layouts: RoundLayouts, preemptions: int) -> tuple[list[int], int]:
    """The degrees of a round whose rows end one after another, and the one it returns to."""
    tp = layouts.start()
    seen = [tp]
    for dispatch, num_rows in enumerate((4, 4, 3, 2, 2, 1, 1)):
        switch = layouts.decide(draining(tp, dispatch, num_rows))
        if switch is not None:
            tp = switch.to_tp
            seen.append(tp)
    return seen, layouts.end(preemptions)


def test_a_round_starts_in_the_planners_degree_goes_up_and_returns():
    layouts = make_layouts()
    # Four rows: 10 ms at tp 1. Two, in different groups at tp 2: 8 ms. One: 4 ms at tp 4.
    assert run_round(layouts, preemptions=0) == ([1, 2, 4], 1), "up inside, and back to the planner's degree"
    assert run_round(layouts, preemptions=3) == ([1, 2, 4], 2), "the planner doubles, whatever the round ended in"
    assert run_round(layouts, preemptions=3) == ([2, 4], 2), "it never falls below the planner's degree"
    assert run_round(layouts, preemptions=9) == ([2, 4], 4)
    assert run_round(layouts, preemptions=9) == ([4], 4), "no way up is left, and the host ends at 4"
    for degree in (4, 4, 4, 2):
        assert run_round(layouts, preemptions=0) == ([4], degree)
    assert run_round(layouts, preemptions=0) == ([2, 4], 2)


def test_the_planner_alone():
    layouts = RoundLayouts(TpPlanner(CONFIG))
    assert run_round(layouts, preemptions=1) == ([2], 2)
    assert run_round(layouts, preemptions=2) == ([2], 4)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 3), max_size=12), st.sampled_from([1, 2, 4]))
def test_inside_a_round_tp_only_grows(preemptions: list[int], initial: int):
    layouts = make_layouts(initial, quiet_rounds=2)
    for count in preemptions:
        planned = layouts.degree()
        seen, back = run_round(layouts, count)
        assert seen[0] == planned
        assert seen == sorted(set(seen))
        assert back == layouts.degree()


def test_the_order_of_calls():
    layouts = make_layouts(initial=2)
    with pytest.raises(ValueError, match=r"a decision at tp 2 needs a round that started"):
        layouts.decide(draining(2, 0, 4))
    with pytest.raises(ValueError, match="no round has started"):
        layouts.end(0)
    layouts.start("short")
    with pytest.raises(ValueError, match=r"a 'long' round starts before the 'short' round has ended"):
        layouts.start("long")
    with pytest.raises(ValueError, match=r"a decision at tp 1 needs .* \(round: 'short', started at tp 2\)"):
        layouts.decide(draining(1, 0, 4))
    layouts.end(5)
    assert layouts.start("long") == 2


def test_rules_that_do_not_go_together():
    planner = TpPlanner(CONFIG)
    rule = LayoutSwitchRule(SWITCH_CONFIG, make_model())
    with pytest.raises(ValueError, match=r"direction \('both'\) must be 'up'"):
        RoundLayouts(planner, replace(rule, config=replace(SWITCH_CONFIG, direction="both")))
    for degrees in ((1, 2), (1, 2, 4, 8)):
        with pytest.raises(ValueError, match=r"must be those of the planner inside one host \(1, 2, 4\)"):
            RoundLayouts(planner, LayoutSwitchRule(replace(SWITCH_CONFIG, degrees=degrees), EightDegrees()))


def test_a_journal_that_lowers_tp_is_refused():
    down = Switch(0, 4, 2, "migrate", 1, 10, 2.0, 1.0, 0.1, 0.1, 0.1, 0.02, 0.01)
    planner = TpPlanner(TpPlannerConfig((1, 2, 4), initial=2, max_degree=4))
    layouts = RoundLayouts(planner)
    layouts.start(replay=[down])
    with pytest.raises(ValueError, match="lowers tp inside a round"):
        layouts.decide(draining(4, 0, 1))


def test_without_a_planner_every_round_starts_alike_and_may_go_down():
    config = replace(SWITCH_CONFIG, direction="both")
    layouts = RoundLayouts(4, LayoutSwitchRule(config, make_model()))
    for _ in range(2):
        assert layouts.start("short") == 4
        switch = layouts.decide(draining(4, 0, 4))
        assert switch is not None
        assert switch.to_tp == 1
        layouts.cancel()
    with pytest.raises(ValueError, match=r"rounds start in \(8\) must be one of the switch rule's \(1, 2, 4\)"):
        RoundLayouts(8, LayoutSwitchRule(config, make_model()))
    alone = RoundLayouts(2)
    assert (alone.start(), alone.wants(draining(2, 0, 1)), alone.end(7)) == (2, False, 2)
    assert alone.state_dict() == {}


def test_a_cancelled_round_teaches_the_planner_nothing():
    layouts = make_layouts()
    run_round(layouts, 1)
    layouts.start()
    layouts.cancel()
    state = layouts.state_dict()
    other = make_layouts()
    other.load_state_dict(state)
    assert other.degree() == layouts.degree() == 1
    assert run_round(other, 5)[1] == run_round(layouts, 5)[1] == 2
