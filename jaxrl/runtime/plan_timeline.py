"""The plans of each worker on the timeline.

Purpose: `PlanTracks` draws plans side by side where several workers have some in flight at the same time. A plan of one
of several is drawn on its worker's track, from when its devices can begin with it (it has been submitted, and the host
has the one before) until the host has its outcome. So the timeline shows what each worker's devices have to do,
whichever worker the host waits for; a worker that waits for another has a plan that takes too long. One worker's plan
is drawn from before it is submitted until the one before it has been collected, which is what the host does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from jaxrl.scheduling.tokens.engine import Engine


class PlanTimeline(Protocol):
    """Where plans and busy rows are drawn (`jaxrl.record.timeline.Timeline`, `jaxrl.sim.clock.SimulatedPhases`)."""

    @property
    def now_s(self) -> float: ...

    def span(self, track: str, name: str, /, **args: Any) -> AbstractContextManager[None]: ...

    def counter(self, track: str, /, **values: float) -> None: ...

    def row(self, row: str, order: int, name: str, start_s: float, end_s: float, /, **args: Any) -> None: ...


class PlanTracks:
    """A track for each engine.

    Args:
      engines: of the workers, by their numbers.
      timeline: where plans are drawn; None: nowhere.
    """

    def __init__(self, engines: Sequence[Engine], timeline: PlanTimeline | None) -> None:
        self._engines, self._timeline = tuple(engines), timeline
        self._is_alone = len(self._engines) == 1
        self._open: dict[int, tuple[int, AbstractContextManager[None]]] = {}  # by worker: the plan that is drawn

    @contextmanager
    def step(self, worker: int) -> Iterator[None]:
        """Around a step of a worker."""
        if self._timeline is None:
            yield
        elif self._is_alone:
            with self._timeline.span("engine", "plan", index=self._engines[worker].counters.plans):
                yield
        else:
            self.follow(worker)  # a change of layout may have collected plans
            yield
            self.follow(worker)

    def follow(self, worker: int) -> None:
        """Plans of a worker may have been collected, or submitted: ends what is drawn of the former, and begins with
        the next."""
        ticket, (index, span) = self._engines[worker].oldest, self._open.get(worker, (None, None))
        oldest = None if ticket is None else ticket.index
        if self._timeline is None or self._is_alone or index == oldest:
            return
        if span is not None:
            span.__exit__(None, None, None)
            del self._open[worker]
        if oldest is not None:
            span = self._timeline.span(f"engine {worker}", "plan", index=oldest)
            span.__enter__()
            self._open[worker] = oldest, span
