"""The live rows of each dp group, which layout decisions look at.

Source: PAT §4.2, Algorithm 1, lines 4 and 8. `jaxrl.scheduling.layouts.regroup` has line 7.

Legend: S decode steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

Bound = Literal["max_length", "expected"]


@dataclass(frozen=True, slots=True)
class LiveRow:
    """A request on the device.

    Attributes:
      request_id: its id.
      length: tokens of its context, prompt and response.
      limit: the longest it can get: prompt + max_tokens.
      expected_remaining: tokens that history still expects it to gain; None if history cannot tell.
    """

    request_id: int
    length: int
    limit: int
    expected_remaining: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.length <= self.limit:
            raise ValueError(f"row of request {self.request_id}: length ({self.length}) must be in [1, {self.limit}]")

    def steps_left(self, bound: Bound) -> int:
        """Decode steps until it ends: up to its limit, or as many as expected (at least 1, never beyond the limit)."""
        left = self.limit - self.length
        if bound == "max_length" or self.expected_remaining is None:
            return left
        return min(max(math.ceil(self.expected_remaining), 1), left)


Rows = tuple[LiveRow, ...]


@dataclass(frozen=True, slots=True)
class GroupCapacity:
    """What one dp group of a layout has room for: tokens of KV, and rows."""

    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class Situation:
    """The state of a generation between two plans.

    Attributes:
      dispatch: logical time: plans since the start of the generation.
      tp: the degree in use.
      groups: live rows of each dp group, in the layout's order.
      capacities: by degree, what a dp group has room for; a degree without an entry cannot be used.
      num_waiting: requests without a row.
    """

    dispatch: int
    tp: int
    groups: tuple[Rows, ...]
    capacities: Mapping[int, GroupCapacity]
    num_waiting: int = 0

    @property
    def num_live(self) -> int:
        return sum(map(len, self.groups))


def load_at(groups: Iterable[Rows], bound: Bound, step_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows [S] and tokens [S] of the fullest dp group after `step_S` more steps; 0 when all rows have ended."""
    batch_S, tokens_S = np.zeros(len(step_S), np.int64), np.zeros(len(step_S), np.int64)
    for rows in groups:
        by_end = sorted((row.steps_left(bound), row.length) for row in rows)
        length_sums = np.cumsum([0, *(length for _, length in by_end)])
        gone_S = np.searchsorted([left for left, _ in by_end], step_S, side="right")
        live_S = len(by_end) - gone_S
        batch_S = np.maximum(batch_S, live_S)
        tokens_S = np.maximum(tokens_S, length_sums[-1] - length_sums[gone_S] + live_S * step_S)
    return batch_S, tokens_S


def num_tokens(rows: Iterable[LiveRow]) -> int:
    """Tokens of these rows' contexts together."""
    return sum(row.length for row in rows)
