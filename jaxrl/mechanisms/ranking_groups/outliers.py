"""Responses of a ranking group that grow much longer than the group's history: they leave their worker.

Source: RhymeRL §6.3. A response is an outlier if it is among the last alpha = 10 % of its group's responses *and*
longer than beta times the largest historical length of the group's prompts, beta = max(1.1, the 75th percentile of
the growth of response lengths over the last epoch). A prompt's historical length is the median of its last responses
(§6.2).

Departures: the paper does not say how many "the last 10 %" are of a small group: here the share is rounded up, so that
the last response of any group can be one. "Short" groups, whose outliers stay in the step, are those with a longer one
still running in it (`session`). The outliers of the longest group stay where they are. The paper defers them to the
next step, because its batches are oversampled; here that is partial rollout's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxrl.types import SampleKey


@dataclass(frozen=True, slots=True)
class RankedGroup:
    """A ranking group as a round launches it.

    Attributes:
      rank: from 0, the shortest.
      keys: its responses.
      longest: the largest historical length of its prompts, in tokens; None: unknown, so that none is an outlier.
    """

    rank: int
    keys: tuple[SampleKey, ...]
    longest: float | None


class Outliers:
    """One round's.

    Args:
      groups: what the round launches at its start.
      share: alpha.
      factor: beta.
    """

    def __init__(self, groups: Iterable[RankedGroup], share: float, factor: float) -> None:
        groups = list(groups)
        self._rank_of = {key: group.rank for group in groups for key in group.keys}
        self._running = {group.rank: dict.fromkeys(group.keys) for group in groups}
        self._last = {group.rank: math.ceil(share * len(group.keys)) for group in groups}
        self._limit = {g.rank: math.inf if g.longest is None else factor * g.longest for g in groups}
        self._named: set[SampleKey] = set()

    def rank(self, key: SampleKey) -> int:
        """The ranking group of a response that is in one."""
        return self._rank_of[key]

    def ended(self, key: SampleKey) -> None:
        """A response has ended or was aborted; ignored if it is in no group."""
        if key in self._rank_of:
            self._running[self._rank_of[key]].pop(key, None)

    def take(self, num_tokens: Callable[[SampleKey], int]) -> list[SampleKey]:
        """The outliers that were not named before, by groups and in the order of launching.

        Args:
          num_tokens: of a running response, so far.
        """
        found: list[SampleKey] = []
        for rank, running in self._running.items():
            if 0 < len(running) <= self._last[rank]:
                longer = (key for key in running if key not in self._named and num_tokens(key) > self._limit[rank])
                found.extend(longer)
        self._named.update(found)
        return found
