"""A process other than 0 of a simulated run on several hosts: what it does next, and when.

Purpose: `OtherHost` does one thing after another on a clock of its own, as a real process: it hears what was published
by now, tells what it has to tell, then makes a plan, or waits for one until its devices are done, or sleeps until
something comes that concerns it. `jaxrl.runtime.simulated_hosts` plays several of them.

Source: none published; docs/architecture.md for what processes tell each other. Departures: it plays no round, and is
handed what that of process 0 commands; what reaches it while it sleeps and does not concern it takes no time, but for
what arrives with what does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from jaxrl.config.simulation import SimulateSection
from jaxrl.runtime.hosts.notices import Batch, Counted, Notice, Scored, encode, joined
from jaxrl.runtime.hosts.stream import MAX_UNREAD
from jaxrl.runtime.layout_session import LayoutSessions
from jaxrl.runtime.plans import PlanRunner
from jaxrl.runtime.round_end import RoundCounts
from jaxrl.runtime.verdicts import Arrival
from jaxrl.scheduling.rounds.busy_time import BusyTime
from jaxrl.scheduling.tokens.order import End, Home
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sim.clock import SimulatedClock, nanoseconds
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.sim.paced import TimedWorkers
from jaxrl.sim.scoring import ScoringWorkers
from jaxrl.types import Prompt, Sample, SampleKey

AT_ONCE = -1
"""The batch of what a process finds out by itself."""
Act = Callable[["OtherHost"], None]


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Nanoseconds: until another host reads what was written, of a call of the store, and of a process for an event."""

    latency_ns: int
    call_ns: int
    event_ns: int

    @classmethod
    def configured(cls, options: SimulateSection) -> HostTimes:
        seconds = options.host_latency_s, options.host_call_s, options.host_event_s
        return cls(*map(nanoseconds, seconds))


@dataclass
class Published:
    """The batches of the stream in this round: when each arrives, and after it the floor and the events so far."""

    arrivals: list[int] = field(default_factory=list)
    floors: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)


class OtherHost:
    """A process other than 0.

    Args:
      process: its number. clock: its own.
      workers, executors, scoring: of this host, on its clock. times: what things take.
      layouts: of its workers; None: they stay.

    Attributes:
      next_ns: when it acts next; None: not before something comes.
      drawn: the responses of this round that ended here, or were aborted.
    """

    def __init__(
        self,
        process: int,
        clock: SimulatedClock,
        workers: TimedWorkers,
        executors: Sequence[SimulatedExecutor],
        scoring: ScoringWorkers,
        times: HostTimes,
        layouts: LayoutSessions | None = None,
    ) -> None:
        self.process, self.clock, self.workers = process, clock, workers
        self.executors, self.scoring, self._times, self.layouts = executors, scoring, times, layouts
        self._plans = PlanRunner(workers, layouts=layouts)
        self.next_ns: int | None = None
        self.drawn: dict[SampleKey, Sample] = {}
        self.acts: deque[tuple[int, Act]] = deque()  # by the batch that brings it
        self._busy = BusyTime()
        self._round = self._num_written = 0
        self._forget(Published(), 0)

    def _forget(self, published: Published, num_batches: int) -> None:
        self._published, self._num_before = published, num_batches  # of earlier rounds
        self._num_heard = self._num_said = self._num_events = 0
        self._sleeps_since: int | None = None
        self._wanted: int | None = None  # the floor that it sleeps for
        self._told: list[Notice] = []
        self._numbers: dict[SampleKey, tuple[int, tuple[float, ...]]] = {}
        self.acts.clear()
        self.drawn.clear()

    def begin(self, now_ns: int, published: Published, num_batches: int) -> None:
        """A round begins, of which `published` will have the stream; `num_batches` came before."""
        self._forget(published, num_batches)
        self.clock.reach(now_ns)
        self._round += 1
        self.workers.begin()
        self.next_ns = self.clock.now_ns

    def cancel(self) -> None:
        """The round is dropped."""
        self.workers.cancel()
        self.scoring.cancel(set(self._numbers))
        if self.layouts is not None:
            self.layouts.cancel()
        self._forget(Published(), 0)
        self.next_ns = None

    def turn(self, post: Callable[[int, int, int, bytes], None]) -> None:
        """Does what it does next, at `next_ns` or later. `post`: called with (process, number, time, value)."""
        assert self.next_ns is not None, "a process that sleeps does nothing"
        self.clock.reach(self.next_ns)
        self._hear()
        self.clock.now_ns += self._times.call_ns  # a read that finds nothing
        self._say(post)
        worker = self.workers.turn
        if worker is None:
            self._sleep()
            return
        collected = self._plans.run_paced(self.workers, worker)
        if collected is not None and self.layouts is not None:
            self._plans.show(collected, None)
        self.next_ns = self.clock.now_ns

    def comes(self, batch: int) -> None:
        """A batch has been published, with what this host is to do in `acts`."""
        if self._sleeps_since is None:
            return
        has_acts = bool(self.acts) and self.acts[-1][0] == batch
        is_far = batch + 1 - self._num_said >= MAX_UNREAD
        if has_acts or is_far or (self._wanted is not None and self._published.floors[batch] >= self._wanted):
            arrives_ns = self._published.arrivals[batch]
            self.next_ns = arrives_ns if self.next_ns is None else min(self.next_ns, arrives_ns)

    # -- what it is told to do ---------------------------------------------------------------------------------------

    def launch(self, home: Home, request: Request, now: int) -> None:
        self.workers.hear(now)
        own = self.workers.launch(request, home.worker)
        assert own.effect == home.effect, f"{own} of a host, and {home} of process 0"

    def abort(self, request_ids: Sequence[int], keep: bool, now: int) -> None:
        self.workers.hear(now)
        for answer, sample in self.workers.abort(request_ids, keep=keep):
            self.drawn[sample.key] = sample
            self._told.append(answer)

    def told(self, end: End) -> None:
        finished = self.workers.told(end)
        assert finished is not None, f"{end}: it is of another host"
        self.drawn[finished.sample.key] = finished.sample

    def score(self, number: int, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...]) -> None:
        self._numbers[sample.key] = number, limits_s
        self._busy.begin(sample.key, self.clock.now_s)
        self.scoring.submit(prompt, sample, limits_s)

    def cancel_scores(self, keys: Collection[SampleKey]) -> None:
        self.scoring.cancel(keys)
        for key in keys:
            self._busy.end(key, self.clock.now_s)
            self._numbers.pop(key, None)

    def finished(self, length: int) -> None:
        assert self.layouts is not None
        self.layouts.finished(length)

    def end(self) -> None:
        """The round is over: counts what was done in it."""
        self.workers.drain()
        counted = self.workers.counted()
        layouts = {} if self.layouts is None else self.layouts.end([each.preemptions for each in counted])
        states = () if self.layouts is None else self.layouts.told()
        scoring = self.scoring.take_metrics() | {"reward/busy_s": self._busy.take()}
        self._told.append(Counted([RoundCounts(counted, 0, scoring, layouts, states).written()]))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Takes in what has arrived."""
        published = self._published
        while True:
            known = bisect_right(published.arrivals, self.clock.now_ns)
            if known == self._num_heard and not (self.acts and self.acts[0][0] < known):
                break
            if known > self._num_heard:
                self._charge(known)
            while self.acts and self.acts[0][0] < known:
                self.acts.popleft()[1](self)
            if known:
                self.workers.raise_floor(published.floors[known - 1])
            self._num_heard = known
        self._sleeps_since = None

    def _charge(self, known: int) -> None:
        """The process's seconds for what has arrived: reading each batch, and deciding at each event."""
        events, before = self._published.events, self._num_events
        self._num_events = events[known - 1]

        def cost_ns(num_batches: int, num_events: int) -> int:
            return self._times.call_ns * num_batches + self._times.event_ns * num_events

        total_ns = cost_ns(known - self._num_heard, self._num_events - before)
        if self._sleeps_since is not None:  # all but the last came while it had nothing else to do
            last_ns = cost_ns(1, self._num_events - (events[known - 2] if known > 1 else 0))
            total_ns = max(total_ns - (self.clock.now_ns - self._sleeps_since), min(last_ns, total_ns))
            self._sleeps_since = None
        self.clock.now_ns += total_ns

    def _say(self, post: Callable[[int, int, int, bytes], None]) -> None:
        """Tells process 0 what there is to tell."""
        told, self._told = self._told, []
        told += self.workers.take_reports()
        for verdict in self.scoring.completed():
            number, limits_s = self._numbers.pop(verdict.key)
            self._busy.end(verdict.key, verdict.time_s)
            told.append(Scored(number, Arrival(verdict, limits_s)))
        if told or self._num_heard - self._num_said >= MAX_UNREAD:
            batch = Batch(self._round, self._num_before + self._num_heard, told)
            self.clock.now_ns += self._times.call_ns
            post(self.process, self._num_written, self.clock.now_ns, joined(batch, encode(batch)))
            self._num_written += 1
            self._num_said = self._num_heard

    def _sleep(self) -> None:
        """Until something comes that concerns it."""
        published, known = self._published, self._num_heard
        self._sleeps_since, self._wanted = self.clock.now_ns, self.workers.wanted_floor()
        batches = [self.acts[0][0]] if self.acts else []
        if self._wanted is not None:
            batches.append(bisect_left(published.floors, self._wanted, known))
        batches.append(self._num_said + MAX_UNREAD - 1)
        batch = min(batches)
        wakes = [published.arrivals[batch]] if batch < len(published.arrivals) else []
        if self.scoring.num_pending and (verdict_ns := self.scoring.next_ns) is not None:
            wakes.append(verdict_ns)
        self.next_ns = min(wakes, default=None)
