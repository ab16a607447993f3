"""The live rows of each dp group, on which layout decisions rest, and the time until they end.

Source: PAT §4.2, Algorithm 1, lines 4 and 8. `jaxrl.scheduling.layouts.regroup` has line 7.

Legend: S decode steps; R rows; G dp groups; K intervals of steps between which rows end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from jaxrl.scheduling.layouts.latency import LatencyPredictor

MAX_TERMS = 2048

Bound = Literal["max_length", "expected"]


@dataclass(frozen=True, slots=True)
class LiveRow:
    """A request on the device: tokens of its context, its longest context, and the tokens that history still expects it
    to gain."""

    request_id: int
    length: int
    limit: int
    expected_remaining: float | None = None

    def __post_init__(self) -> None:
        assert 1 <= self.length <= self.limit, self

    def steps_left(self, bound: Bound) -> int:
        """Up to its limit, or as many as expected (at least 1, never beyond the limit)."""
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
class BatchState:
    """The state of a generation between two plans.

    Attributes:
      dispatch: logical time: plans since the start of the generation.
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
    rows = [(group, row.steps_left(bound), row.length) for group, rows in enumerate(groups) for row in rows]
    if not rows:
        return np.zeros(len(step_S), np.int64), np.zeros(len(step_S), np.int64)
    group_R, left_R, length_R = np.array(rows, np.int64).T
    gone_R = np.searchsorted(step_S, left_R)  # the first place in step_S without the row
    start_K = np.unique(np.append(gone_R[gone_R < len(step_S)], 0))
    num_R = np.searchsorted(start_K, gone_R)  # intervals that have the row
    batch_GK = _rows_by_interval(group_R, num_R, len(start_K), np.ones(len(rows)))
    length_GK = _rows_by_interval(group_R, num_R, len(start_K), length_R)
    # Within an interval a group's tokens are a line over the steps: what is fullest at both ends is so all the way.
    end_K = np.append(start_K[1:], len(step_S))
    first_GK, last_GK = (length_GK + batch_GK * step_S[at_K] for at_K in (start_K, end_K - 1))
    fullest_K, intervals_K = (first_GK + last_GK).argmax(axis=0), np.arange(len(start_K))
    size_K = end_K - start_K
    batch_S = np.repeat(batch_GK.max(axis=0), size_K)
    tokens_S = np.repeat(length_GK[fullest_K, intervals_K], size_K)
    tokens_S += np.repeat(batch_GK[fullest_K, intervals_K], size_K) * step_S
    is_fullest_K = first_GK[fullest_K, intervals_K] == first_GK.max(axis=0)
    is_fullest_K &= last_GK[fullest_K, intervals_K] == last_GK.max(axis=0)
    for k in np.flatnonzero(~is_fullest_K).tolist():
        here = slice(start_K[k], end_K[k])
        tokens_S[here] = (length_GK[:, k, None] + batch_GK[:, k, None] * step_S[here]).max(axis=0)
    return batch_S, tokens_S


def remaining_s(model: LatencyPredictor, tp: int, groups: Sequence[Rows], bound: Bound = "max_length") -> float:
    """Seconds until the last of these rows ends if the layout stays at `tp` (Algorithm 1, est_rem_time): the sum of all
    steps' times. Beyond `MAX_TERMS` steps, the middle step represents each of as many intervals."""
    num_steps = max((row.steps_left(bound) for rows in groups for row in rows), default=0)
    if not num_steps:
        return 0.0
    starts = np.arange(0, num_steps, -(-num_steps // MAX_TERMS))
    widths = np.diff(starts, append=num_steps)
    step_s = model.decode_steps_s(tp, *load_at(groups, bound, starts + widths // 2))
    return float(np.sum(step_s * widths))


def _rows_by_interval(group_R: np.ndarray, num_R: np.ndarray, num_intervals: int, value_R: np.ndarray) -> np.ndarray:
    """Sums of values over the rows of each group, [G, K]; row r counts in the first `num_R[r]` of the K intervals."""
    shape = int(group_R.max()) + 1, num_intervals + 1
    ends_GK = np.bincount(group_R * shape[1] + num_R, value_R, math.prod(shape)).reshape(shape)
    return ends_GK[:, :0:-1].cumsum(axis=1)[:, ::-1].astype(np.int64)


def num_tokens(rows: Iterable[LiveRow]) -> int:
    return sum(row.length for row in rows)


@dataclass(frozen=True, slots=True)
class DegreeChoice:
    degree: int
    predicted_s: Mapping[int, float]

    def __str__(self) -> str:
        return ", ".join(f"{seconds:.4g} s at tp {tp}" for tp, seconds in self.predicted_s.items())


def fastest_degree(
    model: LatencyPredictor,
    capacities: Mapping[int, GroupCapacity],
    num_rows: int,
    prompt_tokens: int,
    response_tokens: int,
) -> DegreeChoice:
    """The degree in which a batch of `num_rows` equal rows is predicted to decode fastest, the smallest of equals:
    `rollout.tensor_model_parallel_size=auto`.

    Source: RollPacker §4.2: the planner profiles the best degree of a plain round, and begins with it. Departures: the
    paper measures rollouts; here one is predicted from decode steps alone, and all rows have the longest prompt and
    grow to the longest response, as PAT bounds the rest of a generation (§4.2). Where a dp group has no room for its
    share of the batch, the rows come in waves.
    """
    length = prompt_tokens + response_tokens

    def wave_s(tp: int, rows: int) -> float:
        group = tuple(LiveRow(i, prompt_tokens, length) for i in range(rows))
        return remaining_s(model, tp, (group,), "max_length") if rows else 0.0

    def decode_s(tp: int) -> float:
        share = -(-num_rows // (model.num_devices // tp))
        room = capacities[tp]
        at_once = min(share, room.rows, room.tokens // length)
        assert at_once >= 1, f"tp {tp} has no room for one row"
        waves, rest = divmod(share, at_once)
        return waves * wave_s(tp, at_once) + wave_s(tp, rest)

    predicted = {tp: decode_s(tp) for tp in sorted(capacities)}
    return DegreeChoice(min(predicted, key=lambda tp: predicted[tp]), predicted)
