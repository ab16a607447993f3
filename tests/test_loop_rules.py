"""The loop with every batch rule on a simulated machine: what a resume may change, rewards that are shaped, and what
is learnt from tokens of earlier versions.

`test_compositions.py` has runs that are killed and stopped anywhere. The real backend carries out the same commands
(tests/run/test_simulated_rounds.py shows that its events are the same).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from sim_machine import SMALL
from simulated_runs import House, check, make_config, make_workload, whole

from jaxrl.run.simulation import build
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import H100

ON = {"enable": True}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "over-provisioning": {"rollout.over_provisioning": {"enable": True, "prompt_factor": 1.5}},
    "tail batching": {"rollout.tail_batching": {"enable": True, "prompt_factor": 1.5}},
    "tail batching that resumes": {
        "rollout.tail_batching": {"enable": True, "prompt_factor": 1.5, "relaunch": "resume", "max_staleness": 2}
    },
    "partial rollout": {"rollout.partial_rollout": ON},
}


@cache
def plain_run(rule: str, seed: int, **more: Any) -> House:
    """An unbroken run with a rule, which tests only read; `more`: options, with __ for the point."""
    options = {path.replace("__", "."): value for path, value in more.items()}
    return whole(make_config(RULES[rule], **options), make_workload(seed))


# ---------------------------------------------------------------- checkpoints


def saved_after(values: dict[str, Any], steps: int) -> House:
    house = House(make_config(values, **{"trainer.total_training_steps": steps}), make_workload(3))
    assert house.run()
    return house


@pytest.mark.parametrize("rule", [name for name in RULES if name.startswith("tail batching")])
def test_a_run_that_is_killed_again_and_again_makes_the_same_batches(rule: str):
    """What waits in the queue survives, with its tokens and versions where it has some."""
    straight, killed = plain_run(rule, 2), House(make_config(RULES[rule]), make_workload(2))
    assert any(metrics["rollout/long_round"] for metrics in straight.metrics.values())
    resumed = [metrics.get("rollout/resumed_tokens", 0.0) for metrics in straight.metrics.values()]
    assert any(resumed) == (rule == "tail batching that resumes")
    check(straight)
    ends = 0
    while not killed.run(("kill", 45)):
        ends += 1
    assert ends > 1
    assert killed.decided() == straight.decided()


LEAVE = {"rollout.tail_batching": {"enable": True, "prompt_factor": 2.0, "at_end": "leave"}}


def test_prompts_that_wait_in_another_rule_are_not_dropped_in_silence():
    house = saved_after(LEAVE, 1)
    waiting = house.state["rule"]["num_carried"]
    assert waiting > 0
    assert house.loop.num_carried == waiting
    again = House(make_config({}), make_workload(3))
    again.saved = house.saved
    with pytest.raises(ValueError, match=rf"{waiting} prompts wait in the state of tail batching, and this run uses"):
        again.run()
    emptied = saved_after({"rollout.tail_batching": {"enable": True, "prompt_factor": 2.0}}, 2)
    again.saved = emptied.saved  # flushed: the run may go on with another rule
    assert again.run()


@pytest.mark.parametrize("rule", RULES)
def test_rollout_beside_the_update_changes_nothing_but_time(rule: str):
    """Two devices that roll out and train in turns, and four of which two roll out: the same batches, in less time."""
    turns = plain_run(rule, 1, trainer__one_step_off=True)
    beside = plain_run(rule, 1, trainer__one_step_off=True, trainer__num_devices=4, rollout__num_devices=2)
    check(beside)
    assert beside.decided() == turns.decided()
    for step in range(2, 7):  # the first step's own round is beside nothing, and beside the last update there is none
        own, other = beside.metrics[step], turns.metrics[step]
        update_s, rollout_s = own["timing_s/update_actor"], other["timing_s/ahead"]
        assert own["timing_s/step"] == pytest.approx(max(update_s, rollout_s) + own["timing_s/sync"], rel=0.01)
        assert own["timing_s/step"] < other["timing_s/step"]


def test_one_step_off_may_be_switched_at_a_resume():
    """Each step trains on a batch of the version before, or of its own where the switch has been turned."""
    off, on = ({"trainer.one_step_off": value, **RULES["tail batching"]} for value in (False, True))
    workload = make_workload(5)

    def staleness(house: House) -> list[float]:
        return [values["training/off_policy/max_staleness"] for _, values in sorted(house.metrics.items())]

    house = House(make_config(on), workload)
    house.run(("stop", 60))
    stopped_at = max(house.saved)
    assert 0 < stopped_at < 6
    assert house.state["ahead"] is not None
    assert house.loop.num_carried >= 3, "the batch ahead is not trained on yet"
    house.config = make_config(off)
    assert house.run()
    assert staleness(house) == [0.0] + [1.0] * stopped_at + [0.0] * (6 - stopped_at)
    assert house.loop.num_carried == 0

    house = House(make_config(off), workload)
    house.run(("stop", 60))
    stopped_at = max(house.saved)
    house.config = make_config(on)
    assert house.run()
    assert staleness(house) == [0.0] * (stopped_at + 1) + [1.0] * (6 - stopped_at)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        (RULES["partial rollout"], "that partial rollout carries"),
        ({"trainer.one_step_off": True}, "in the batch that waits"),
    ],
)
def test_samples_too_long_for_a_smaller_limit_are_refused_at_the_start(values: dict[str, Any], what: str):
    """Not in the middle of the first step."""
    house = House(make_config(values), make_workload(1))
    house.run(("stop", 60))
    assert house.saved
    assert max(house.saved) < 7
    again = House(make_config(values, **{"data.max_response_length": 5}), make_workload(1))
    again.saved = house.saved
    with pytest.raises(ValueError, match=rf"data\.max_response_length \(5 tokens\) must be >= \d+ .* samples {what}"):
        again.run(("kill", 1))


# ---------------------------------------------------------------- overlong reward shaping

SHAPING = {"reward.overlong_buffer": {"enable": True, "len": 36, "penalty_factor": 0.5}}


def of_samples(house: House) -> dict[Any, tuple[int, float, Any]]:
    """Length, reward and error by step and sample."""
    return {
        (step, sample.key): (len(sample), sample.reward or 0.0, sample.failure)
        for step, groups in house.groups.items()
        for group in groups
        for sample in group.samples
    }


@pytest.mark.parametrize("rule", RULES)
def test_long_responses_lose_reward_and_nothing_else_changes(rule: str):
    plain, shaped = plain_run(rule, 5), whole(make_config({**RULES[rule], **SHAPING}), make_workload(5))
    before, after = of_samples(plain), of_samples(shaped)
    assert before.keys() == after.keys()
    penalised = 0
    for key, (length, reward, error) in before.items():
        lost = 0.0 if error else max(length - 4, 0) / 36 * 0.5
        assert after[key][:2] == (length, pytest.approx(reward - lost))
        penalised += lost > 0
    assert penalised > 5
    for step, values in shaped.metrics.items():
        rewards = [s.reward or 0.0 for g in shaped.groups[step] for s in g.samples]
        assert values["critic/rewards/mean"] == pytest.approx(np.mean(rewards)), "what is logged is what is learnt from"
        lost = plain.metrics[step]["critic/rewards/mean"] - values["critic/rewards/mean"]
        assert values["reward/overlong_penalty/mean"] == pytest.approx(lost)
        assert "reward/overlong_penalty/mean" not in plain.metrics[step]


# ---------------------------------------------------------------- training on several versions


def learnt_from(values: dict[str, Any]) -> list[Any]:
    """The batches that the trainer is given."""
    house = House(make_config({**RULES["partial rollout"], **values}), make_workload(4))
    callbacks: Any = {"on_step": house.on_step, "save": house.save, "stop": house.stop}
    simulation = build(house.config, CostModel(SMALL, H100), house.workload, **callbacks)
    batches: list[Any] = []
    trainer: Any = simulation.loop._models.policy
    trainer.accumulate = lambda batch: batches.append(batch)
    trainer.token_logprobs = lambda batch, which: [np.full(len(s), -9.0, np.float32) for s in batch.samples]
    assert simulation.loop.run()
    return batches


def test_tokens_of_earlier_versions_keep_their_recorded_logprobs():
    batches = learnt_from({})
    old = 0
    for step, batch in enumerate(batches, 1):
        assert batch.loss_masks is None
        for sample, values in zip(batch.samples, batch.old_logprobs, strict=True):
            expected = np.where(sample.versions >= step - 1, -9.0, sample.rollout_logprobs)
            assert values.tolist() == expected.tolist()
            old += int((sample.versions < step - 1).sum())
    assert old > 0
    assert all(batch.old_logprobs is None for batch in learnt_from({"actor.old_logprobs": "rollout"}))
