"""The steps of a simulated plan that verifies: how much of what is proposed is accepted, and what each row gains.

`verify` plays the decode loop for all rows at once, by the rules that devices follow (`jaxrl.rollout.verify`). What is
proposed, and how much of it is right, a mechanism says (`Proposals`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxrl.types import SampleKey


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """By position of a response, each [tokens]:

    Attributes:
      right: int16, tokens from here on that a proposal would have right; -1: nothing is proposed.
      matched: int8, tokens of context by which the proposal is found; 0: none is.
    """

    right: np.ndarray
    matched: np.ndarray


class Proposals(Protocol):
    """The proposals on simulated devices (`jaxrl.mechanisms.speculation.proposer.Drafting`)."""

    @property
    def first_window(self) -> int: ...

    def acceptance(self, key: SampleKey, length: int) -> Acceptance:
        """How many tokens of a proposal are right, by position of a response of `length` tokens."""
        ...

    def width(self, rows: int) -> int:
        """The most tokens that a step verifies in each row, by the rows of the fullest dp group."""
        ...

    def next_window(self, window: Any, proposed: Any, accepted: Any) -> Any:
        """The most tokens of the next proposals, after a step with `proposed` and `accepted` tokens."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """The outcome of a plan's steps, by row.

    Attributes:
      gained, windows: tokens, and the windows afterwards, int64 [R].
      active: which rows gained something in a step; before: tokens that they had gained before it; [num_steps, R].
      counts: the fields of `VerifyCounts`, int64 [5, R].
    """

    num_steps: int
    gained: np.ndarray
    windows: np.ndarray
    active: np.ndarray
    before: np.ndarray
    counts: np.ndarray


def verify(
    acceptance: Sequence[Acceptance | None],
    generated: np.ndarray,
    left: np.ndarray,
    max_new: np.ndarray,
    windows: np.ndarray,
    *,
    next_window: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    width: int,
    num_steps: int,
    num_stops: int,
) -> Verified:
    """Up to `num_steps` steps of R rows, each of `width` proposed tokens at most.

    Args:
      acceptance: of each row; None: it has no history.
      generated, left, max_new: of each row, tokens that it has, tokens until it stops, and the most that it may gain;
        int64 [R].
      num_stops: rows that must stop before the loop is left.
    """
    count = len(generated)
    room = np.minimum(left, max_new)
    right, matched = _ahead(acceptance, generated, room)
    gained, now, counts = np.zeros(count, np.int64), windows.copy(), np.zeros((5, count), np.int64)
    actives, befores = [], []
    for _ in range(num_steps):
        active = gained < room
        if not active.any() or np.count_nonzero(gained == left) >= num_stops:
            break
        actives.append(active)
        befores.append(gained.copy())
        rows = np.flatnonzero(active)
        at = gained[rows]
        known = right[rows, at]
        most = np.minimum(np.minimum(now[rows], width), room[rows] - at - 1)
        proposed = np.where(known >= 0, most, 0)
        accepted = np.minimum(proposed, np.maximum(known, 0))
        now[rows] = next_window(now[rows], proposed, accepted)
        gained[rows] = at + accepted + 1
        proposes = proposed > 0
        counts[:, rows] += (np.ones_like(at), proposed, accepted, proposes, matched[rows, at] * proposes)
    shape = (len(actives), count)
    return Verified(
        len(actives), gained, now, np.array(actives, bool).reshape(shape), np.array(befores).reshape(shape), counts
    )


def _ahead(acceptance: Sequence[Acceptance | None], generated: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, ...]:
    """`Acceptance` over the tokens that a plan may bring: `right` and `matched`, each [R, most tokens]."""
    shape = len(acceptance), int(room.max(initial=0))
    right, matched = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    for row, (each, first, tokens) in enumerate(zip(acceptance, generated.tolist(), room.tolist(), strict=True)):
        if each is not None and tokens:
            right[row, :tokens] = each.right[first : first + tokens]
            matched[row, :tokens] = each.matched[first : first + tokens]
    return right, matched
