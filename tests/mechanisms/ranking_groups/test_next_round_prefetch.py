"""Ranking groups in simulated runs: workers that are done begin with the next round, outliers move, and no number
changes."""

from __future__ import annotations

import threading
import time
from contextlib import closing, nullcontext
from typing import Any

import numpy as np
import pytest
from sim_machine import SMALL
from simulated_runs import House, check, make_config, make_workload, samples_of, whole

from jaxrl.mechanisms.one_step_off import ConcurrentPhases
from jaxrl.sim.cost_model import CostModel, Efficiency
from jaxrl.sim.hardware import H100
from jaxrl.types import SampleKey

BASE: dict[str, Any] = {
    "data.train_batch_size": 4,
    "data.max_response_length": 600,
    "actor.ppo_max_token_len_per_gpu": 1024,
    "rollout.num_devices": 4,
    "rollout.num_workers": 4,
    "rollout.max_num_seqs": 8,
    "rollout.num_blocks": 700,
    "rollout.decode_steps": 8,
    "trainer.num_devices": 6,
    "trainer.one_step_off": True,
    "trainer.total_training_steps": 8,
    "simulate.num_prompts": 8,
}
# rollouts take a few tenths of a second; an update is to be a part of that
COST = CostModel(SMALL, H100, efficiency=Efficiency(train_fixed_s=0.02, sync_fixed_s=0.002))
RANKED = {"rollout.ranking_groups": {"enable": True, "num_groups": 4}}


class Lengths:
    """Prompt i has responses of about 40 · (i + 1) tokens; one in ten of the last epochs is four times as long."""

    def __init__(self) -> None:
        self._inner: Any = make_workload(5, hang_share=0.0, scoring_s=0.001)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def length(self, key: SampleKey, step: int = 0) -> int:
        draw = np.random.default_rng([key.epoch, key.prompt_index, key.sample_index])
        length = 40 * (key.prompt_index + 1) * draw.uniform(0.9, 1.1)
        return int(min(length * (4 if key.epoch and draw.random() < 0.1 else 1), 600))


def summed(house: House, name: str) -> float:
    return sum(line.get(f"rollout/ranking/{name}", 0.0) for line in house.metrics.values())


@pytest.fixture(scope="module")
def plain() -> House:
    return whole(make_config(BASE), Lengths(), COST)


@pytest.fixture(scope="module")
def ranked() -> House:
    return whole(make_config(BASE, **RANKED), Lengths(), COST)


def test_a_head_start_changes_no_number(plain: House, ranked: House):
    """Every prompt runs once, with the tokens and versions that it has without."""
    house = ranked
    check(house)
    assert samples_of(house.groups) == samples_of(plain.groups)
    assert summed(house, "head_start_s") > 0
    assert summed(house, "moved_share") > 0
    first, later = house.metrics[1], house.metrics[5]
    assert first["rollout/ranking/groups"] == 0, "nothing is known in the first epoch"
    assert later["rollout/ranking/groups"] == 4
    seconds = [sum(line["timing_s/step"] for line in each.metrics.values()) for each in (house, plain)]
    assert seconds[0] < seconds[1]
    assert not any("ranking" in name for line in plain.metrics.values() for name in line)


@pytest.mark.parametrize(
    "more",
    [
        {"rollout.partial_rollout": {"enable": True}},
        {"algorithm.filter_groups": {"enable": True}},
        {"trainer.test_freq": 1},  # an evaluation comes between
    ],
)
def test_what_a_clock_may_not_decide_has_no_head_start(more: dict[str, Any]):
    house = whole(make_config(BASE, **RANKED, **more), Lengths(), COST)
    check(house)
    assert summed(house, "groups") > 0
    assert summed(house, "head_start_s") == 0
    assert ("rollout.partial_rollout" in more) == (summed(house, "carried_share") > 0)


# ---------------------------------------------------------------- two things at once


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_of_two_things_is_told_when_the_second_has_ended_well(fails: bool):
    ended, seen = threading.Event(), list[bool]()

    def first() -> None:
        seen.append(together.has_ended)
        ended.set()
        while together.busy and not together.has_ended and not failed.is_set():
            time.sleep(0.001)
        time.sleep(0.05 * fails)
        seen.append(together.has_ended)

    def second() -> None:
        ended.wait(60)
        if fails:
            failed.set()
            raise ValueError("no")

    failed = threading.Event()
    with closing(ConcurrentPhases()) as together:
        with pytest.raises(ValueError, match="no") if fails else nullcontext():
            together(first, second)
        assert seen == [False, not fails]
        assert not together.has_ended, "nothing runs"
