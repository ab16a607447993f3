"""Plans of the workers, one after another, and what is called and drawn around each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxrl.runtime.plan_timeline import PlanTimeline, PlanTracks, RowTracks
from jaxrl.scheduling.mechanism import Mechanism
from jaxrl.scheduling.tokens.engine import Finished
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.scheduling.tokens.progress import Counters


class PlanRunner:
    """The part of the backend between its events and its workers. `timeline`: where plans and rows are drawn, if
    anywhere."""

    def __init__(
        self, workers: LocalWorkers, mechanisms: Sequence[Mechanism] = (), timeline: PlanTimeline | None = None
    ) -> None:
        self.plan_tracks = PlanTracks(workers.engines, timeline)
        self.row_tracks = None if timeline is None else RowTracks(workers.engines, timeline)
        self._workers, self._mechanisms, self._timeline = workers, mechanisms, timeline
        self._counters = [Counters() for _ in workers.engines]

    def begin(self) -> None:
        self._counters = [replace(engine.counters) for engine in self._workers.engines]

    def counted(self) -> list[Counters]:
        """What each worker has done in the round."""
        engines = zip(self._workers.engines, self._counters, strict=True)
        return [engine.counters.since(before) for engine, before in engines]

    def run(self) -> tuple[list[Finished], int | None]:
        """Serves the worker whose turn it is: makes a plan of it, or waits for one, or both where it is alone. Returns
        the responses that may now be reported as ended, and the worker of which a plan has been collected."""
        workers = self._workers
        worker = workers.next_worker()
        if worker is None:  # ends that waited for another worker's, whose requests have been aborted since
            return workers.step(), None
        if workers.makes_plan(worker):
            for each in self._mechanisms:
                each.before_plan(worker)
        waits = workers.waits(worker)
        with self.plan_tracks.step(worker):
            finished = workers.step(worker)
        if self.row_tracks is not None:
            self.row_tracks.follow(worker)
        return finished, worker if waits else None

    def show(self, on_progress: Callable[[int, int, int], None] | None) -> None:
        """A plan has been collected. `on_progress`: called with (rows busy, rows, tokens of the round so far)."""
        busy = self._workers.num_running
        if self._timeline is not None:
            self._timeline.counter("rows", busy=busy)
        if on_progress is not None:
            counts = zip(self._workers.engines, self._counters, strict=True)
            tokens = sum(engine.counters.busy_row_steps - before.busy_row_steps for engine, before in counts)
            on_progress(busy, self._workers.num_rows, tokens)

    def follow(self) -> None:
        """Requests may have been aborted, and plans collected, outside of `run`: updates the timeline."""
        for worker in range(len(self._workers.engines)):
            self.plan_tracks.follow(worker)
            if self.row_tracks is not None:
                self.row_tracks.follow(worker)
