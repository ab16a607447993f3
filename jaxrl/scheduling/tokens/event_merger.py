"""One sequence of events over several workers: which worker has which request, and which completion comes next.

Purpose: `RequestPlacements` and `EventMerger` are the part of virtual time that all processes of a run share
(`jaxrl.scheduling.tokens.synchronized` has the workers of one process). Every process keeps a `RequestPlacements`,
which follows from the events and commands of the round alone. `EventMerger` merges the progress of all workers; one
process has it.

Source: conservative parallel discrete-event simulation (Chandy and Misra 1979; Bryant 1977): an event is delivered once
no earlier one can come, and a lookahead keeps the parties from waiting for each other. docs/architecture.md has the
ticks.

The rules, for a lookahead of L ticks:

- A worker's *tick* grows with every plan that it has collected. A response that ended in a plan has the tick after it;
  completions are delivered in the order of their `SortKey`.
- *Virtual time* (`now`) is the tick of the last completion that was delivered, 0 when a round starts.
- A command given at virtual time T takes effect at T + L: in the first plan that a worker makes at that tick or later.
- A worker without live requests is idle from T on. What it has computed or sent beyond T is dropped: its *busy period*
  has ended. The next one begins at the tick at which its next request takes effect.
- The *low watermark* is a tick up to which everything has been delivered and handled. A worker makes a plan at tick t
  once the low watermark is at t - L or beyond, so it knows every command that concerns the plan.

No deadlock: the low watermark is at least the least tick of the workers with a completion to come, less one while the
round waits for something, and those workers may go on for L ticks more. L is at least 1.

Departures: requests are dealt by the tokens that they may take at most, not by what is left of them, because only its
own worker knows how far a row has come.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxrl.types import FinishReason

Deal = Literal["tokens", "prompts"]
"""The worker of a new request; tokens: the one whose requests may take the fewest, prompts: the one of the prompt's
first request, which is chosen so."""


class SortKey(NamedTuple):
    """When and where a response ended. `dispatch`: the number of the plan in its worker since the round began."""

    tick: int
    worker: int
    dispatch: int
    dp_group: int
    slot: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A response of `length` tokens that ended by itself."""

    request_id: int
    sort_key: SortKey
    length: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """A worker's tick, and what completed since its last message. `busy_period`: see `RequestPlacements`."""

    worker: int
    busy_period: int
    tick: int
    completions: tuple[Completion, ...] = ()


@dataclass(frozen=True, slots=True)
class AbortResult:
    """What became of a response that was aborted: it has `length` tokens of the plans up to `dispatch`. `reason`:
    abort, or why it had ended by itself where that counts."""

    request_id: int
    length: int
    reason: FinishReason
    dispatch: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a live request is, the most tokens that it may have (its prompt's too), and when it takes effect."""

    worker: int
    limit: int
    effect: int


class RequestPlacements:
    """The live requests of all workers: launched, and neither completed nor aborted.

    Args:
      num_workers: of all processes. lookahead: in ticks. deal: see `Deal`.

    Attributes:
      now: virtual time.
    """

    def __init__(self, num_workers: int, lookahead: int, deal: Deal = "tokens") -> None:
        if num_workers < 1 or lookahead < 1:
            raise ValueError(f"logical time: workers ({num_workers}) and lookahead ({lookahead} ticks) must be >= 1")
        self.num_workers, self.lookahead = num_workers, lookahead
        self._deal = deal
        self.begin()

    def begin(self) -> None:
        """A round begins: nothing is live, at tick 0."""
        self.now = 0
        self._by_id: dict[int, Placement] = {}
        self._limits = [0] * self.num_workers
        self._num_live = [0] * self.num_workers
        self._busy_periods = [0] * self.num_workers
        self._first: dict[tuple[int, int], int] = {}  # (epoch, prompt index) -> the worker of its first request

    @property
    def num_live(self) -> int:
        """Live requests of all workers."""
        return len(self._by_id)

    def live(self) -> tuple[int, ...]:
        """Their ids, in the order in which they were launched."""
        return tuple(self._by_id)

    def find(self, request_id: int) -> Placement | None:
        """Where a request is; None where it is not live."""
        return self._by_id.get(request_id)

    def num_live_in(self, worker: int) -> int:
        """Live requests of a worker."""
        return self._num_live[worker]

    def busy_period(self, worker: int) -> int:
        """How many busy periods of a worker have ended in this round."""
        return self._busy_periods[worker]

    def outstanding(self, worker: int) -> int:
        """Tokens that a worker's live requests may take at most, their prompts' too."""
        return self._limits[worker]

    def launch(self, request_id: int, prompt: tuple[int, int], limit: int, worker: int | None = None) -> Placement:
        """Deals a request, or gives it to `worker`."""
        assert request_id not in self._by_id, f"request {request_id} is live"
        if worker is None:
            known = self._first.get(prompt) if self._deal == "prompts" else None
            worker = self._limits.index(min(self._limits)) if known is None else known
        self._first.setdefault(prompt, worker)
        placement = self._by_id[request_id] = Placement(worker, limit, self.now + self.lookahead)
        self._num_live[worker] += 1
        self._limits[worker] += limit
        return placement

    def remove(self, request_id: int) -> int | None:
        """A live request has completed or is aborted; its worker, where nothing is live there any more."""
        placement = self._by_id.pop(request_id)
        self._limits[placement.worker] -= placement.limit
        self._num_live[placement.worker] -= 1
        if self._num_live[placement.worker]:
            return None
        self._busy_periods[placement.worker] += 1
        return placement.worker


class EventMerger:
    """Merges the progress of the workers; `placements` says what they have to do.

    Example::

        merger.launched(request_id)           # for every launch
        merger.add(progress)                  # as it comes
        while (completion := merger.next()) is not None:
            ...                               # handle it, and carry out what follows, before the next
        low_watermark = merger.low_watermark()
    """

    def __init__(self, placements: RequestPlacements) -> None:
        self._placements = placements
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        count = self._placements.num_workers
        self._ticks = [0] * count
        self._running: list[set[int]] = [set() for _ in range(count)]  # live requests without a known completion
        self._heap: list[tuple[SortKey, int]] = []
        self._undelivered: dict[int, Completion] = {}  # those that were not aborted either
        self._bound: int | None = None  # the least tick after which something may come; None: to be found

    def launched(self, request_id: int) -> None:
        """A request has been launched."""
        placement = self._placements.find(request_id)
        assert placement is not None, f"request {request_id} is not live"
        self._running[placement.worker].add(request_id)
        if self._placements.num_live_in(placement.worker) == 1:  # a busy period begins, at that tick
            self._ticks[placement.worker] = max(self._ticks[placement.worker], placement.effect)
        self._bound = None

    def aborted(self, request_id: int, worker: int) -> None:
        """A live request of `worker` is aborted: its completion is not delivered any more."""
        self._undelivered.pop(request_id, None)
        self._running[worker].discard(request_id)
        self._bound = None

    def became_idle(self, worker: int) -> None:
        """A worker has nothing live left: it is idle from now on."""
        assert not self._running[worker], "a worker with live requests is not idle"
        self._ticks[worker] = self._placements.now
        self._bound = None

    def add(self, progress: WorkerProgress) -> None:
        """Takes in a worker's progress; what was dropped meanwhile is left out."""
        worker, running = progress.worker, self._running[progress.worker]
        if progress.busy_period != self._placements.busy_period(worker):
            return
        assert progress.tick >= self._ticks[worker], f"worker {worker} goes back from {self._ticks[worker]}: {progress}"
        self._ticks[worker] = progress.tick
        self._bound = None
        for completion in progress.completions:
            if completion.request_id in running:
                running.remove(completion.request_id)
                self._undelivered[completion.request_id] = completion
                heapq.heappush(self._heap, (completion.sort_key, completion.request_id))

    def next(self) -> Completion | None:
        """The next completion; None where an earlier one may still come, or there is none."""
        heap = self._heap
        while heap and heap[0][1] not in self._undelivered:
            heapq.heappop(heap)
        if not heap or heap[0][0].tick > self._least():
            return None
        return self._undelivered.pop(heapq.heappop(heap)[1])

    def low_watermark(self) -> int:
        """A tick up to which everything has been delivered, when `next` has nothing."""
        return max(self._placements.now, self._least()) if any(self._running) else self._placements.now

    def slowest(self) -> int | None:
        """The worker that holds the low watermark: the others wait for it; None where nothing is to come."""
        running = [(self._ticks[worker], worker) for worker, own in enumerate(self._running) if own]
        return min(running)[1] if running else None

    def _least(self) -> int:
        """No unknown completion is at this tick or before it."""
        if self._bound is None:
            running = (tick for tick, own in zip(self._ticks, self._running, strict=True) if own)
            self._bound = min(running, default=1 << 62)
        return self._bound
