"""The next round runs beside the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from jaxrl.mechanisms.one_step_off import ConcurrentPhases, OneStepOff
from jaxrl.scheduling.rounds.events import Interrupted
from jaxrl.types import Group, RunFailed

BATCH: list[Group] = []


class FakeStep:
    """A step of the loop that says what it is asked for, in that order."""

    step, is_last = 3, False

    def __init__(self, collect: Callable[[], Any]) -> None:
        self.asked, self._collect = list[Any](), collect

    def collect(self, waiting: Sequence[Group] | None = None) -> Any:
        self.asked.append(("collect", waiting))
        return self._collect()

    def learn(self, track: str = "loop") -> Any:
        self.asked.append(("learn", track))
        return "update"

    def leave_rollout(self) -> None:
        self.asked.append(("leave",))


def test_a_round_that_ends_early_beside_an_update_ends_the_run() -> None:
    def collect() -> Any:
        raise Interrupted("a host is gone")

    together = ConcurrentPhases()
    said = (
        r"^step 4: its rollout ended early \(a host is gone\), beside update 3, which cannot be taken back: run again"
    )
    with pytest.raises(RunFailed, match=said):
        OneStepOff(together, lambda name: nullcontext()).update(FakeStep(collect=collect), BATCH)
    together.close()
    with pytest.raises(Interrupted, match="a host is gone"):  # in turns nothing was begun that is lost
        OneStepOff(None, lambda name: nullcontext()).update(step := FakeStep(collect=collect), BATCH)
    assert step.asked == [("collect", BATCH)]
