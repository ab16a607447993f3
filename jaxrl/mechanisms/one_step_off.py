"""One-step-off: a round comes before the update whose batch it does not bring.

The rollout for step s + 1 runs before update s, so its tokens are of version s - 1 and one version old when
they are trained on. Its groups wait in the loop, and are part of a checkpoint. Rollout and update take turns on the
same devices, or run at the same time, each on its own devices (`rollout.num_devices`). Neither reads what the other
writes, so both ways give the same numbers. A resumed run may switch one-step-off on or off.

Source: RollPacker §6.7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from jaxrl.scheduling.mechanism import Mechanism, PhaseOrder, Step
from jaxrl.scheduling.rounds.events import Interrupted
from jaxrl.types import Group, RunFailed

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.run.run import Run
    from jaxrl.sim.clock import SimulatedConcurrently

_STOP = "a stop was asked for"
A = TypeVar("A")
B = TypeVar("B")


class ConcurrentPhases:
    """Does two things at the same time, on real devices; `busy` while it does, because both have to end first.

    The rollout stays in the calling thread, which feeds its devices plan by plan; the update has a second thread, which
    mostly waits for its own devices. On CPU, programs over several devices run one after another, so only submeshes of
    one device overlap there.
    """

    def __init__(self) -> None:
        self.busy = False
        self._other: Future[Any] | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="update")

    @property
    def has_ended(self) -> bool:
        """Whether the second has ended well; asked by the first."""
        return self._other is not None and self._other.done() and self._other.exception() is None

    def __call__(self, first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
        """An exception of either is raised once both have ended; if both fail, that of `second`."""
        self.busy = True
        try:
            other = self._other = self._threads.submit(second)
            try:
                mine = first()
            except BaseException as error:
                beside = other.exception()  # waits
                if beside is not None:
                    raise beside from error
                raise
            return mine, other.result()
        finally:
            self.busy, self._other = False, None

    def close(self) -> None:
        self._threads.shutdown()


if TYPE_CHECKING:
    Concurrently = ConcurrentPhases | SimulatedConcurrently


class OneStepOff(Mechanism, PhaseOrder):
    """Runs the next step's round before an update, or beside it. `together`: runs both at the same time, on devices of
    their own; None where they take turns."""

    title = "one-step-off"
    option = "trainer.one_step_off"
    rounds_ahead = 1

    def __init__(self, together: Concurrently | None, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        self._together, self._phase = together, phase
        self.phase_order = self

    @classmethod
    def problem(cls, config: Config, racing: Sequence[str]) -> str | None:
        stale, correction = config.rollout.stale_tokens, config.algorithm.rollout_correction
        if stale == "mask":
            return (
                "rollout.stale_tokens=mask excludes trainer.one_step_off: every token there is of an earlier "
                "version, so nothing would be left to learn from"
            )
        asked = f"rollout_is={correction.rollout_is}" if correction.rollout_is != "none" else "rollout_rs"
        if stale == "recorded" and correction.is_on and config.actor.old_logprobs == "recompute":
            return (
                f"algorithm.rollout_correction.{asked} with trainer.one_step_off needs "
                "rollout.stale_tokens=recompute, found recorded: every token there is of an earlier version, so its "
                "ratio is taken to what was recorded at sampling, every weight would be 1, and nothing would be "
                "rejected"
            )
        return None

    @classmethod
    def build(cls, run: Run) -> Self | None:
        if not cls.is_on(run.config) or run.timeline is None:
            return None
        return cls(run.machine.concurrently() if run.config.rollout.num_devices else None, run.timeline.phase)

    @property
    def update_has_ended(self) -> bool:
        return self._together is not None and self._together.has_ended

    @property
    def defers_stop(self) -> bool:
        """The update beside a round cannot be undone, and its step ends only when both have ended."""
        return self._together is not None and self._together.busy

    def update(self, step: Step, groups: Sequence[Group]) -> tuple[Any, Any]:
        """Raises RunFailed where the round beside an update ended early: the update cannot be taken back."""
        if step.is_last:
            return super().update(step, groups)
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
                "which cannot be taken back: run again to resume from the last checkpoint"
            ) from early
        step.leave_rollout()  # as when both take turns: no old weights and no KV lie there
        return done
