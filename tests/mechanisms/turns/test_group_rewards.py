"""What trajectories are given for how they compare, and that a step that runs again asks nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxrl.environments.env import Trajectory
from jaxrl.mechanisms.turns.group_rewards import GroupRewards
from jaxrl.record.journal import Journal
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.types import Episode, Group, Prompt, Sample, SampleKey, Turn

ASKED = ({"role": "user", "content": "?"},)


class Contests:
    """Of two trajectories the one with more turns is given a half; the prompts that it is asked about are kept."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[Trajectory]]] = []

    def __call__(self, asked: Sequence[tuple[Prompt, Sequence[Trajectory]]]) -> list[list[float] | str]:
        self.asked += [(prompt.index, [*trajectories]) for prompt, trajectories in asked]
        return [
            "no contest" if prompt.index == 9 else [0.5 * (len(each.messages) > 3) for each in trajectories]
            for prompt, trajectories in asked
        ]


def sample(index: int, number: int, turns: int, reward: float | None) -> Sample:
    ids, zeros = np.arange(turns + 1, dtype=np.int32), np.zeros(turns + 1, np.float32)
    made = Sample(SampleKey(0, index, number), ids, zeros, zeros, np.zeros(turns + 1, np.int32), "stop", reward=reward)
    answer = ({"role": "user", "content": "go on"},)
    said = tuple(Turn(i + 1, f"turn {i}", answer if i < turns - 1 else (), reward=0.25) for i in range(turns))
    return replace(made, episode=Episode(said, stop="done") if turns else None, reward_info={"acc": 1})


def groups() -> list[Group]:
    def group(index: int, *of: Sample) -> Group:
        return Group(Prompt(0, index, (), "", "x", extra={"messages": ASKED}), [*of])

    return [
        group(3, sample(3, 0, 1, 0.25), sample(3, 1, 2, 1.0)),
        group(4, sample(4, 0, 0, 1.0)),
        group(9, sample(9, 0, 2, None), sample(9, 1, 3, 0.75)),
    ]


def rewards_of(found: Sequence[Group]) -> list[list[float | None]]:
    return [[each.reward for each in group.samples] for group in found]


def test_rewards_that_compare():
    contests, found = Contests(), groups()
    measured = GroupRewards(contests)(found, RoundInfo(1))
    assert rewards_of(found) == [[0.25, 1.5], [1.0], [0.0, 0.0]]
    counts = {"environment/group_errors": 1.0, "reward/errors": 2.0}
    assert measured == {"environment/group_reward/mean": 0.25, **counts}
    first, second = found[0].samples
    assert (first.reward_info, second.reward_info) == ({"acc": 1, "group_reward": 0.0}, {"acc": 1, "group_reward": 0.5})
    assert found[1].samples[0].reward_info == {"acc": 1}
    assert [each.failure for group in found for each in group.samples] == ["", "", "", "no contest", "no contest"]
    assert [index for index, _ in contests.asked] == [3, 9], "one without turns has nothing to compare"
    longer = contests.asked[0][1][1]
    said = [(message["role"], message["content"]) for message in longer.messages]
    assert said == [("user", "?"), ("assistant", "turn 0"), ("user", "go on"), ("assistant", "turn 1")]
    assert (longer.turn_rewards, longer.reward, longer.stop) == ((0.25, 0.25), 1.0, "done")


def test_what_was_compared_is_not_compared_again(tmp_path: Path):
    """Unless the trajectories are others, or those of an evaluation."""
    asked = []
    for step, kind, spoil in ((1, 0, False), (1, 0, False), (1, 1, False), (1, 0, True), (2, 0, False)):
        contests, found = Contests(), groups()
        if spoil:
            found[0].samples[0].token_ids[0] += 1
        with closing(Journal(tmp_path / "journal.jsonl", 0)) as journal:
            GroupRewards(contests, journal)(found, RoundInfo(step, kind))
        assert rewards_of(found) == [[0.25, 1.5], [1.0], [0.0, 0.0]]
        asked.append([index for index, _ in contests.asked])
    assert asked == [[3, 9], [], [3, 9], [3], [3, 9]]
