"""The time that a run will still take: without compilation, with what is due now and then."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxrl.record.live import EtaEstimator


def after(steps: list[tuple[float, dict[str, float]]], total: int = 20, **every: int) -> EtaEstimator:
    found = EtaEstimator(total, every)
    for step, (seconds, metrics) in enumerate(steps, 1):
        found.step(step, seconds, metrics)
    return found


def test_the_first_step_counts_only_while_it_is_alone():
    one = after([(100.0, {})])
    assert (one.seconds(), one.is_bound) == (1900.0, True)
    two = after([(100.0, {}), (4.0, {})])
    assert (two.seconds(), two.is_bound) == (72.0, False)


def test_a_step_that_compiled_again_does_not_count():
    found = after([(50.0, {}), (4.0, {}), (60.0, {"actor/recompiles": 2.0}), (6.0, {"rollout/recompiles": 0.0})])
    assert found.seconds() == 16 * 5.0
    only = after([(50.0, {}), (60.0, {"rollout/recompiles": 1.0})])
    assert (only.seconds(), only.is_bound) == (18 * 50.0, True)


def test_evaluations_and_saving_are_added_as_often_as_they_are_due():
    steps = [(9.0, {})] + [
        (10.0 + 30.0 * (step % 5 == 0) + 2.0 * (step == 7), {"timing_s/testing": 30.0} if step % 5 == 0 else {})
        for step in range(2, 8)
    ]
    steps[-1][1]["timing_s/save"] = 2.0
    found = after(steps, total=20, testing=5, save=6)
    assert found.seconds() == pytest.approx(13 * 10.0 + 3 * 30.0 + 3 * 2.0), "at 10, 15, 20; after 12, 18, 20"


def test_the_last_ten_steps_count():
    found = after([(1.0, {})] * 10 + [(3.0, {})] * 10, total=30)
    assert found.seconds() == 30.0


@pytest.mark.parametrize(
    ("total", "seconds"),
    [(0, [5.0, 5.0]), (20, []), (20, [None])],
)
def test_what_is_not_known(total: int, seconds: list[Any]):
    found = EtaEstimator(total, {"testing": 0})
    for step, each in enumerate(seconds, 1):
        found.step(step, each, {"timing_s/testing": math.nan})
    assert found.seconds() is None


def test_at_the_end_nothing_is_left():
    assert after([(5.0, {}), (4.0, {})], total=2).seconds() == 0
