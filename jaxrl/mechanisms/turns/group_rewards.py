"""Trajectories of a prompt, compared by a class of the user's when all of them are over and scored.

Purpose: what a trajectory is worth may depend on the others of its prompt: a game of several players, a tournament of
answers. Each is given more or less for it before advantages are made.

A comparison is asked of a process of the user's, so what it says is written to the journal before it takes effect: a
step that runs again compares nothing anew.

Source: tinker-cookbook's `EnvGroupBuilder.compute_group_rewards`. Departure: none of its metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.environments.env import Trajectory
from jaxrl.mechanisms.turns.rule import Compared, tokens_crc32
from jaxrl.record.journal import Journal
from jaxrl.rewards.request import ScoreRequest
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.types import Group, Prompt, Sample

_log = logging.getLogger(__name__)
_KIND = "group"  # of entries in the journal


class GroupRewards:
    """Compares the trajectories of each group of a finished round (`jaxrl.scheduling.mechanism.GroupRewards`).

    Args:
      compared: as in `Conversation`.
      journal: of rewards.
    """

    def __init__(self, compared: Compared, journal: Journal | None = None) -> None:
        self._compared, self._journal = compared, journal
        self._info = RoundInfo(-1)

    def __call__(self, groups: Sequence[Group], info: RoundInfo) -> Mapping[str, float]:
        self._info = info
        there = [(group, samples) for group in groups if (samples := _with_turns(group))]
        if not there:
            return {}
        found = [self._recorded(group.prompt, samples) for group, samples in there]
        new = [i for i, each in enumerate(found) if each is None]
        asked = [(group.prompt, [_trajectory(group.prompt, each) for each in samples]) for group, samples in there]
        for i, rewards in zip(new, self._compared([asked[i] for i in new]), strict=True):
            found[i] = rewards
            self._note(there[i][0].prompt, there[i][1], rewards)
        for (_, samples), rewards in zip(there, found, strict=True):
            assert rewards is not None
            _give(samples, rewards)
        given = [reward for rewards in found if isinstance(rewards, list) for reward in rewards]
        errors = [rewards for rewards in found if isinstance(rewards, str)]
        if errors:
            _log.warning("environment.group: %d of %d comparisons failed: %s", len(errors), len(found), errors[-1])
        return {
            "environment/group_reward/mean": float(np.mean(given)) if given else 0.0,
            "environment/group_errors": float(len(errors)),
            "reward/errors": float(sum(each.failure in errors for _, samples in there for each in samples)),
        }

    def _place(self, prompt: Prompt) -> tuple[int, int, int]:
        return self._info.index, prompt.epoch, prompt.index

    def _recorded(self, prompt: Prompt, samples: Sequence[Sample]) -> list[float] | str | None:
        """What the journal says of these trajectories; None: nothing."""
        if self._journal is None:
            return None
        entry = self._journal.find(self._info.step, _KIND, self._place(prompt))
        return None if entry is None or entry["crc32"] != _crc32(samples) else entry["rewards"]

    def _note(self, prompt: Prompt, samples: Sequence[Sample], rewards: list[float] | str) -> None:
        if self._journal is not None:
            entry = {"crc32": _crc32(samples), "rewards": rewards}
            self._journal.append(self._info.step, _KIND, self._place(prompt), entry)


def _with_turns(group: Group) -> list[Sample]:
    """Those that can be compared: what has failed before is none of them."""
    return [each for each in group.samples if each.episode is not None and each.episode.turns and not each.failure]


def _trajectory(prompt: Prompt, sample: Sample) -> Trajectory:
    seen = ScoreRequest.of(prompt, sample)
    return Trajectory(tuple(seen.extra["messages"]), seen.turn_rewards or (), sample.reward or 0.0, seen.stop)


def _give(samples: Sequence[Sample], rewards: list[float] | str) -> None:
    if isinstance(rewards, str):
        for sample in samples:
            sample.reward, sample.failure = 0.0, rewards
        return
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = (sample.reward or 0.0) + reward
        sample.reward_info = {**sample.reward_info, "group_reward": reward}


def _crc32(samples: Sequence[Sample]) -> list[Any]:
    """Of what was compared: tokens, and rewards before."""
    return [[tokens_crc32(sample), sample.reward] for sample in samples]
