"""What is counted of verdicts: in all, by domain, and of a reward's parts."""

from dataclasses import replace
from typing import Any

import pytest

from jaxrl.config import Config, from_mapping
from jaxrl.rewards.reward_metrics import RewardMetrics
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import SampleKey

STAGED = {"domains": {"judged": {"kind": "math", "weight": 0.5}, "math": {"kind": "math"}}}


def config(**reward: Any) -> Config:
    return from_mapping({"model": {"path": "x"}, "data": {"answer_key": "answer"}, "reward": reward})


def verdict(reward: float = 1.0, status: Any = "ok", seconds: float = 0.5, **info: Any) -> Verdict:
    return Verdict(3.0, SampleKey(0, 0, 0), reward, status, info, seconds)


GDPO = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["acc", "fmt"]}
KEYS = "algorithm.gdpo_reward_keys names 'fmt', and the reward has these numbers: "
METRIC = "algorithm.filter_groups.metric (fmt): the scorer returned no such value, found "


@pytest.mark.parametrize(
    ("algorithm", "info", "failure"),
    [
        (GDPO, {"acc": 1.0, "fmt": 0.5}, ""),
        (GDPO, {"acc": 1.0, "parts": {"fmt": 0.5}, "error": "the user's own"}, ""),
        (GDPO, {"acc": 1.0}, KEYS + "acc"),
        ({"filter_groups": {"enable": True, "metric": "fmt"}}, {"fmt": None}, ""),
        ({"filter_groups": {"enable": True, "metric": "fmt"}}, {"acc": 1.0}, METRIC + "acc"),
    ],
)
def test_a_reward_without_a_value_that_training_asks_for_has_failed(
    algorithm: dict[str, Any], info: dict[str, Any], failure: str, caplog: pytest.LogCaptureFixture
):
    made = {"model": {"path": "x"}, "data": {"answer_key": "answer"}, "algorithm": algorithm, "rollout": {"n": 2}}
    tally = RewardMetrics.configured(from_mapping(made))
    given = verdict(0.5, **info)
    assert tally.add("math", given, is_training=False) is given, "evaluations take the reward alone"
    found = tally.add("math", given)
    assert (found.failure, found.status, found.reward) == ((failure, "error", 0.0) if failure else ("", "ok", 0.5))
    assert tally.take({"reward/errors": 0.0})["reward/errors"] == bool(failure)
    told = [f"reward 0 for epoch 0, prompt 0, sample 0: {failure}"] if failure else []
    assert [record.getMessage() for record in caplog.records] == told
    late = verdict(0.0, "timeout", error="late")
    assert tally.add("math", late) is late


def test_by_domain():
    tally = RewardMetrics.configured(config(**STAGED))
    for status, seconds in (("ok", 1.0), ("timeout", 3.0), ("ok", 2.0)):
        tally.add("math", verdict(0.5, status, seconds))
    tally.add("judged", verdict(0.5, seconds=9.0, own_reward=1.0, parts={"tags": 1.0}))
    metrics = tally.take({})
    assert (metrics["reward/num_scored"], metrics["reward/timeouts"]) == (4, 1)
    of_math = {name.rpartition("/")[2]: value for name, value in metrics.items() if name.startswith("reward/math/")}
    seconds = {"p50_s": 2.0, "p95_s": 3.0, "max_s": 3.0}
    assert of_math == {"num_scored": 3, "errors": 0, "timeouts": 1, "crashes": 0, **seconds}
    assert metrics["reward/judged/max_s"] == 9.0
    assert metrics["reward/own/mean"] == pytest.approx((0.5 + 0.5 + 1.0) / 3)
    assert metrics["reward/part/tags/mean"] == 1.0
    tally.add("math", replace(verdict(status="timeout", seconds=0.0), is_replayed=True))
    tally.add("math", verdict(seconds=2.0))
    assert tally.take({})["reward/math/p50_s"] == 2.0, "the seconds of what the journal gives are not known"
    tally.add("math", verdict())
    tally.clear()
    assert not any(tally.take({}).values()), "a round that was dropped"
