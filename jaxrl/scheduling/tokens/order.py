"""One order over several workers: who has which request, what ended, and how far all of them are.

Purpose: `Ledger` and `Order` are the part of logical time that all processes of a run share
(`jaxrl.scheduling.tokens.paced` has the workers of one process). Every process keeps a `Ledger`, which follows from the
events and commands of the round alone. `Order` merges the reports of all workers; one process has it.

Source: conservative parallel simulation (Chandy and Misra 1979; Bryant 1977): what happened is told once nothing
earlier can come, and a lookahead keeps the parties from waiting for each other. docs/architecture.md has the ticks.

The rules, for a lookahead of L ticks:

- A worker's *tick* grows with every plan that it has collected. A response that ended in a plan has the tick after it
  as its own, and its place is (tick, worker, dispatch, dp group, slot). Ends are told in the order of their places.
- The *present tick* T is that of the last end that was told, 0 when a round starts.
- What is commanded at T takes effect at T + L: with the first plan that a worker makes at that tick or later.
- A worker that has nothing live is idle from T on, whatever it has computed beyond: that is dropped, and so is what it
  reported. It begins again at the tick at which its next request takes effect. (Its *stretch* has ended.)
- The *floor* is a tick up to which everything has been told and handled. A worker makes a plan at tick t once the floor
  is at t - L or beyond, so it has heard of every command that concerns the plan.

No deadlock: the floor is at least the least tick of the workers from which an end may still come, less one while the
round waits for something, and those workers may go on for L ticks more. L is at least 1.

Departures: requests are dealt by the tokens that they may take at most, not by what is left of them, because how far a
row has come is known to its worker alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxrl.types import FinishReason

Deal = Literal["tokens", "prompts"]
"""The worker of a new request; tokens: the one whose requests may take the fewest, prompts: the one of the prompt's
first request, which is chosen so."""


class Place(NamedTuple):
    """Where and when a response ended. `dispatch`: the number of the plan in its worker since the round began."""

    tick: int
    worker: int
    dispatch: int
    dp_group: int
    slot: int


@dataclass(frozen=True, slots=True)
class End:
    """A response that ended by itself, as every process hears of it: tokens in `length`."""

    request_id: int
    place: Place
    length: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Report:
    """How far a worker is, and what ended there since it last told. `stretch`: `Ledger.stretch` of the worker."""

    worker: int
    stretch: int
    tick: int
    ends: tuple[End, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a response that was aborted: it has `length` tokens of the plans up to `dispatch`. `reason`:
    abort, or why it had ended by itself where that counts."""

    request_id: int
    length: int
    reason: FinishReason
    dispatch: int


@dataclass(frozen=True, slots=True)
class Home:
    """Where a live request is, the most tokens that it may have (its prompt's too), and when it takes effect."""

    worker: int
    limit: int
    effect: int


class Ledger:
    """The live requests of all workers: launched, and neither told as ended nor aborted.

    Args:
      num_workers: of all processes. lookahead: in ticks. deal: see `Deal`.

    Attributes:
      now: the present tick.
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
        self._homes: dict[int, Home] = {}
        self._limits = [0] * self.num_workers
        self._num_live = [0] * self.num_workers
        self._stretches = [0] * self.num_workers
        self._first: dict[tuple[int, int], int] = {}  # (epoch, prompt index) -> the worker of its first request

    @property
    def num_live(self) -> int:
        """Live requests of all workers."""
        return len(self._homes)

    def live(self) -> tuple[int, ...]:
        """Their ids, in the order in which they were launched."""
        return tuple(self._homes)

    def home(self, request_id: int) -> Home | None:
        """Where a live request is; None where it is not live."""
        return self._homes.get(request_id)

    def num_live_in(self, worker: int) -> int:
        """Live requests of a worker."""
        return self._num_live[worker]

    def stretch(self, worker: int) -> int:
        """How often a worker has had nothing live left in this round."""
        return self._stretches[worker]

    def outstanding(self, worker: int) -> int:
        """Tokens that a worker's live requests may take at most, their prompts' too."""
        return self._limits[worker]

    def launch(self, request_id: int, prompt: tuple[int, int], limit: int, worker: int | None = None) -> Home:
        """Deals a request, or gives it to `worker`."""
        assert request_id not in self._homes, f"request {request_id} is live"
        if worker is None:
            known = self._first.get(prompt) if self._deal == "prompts" else None
            worker = self._limits.index(min(self._limits)) if known is None else known
        self._first.setdefault(prompt, worker)
        home = self._homes[request_id] = Home(worker, limit, self.now + self.lookahead)
        self._num_live[worker] += 1
        self._limits[worker] += limit
        return home

    def leave(self, request_id: int) -> int | None:
        """A live request was told as ended, or is aborted; its worker, where nothing is live there any more."""
        home = self._homes.pop(request_id)
        self._limits[home.worker] -= home.limit
        self._num_live[home.worker] -= 1
        if self._num_live[home.worker]:
            return None
        self._stretches[home.worker] += 1
        return home.worker


class Order:
    """Merges what the workers report; `ledger` says what they have to do.

    Example::

        order.launched(request_id)            # for every launch
        order.report(report)                  # as they come
        while (end := order.next()) is not None:
            ...                               # told: handle it, and carry out what follows, before the next
        floor = order.floor()
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        count = self._ledger.num_workers
        self._ticks = [0] * count
        self._coming: list[set[int]] = [set() for _ in range(count)]  # live requests that were not reported as ended
        self._held: list[tuple[Place, int]] = []  # a heap
        self._ends: dict[int, End] = {}  # reported and neither told nor aborted
        self._bound: int | None = None  # the least tick after which something may come; None: to be found

    def launched(self, request_id: int) -> None:
        """A request has been launched."""
        home = self._ledger.home(request_id)
        assert home is not None, f"request {request_id} is not live"
        self._coming[home.worker].add(request_id)
        if self._ledger.num_live_in(home.worker) == 1:  # it begins again, at that tick
            self._ticks[home.worker] = max(self._ticks[home.worker], home.effect)
        self._bound = None

    def gone(self, request_id: int, worker: int) -> None:
        """A live request of `worker` is aborted: its end is told no more."""
        self._ends.pop(request_id, None)
        self._coming[worker].discard(request_id)
        self._bound = None

    def cleared(self, worker: int) -> None:
        """A worker has nothing live left: it is idle from the present tick on."""
        assert not self._coming[worker], "a worker with live requests is cleared"
        self._ticks[worker] = self._ledger.now
        self._bound = None

    def report(self, report: Report) -> None:
        """Takes in a report; what was dropped meanwhile is left out."""
        worker, coming = report.worker, self._coming[report.worker]
        if report.stretch != self._ledger.stretch(worker):
            return
        assert report.tick >= self._ticks[worker], f"worker {worker} goes back from {self._ticks[worker]} to {report}"
        self._ticks[worker] = report.tick
        self._bound = None
        for end in report.ends:
            if end.request_id in coming:
                coming.remove(end.request_id)
                self._ends[end.request_id] = end
                heapq.heappush(self._held, (end.place, end.request_id))

    def next(self) -> End | None:
        """What is to be told next; None where something earlier may still come, or nothing has ended."""
        held = self._held
        while held and held[0][1] not in self._ends:
            heapq.heappop(held)
        if not held or held[0][0].tick > self._least():
            return None
        return self._ends.pop(heapq.heappop(held)[1])

    def floor(self) -> int:
        """A tick up to which everything has been told, when `next` has nothing."""
        return max(self._ledger.now, self._least()) if any(self._coming) else self._ledger.now

    def slowest(self) -> int | None:
        """The worker that holds the floor: the others wait for its report; None where nothing is to come."""
        coming = [(self._ticks[worker], worker) for worker, own in enumerate(self._coming) if own]
        return min(coming)[1] if coming else None

    def _least(self) -> int:
        """Nothing ends at this tick or before it that has not been reported."""
        if self._bound is None:
            coming = (tick for tick, own in zip(self._ticks, self._coming, strict=True) if own)
            self._bound = min(coming, default=1 << 62)
        return self._bound


def merged(order: Order, reports: Iterable[Report]) -> Sequence[End]:
    """Takes in reports and returns all that can be told, where nothing is commanded in between."""
    for report in reports:
        order.report(report)
    found: list[End] = []
    while (end := order.next()) is not None:
        found.append(end)
    return found
