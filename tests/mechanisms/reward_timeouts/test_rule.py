"""Time limits that follow from anchors: the formula, what makes an anchor, and a checkpoint of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxrl.config import from_mapping
from jaxrl.config.rewards import CodeSection
from jaxrl.mechanisms.reward_timeouts import AdaptiveTimeouts, TimeoutRule
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt, SampleKey


def prompt(index: int, epoch: int = 0, source: str = "code", text: str = "") -> Prompt:
    return Prompt(epoch, index, (1,), text or f"problem {index}", source)


def right(*seconds: float) -> dict[str, Any]:
    return {"correct": True, "passed": len(seconds), "cases": len(seconds), "cut_off": 0, "case_s": list(seconds)}


def wrong(*seconds: float, cut_off: int = 0) -> dict[str, Any]:
    return {"correct": False, "passed": 0, "cases": 9, "cut_off": cut_off, "case_s": list(seconds)}


def taught(*infos: dict[str, Any], **options: Any) -> AdaptiveTimeouts:
    """Has heard these verdicts on responses to prompt 0."""
    timeouts = AdaptiveTimeouts(TimeoutRule(), **options)
    for info in infos:
        timeouts.scored(prompt(0), timeouts.limits(prompt(0)), said(info))
    return timeouts


@pytest.mark.parametrize(("anchor_s", "limit_s"), [(None, 30.0), (1.3, 2.0), (2.0, 3.0), (25.0, 30.0)])
def test_the_papers_formula(anchor_s: float | None, limit_s: float):
    assert TimeoutRule.of(CodeSection()) == TimeoutRule()
    assert TimeoutRule().limit_s(anchor_s) == pytest.approx(limit_s)


@pytest.mark.parametrize(
    ("infos", "limits"),
    [
        ([wrong(0.1, 30.0, cut_off=1)], ()),
        ([right(0.1, 4.0), wrong(29.0, 29.0)], (2.0, 6.0)),
        ([right(0.1, 4.0), right(3.0, 0.5)], (4.5, 6.0)),
        ([right(0.1, 4.0), right(0.1)], (2.0,)),  # the tests of the prompt have changed
        ([{"correct": True, "case_s": ["1", None]}, {"correct": 1, "case_s": [5.0]}], ()),
        ([{"correct": True, "case_s": [-1.0]}, {"correct": True, "case_s": float("nan")}], ()),
    ],
)
def test_correct_responses_alone_make_anchors(infos: list[dict[str, Any]], limits: tuple[float, ...]):
    assert taught(*infos).limits(prompt(0)) == pytest.approx(limits)


def said(info: dict[str, Any]) -> Verdict:
    return Verdict(0.0, SampleKey(0, 0, 0), 0.0, info=info)


def test_prompts_without_tests_have_neither_limits_nor_anchors():
    config = from_mapping({"model": {"path": "x"}, "reward": {"kind": "math", "domains": {"code": {"kind": "code"}}}})
    timeouts = AdaptiveTimeouts.configured(config)
    assert timeouts is not None
    for source in ("code", "math"):
        timeouts.scored(prompt(0, source=source), (), said(right(4.0)))
        assert timeouts.limits(prompt(0, source=source)) == ((6.0,) if source == "code" else ())
        assert timeouts.is_close(prompt(0, source=source), said(right(4.0))) == (source == "code")
    assert AdaptiveTimeouts.configured(from_mapping({"model": {"path": "x"}, "reward": {"kind": "math"}})) is None


def test_what_another_limit_might_have_cut_off_is_close():
    timeouts = taught()
    close = [timeouts.is_close(prompt(0), said(right(0.1, seconds))) for seconds in (0.9, 1.1, 25.0)]
    assert close == [False, True, True]
    fixed = AdaptiveTimeouts(TimeoutRule.of(CodeSection(timeout="fixed")))
    assert [fixed.is_close(prompt(0), said(right(seconds))) for seconds in (14.0, 16.0)] == [False, True]
    assert not timeouts.is_close(prompt(0), said({}))


def fill(timeouts: AdaptiveTimeouts, indices: Sequence[int], num_cases: int = 2) -> None:
    for index in indices:
        timeouts.scored(prompt(index), (), said(right(*[float(index)] * num_cases)))


def test_a_checkpoint_holds_the_anchors():
    first, second = AdaptiveTimeouts(TimeoutRule(), max_anchors=8), AdaptiveTimeouts(TimeoutRule(), max_anchors=8)
    fill(first, [5, 6, 7, 5])
    state = first.state_dict()
    assert (state["prompts"].shape, state["seconds"].tolist()) == ((3, 2), [6.0, 6.0, 7.0, 7.0, 5.0, 5.0])
    second.load_state_dict(state)
    for timeouts in (first, second):
        fill(timeouts, [8, 9])
    assert [first.limits(prompt(i)) for i in range(10)] == [second.limits(prompt(i)) for i in range(10)]
    assert not second.limits(prompt(6)), "it was right longest ago"
    np.testing.assert_equal(first.state_dict(), second.state_dict())
    empty = AdaptiveTimeouts(TimeoutRule())
    empty.load_state_dict(AdaptiveTimeouts(TimeoutRule()).state_dict())
    assert empty.limits(prompt(5)) == ()
