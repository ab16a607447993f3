"""Windows, widths, and when drafts are verified."""

import numpy as np
import pytest

from jaxrl.mechanisms.speculation.rule import PROBE_EVERY, DraftConfig, DraftRule, DraftWindow, StepCosts, draft_width
from jaxrl.scheduling.tokens.plan import VerifyCounts


def test_a_window_grows_by_two_and_falls_back_at_any_rejection():
    window, seen = DraftWindow(), [2]
    for drafted, accepted in [(2, 2), (4, 4), (6, 5), (2, 2), (0, 0), (4, 0)]:
        seen.append(int(window.after(np.asarray(seen[-1]), drafted, accepted)))
    assert seen == [2, 4, 6, 2, 4, 4, 2]
    windows = np.asarray([31, 32, 32])
    # the last could draft 3 alone, and all of them were accepted
    assert window.after(windows, windows - [0, 0, 29], windows - [0, 0, 29]).tolist() == [32] * 3


def test_rows_share_what_a_step_verifies():
    assert [draft_width(rows, 64, 32) for rows in (0, 1, 2, 3, 8, 32, 33, 64)] == [32, 32, 32, 21, 8, 2, 0, 0]
    assert draft_width(4, 4, 1) == 1
    assert draft_width(5, 4, 1) == 0


def rule(verify_s: float, max_batch: int = 0) -> DraftRule:
    costs = StepCosts(decode_s=lambda rows, context: 1.0, verify_s=lambda rows, context: verify_s)
    return DraftRule(DraftConfig(DraftWindow(), 64, max_batch, costs))


def test_the_rule_compares_what_a_step_gains_with_what_it_costs():
    # 3 of 4 steps have a draft of 4 tokens, half of them are accepted: 1 + 3/4 * 4 * 1/2 = 2.5 tokens a step
    counts = VerifyCounts(steps=80, proposed=240, accepted=120, proposing_steps=60, matched=300)
    for verify_s, pays in ((2.4, True), (2.6, False)):
        decided = rule(verify_s)
        decided.saw(counts)
        assert decided.gain(8) == pytest.approx(2.5)
        assert decided.decides(8, 1000.0) is pays
        assert not decided.decides(33, 1000.0), "no width"


def test_before_anything_was_seen_drafts_are_tried_and_later_they_are_probed():
    decided = rule(8.0)
    assert decided.decides(8, 1000.0)
    decided.saw(VerifyCounts(steps=8))
    asked = [decided.decides(8, 1000.0) for _ in range(3 * PROBE_EVERY)]
    assert [i for i, each in enumerate(asked) if each] == [i * PROBE_EVERY - 1 for i in (1, 2, 3)]


def test_a_limit_of_rows_comes_before_costs():
    assert rule(99.0, max_batch=8).decides(8, 0.0)
    assert not rule(0.1, max_batch=8).decides(9, 0.0)
