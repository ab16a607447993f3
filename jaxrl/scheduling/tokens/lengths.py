"""Predicts response lengths from earlier responses.

Purpose: layout decisions ask how many more tokens a response will gain. Scale-down asks how many of the remaining
responses will still run later, and how much KV they will hold.

Source: none published; PAT §4.2 and RollPacker §4.4 speak of the distribution of earlier responses' lengths.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from itertools import accumulate

import numpy as np

HISTORY = 1024


class LengthHistory:
    """The lengths of the last responses that ended by themselves, at most `HISTORY`.

    Decisions that rest on it are journalled; a checkpoint holds its state (`lengths`).
    """

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=HISTORY)
        self._ascending: list[int] = []  # the same
        self._sums: list[int] = []  # of the first n of them, for each n; empty: to be made

    def add(self, length: int) -> None:
        """Records a response that ended after `length` tokens."""
        if len(self._lengths) == HISTORY:
            del self._ascending[bisect_left(self._ascending, self._lengths[0])]
        self._lengths.append(length)
        insort(self._ascending, length)
        self._sums = []

    def lengths(self) -> list[int]:
        """The lengths that count, the oldest first."""
        return list(self._lengths)

    def expected_remaining(self, so_far: int) -> float | None:
        """Tokens that a response of `so_far` is still expected to gain: the mean over recorded responses that were
        longer; None if there are none."""
        if not self._sums:
            self._sums = list(accumulate(self._ascending, initial=0))
        shorter = bisect_right(self._ascending, so_far)
        longer = len(self._ascending) - shorter
        return (self._sums[-1] - self._sums[shorter] - longer * so_far) / longer if longer else None

    def num_longer(self, lengths: np.ndarray) -> np.ndarray:
        """How many recorded responses were longer than each of these lengths; int64, of the same shape."""
        return len(self._ascending) - np.searchsorted(np.asarray(self._ascending, np.int64), lengths, side="right")
