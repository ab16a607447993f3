"""The steps of a simulated plan that verifies drafts: what each row drafts, gains, and how its window moves.

Purpose: `verify` plays the decode loop of a plan that speculates for all rows at once, step by step, by the rules that
devices follow (`jaxrl.scheduling.tokens.draft_rule`). What drafts have right comes from `jaxrl.sim.foretold`.

Source: RhymeRL §5.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.scheduling.tokens.draft_rule import Window
from jaxrl.scheduling.tokens.plan import DraftCounts
from jaxrl.sim.foretold import Foretold
from jaxrl.types import SampleKey


@dataclass(frozen=True, slots=True)
class Drafting:
    """How rows draft.

    Attributes:
      foretold: (a response, its tokens) -> what its history foretells of it.
      window: of every row.
      width: the most tokens that each row drafts in a step, by the rows of the fullest dp group.
    """

    foretold: Callable[[SampleKey, int], Foretold]
    window: Window
    width: Callable[[int], int]


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """What a plan's steps brought.

    Attributes:
      num_steps: taken.
      gained: tokens by row, int64 [R].
      windows: of the rows afterwards, int64 [R].
      active: which rows gained something in a step, bool [num_steps, R].
      before: tokens that each row had gained before a step, int64 [num_steps, R].
      counts: steps, drafted, accepted, draft steps and matched of each row, int64 [5, R].
    """

    num_steps: int
    gained: np.ndarray
    windows: np.ndarray
    active: np.ndarray
    before: np.ndarray
    counts: np.ndarray


def verify(
    foretold: Sequence[Foretold | None],
    generated: np.ndarray,
    left: np.ndarray,
    max_new: np.ndarray,
    windows: np.ndarray,
    *,
    window: Window,
    width: int,
    num_steps: int,
    num_stops: int,
) -> Verified:
    """Up to `num_steps` steps of R rows, each of `width` drafted tokens at most.

    Args:
      foretold: of each row; None: it has no history.
      generated, left, max_new: of each row, tokens that it has, tokens until it stops, and the most that it may gain;
        int64 [R].
      windows: int64 [R].
      num_stops: the loop is left once so many rows have stopped.
    """
    count = len(generated)
    room = np.minimum(left, max_new)
    right, matched = _ahead(foretold, generated, room)
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
        drafted = np.where(known >= 0, most, 0)
        accepted = np.minimum(drafted, np.maximum(known, 0))
        grown = np.where(accepted == drafted, np.minimum(now[rows] + window.step, window.most), window.least)
        has_draft = drafted > 0
        now[rows] = np.where(has_draft, grown, now[rows])
        gained[rows] = at + accepted + 1
        counts[:, rows] += (np.ones_like(at), drafted, accepted, has_draft, matched[rows, at] * has_draft)
    shape = (len(actives), count)
    return Verified(
        len(actives), gained, now, np.array(actives, bool).reshape(shape), np.array(befores).reshape(shape), counts
    )


def counts_of(counts: np.ndarray) -> DraftCounts:
    """Counts of one row, [5], as a result has them."""
    steps, drafted, accepted, draft_steps, matched = counts.tolist()
    return DraftCounts(steps, drafted, accepted, draft_steps, matched)


def _ahead(foretold: Sequence[Foretold | None], generated: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, ...]:
    """What is foretold of the tokens that a plan may bring: `right` and `matched`, each [R, most tokens]."""
    shape = len(foretold), int(room.max(initial=0))
    right, matched = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    for row, (each, first, tokens) in enumerate(zip(foretold, generated.tolist(), room.tolist(), strict=True)):
        if each is not None and tokens:
            right[row, :tokens] = each.right[first : first + tokens]
            matched[row, :tokens] = each.matched[first : first + tokens]
    return right, matched
