"""The workers of a simulated host: as a real host's, with what waiting costs measured; or without synchronisation.

Purpose: `TimedWorkers` are `jaxrl.scheduling.tokens.synchronized.SynchronizedWorkers` that measure for how long devices
stand idle because a worker may not plan yet, and call a listener with what a round commands. `UnsynchronizedWorkers`
never wait: completions are delivered in order of arrival, and commands take effect at once. No real run does that,
because what it trains on would depend on a clock; it shows what synchronisation costs.

Source: none published. Departures: in arrival order an aborted response has all tokens of the plans that its worker has
collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxrl.scheduling.tokens.engine import Engine, Finished
from jaxrl.scheduling.tokens.event_merger import (
    AbortResult,
    Completion,
    Deal,
    EventMerger,
    Placement,
    RequestPlacements,
    WorkerProgress,
)
from jaxrl.scheduling.tokens.local_workers import Ticks
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.synchronized import SynchronizedWorkers, _Worker
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.types import Sample

_NEVER_WAITS = 1 << 62


class Listener(Protocol):
    """Called with what the round of process 0 commands, and with what completes; `now`: virtual time."""

    def on_launch(self, placement: Placement, request: Request, now: int, /) -> None: ...

    def on_abort(self, placed: Mapping[int, Placement], keep: bool, now: int, /) -> None: ...

    def on_completion(self, completion: Completion, /) -> None: ...


class TimedWorkers(SynchronizedWorkers):
    """`SynchronizedWorkers` over simulated executors.

    Args:
      engines, lookahead, num_workers, deal, ticks: as there.
      clock: of this host's process.
      listener: called with what a round does; None: nothing is.

    Attributes:
      waited_ns: by worker, for how long its devices have stood idle because it waited for the low watermark.
    """

    def __init__(
        self,
        engines: Mapping[int, Engine] | Sequence[Engine],
        lookahead: int,
        num_workers: int,
        deal: Deal,
        ticks: Ticks,
        clock: SimulatedClock,
        listener: Listener | None = None,
    ) -> None:
        super().__init__(engines, lookahead, num_workers, deal, ticks)
        self._clock, self._listener = clock, listener
        self._waits_since: dict[int, int] = {}  # by worker that may not plan yet
        self.waited_ns = dict.fromkeys(self.numbers, 0)

    def advance_to(self, now: int) -> None:
        """What comes next was commanded at this virtual time, in another process."""
        self.placements.now = max(self.placements.now, now)

    def needed_low_watermark(self) -> int | None:
        """The least low watermark at which a worker that waits may plan; None: none waits."""
        ticks = [each.next_tick() for each in self._workers.values() if not each.may_collect]
        return min((tick - self.placements.lookahead for tick in ticks if tick is not None), default=None)

    def begin(self) -> None:
        super().begin()
        self._waits_since.clear()

    def launch(self, request: Request, worker: int | None = None) -> Placement:
        placement = super().launch(request, worker)
        if self._listener is not None:
            self._listener.on_launch(placement, request, self.placements.now)
        return placement

    def abort(self, request_ids: Sequence[int], *, keep: bool) -> list[tuple[AbortResult, Sample]]:
        placed = {i: placement for i in request_ids if (placement := self.placements.find(i)) is not None}
        results = super().abort(request_ids, keep=keep)
        if self._listener is not None:
            self._listener.on_abort(placed, keep, self.placements.now)
        return results

    def deliver(self, completion: Completion) -> Finished | None:
        found = super().deliver(completion)
        if self._listener is not None:
            self._listener.on_completion(completion)
        return found

    @property
    def turn(self) -> int | None:
        found = super().turn
        for number, worker in self._workers.items():
            if number not in self._waits_since and not self._is_able(worker) and worker.next_tick() is not None:
                self._waits_since[number] = self._clock.now_ns
        return found

    def step(self, worker: int) -> None:
        if self.makes_plan(worker):
            since = self._waits_since.pop(worker, None)
            if since is not None:
                executor = self._workers[worker].engine.executor
                assert isinstance(executor, SimulatedExecutor), "another machine"
                self.waited_ns[worker] += max(self._clock.now_ns - max(since, executor.free_ns), 0)
        super().step(worker)

    def _drop(self, number: int) -> None:
        self._waits_since.pop(number, None)
        super()._drop(number)


class UnsynchronizedWorkers(TimedWorkers):
    """Workers that wait for nobody."""

    def _new_placements(self, num_workers: int, lookahead: int, deal: Deal) -> RequestPlacements:
        return _UntimedPlacements(num_workers, 1, deal)

    def new_merger(self) -> EventMerger:
        return ArrivalMerger(self.placements)

    def begin(self) -> None:
        super().begin()
        self.low_watermark = _NEVER_WAITS

    def step(self, worker: int) -> None:
        super().step(worker)
        own = self._workers[worker]
        own.history.forget(own.tick)

    def _now(self, worker: _Worker) -> int:
        return worker.tick


class _UntimedPlacements(RequestPlacements):
    """Placements at which it is always tick 0, so that what is commanded takes effect with the next plan."""

    @property
    def now(self) -> int:
        return 0

    @now.setter
    def now(self, tick: int) -> None:
        pass


class ArrivalMerger(EventMerger):
    """Delivers completions as they arrive, those of one message in the order of their sort keys."""

    def begin(self) -> None:
        super().begin()
        self._arrived: deque[Completion] = deque()

    def add(self, progress: WorkerProgress) -> None:
        running = self._running[progress.worker]
        for completion in progress.completions:
            if completion.request_id in running:
                running.remove(completion.request_id)
                self._undelivered[completion.request_id] = completion
                self._arrived.append(completion)

    def next(self) -> Completion | None:
        while self._arrived:
            completion = self._arrived.popleft()
            if self._undelivered.pop(completion.request_id, None) is not None:
                return completion
        return None

    def low_watermark(self) -> int:
        return 0
