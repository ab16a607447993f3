"""Simulated runs with test cases: adaptive limits save time, and anchors outlive a resume."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_runs import House, make_config, make_workload, whole

from jaxrl.config import Config


def config(timeout: str, **code: Any) -> Config:
    reward = {"num_workers": 2, "kind": "code", "code": {"timeout": timeout, "max_timeout_s": 1.0, **code}}
    return make_config({"trainer.test_freq": 3}, **{f"reward.{name}": value for name, value in reward.items()})


def total(house: House, name: str) -> float:
    return sum(measured[name] for measured in house.metrics.values())


def test_adaptive_limits_save_what_they_say():
    workload = make_workload(3, pass_rate=0.95)
    fixed, adaptive = whole(config("fixed"), workload), whole(config("adaptive", min_timeout_s=0.1), workload)
    assert total(adaptive, "reward/code/saved_s") > 0
    assert total(adaptive, "timing_s/reward") < total(fixed, "timing_s/reward")
    assert adaptive.metrics[7]["reward/code/anchor_s/max"] <= 1.0


def test_a_killed_run_goes_on_with_the_anchors_that_it_had():
    made, workload = config("adaptive", min_timeout_s=0.1), make_workload(5, pass_rate=0.9)
    unbroken, house = whole(made, workload), House(made, workload)
    assert not house.run(("kill", 40))
    assert house.run()
    assert house.decided() == unbroken.decided()
    assert total(unbroken, "reward/code/saved_s") > 0


def test_a_column_of_reference_times_limits_the_first_epoch_too():
    """Nothing is ever solved, so nothing but the column can make an anchor; scoring takes 0.05 s at the median."""
    learnt, workload = config("adaptive", min_timeout_s=0.2), make_workload(3, pass_rate=1e-12)
    given = learnt.replace(data=learnt.data.replace(reference_time_key="seconds"))
    without, with_column = whole(learnt, workload), whole(given, workload)
    assert total(without, "reward/code/cut_off") > 0
    assert total(without, "reward/code/saved_s") == 0
    cut_off = total(with_column, "reward/code/cut_off")
    assert total(with_column, "reward/code/saved_s") == pytest.approx(0.8 * cut_off), "each 0.2 s instead of 1"
    assert total(with_column, "reward/seconds") < total(without, "reward/seconds")
