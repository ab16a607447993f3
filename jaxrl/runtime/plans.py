"""Plans of the workers, one after another, and what a run does around each.

Purpose: `PlanRunner` is the part of the backend between its events and its workers. Before a plan a layout may change
and requests may get something to draft from; after it the timeline and the live view are told.

Source: docs/architecture.md. Departures: of several workers that keep one order (`PacedWorkers`), one that cannot
change its layout stops all processes at the same event, so it raises nothing here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from jaxrl.runtime.lanes import PlanLanes, PlanTimeline
from jaxrl.runtime.rows import RowLanes
from jaxrl.scheduling.layouts.control import Layouts
from jaxrl.scheduling.layouts.relayout import SwitchFailed
from jaxrl.scheduling.rounds.events import Interrupted
from jaxrl.scheduling.tokens.engine import Finished
from jaxrl.scheduling.tokens.paced import PacedWorkers
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.scheduling.tokens.workers import Workers

_log = logging.getLogger(__name__)


class Worker(Protocol):
    """What a run needs of executors besides running plans: of one (`jaxrl.rollout.executor.MeshExecutor` and
    `jaxrl.sim.executor.SimulatedExecutor` have it), or of all workers' together. `allocate` makes pools where there
    are none, and leaves others as they are."""

    @property
    def recompiles(self) -> int: ...

    def sync_weights(self, train_params: Any, policy_version: int, /) -> None: ...

    def allocate(self) -> None: ...

    def release(self, *, weights: bool = False) -> None: ...


class PlanRunner:
    """Runs plans.

    Args:
      workers: of this process.
      timeline, layouts: as in `jaxrl.runtime.backend.RolloutBackend`.

    Attributes:
      lanes, rows: where plans are drawn, and who has which row; None: that is not.
      stuck: why a worker that keeps one order with others cannot go on; None: all can.
    """

    def __init__(
        self,
        workers: Workers | PacedWorkers,
        timeline: PlanTimeline | None = None,
        layouts: Layouts | None = None,
    ) -> None:
        self.layouts, self.stuck = layouts, None
        several = isinstance(workers, PacedWorkers)
        self.lanes = PlanLanes(workers.engines, timeline, several=several)
        self.rows = None if timeline is None else RowLanes(workers.engines, timeline, several=several)
        self._workers, self._timeline = workers, timeline
        self._before = [Counters() for _ in workers.engines]

    def begin(self) -> None:
        """A round begins."""
        self._before = [replace(engine.counters) for engine in self._workers.engines]

    def counted(self) -> list[Counters]:
        """What each worker of this process has done in the round."""
        if isinstance(self._workers, PacedWorkers):
            return self._workers.counted()
        engines = zip(self._workers.engines, self._before, strict=True)
        return [engine.counters.since(before) for engine, before in engines]

    def run(self, workers: Workers) -> tuple[list[Finished], int | None]:
        """Serves the worker whose turn it is: makes a plan of it, or waits for one, or both where it is alone. Returns
        what can be told, and the worker of which a plan has been collected.

        Raises Interrupted where a layout switch leaves nothing usable.
        """
        worker = workers.turn
        if worker is None:  # what ended in one is told, now that another's requests have been aborted
            return workers.step(), None
        if workers.makes_plan(worker):
            failure = self._change_layout(worker)
            if failure is not None:
                raise Interrupted(failure)
        waits = workers.waits(worker)
        with self.lanes.step(worker):
            finished = workers.step(worker)
        self._follow_rows()
        return finished, worker if waits else None

    def run_paced(self, workers: PacedWorkers, worker: int) -> int | None:
        """Makes a plan of a worker, or waits for one; returns the place among the workers of this process of one of
        which a plan has been collected."""
        makes_plan, place = workers.makes_plan(worker), workers.numbers.index(worker)
        if makes_plan:
            workers.prepare(worker)
            self.stuck = self._change_layout(place)
            if self.stuck is not None:
                return None
        with self.lanes.step(place):
            workers.step(worker)
        self._follow_rows()
        return None if makes_plan else place

    def show(self, worker: int, on_progress: Callable[[int, int, int], None] | None) -> None:
        """A plan of a worker has been collected. `on_progress`: called with (rows busy, rows, tokens of the round so
        far); None: nothing is new."""
        if self.layouts is not None:
            self.layouts.after_plan(worker)
        busy = self._workers.num_running
        if self._timeline is not None:
            self._timeline.counter("rows", busy=busy)
        if on_progress is not None:
            counts = zip(self._workers.engines, self._before, strict=True)
            tokens = sum(engine.counters.busy_row_steps - before.busy_row_steps for engine, before in counts)
            on_progress(busy, self._workers.num_rows, tokens)

    def follow(self) -> None:
        """Requests may have been aborted, and plans collected, outside of `run`: the picture hears of it."""
        self.lanes.follow()
        self._follow_rows()

    def _follow_rows(self) -> None:
        if self.rows is not None:
            self.rows.follow()

    def _change_layout(self, worker: int) -> str | None:
        """Lets the layout change; why nothing is usable where that failed."""
        if self.layouts is None:
            return None
        try:
            self.layouts.before_plan(worker)
        except SwitchFailed as failure:
            _log.error("the run stops: %s", failure)
            return str(failure)
        return None
