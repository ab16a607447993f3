"""Trajectories of a prompt, compared by a class of the user's when all of them have ended and are scored."""

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
    """What trajectories are worth beside the others of their prompt (`jaxrl.scheduling.mechanism.GroupRewards`).

    A user's process computes the rewards, so they are written to the journal before they take effect: a step that runs
    again compares nothing anew.

    Source: tinker-cookbook's `EnvGroupBuilder.compute_group_rewards`. Departure: none of its metrics.
    """

    def __init__(self, compared: Compared, journal: Journal | None = None) -> None:
        self._compared, self._journal = compared, journal

    def __call__(self, groups: Sequence[Group], info: RoundInfo) -> Mapping[str, float]:
        there = [(group.prompt, samples) for group in groups if (samples := _with_turns(group))]
        if not there:
            return {}
        found = [self._recorded(info, *each) for each in there]
        new = [each for each, rewards in zip(there, found, strict=True) if rewards is None]
        asked = [(prompt, [_trajectory(prompt, each) for each in samples]) for prompt, samples in new]
        answers = iter(self._compared(asked))
        for i, (prompt, samples) in enumerate(there):
            if (rewards := found[i]) is None:
                rewards = found[i] = next(answers)
                self._note(info, prompt, samples, rewards)
        given: list[float] = []
        errors: list[str] = []
        for (_, samples), rewards in zip(there, found, strict=True):
            if isinstance(rewards, str):
                errors.append(rewards)
                for sample in samples:
                    sample.reward, sample.failure = 0.0, rewards
                continue
            assert rewards is not None
            given += rewards
            for sample, reward in zip(samples, rewards, strict=True):
                sample.reward = (sample.reward or 0.0) + reward
                sample.reward_info = {**sample.reward_info, "group_reward": reward}
        if errors:
            _log.warning("environment.group: %d of %d comparisons failed: %s", len(errors), len(found), errors[-1])
        return {
            "environment/group_reward/mean": float(np.mean(given)) if given else 0.0,
            "environment/group_errors": float(len(errors)),
            "reward/errors": float(sum(each.failure in errors for _, samples in there for each in samples)),
        }

    def _recorded(self, info: RoundInfo, prompt: Prompt, samples: Sequence[Sample]) -> list[float] | str | None:
        """The journal's rewards of these trajectories; None if it has none."""
        if self._journal is None:
            return None
        entry = self._journal.find(info.step, _KIND, (info.index, *prompt.key))
        return None if entry is None or entry["crc32"] != _crc32(samples) else entry["rewards"]

    def _note(self, info: RoundInfo, prompt: Prompt, samples: Sequence[Sample], rewards: list[float] | str) -> None:
        if self._journal is not None:
            entry = {"crc32": _crc32(samples), "rewards": rewards}
            self._journal.append(info.step, _KIND, (info.index, *prompt.key), entry)


def _with_turns(group: Group) -> list[Sample]:
    """The samples that can be compared, without those that have failed before."""
    return [each for each in group.samples if each.episode is not None and each.episode.turns and not each.failure]


def _trajectory(prompt: Prompt, sample: Sample) -> Trajectory:
    seen = ScoreRequest.of(prompt, sample)
    return Trajectory(tuple(seen.extra["messages"]), seen.turn_rewards or (), sample.reward or 0.0, seen.stop)


def _crc32(samples: Sequence[Sample]) -> list[Any]:
    """Checksums of what was compared: tokens, and rewards before."""
    return [[tokens_crc32(sample), sample.reward] for sample in samples]
