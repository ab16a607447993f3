"""Layout switches in the journal, and a generation that runs again by them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from made_up import DEGREES, MOVE, ROOMY, SIMPLE, situation

from jaxrl.scheduling.layouts.switch_rule import LayoutSwitchRule, ReplayedSwitchRule, Switch


def two_switches() -> list[Switch]:
    rule = LayoutSwitchRule(replace(MOVE, cooldown=1), SIMPLE)
    now = situation(1, [[(10, 10_000)]], dispatch=3, capacities={2: ROOMY})
    first = rule.decide(now)
    second = rule.decide(situation(2, [[(50, 9_960)]], dispatch=6))
    assert first is not None
    assert second is not None
    return [first, second]


def test_a_switch_survives_the_journal():
    for switch in two_switches():
        entry = {"step": 4, "kind": "layout_switch", "key": [switch.dispatch], **switch.to_json()}
        assert Switch.from_json(json.loads(json.dumps(entry))) == switch
    with pytest.raises(ValueError, match=r"this version reads schema 1, with the fields dispatch, from_tp"):
        Switch.from_json({**two_switches()[0].to_json(), "schema": 9})
    with pytest.raises(ValueError, match=r"this version reads schema 1"):
        Switch.from_json({"schema": 1})


def test_replay_by_dispatch_number_then_live():
    """The replayed part asks no predictor; what follows is decided with the replayed switches in mind."""
    first, second = two_switches()
    live = LayoutSwitchRule(replace(MOVE, cooldown=4), SIMPLE)
    rule = ReplayedSwitchRule([first, second], then=live)
    for _ in range(2):  # a generation that starts over
        rule.start_generation()
        tp, seen = 1, {}
        for dispatch in range(12):
            capacities = {2: ROOMY, 8: ROOMY} if dispatch != 4 else dict.fromkeys(DEGREES, ROOMY)
            switch = rule.decide(situation(tp, [[(10, 10_000)]], dispatch=dispatch, capacities=capacities))
            if switch is not None:
                seen[dispatch], tp = switch, switch.to_tp
        assert seen == {3: first, 6: second}
    short = ReplayedSwitchRule([first], then=live)
    short.start_generation()
    assert short.decide(situation(1, [[(10, 10_000)]], dispatch=0)) is None, "nothing was decided then"
    assert short.decide(situation(1, [[(10, 10_000)]], dispatch=3)) == first
    for dispatch, decides in [(4, False), (6, False), (7, True)]:  # cooldown counts from the replayed switch
        assert (short.decide(situation(2, [[(10, 10_000)]], dispatch=dispatch)) is not None) == decides


def test_a_replay_alone_decides_nothing_more():
    rule = ReplayedSwitchRule(two_switches()[:1])
    assert rule.decide(situation(1, [[(10, 10_000)]], dispatch=3)) is not None
    assert rule.decide(situation(2, [[(10, 10_000)]], dispatch=30)) is None


@pytest.mark.parametrize(("dispatch", "tp"), [(3, 2), (4, 1)])
def test_a_run_that_leaves_its_journal_is_refused(dispatch: int, tp: int):
    rule = ReplayedSwitchRule(two_switches())
    with pytest.raises(ValueError, match=rf"at dispatch 3 from tp 1: the run is at dispatch {dispatch} with tp {tp}"):
        rule.decide(situation(tp, [[(10, 10_000)]], dispatch=dispatch))


def test_a_journal_out_of_order_is_refused():
    with pytest.raises(ValueError, match=r"dispatch numbers \[6, 3\] must ascend"):
        ReplayedSwitchRule(two_switches()[::-1])
