"""Plans of the workers, one after another, and what is called and drawn around each.

Purpose: `PlanRunner` is the part of the backend between its events and its workers. Before a plan mechanisms may change
what it will be made of; after it the timeline and the live view are updated.

Source: docs/architecture.md. Departures: of several workers that are synchronised (`SynchronizedWorkers`), one that
cannot go on stops all processes at the same event, so what its mechanisms raise is kept for that (`stuck`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxrl.runtime.plan_timeline import PlanTimeline, PlanTracks
from jaxrl.runtime.row_timeline import RowTracks
from jaxrl.scheduling.mechanism import Mechanism
from jaxrl.scheduling.rounds.events import Interrupted
from jaxrl.scheduling.tokens.engine import Finished
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.scheduling.tokens.synchronized import SynchronizedWorkers


class PlanRunner:
    """Runs plans.

    Args:
      workers: of this process.
      mechanisms: called before a plan is made.
      timeline: where plans and busy rows are drawn; None: nowhere.

    Attributes:
      plan_tracks, row_tracks: draw plans, and who has which row; None: that is not drawn.
      stuck: why this process cannot go on, where all processes have to agree to stop; None: it can.
    """

    def __init__(
        self,
        workers: LocalWorkers | SynchronizedWorkers,
        mechanisms: Sequence[Mechanism] = (),
        timeline: PlanTimeline | None = None,
    ) -> None:
        self.stuck: str | None = None
        several = isinstance(workers, SynchronizedWorkers)
        self.plan_tracks = PlanTracks(workers.engines, timeline, several=several)
        self.row_tracks = None if timeline is None else RowTracks(workers.engines, timeline, several=several)
        self._workers, self._mechanisms, self._timeline = workers, mechanisms, timeline
        self._counters = [Counters() for _ in workers.engines]

    def begin(self) -> None:
        """A round begins."""
        self._counters = [replace(engine.counters) for engine in self._workers.engines]

    def counted(self) -> list[Counters]:
        """What each worker of this process has done in the round."""
        if isinstance(self._workers, SynchronizedWorkers):
            return self._workers.counted()
        engines = zip(self._workers.engines, self._counters, strict=True)
        return [engine.counters.since(before) for engine, before in engines]

    def run(self, workers: LocalWorkers) -> tuple[list[Finished], int | None]:
        """Serves the worker whose turn it is: makes a plan of it, or waits for one, or both where it is alone. Returns
        the responses that may now be reported as ended, and the worker of which a plan has been collected.

        Raises Interrupted where a mechanism cannot go on.
        """
        worker = workers.turn
        if worker is None:  # ends that waited for another worker's, whose requests have been aborted since
            return workers.step(), None
        if workers.makes_plan(worker):
            self._before(worker)
        waits = workers.waits(worker)
        with self.plan_tracks.step(worker):
            finished = workers.step(worker)
        self._follow_rows()
        return finished, worker if waits else None

    def run_synchronized(self, workers: SynchronizedWorkers, worker: int) -> int | None:
        """Makes a plan of a worker, or waits for one; returns the index among the workers of this process of one of
        which a plan has been collected."""
        makes_plan, index = workers.makes_plan(worker), workers.numbers.index(worker)
        if makes_plan:
            workers.prepare(worker)
            try:
                self._before(index)
            except Interrupted as failure:
                self.stuck = str(failure)
                return None
        with self.plan_tracks.step(index):
            workers.step(worker)
        self._follow_rows()
        return None if makes_plan else index

    def show(self, on_progress: Callable[[int, int, int], None] | None) -> None:
        """A plan has been collected. `on_progress`: called with (rows busy, rows, tokens of the round so
        far); None: nothing is new."""
        busy = self._workers.num_running
        if self._timeline is not None:
            self._timeline.counter("rows", busy=busy)
        if on_progress is not None:
            counts = zip(self._workers.engines, self._counters, strict=True)
            tokens = sum(engine.counters.busy_row_steps - before.busy_row_steps for engine, before in counts)
            on_progress(busy, self._workers.num_rows, tokens)

    def follow(self) -> None:
        """Requests may have been aborted, and plans collected, outside of `run`: updates the timeline."""
        self.plan_tracks.follow()
        self._follow_rows()

    def _follow_rows(self) -> None:
        if self.row_tracks is not None:
            self.row_tracks.follow()

    def _before(self, worker: int) -> None:
        """A plan will be made of a worker, by its index among those of this process."""
        for each in self._mechanisms:
            each.before_plan(worker)
