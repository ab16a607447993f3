"""Rollout one step ahead of the update: a round comes before the update whose batch it does not bring.

Purpose: the rollout for step s + 1 runs before update s, so its tokens are of version s - 1 and one version old when
they are trained on. Its groups wait in the loop, and are part of a checkpoint. Rollout and update take turns on the
same devices, or run at the same time, each on its own devices (`Concurrently`). Neither reads what the other writes, so
both ways give the same numbers. A resumed run may switch one-step-off on or off.

Source: RollPacker §6.7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from jaxrl.scheduling.mechanism import Mechanism, Step
from jaxrl.scheduling.rounds.events import Interrupted
from jaxrl.types import Group, RunFailed

_STOP = "a stop was asked for"
A = TypeVar("A")
B = TypeVar("B")


class Concurrently(Protocol):
    """Does two things at the same time, and returns or raises when both have ended. `has_ended`: whether the second has
    ended well; asked by the first. `busy`: whether two things are running that have to end first."""

    def __call__(self, first: Callable[[], A], second: Callable[[], B], /) -> tuple[A, B]: ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def busy(self) -> bool: ...


class OneStepOff(Mechanism):
    """Runs the next step's round before an update, or beside it.

    Args:
      together: runs both at the same time, which needs devices of the rollout's own; None: they take turns.
      phase: around both, by a name: `timing_s/<name>`.
    """

    rounds_ahead = 1

    def __init__(self, together: Concurrently | None, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        self._together, self._phase = together, phase

    @property
    def update_has_ended(self) -> bool:
        return self._together is not None and self._together.has_ended

    @property
    def defers_stop(self) -> bool:
        """The update beside a round cannot be undone, and its step ends only when both have ended."""
        return self._together is not None and self._together.busy

    def update(self, step: Step, groups: Sequence[Group]) -> tuple[Any, Any] | None:
        """Raises RunFailed where the round beside an update ended early: the update cannot be taken back."""
        if step.is_last:
            return None
        if self._together is None:
            ahead = step.collect(groups)
            step.leave_rollout()
            return ahead, step.learn()
        try:
            with self._phase("together"):
                done = self._together(step.collect, lambda: step.learn("update"))
        except Interrupted as early:
            raise RunFailed(
                f"step {step.step + 1}: its rollout ended early ({str(early) or _STOP}), beside update {step.step}, "
                "which cannot be taken back: run again to go on from the last checkpoint"
            ) from early
        step.leave_rollout()  # as when both take turns: no old weights and no KV lie there
        return done
