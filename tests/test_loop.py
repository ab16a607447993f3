"""The loop on a simulated machine: the order of things, rounds, evaluations, saves and alarms.

`test_compositions.py` has runs that are killed and stopped anywhere, with every batch rule.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from simulated_runs import House, make_config, make_workload

from jaxrl.record.metrics import UPDATE_PHASES
from jaxrl.run.simulation import Simulation
from jaxrl.types import RunFailed, SamplingParams

QUICK = {"data.train_batch_size": 4, "trainer.save_freq": 2, "reward.timeout_s": 0.0}
WORKLOAD = make_workload(3, hang_share=0.0, pass_rate=0.4)


class Noted:
    """A run whose loop's calls of the backend and of its models are noted in `log`, and its phases by step.

    `measured`: what an update returns, given its number from 1.
    """

    def __init__(self, values: dict[str, Any], workload: Any = WORKLOAD, steps: int = 2, **more: Any) -> None:
        self.log, self.phases, self.evaluations, self.num_updates = [], [], [], 0
        self.measured: Callable[[int], dict[str, float]] = lambda number: {"actor/pg_loss": float(number)}
        config = make_config({**QUICK, "trainer.total_training_steps": steps, **values})
        callbacks = {
            "on_phase": lambda step, name: self.phases.append((step, name)),
            "on_eval": lambda *evaluation: self.evaluations.append(evaluation),
        }
        self.house = House(config, workload, None, self._watch, **callbacks, **more)

    def run(self) -> House:
        assert self.house.run()
        return self.house

    def calls(self, name: str) -> list[Any]:
        return [arguments for called, *arguments in self.log if called == name]

    def _watch(self, simulation: Simulation) -> None:
        backend, models = simulation.loop.backend, simulation.loop._models
        for of, name in ((backend, "enter_rollout"), (backend, "begin"), (backend, "leave_rollout")):
            self._note(of, name, name)
        self._note(models.policy, "token_logprobs", "logprobs")
        self._note(models.policy, "train_step", "update")
        if models.critic is not None:
            self._note(models.critic, "train_step", "critic")

    def _note(self, of: Any, name: str, called: str) -> None:
        inner = getattr(of, name)

        def noting(*arguments: Any) -> Any:
            self.log.append((called, *arguments))
            found = inner(*arguments)
            if called != "update":
                return found | {"critic/vf_loss": 1.0} if called == "critic" else found
            self.num_updates += 1
            return found | self.measured(self.num_updates)

        setattr(of, name, noting)


def test_a_step_from_the_first_phase_to_the_last():
    noted = Noted({"actor.use_kl_loss": True, "trainer.test_freq": 2, "rollout.val_kwargs": {"temperature": 0.5}})
    noted.run()
    said = {
        "enter_rollout": lambda version: version,
        "begin": lambda info, params: (info.step, params.temperature),
        "logprobs": lambda batch, which: which,
    }
    found = [(name, said[name](*of)) if name in said else name for name, *of in noted.log]
    step = ["leave_rollout", ("logprobs", "actor"), ("logprobs", "ref"), "update"]
    assert [each for each, _ in groupby(found)] == [
        *(("enter_rollout", 0), ("begin", (1, 1.0)), *step),
        *(("enter_rollout", 1), ("begin", (2, 1.0)), *step),
        *(("enter_rollout", 2), ("begin", (2, 0.5))),  # the evaluation, on the new weights
    ]
    order = ["data", "gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "sync"]
    phases = [each for each, _ in groupby(noted.phases) if each[1] not in ("gen", "reward")]
    rest = [name for name in order if name not in ("gen", "reward")]
    assert phases == [(1, name) for name in rest] + [(2, name) for name in [*rest, "testing", "save"]]


@pytest.mark.parametrize("adv_estimator", ["grpo", "none"])
def test_epochs_times_minibatches_of_whole_groups(adv_estimator: str):
    beats: list[int] = []
    values = {"actor.ppo_epochs": 3, "actor.ppo_mini_batch_size": 2, "algorithm.adv_estimator": adv_estimator}
    noted = Noted(
        values | {"algorithm.teacher": {"path": "t"}}, steps=1, beat=lambda *_: beats.append(noted.num_updates)
    )
    house = noted.run()
    parts = [[sample.key for sample in batch.samples] for (batch,) in noted.calls("update")]
    assert len(parts) == 3 * 2
    for part in parts:
        groups = [(key.epoch, key.prompt_index) for key in part]
        assert all(groups.count(group) == 2 for group in groups), "whole groups"
    assert parts[0] + parts[1] == sorted({key for part in parts for key in part}), "each sample once an epoch"
    assert parts[:2] == parts[2:4] == parts[4:]
    assert house.metrics[1]["actor/pg_loss"] == np.mean([1, 2, 3, 4, 5, 6]), "the mean over all updates"
    assert {1, 2, 3, 4, 5, 6} <= {*beats}, "a sign of life after each"


def test_a_critic_learns_first_and_at_the_beginning_alone():
    gae = {"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 1}
    noted = Noted(gae | {"critic.ppo_epochs": 2, "critic.ppo_mini_batch_size": 2})
    first, second = noted.run().metrics.values()
    for step, updates in ((1, ["update_critic"]), (2, ["update_critic", "update_actor"])):
        expected = ["old_log_prob", "ref", "values", "adv", *updates]
        assert [name for at, name in noted.phases if at == step and name in UPDATE_PHASES] == expected
    parts = [[sample.key for sample in batch.samples] for (batch,) in noted.calls("critic")]
    assert len(parts) == 2 * 2 * 2
    assert parts[:2] == parts[2:4] != parts[4:6]
    assert "actor/pg_loss" not in first
    assert (second["actor/pg_loss"], second["critic/vf_loss"]) == (1, 1)
    assert {"critic/values/max", "critic/returns/mean", "critic/vf_explained_var", "timing_s/values"} <= set(first)


def test_sampling_options_reach_the_backend():
    noted = Noted({"rollout.top_k": -1, "rollout.top_p": 0.9, "rollout.min_p": 0.1}, steps=1)
    noted.run()
    ((_, params),) = noted.calls("begin")
    assert params == SamplingParams(1.0, 0, 0.9, 0.1, max_tokens=40, stop_token_ids=(1,))


@pytest.mark.parametrize("one_step_off", [False, True])
def test_evaluations_come_before_and_between(one_step_off: bool):
    """An evaluation has the step of the training round before it, and prompts of the same keys."""
    values = {"trainer.test_freq": 2, "trainer.val_before_train": True, "trainer.one_step_off": one_step_off}
    noted = Noted(values | {"rollout.val_kwargs": {"n": 3}}, steps=3)
    house = noted.run()
    assert [step for step, *_ in noted.evaluations] == [0, 2, 3], "the last step has one as well"
    for step, measured, groups in noted.evaluations:
        assert [len(group.samples) for group in groups] == [3, 3]
        assert {version for g in groups for s in g.samples for version in s.versions.tolist()} == {step}
        rewards = [sample.reward for group in groups for sample in group.samples]
        assert measured["val/reward"] == measured["val/accuracy"] == pytest.approx(np.mean(rewards))
        assert {"val/best@3", "val/response_length/mean"} <= set(measured)
    assert house.loop.departures.counts["trained"] == 12, "held-out prompts do not depart"
    assert "timing_s/testing" not in house.metrics[1], "what ran before the first step is not the first step's"
    assert "timing_s/testing" in house.metrics[2]
    infos = [info for info, _ in noted.calls("begin")]
    found = [(info.step, info.kind) for info in infos]
    assert all(info.is_training == (info.kind == "plain") == (info.index == 0) for info in infos)
    second = [(2, "plain"), (3, "plain"), (2, "eval")] if one_step_off else [(2, "plain"), (2, "eval"), (3, "plain")]
    assert found == [(0, "eval"), (1, "plain"), *second, (3, "eval")]
    assert [info.update for info in infos if info.is_training] == ([1, 1, 2] if one_step_off else [1, 2, 3])


@pytest.mark.parametrize(("save_freq", "total", "expected"), [(2, 5, [2, 4, 5]), (0, 3, [3])])
def test_when_it_saves(save_freq: int, total: int, expected: list[int]):
    assert sorted(Noted({"trainer.save_freq": save_freq}, steps=total).run().saved) == expected


# ---------------------------------------------------------------- alarms


class Breaks:
    """A workload whose scorers answer too late in one training step, or for held-out prompts, which are step 0's."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(WORKLOAD, name)

    def reward_s(self, key: Any, step: int = 0) -> float:
        return 9.0 if step == self.step else 0.01


ALARMS = {"trainer.max_bad_steps": 1, "trainer.save_freq": 0, "reward.timeout_s": 1.0}


def test_failing_rewards_end_the_run_inside_a_round_and_it_goes_on_from_the_boundary():
    house = Noted(ALARMS, Breaks(2), steps=3).house
    with pytest.raises(RunFailed) as caught:
        house.run()
    assert str(caught.value) == (
        "step 2: the last 8 rewards have all failed, the worth of one batch; the last one: no verdict after 1.0 s "
        "(trainer.max_bad_steps=1); saved after step 1"
    )
    assert (sorted(house.saved), house.loop.backend.engine.is_idle) == ([1], True)
    house.workload = Breaks(None)
    assert house.run()
    assert house.decided() == Noted(ALARMS, Breaks(None), steps=3).run().decided()


def test_failing_rewards_of_an_evaluation_end_the_run_too():
    values = ALARMS | {"trainer.val_before_train": True, "rollout.val_kwargs": {"n": 5}}
    noted = Noted(values, Breaks(1))  # of version 0, as the first step's
    with pytest.raises(RunFailed, match=r"the last 8 rewards have all failed.*saved after step 0$"):
        noted.house.run()
    assert not noted.house.metrics
    assert not noted.evaluations


@pytest.mark.parametrize("one_step_off", [False, True])
def test_steps_without_an_update_end_the_run_with_all_saved(one_step_off: bool):
    values = {"trainer.max_bad_steps": 2, "actor.ppo_mini_batch_size": 2, "trainer.one_step_off": one_step_off}
    noted = Noted(values, steps=9)
    skipped = {3, *range(7, 99)}  # half of step 2, all of steps 4 and 5
    noted.measured = lambda number: {"actor/skipped_updates": float(number in skipped)}
    with pytest.raises(RunFailed, match=r"step 5: 2 of 2 updates skipped.*no update in 2 steps.*saved after step 5$"):
        noted.house.run()
    found = noted.house.metrics
    assert [measured["actor/skipped_updates"] for measured in found.values()] == [0, 1, 0, 2, 2]
    assert max(noted.house.saved) == 5
