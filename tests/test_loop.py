"""The loop over a backend and a trainer that only note their calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_house import Build, houses

from jaxrl.record.metrics import UPDATE_PHASES
from jaxrl.scheduling.mechanism import Mechanism
from jaxrl.scheduling.rounds.batches import RoundResult
from jaxrl.types import RunFailed, SamplingParams


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    with houses(tmp_path) as one:
        yield one


def kinds(log: list[Any]) -> list[Any]:
    """The log without launches, and consecutive equal entries once."""
    out: list[Any] = []
    for entry in log:
        if isinstance(entry, tuple) and entry[0] == "launch":
            continue
        name = entry[0] if isinstance(entry, tuple) and entry[0] == "accumulate" else entry
        if not out or out[-1] != name:
            out.append(name)
    return out


# ---------------------------------------------------------------- the order of things


def test_a_step_from_the_first_phase_to_the_last(build: Build):
    house = build({"actor.use_kl_loss": True, "trainer.test_freq": 2}, total_steps=2)
    assert house.loop.run()
    assert kinds(house.log) == [
        ("enter", 0),
        ("begin", 1, 0.9),
        "leave",
        ("logprobs", "actor"),
        ("logprobs", "ref"),
        "accumulate",
        "apply",
        ("enter", 1),
        ("line", 1),
        ("begin", 2, 0.9),
        "leave",
        ("logprobs", "actor"),
        ("logprobs", "ref"),
        "accumulate",
        "apply",
        ("enter", 2),
        ("begin", 2, 0.5),  # the evaluation, on the new weights
        ("line", 2),
        ("save", 2),
    ]
    order = ["data", "gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "sync"]
    assert house.phases == [(1, name) for name in order] + [(2, name) for name in [*order, "testing", "save"]]


@pytest.mark.parametrize("adv_estimator", ["grpo", "gae", "grpo_turns", "none"])
def test_epochs_times_minibatches_of_whole_groups(build: Build, adv_estimator: str):
    values = {"actor.ppo_epochs": 3, "actor.ppo_mini_batch_size": 2, "algorithm.adv_estimator": adv_estimator}
    values |= {"environment.kind": "tools", "environment.path": "calculator"}  # which one of them needs
    values |= {"algorithm.teacher": {"path": "t"}}  # and another one
    house = build(values, total_steps=1)
    house.loop.run()
    parts = [entry[1] for entry in house.log if entry[0] == "accumulate"]
    assert len(parts) == 3 * 2
    assert house.log.count("apply") == 3 * 2
    for part in parts:
        groups = [(key.epoch, key.prompt_index) for key in part]
        assert len(part) == 2 * 2
        assert all(groups.count(group) == 2 for group in groups), "whole groups"
    assert parts[0] + parts[1] == sorted({key for part in parts for key in part}), "each sample once an epoch"
    assert parts[:2] == parts[2:4] == parts[4:]
    _, measured, _ = house.steps[0]
    assert measured["actor/pg_loss"] == np.mean([1, 2, 3, 4, 5, 6]), "the mean over all updates"


def test_a_critic_learns_first_and_at_the_beginning_alone(build: Build):
    gae = {"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 1}
    house = build(gae | {"critic.ppo_epochs": 2, "critic.ppo_mini_batch_size": 2}, total_steps=2)
    house.loop.run()
    assert [name for step, name in house.phases if step == 1 and name in UPDATE_PHASES] == [
        "old_log_prob",
        "ref",
        "values",
        "adv",
        "update_critic",
    ]
    assert [name for step, name in house.phases if step == 2 and name.startswith("update")] == [
        "update_critic",
        "update_actor",
    ]
    parts = [entry[1] for entry in house.log if entry[0] == "critic"]
    assert len(parts) == 2 * 2 * 2
    assert parts[:2] == parts[2:4] != parts[4:6]
    first, second = (measured for _, measured, _ in house.steps)
    assert "actor/pg_loss" not in first
    assert (second["actor/pg_loss"], second["critic/vf_loss"]) == (1, 1)
    assert first["critic/values/max"] == 0
    assert {"critic/returns/mean", "critic/vf_explained_var", "timing_s/values"} <= set(first)


def test_sampling_options_reach_the_backend(build: Build):
    house = build({"rollout.top_k": -1, "rollout.top_p": 0.9, "rollout.min_p": 0.1, "rollout.stop": ["X"]})
    house.loop.run()
    expected = SamplingParams(0.9, 0, 0.9, 0.1, max_tokens=8, stop_token_ids=(2,), stop_strings=("X",))
    assert house.backend.params == expected


# ---------------------------------------------------------------- evaluation


def test_evaluation_before_and_between(build: Build):
    house = build({"trainer.test_freq": 2, "trainer.val_before_train": True}, total_steps=4)
    house.loop.run()
    assert [step for step, _, _ in house.evaluations] == [0, 2, 4]
    for step, measured, groups in house.evaluations:
        assert [group.prompt.text for group in groups] == ["held out 0", "held out 1", "held out 2"]
        assert {v for g in groups for s in g.samples for v in s.versions.tolist()} == {step}
        assert measured["val/reward"] == measured["val/accuracy"] == pytest.approx(1 / 3)
        assert measured["val/best@3"] == 1.0
        assert "val/response_length/mean" in measured
    assert house.loop.departures.counts["trained"] == 16, "held-out prompts do not depart"
    assert "timing_s/testing" not in house.steps[0][1], "what ran before the first step is not the first step's"
    assert "timing_s/testing" in house.steps[1][1]


@pytest.mark.parametrize("one_step_off", [False, True])
def test_a_round_says_what_it_is(build: Build, one_step_off: bool):
    """An evaluation has the step of the training round before it, and prompts of the same keys."""
    values = {"trainer.test_freq": 1, "trainer.val_before_train": True, "trainer.one_step_off": one_step_off}
    house = build(values, total_steps=2)
    house.loop.run()
    training, evaluation = (0, "plain", True), (1, "eval", False)
    found = [(info.step, (info.index, info.kind, info.is_training)) for info in house.backend.infos]
    assert found == [
        (0, evaluation),
        (1, training),
        *([(2, training), (1, evaluation)] if one_step_off else [(1, evaluation), (2, training)]),
        (2, evaluation),
    ]
    assert [info.update for info in house.backend.infos if info.is_training] == ([1, 1] if one_step_off else [1, 2])


# ---------------------------------------------------------------- saving, stopping, resuming


@pytest.mark.parametrize(("save_freq", "total", "expected"), [(2, 5, [2, 4, 5]), (0, 3, [3])])
def test_when_it_saves(build: Build, save_freq: int, total: int, expected: list[int]):
    house = build({"trainer.save_freq": save_freq}, total_steps=total)
    assert house.loop.run()
    assert [step for step, _, _ in house.saves] == expected


def test_a_stop_in_the_middle_of_a_round_saves_the_boundary(build: Build):
    house = build({"trainer.save_freq": 0}, total_steps=3, stop_after=25)  # a round takes 17 events
    assert not house.loop.run()
    assert house.log[-2:] == ["cancel", ("save", 1)]
    assert house.saves[0][1]["data"] == {"position": 4}
    assert house.prompts.position == 8, "the prompts of step 2 had been taken: the checkpoint gives them back"
    assert house.loop.step == 1


def test_what_outlives_rounds_is_kept_as_it_is_at_the_boundary(build: Build):
    """Also where a step ends early after one of its rounds has ended."""

    class Seen(Mechanism):
        def __init__(self, name: str) -> None:
            self.name, self.rounds = name, 0  # pyright: ignore[reportAttributeAccessIssue]

        def state_dict(self) -> dict[str, Any]:
            return {"rounds": self.rounds}

        def load_state_dict(self, state: Any) -> None:
            self.rounds = state.get("rounds", -1)

    seen, other = Seen("seen"), Seen("another")
    house = build({"trainer.one_step_off": True}, stop_after=30, mechanisms=[seen])  # in the second round of step 1
    end = house.backend.end

    def ended(result: RoundResult | None = None) -> dict[str, float]:
        seen.rounds += 1
        return end(result)

    house.backend.end = ended
    assert not house.loop.run()
    assert seen.rounds == 1
    assert house.saves[-1][1]["seen"] == {"rounds": 0}
    again = build(mechanisms=[seen, other])
    again.resume(house)
    assert (seen.rounds, other.rounds) == (0, -1)


# ---------------------------------------------------------------- alarms


def test_failing_rewards_end_the_run_inside_a_round_and_it_goes_on_from_the_boundary(build: Build):
    house = build({"trainer.max_bad_steps": 1, "trainer.save_freq": 0}, total_steps=3)

    def breaks_in_step_2() -> bool:
        house.backend.broken_scorer = house.loop.step == 1
        return False

    house.backend.stop = breaks_in_step_2
    with pytest.raises(RunFailed) as caught:
        house.loop.run()
    assert str(caught.value) == (
        "step 2: the last 8 rewards have all failed, the worth of one batch; the last one: no such service "
        "(trainer.max_bad_steps=1); saved after step 1"
    )
    assert [(step, state["step"]) for step, state, _ in house.saves] == [(1, 1)]
    assert "cancel" in house.log
    mended = build(total_steps=3)
    mended.resume(house)
    assert mended.loop.run()
    whole = build(total_steps=3)
    whole.loop.run()
    assert mended.trainer.digest == whole.trainer.digest


@pytest.mark.parametrize("steps_off", [False, True])
def test_steps_without_an_update_end_the_run_with_all_saved(build: Build, steps_off: bool):
    values = {"trainer.max_bad_steps": 2, "actor.ppo_mini_batch_size": 2, "trainer.one_step_off": steps_off}
    house = build(values, total_steps=9)
    house.trainer.skips = lambda update: update == 3 or update > 6  # half of step 2, all of steps 4 and 5
    with pytest.raises(RunFailed, match=r"step 5: 2 of 2 updates skipped.*no update in 2 steps.*saved after step 5$"):
        house.loop.run()
    assert [measured["actor/skipped_updates"] for _, measured, _ in house.steps] == [0, 1, 0, 2, 2]
    assert house.saves[-1][0] == 5


def test_failing_rewards_of_an_evaluation_end_the_run_too(build: Build):
    values = {"trainer.max_bad_steps": 1, "trainer.val_before_train": True}  # 9 rewards, of which 8 are a batch's worth
    house = build(values)
    house.backend.broken_scorer = True
    with pytest.raises(RunFailed, match=r"the last 8 rewards have all failed.*saved after step 0$"):
        house.loop.run()
    assert house.steps == []
    assert house.evaluations == []


# ---------------------------------------------------------------- progress


def test_every_minibatch_is_progress(build: Build):
    """Many slow ones are no silence, and none is told of before it is done: one that is stuck is silent, in the phase
    that the timeline shows to a watchdog."""
    updates, beats, phases = list[int](), list[int](), set[str]()
    values = {"actor.ppo_mini_batch_size": 1, "actor.ppo_epochs": 5}
    house = build(values, total_steps=1, beat=lambda: beats.append(len(updates)))
    apply = house.trainer.apply

    def slow() -> dict[str, float]:
        before = len(beats)
        phases.update(name for _, name, _ in house.timeline.open_spans())
        measured = apply()
        assert len(beats) == before
        updates.append(1)
        return measured

    house.trainer.apply = slow
    house.loop.run()
    assert len(updates) == 20
    assert {*range(1, 21)} <= {*beats}, "one beat at least between two updates"
    assert "update_actor" in phases


def test_a_stop_beside_an_update_is_named(build: Build):
    house = build({"trainer.one_step_off": True}, together=lambda first, second: (first(), second()), stop_after=18)
    with pytest.raises(RunFailed, match=r"step 2: its rollout ended early \(a stop was asked for\), beside update 1, "):
        house.loop.run()
