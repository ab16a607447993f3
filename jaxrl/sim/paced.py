"""The workers of a simulated host: as a real host's, with what waiting costs measured; or in order of arrival.

Purpose: `TimedWorkers` are `jaxrl.scheduling.tokens.paced.PacedWorkers` that count for how long devices stand idle
because a worker may not plan yet, and tell a listener what a round commands. `ArrivingWorkers` keep no order at all: a
worker never waits, what ends is told as it comes, and what is commanded takes effect at once. No real run does that,
because what it trains on would depend on a clock; it shows what the order costs.

Source: none published. Departures: in arrival order an aborted response has all tokens of the plans that its worker has
collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.order import Answer, Deal, End, Home, Ledger, Order, Report
from jaxrl.scheduling.tokens.paced import PacedWorkers, _Worker
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.workers import Ticks
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.types import Sample

_NEVER_WAITS = 1 << 62


class Listener(Protocol):
    """Hears what the round of process 0 commands, and what it is told; `now`: the present tick."""

    def on_launch(self, home: Home, request: Request, now: int, /) -> None: ...

    def on_abort(self, homes: Mapping[int, Home], keep: bool, now: int, /) -> None: ...

    def on_end(self, end: End, /) -> None: ...


class TimedWorkers(PacedWorkers):
    """`PacedWorkers` over simulated executors.

    Args:
      engines, lookahead, num_workers, deal, ticks: as there.
      clock: of this host's process.
      listener: to what a round does; None: nobody listens.

    Attributes:
      waited_ns: by worker, for how long its devices have stood idle because it waited for the floor.
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

    def hear(self, now: int) -> None:
        """What comes next was commanded at this tick, somewhere else."""
        self.ledger.now = max(self.ledger.now, now)

    def wanted_floor(self) -> int | None:
        """The least floor at which a worker that waits may plan; None: none waits."""
        ticks = [each.next_tick() for each in self._workers.values() if not each.may_collect]
        return min((tick - self.ledger.lookahead for tick in ticks if tick is not None), default=None)

    def begin(self) -> None:
        super().begin()
        self._waits_since.clear()

    def launch(self, request: Request, worker: int | None = None) -> Home:
        home = super().launch(request, worker)
        if self._listener is not None:
            self._listener.on_launch(home, request, self.ledger.now)
        return home

    def abort(self, request_ids: Sequence[int], *, keep: bool) -> list[tuple[Answer, Sample]]:
        homes = {i: home for i in request_ids if (home := self.ledger.home(i)) is not None}
        answers = super().abort(request_ids, keep=keep)
        if self._listener is not None:
            self._listener.on_abort(homes, keep, self.ledger.now)
        return answers

    def told(self, end: End) -> Any:
        found = super().told(end)
        if self._listener is not None:
            self._listener.on_end(end)
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


class ArrivingWorkers(TimedWorkers):
    """Workers that wait for nobody."""

    def _new_ledger(self, num_workers: int, lookahead: int, deal: Deal) -> Ledger:
        return _NoTime(num_workers, 1, deal)

    def new_order(self) -> Order:
        return ArrivalOrder(self.ledger)

    def begin(self) -> None:
        super().begin()
        self.floor = _NEVER_WAITS

    def step(self, worker: int) -> None:
        super().step(worker)
        own = self._workers[worker]
        own.past.forget(own.tick)

    def _answer(self, worker: _Worker, request_id: int, keep: bool) -> tuple[Answer, Sample]:
        place, finished = worker.ended.get(request_id, (None, None))
        if place is not None and finished is not None:
            sample = finished.sample if keep else replace(finished.sample, finish_reason="abort")
            assert sample.finish_reason is not None
            return Answer(request_id, len(sample), sample.finish_reason, place.dispatch), sample
        sample, count = worker.count_at(request_id, worker.tick)
        assert len(sample) == count, "plans are forgotten as soon as they are collected"
        return Answer(request_id, count, "abort", worker.past.last_by(worker.tick)), sample

    def _drop(self, number: int) -> None:
        self._waits_since.pop(number, None)
        self._reports.pop(number, None)
        own = self._workers[number]
        own.drop(own.tick)


class _NoTime(Ledger):
    """A ledger in which it is always tick 0, so that what is commanded takes effect with the next plan."""

    @property
    def now(self) -> int:
        return 0

    @now.setter
    def now(self, tick: int) -> None:
        pass


class ArrivalOrder(Order):
    """What ends is told as it is reported, worker by worker in the order of their places."""

    def begin(self) -> None:
        super().begin()
        self._arrived: deque[End] = deque()

    def report(self, report: Report) -> None:
        coming = self._coming[report.worker]
        for end in report.ends:
            if end.request_id in coming:
                coming.remove(end.request_id)
                self._ends[end.request_id] = end
                self._arrived.append(end)

    def next(self) -> End | None:
        while self._arrived:
            end = self._arrived.popleft()
            if self._ends.pop(end.request_id, None) is not None:
                return end
        return None

    def floor(self) -> int:
        return 0
