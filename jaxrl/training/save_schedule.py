"""Which step boundaries a run saves: every `trainer.save_freq`-th, or with `auto` as many as cost the least time.

Source: Young 1974 and Daly 2006. If a save holds the run up for C seconds, and M seconds pass between failures on
average, what saves and repeated steps cost together is least with sqrt(2 C M) - C seconds between two saves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jaxrl.config.options import TrainerSection


class SaveSchedule:
    """Asks at each boundary (`is_due`), and measures each save (`saving`). With `auto` the first boundary of a process
    is saved, to measure C."""

    def __init__(self, options: TrainerSection, clock: Callable[[], float] = time.perf_counter) -> None:
        self._freq: int | Literal["auto"] = options.save_freq
        self._mtbf_s, self._clock = options.mtbf_s, clock
        self._seconds: list[float] = []  # of each save
        self._last_s = 0.0  # when it ended

    def is_due(self, step: int) -> bool:
        if self._freq == 0 or step == 0:
            return False
        if self._freq != "auto":
            return step % self._freq == 0
        return not self._seconds or self._clock() - self._last_s >= self.interval_s

    @property
    def interval_s(self) -> float:
        """Seconds of work between two saves. Where a save takes longer than half of M, Daly's limit is M."""
        cost = mean(self._seconds)
        return math.sqrt(2 * cost * self._mtbf_s) - cost if 2 * cost < self._mtbf_s else self._mtbf_s

    @contextmanager
    def saving(self) -> Iterator[None]:
        begun_s = self._clock()
        yield
        self._last_s = self._clock()
        self._seconds.append(self._last_s - begun_s)
