"""The seconds that plans take on an executor's devices, as the host sees them.

Purpose: plans queue, so one begins when it is submitted or when the one before has ended, and has ended when its values
are there. Where the host looks later (another model has had the devices behind a plan), the plan ended when the devices
were last seen quiet: `seen_quiet` keeps what comes after out of its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class PlanTimer:
    """Moments are those of `clock`, in seconds.

    Attributes:
      ended_s: when the last plan was known to have ended.
    """

    clock: Callable[[], float] = time.perf_counter
    ended_s: float = 0.0
    _submitted_s: float = 0.0
    _quiet_s: float = 0.0

    def submits(self) -> float:
        """A plan is about to be submitted; when."""
        self._submitted_s = self.clock()
        return self._submitted_s

    def seen_quiet(self) -> None:
        """What was submitted has ended by now. The first such moment after a plan counts."""
        if self._quiet_s <= self._submitted_s:
            self._quiet_s = self.clock()

    def took(self, submitted_s: float) -> float:
        """The seconds of the plan that was submitted then, whose values are there."""
        now_s = self.clock()
        ended_s = self._quiet_s if submitted_s < self._quiet_s else now_s
        began_s, self.ended_s = max(submitted_s, self.ended_s), ended_s
        return max(ended_s - began_s, 0.0)
