"""How long a run will still take, from the steps that it has made.

Purpose: `TimeToGo` leaves out what does not come again. The first step after a start compiles programs, and so does one
that reports recompilations: they count only while there is no other, and what is said then is an upper bound. What
comes every few steps, evaluations and saving, is taken out of a step's seconds and added for as often as it is due.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean

_RECENT_STEPS = 10
_COMPILED = ("rollout/recompiles", "actor/recompiles")


class TimeToGo:
    """Estimates a run's remaining seconds.

    Args:
      total_steps: the run's last step; 0: not known, and nothing is estimated.
      every: by the name of a phase, the steps from one time that it is due to the next; 0: it is not.
    """

    def __init__(self, total_steps: int, every: Mapping[str, int]) -> None:
        self._total, self._every = total_steps, {name: steps for name, steps in every.items() if steps > 0}
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)  # seconds of steps, without what is due now and then
        self._compiling: float | None = None  # of the fastest step that also compiled
        self._due: dict[str, float] = {}  # seconds of each such phase, the last time
        self._last_step, self._num_steps = 0, 0

    def step(self, step: int, seconds: float | None, metrics: Mapping[str, float]) -> None:
        """A step is over; `seconds`: that it took, None if that is not known."""
        self._last_step, self._num_steps = step, self._num_steps + 1
        if seconds is None:
            return
        for name in self._every:
            took_s = _number(metrics.get(f"timing_s/{name}"))
            if took_s > 0:
                self._due[name] = took_s
                seconds -= took_s
        seconds = max(seconds, 0.0)
        if self._num_steps == 1 or any(_number(metrics.get(name)) > 0 for name in _COMPILED):
            self._compiling = seconds if self._compiling is None else min(self._compiling, seconds)
        else:
            self._recent.append(seconds)

    @property
    def is_bound(self) -> bool:
        """Whether all steps so far also compiled, so that it will take less."""
        return not self._recent

    def seconds(self) -> float | None:
        """What is left, from the end of the last step; None where nothing is known."""
        each_s = fmean(self._recent) if self._recent else self._compiling
        if not self._total or each_s is None:
            return None
        left = max(self._total - self._last_step, 0)
        found = left * each_s
        for name, took_s in self._due.items() if left else ():
            every = self._every[name]
            found += (-(-self._total // every) - self._last_step // every) * took_s  # and after the last step
        return found


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
