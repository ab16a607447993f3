"""A process other than 0 of a simulated run on several hosts: what it does next, and when.

Purpose: `OtherHost` does one thing after another on a clock of its own, as a real process: it receives what was
published by now, sends its notices, then makes a plan, or waits for one until its devices are done, or sleeps until
something comes that concerns it. `jaxrl.runtime.simulated_hosts` plays several of them.

Source: none published; docs/architecture.md has the messages between processes. Departures: it plays no round, and is
given the commands of process 0's round; what reaches it while it sleeps and does not concern it takes no time, but for
what arrives with what does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from jaxrl.config.simulation import SimulateSection
from jaxrl.runtime.hosts.event_stream import MAX_UNREAD
from jaxrl.runtime.hosts.notices import Batch, Counted, Notice, Scored, encode, joined
from jaxrl.runtime.plans import PlanRunner
from jaxrl.runtime.round_end import RoundCounts
from jaxrl.runtime.verdicts import Arrival
from jaxrl.scheduling.mechanism import Mechanism
from jaxrl.scheduling.rounds.busy_time import BusyTime
from jaxrl.scheduling.tokens.event_merger import Completion, Placement
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sim.clock import SimulatedClock, nanoseconds
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.sim.scoring import ScoringWorkers
from jaxrl.sim.timed_workers import TimedWorkers
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
    """The stream of this round, by batch: when it arrives, and after it the low watermark and the events so far."""

    arrivals: list[int] = field(default_factory=list)
    low_watermarks: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)


class OtherHost:
    """A process other than 0.

    Args:
      process: its number. clock: its own.
      workers, executors, scoring: of this host, on its clock. times: what things take.
      mechanisms: of this host, beside those of process 0.

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
        mechanisms: Sequence[Mechanism] = (),
    ) -> None:
        self.process, self.clock, self.workers = process, clock, workers
        self.executors, self.scoring, self._times, self.mechanisms = executors, scoring, times, mechanisms
        self._plans = PlanRunner(workers, mechanisms)
        self.next_ns: int | None = None
        self.drawn: dict[SampleKey, Sample] = {}
        self.acts: deque[tuple[int, Act]] = deque()  # by the batch that brings it
        self._busy = BusyTime()
        self._round = self._num_written = 0
        self._forget(Published(), 0)

    def _forget(self, published: Published, num_batches: int) -> None:
        self._published, self._num_before = published, num_batches  # of earlier rounds
        self._num_received = self._num_acknowledged = self._num_events = 0
        self._sleeps_since: int | None = None
        self._wanted: int | None = None  # the low watermark that it sleeps for
        self._outgoing: list[Notice] = []
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
        for each in self.mechanisms:
            each.cancelled()
        self._forget(Published(), 0)
        self.next_ns = None

    def turn(self, post: Callable[[int, int, int, bytes], None]) -> None:
        """Does what it does next, at `next_ns` or later. `post`: called with (process, number, time, value)."""
        assert self.next_ns is not None, "a process that sleeps does nothing"
        self.clock.reach(self.next_ns)
        self._receive()
        self.clock.now_ns += self._times.call_ns  # a read that finds nothing
        self._send(post)
        worker = self.workers.turn
        if worker is None:
            self._sleep()
            return
        collected = self._plans.run_synchronized(self.workers, worker)
        for each in self.mechanisms:
            each.after_plan(collected)
        self.next_ns = self.clock.now_ns

    def batch_published(self, batch: int) -> None:
        """A batch has been published, with what this host is to do in `acts`."""
        if self._sleeps_since is None:
            return
        has_acts = bool(self.acts) and self.acts[-1][0] == batch
        is_far = batch + 1 - self._num_acknowledged >= MAX_UNREAD
        if has_acts or is_far or (self._wanted is not None and self._published.low_watermarks[batch] >= self._wanted):
            arrives_ns = self._published.arrivals[batch]
            self.next_ns = arrives_ns if self.next_ns is None else min(self.next_ns, arrives_ns)

    # -- commands ----------------------------------------------------------------------------------------------------

    def launch(self, placement: Placement, request: Request, now: int) -> None:
        self.workers.advance_to(now)
        own = self.workers.launch(request, placement.worker)
        assert own.effect == placement.effect, f"{own} of a host, and {placement} of process 0"

    def abort(self, request_ids: Sequence[int], keep: bool, now: int) -> None:
        self.workers.advance_to(now)
        for result, sample in self.workers.abort(request_ids, keep=keep):
            self.drawn[sample.key] = sample
            self._outgoing.append(result)

    def deliver(self, completion: Completion) -> None:
        finished = self.workers.deliver(completion)
        assert finished is not None, f"{completion}: it is of another host"
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

    def finished(self, sample: Sample) -> None:
        """A response has ended, on any host."""
        for each in self.mechanisms:
            each.finished([sample], is_stopping=False)

    def end(self) -> None:
        """The round is over: counts what was done in it."""
        self.workers.drain()
        counted = self.workers.counted()
        sent = {each.name: each.counts(counted) for each in self.mechanisms}
        scoring = self.scoring.take_metrics() | {"reward/busy_s": self._busy.take()}
        self._outgoing.append(Counted([RoundCounts(counted, 0, scoring, sent).written()]))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Takes in what has arrived."""
        published = self._published
        while True:
            known = bisect_right(published.arrivals, self.clock.now_ns)
            if known == self._num_received and not (self.acts and self.acts[0][0] < known):
                break
            if known > self._num_received:
                self._charge(known)
            while self.acts and self.acts[0][0] < known:
                self.acts.popleft()[1](self)
            if known:
                self.workers.raise_low_watermark(published.low_watermarks[known - 1])
            self._num_received = known
        self._sleeps_since = None

    def _charge(self, known: int) -> None:
        """The process's seconds for what has arrived: reading each batch, and deciding at each event."""
        events, before = self._published.events, self._num_events
        self._num_events = events[known - 1]

        def cost_ns(num_batches: int, num_events: int) -> int:
            return self._times.call_ns * num_batches + self._times.event_ns * num_events

        total_ns = cost_ns(known - self._num_received, self._num_events - before)
        if self._sleeps_since is not None:  # all but the last came while it had nothing else to do
            last_ns = cost_ns(1, self._num_events - (events[known - 2] if known > 1 else 0))
            total_ns = max(total_ns - (self.clock.now_ns - self._sleeps_since), min(last_ns, total_ns))
            self._sleeps_since = None
        self.clock.now_ns += total_ns

    def _send(self, post: Callable[[int, int, int, bytes], None]) -> None:
        """Sends process 0 what there is to send."""
        outgoing, self._outgoing = self._outgoing, []
        outgoing += self.workers.take_progress()
        for verdict in self.scoring.completed():
            number, limits_s = self._numbers.pop(verdict.key)
            self._busy.end(verdict.key, verdict.time_s)
            outgoing.append(Scored(number, Arrival(verdict, limits_s)))
        if outgoing or self._num_received - self._num_acknowledged >= MAX_UNREAD:
            batch = Batch(self._round, self._num_before + self._num_received, outgoing)
            self.clock.now_ns += self._times.call_ns
            post(self.process, self._num_written, self.clock.now_ns, joined(batch, encode(batch)))
            self._num_written += 1
            self._num_acknowledged = self._num_received

    def _sleep(self) -> None:
        """Until something comes that concerns it."""
        published, known = self._published, self._num_received
        self._sleeps_since, self._wanted = self.clock.now_ns, self.workers.needed_low_watermark()
        batches = [self.acts[0][0]] if self.acts else []
        if self._wanted is not None:
            batches.append(bisect_left(published.low_watermarks, self._wanted, known))
        batches.append(self._num_acknowledged + MAX_UNREAD - 1)
        batch = min(batches)
        wakes = [published.arrivals[batch]] if batch < len(published.arrivals) else []
        if self.scoring.num_pending and (verdict_ns := self.scoring.next_ns) is not None:
            wakes.append(verdict_ns)
        self.next_ns = min(wakes, default=None)
