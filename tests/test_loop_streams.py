"""The loop with gradients beside the rollout: each group is learnt from once, and a round that is dropped
takes its gradients along."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loop_house import Build, House, houses

from jaxrl.types import RunFailed, SampleKey


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    with houses(tmp_path) as one:
        yield one


def learnt(house: House) -> list[list[SampleKey]]:
    """Keys of the samples of each update, those that were streamed first, in the order of their prompts."""
    streamed: dict[int, list[SampleKey]] = {}
    updates: list[list[SampleKey]] = []
    by_prompt = {group.prompt.key: group for _, _, groups in house.steps for group in groups}
    begun: list[SampleKey] = []
    for entry in house.log:
        match entry:
            case ("streamed", step, prompt_key):
                streamed.setdefault(step, []).extend(sample.key for sample in by_prompt[prompt_key].samples)
            case ("accumulate", keys):
                begun += keys
            case "apply":
                updates.append(begun)
                begun = []
    first, per_step = house.steps[0][0], house.config.actor.ppo_epochs
    begun_by = [[] if i % per_step else sorted(streamed.get(first + i // per_step, [])) for i in range(len(updates))]
    return [before + keys for before, keys in zip(begun_by, updates, strict=True)]


STREAMING = [{}, {"trainer.one_step_off": True}, {"actor.ppo_epochs": 2}, {"actor.old_logprobs": "rollout"}]


@pytest.mark.parametrize("values", STREAMING)
def test_streamed_groups_are_learnt_from_once_and_all_else_is_the_same(build: Build, values: dict[str, Any]):
    plain, house = build(values, total_steps=3), build(values, total_steps=3, streams=True)
    assert plain.loop.run()
    assert house.loop.run()
    assert any(entry[0] == "streamed" for entry in house.log)
    assert [sorted(keys) for keys in learnt(house)] == [sorted(keys) for keys in learnt(plain)]
    for (step, measured, groups), (_, expected, others) in zip(house.steps, plain.steps, strict=True):
        taken = sum(entry[:2] == ("streamed", step) for entry in house.log if isinstance(entry, tuple))
        assert measured["actor/streamed_share"] == taken / len(groups)
        assert [group.prompt.key for group in groups] == [group.prompt.key for group in others]
        for name in ("critic/advantages/mean", "critic/advantages/max", "critic/rewards/mean", "actor/pg_loss"):
            assert measured[name] == expected[name]
    assert "actor/streamed_share" not in plain.steps[0][1]


def test_with_one_step_off_the_batch_that_waits_is_streamed(build: Build):
    house = build({"trainer.one_step_off": True}, total_steps=3, streams=True)
    assert house.loop.run()
    began = [entry for entry in house.log if entry[0] in ("begin", "streamed")]
    first = next(i for i, entry in enumerate(began) if entry[0] == "streamed")
    assert began[:first] == [("begin", 1, 0.9), ("begin", 2, 0.9)], "nothing in the round that begins the pipeline"
    assert {entry[1] for entry in began if entry[0] == "streamed"} == {1, 2}, "no round is beside the last update"
    assert began[first][:2] == ("streamed", 1)


def goes_on_as(whole: Any, cut: Any, build: Build, values: dict[str, Any]) -> Any:
    """The run that goes on from where `cut` was left, which must have the batches of `whole`."""
    again = build(values, total_steps=3, streams=True)
    again.resume(cut)
    assert again.loop.run()
    steps = {step: groups for house in (cut, again) for step, _, groups in house.steps}
    for step, _, groups in whole.steps:
        assert [group.prompt.key for group in steps[step]] == [group.prompt.key for group in groups]
    return again


@pytest.mark.parametrize("stop_after", [3, 9, 20, 33])
@pytest.mark.parametrize("values", STREAMING[:2])
def test_a_round_that_is_dropped_takes_its_stream_along(build: Build, stop_after: int, values: dict[str, Any]):
    whole = build(values, total_steps=3, streams=True)
    assert whole.loop.run()
    cut = build(values, total_steps=3, streams=True, stop_after=stop_after)
    assert not cut.loop.run()
    assert "abandon" in cut.log
    assert not cut.stream.taken
    for keys in learnt(goes_on_as(whole, cut, build, values)):
        assert len(keys) == len(set(keys)) == 8


def test_what_a_round_is_beside(build: Build):
    for off, expected in ((False, [1, 2, 3]), (True, [None, 1, 2])):
        house = build({"trainer.one_step_off": off}, total_steps=3, streams=True)
        assert house.loop.run()
        assert house.stream.expected == expected


@pytest.mark.parametrize("call", ["offer", "close"])
@pytest.mark.parametrize("values", STREAMING[:2])
def test_gradients_that_fail_end_the_run_at_the_boundary(build: Build, call: str, values: dict[str, Any]):
    whole = build(values, total_steps=3, streams=True)
    assert whole.loop.run()
    cut = build(values | {"trainer.save_freq": 0}, total_steps=3, streams=True)

    def fails_in_step_2() -> bool:
        cut.stream.fails_in = call if cut.loop.step == 1 else ""
        return False

    cut.backend.stop = fails_in_step_2
    with pytest.raises(RunFailed, match=f"^no memory in {call}; saved after step 1$"):
        cut.loop.run()
    assert [(step, state["step"]) for step, state, _ in cut.saves] == [(1, 1)]
    assert "abandon" in cut.log
    assert ("cancel" in cut.log) == (call == "offer"), "a round that is over is not dropped"
    goes_on_as(whole, cut, build, values)
