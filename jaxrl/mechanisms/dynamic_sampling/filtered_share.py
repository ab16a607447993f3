"""The share of groups that are filtered, learnt from verdicts, and how many groups to have under way.

Replacements that start after a verdict start late: with most groups filtered, a round becomes a chain of generations.
So a round launches ahead of verdicts: if a share s of the groups is filtered, `missing` groups that count need
missing / (1 - s) under way, and some more for chance.

Source: DAPO (Yu et al. 2025, §3.2) over-samples by a fixed factor (`gen_batch_size` in verl's recipe: three times the
batch); here the factor follows what a run sees.

The estimate changes in logical time and is part of a checkpoint. Older groups count less, since the share drifts as
the policy learns. Before the first verdict it is 0: a run in which nothing is filtered launches what a run without
dynamic sampling does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_GROUPS = 4
"""Groups that count as kept before the first verdict, so that few verdicts say little."""

MEMORY_BATCHES = 8
"""Batches' worth of groups after which a verdict counts 1/e of a new one."""

MARGIN = 0.5
"""Standard deviations of the number that count, by which more is launched than is needed on average."""

MOST_PER_MISSING = 4
"""The most groups under way for each that is missing, whatever the share."""


@dataclass(frozen=True, slots=True)
class FilteredShare:
    """The estimate: groups judged and groups filtered, the older ones discounted."""

    judged: float = 0.0
    filtered: float = 0.0

    @property
    def share(self) -> float:
        """The share of groups that are expected to be filtered, below 1."""
        return self.filtered / (self.judged + PRIOR_GROUPS)

    def after(self, filtered: bool, batch_groups: int) -> FilteredShare:
        """The estimate after one more verdict, in a run with batches of `batch_groups`."""
        keep = 1 - 1 / (MEMORY_BATCHES * batch_groups)
        return FilteredShare(self.judged * keep + 1, self.filtered * keep + filtered)

    def under_way(self, missing: int) -> int:
        """How many groups to have under way so that `missing` of them may be expected to count."""
        counting = 1 - self.share
        # n counting >= missing + MARGIN sqrt(n counting share), solved for sqrt(n)
        margin = MARGIN * math.sqrt(counting * self.share)
        root = (margin + math.sqrt(margin * margin + 4 * counting * missing)) / (2 * counting)
        return min(math.ceil(root * root - 1e-9), MOST_PER_MISSING * missing)

    def state(self) -> list[float]:
        return [self.judged, self.filtered]

    @classmethod
    def of_state(cls, state: Sequence[float]) -> FilteredShare:
        return cls(*map(float, state))
