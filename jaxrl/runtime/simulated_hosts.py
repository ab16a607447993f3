"""The other hosts of a simulated run: what they do and when, as process 0 sees it.

Purpose: with several simulated hosts, the simulation's backend, round and rules are those of process 0, with its part
of the workers and the very code that merges and publishes in a real run (`jaxrl.runtime.ordered`,
`jaxrl.runtime.hosts.event_stream`). `SimulatedHosts` stands for everything else: the shared store with its latency
(`SimulatedStore`), and a process on each other host (`OtherHost`) with workers, scoring and layouts of its own.

Each process has a clock of its own, and all begin at the same moment. A process does one thing after another, as a real
one (`jaxrl.runtime.other_host`). Hosts receive messages of each other through process 0 alone, so each may be
played by itself up to the time of process 0.

Source: none published; docs/architecture.md has the messages between processes. Departures from a real run:

- The other processes play no rounds: they are given what the round of process 0 commands, when the batch of the stream
  arrives from which they would have found it out.
- A process that sleeps wakes only for what concerns it; what it would have done with the rest meanwhile takes no time.
- Barriers before phases of all hosts take no time, nor does agreeing at the start.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxrl.mechanisms.reward_timeouts.rule import AdaptiveTimeouts
from jaxrl.runtime.hosts.event_stream import EventStream
from jaxrl.runtime.other_host import AT_ONCE, Act, HostTimes, OtherHost, Published
from jaxrl.runtime.round_end import Hosts
from jaxrl.scheduling.mechanism import Mechanism, RoundEnd, RoundInfo, UnderWay
from jaxrl.scheduling.rounds.events import CancelScore, Command, Event, RoundStarted, SampleFinished, Score
from jaxrl.scheduling.tokens.event_merger import Completion, Placement
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.sim.clock import SimulatedClock, nanoseconds
from jaxrl.sim.timed_workers import TimedWorkers
from jaxrl.types import Sample, SampleKey

NAME = "stream"
_TOKEN_BYTES = 16  # of a token that is exchanged: its id, its version, two log-probabilities


class SimulatedStore:
    """The shared store as process 0 sees it (`jaxrl.runtime.hosts.event_stream.StreamStore`), in simulated time.

    Args:
      hosts: the others. clock: of process 0. times: what things take.
      waits_for_any: a wait ends with the first notice, whoever it is from.
      published: called with every batch of the stream.
    """

    process = 0

    def __init__(
        self,
        hosts: Sequence[OtherHost],
        clock: SimulatedClock,
        times: HostTimes,
        waits_for_any: bool,
        published: Callable[[], None],
    ) -> None:
        self.num_processes = len(hosts) + 1
        self._hosts, self._clock, self._times = hosts, clock, times
        self._waits_for_any, self._publish = waits_for_any, published
        self._coming: list[tuple[int, str, bytes]] = []  # a heap: when a notice arrives, its key and value
        self._here: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self._clock.now_ns += self._times.call_ns
        self._publish()

    def folder(self, prefix: str) -> list[tuple[str, bytes]]:
        self._clock.now_ns += self._times.call_ns
        self._play(self._clock.now_ns)
        self._take()
        return sorted(self._here.items())

    def delete(self, key_or_prefix: str) -> None:
        self._clock.now_ns += self._times.call_ns
        self._here.pop(key_or_prefix, None)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Waits for a notice. Raises RuntimeError where no host will ever send anything."""
        deadline_ns = self._clock.now_ns + nanoseconds(timeout_s)
        found_ns = self._wait_for_any(deadline_ns) if self._waits_for_any else self._wait_for(key, deadline_ns)
        self._clock.reach(min(found_ns, deadline_ns))
        self._take()
        return self._here.get(key)

    def post(self, process: int, number: int, at_ns: int, value: bytes) -> None:
        """A host sends a batch of notices."""
        arrives_ns = at_ns + self._times.latency_ns
        heapq.heappush(self._coming, (arrives_ns, f"{NAME}/notices/{process:05d}/{number:012d}", value))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        while self._coming and self._coming[0][0] <= self._clock.now_ns:
            _, key, value = heapq.heappop(self._coming)
            self._here[key] = value

    def _play(self, until_ns: int) -> None:
        for host in self._hosts:
            while host.next_ns is not None and host.next_ns <= until_ns:
                host.turn(self.post)

    def _wait_for(self, key: str, deadline_ns: int) -> int:
        """When a notice arrives, or a time beyond the deadline. The host that sends it goes on no further: it may
        receive what process 0 publishes then."""
        host = self._hosts[int(key.split("/")[-2]) - 1]
        while True:
            found = [arrives_ns for arrives_ns, each, _ in self._coming if each == key]
            if found or key in self._here:
                return min(found, default=self._clock.now_ns)
            if host.next_ns is None and all(each.next_ns is None for each in self._hosts) and not self._coming:
                raise RuntimeError(f"the simulated host {host.process} is waited for, and no host has anything to do")
            if host.next_ns is None or host.next_ns > deadline_ns:
                return deadline_ns + 1
            host.turn(self.post)

    def _wait_for_any(self, deadline_ns: int) -> int:
        """When the first notice arrives, or a time beyond the deadline."""
        after_ns = self._times.call_ns + self._times.latency_ns
        while not self._here:
            first_ns = self._coming[0][0] if self._coming else None
            awake = [host for host in self._hosts if host.next_ns is not None]
            host = min(awake, key=lambda host: host.next_ns or 0, default=None)
            next_ns = None if host is None else host.next_ns
            if first_ns is not None and (next_ns is None or next_ns + after_ns >= first_ns):
                return first_ns
            if host is None or next_ns is None:
                raise RuntimeError("process 0 waits for the simulated hosts, and none has anything to do")
            if next_ns > deadline_ns:
                return deadline_ns + 1
            host.turn(self.post)
        return self._clock.now_ns


class SimulatedHosts(Mechanism):
    """All other hosts, and the store between them and process 0. Implements `jaxrl.sim.timed_workers.Listener`.

    It is the last mechanism of the backend of process 0, and lets the others know what that does.

    Args:
      others: in the order of their numbers, from 1 on. clock: of process 0.
      times: what things take.
      bytes_per_s: at which a host takes in the tokens of others.
      in_order: as a real run; else in order of arrival.
      timeouts: gives test cases their time limits; None: scorers have their own.
    """

    def __init__(
        self,
        others: Sequence[OtherHost],
        clock: SimulatedClock,
        times: HostTimes,
        bytes_per_s: float,
        in_order: bool = True,
        timeouts: AdaptiveTimeouts | None = None,
    ) -> None:
        self.others, self._clock, self._times = tuple(others), clock, times
        self._bytes_per_s, self._timeouts = bytes_per_s, timeouts
        self._workers_per_process = len(others[0].workers.numbers)
        self.board = SimulatedStore(others, clock, times, not in_order, self._batch)
        self.stream = EventStream(self.board, NAME, clock=lambda: clock.now_s)
        self.leading: TimedWorkers | None = None
        self._num_batches = 0  # of earlier rounds
        self._published = Published()
        self._pending: list[tuple[OtherHost, Act]] = []
        self._num_events = self._num_scores = 0
        self._has_begun = False  # an event has been delivered
        self._exchanged = 0.0, 0
        self._owners: dict[SampleKey, int] = {}  # the process that draws a response of this round
        self._is_training = False

    @property
    def hosts(self) -> Hosts:
        """What the backend of process 0 has of the others."""
        return Hosts(self.stream, self.exchange)

    def attach(self, under_way: UnderWay) -> None:
        assert isinstance(under_way.workers, TimedWorkers)
        self.leading, self._requests = under_way.workers, under_way.requests

    def enter_rollout(self, policy_version: int, *, was_released: bool) -> bool:
        for host in self.others:
            for each in host.mechanisms:
                each.enter_rollout(policy_version, was_released=was_released)
            for executor in host.executors:
                executor.policy_version = policy_version
        return False

    def round_begins(self, info: RoundInfo) -> None:
        """A round begins everywhere."""
        self._is_training = info.is_training
        self._owners.clear()
        self._num_batches += len(self._published.arrivals)
        self._published = Published()
        self._pending.clear()
        self._num_events = self._num_scores = 0
        self._has_begun = False
        for host in self.others:
            host.begin(self._clock.now_ns, self._published, self._num_batches)
        for host in self.others:
            for each in host.mechanisms:
                each.round_begins(info)

    def handed(self, event: Event) -> None:
        if not isinstance(event, RoundStarted):
            self._has_begun = True
            self._num_events += 1
            self._clock.now_ns += self._times.event_ns
        if isinstance(event, SampleFinished) and any(host.mechanisms for host in self.others):
            self._command_all(partial(OtherHost.finished, sample=event.sample))

    def commanded(self, command: Command) -> None:
        match command:
            case Score(prompt=prompt, sample=sample):
                number, self._num_scores = self._num_scores, self._num_scores + 1
                process = self._owners.get(sample.key, number % (len(self.others) + 1))
                limits_s = self._timeouts.limits(prompt) if self._timeouts is not None and self._is_training else ()
                scored = partial(OtherHost.score, number=number, prompt=prompt, sample=sample, limits_s=limits_s)
                self._command(process * self._workers_per_process, scored)
            case CancelScore(keys=keys):
                of_processes: dict[int, list[SampleKey]] = {}
                for key in keys:
                    owner = self._owners.get(key)  # None: drawn in an earlier round
                    for process in range(len(self.others) + 1) if owner is None else (owner,):
                        of_processes.setdefault(process, []).append(key)
                for process, own in of_processes.items():
                    self._command(process * self._workers_per_process, partial(OtherHost.cancel_scores, keys=own))

    def counts(self, workers: Sequence[Counters]) -> None:
        self._command_all(OtherHost.end)

    def cancelled(self) -> None:
        """The round is dropped."""
        self._pending.clear()
        for host in self.others:
            host.cancel()

    def exchange(self, samples: Sequence[Sample], owners: Sequence[int]) -> None:
        """Fills in what other hosts have drawn, in the time that its bytes take."""
        num_tokens = 0
        for sample, owner in zip(samples, owners, strict=True):
            num_tokens += len(sample)
            if owner:
                found = self.others[owner - 1].drawn[sample.key]
                assert len(found) == len(sample), f"{sample.key}: {len(found)} and {len(sample)} tokens"
                sample.token_ids, sample.versions = found.token_ids, found.versions
                sample.rollout_logprobs, sample.sampled_logprobs = found.rollout_logprobs, found.sampled_logprobs
        num_bytes = _TOKEN_BYTES * num_tokens
        seconds = num_bytes * len(self.others) / (len(self.others) + 1) / self._bytes_per_s
        self._clock.advance(seconds)
        self._exchanged = self._exchanged[0] + seconds, self._exchanged[1] + num_bytes

    def round_ends(self, end: RoundEnd, by_process: Sequence[Any]) -> dict[str, float]:
        """Of the round: `hosts/order_wait_s`, the seconds for which devices stood idle because their worker waited for
        the others, on average over all workers, and `hosts/order_wait_max_s` of the one that has waited longest;
        `hosts/exchange_s` and `hosts/exchange_bytes` as in a real run."""
        assert self.leading is not None
        waited: list[int] = []
        for workers in (self.leading, *(host.workers for host in self.others)):
            waited += workers.waited_ns.values()
            workers.waited_ns = dict.fromkeys(workers.numbers, 0)
        (seconds, num_bytes), self._exchanged = self._exchanged, (0.0, 0)
        return {
            "hosts/order_wait_s": sum(waited) / len(waited) / 1e9,
            "hosts/order_wait_max_s": max(waited) / 1e9,
            "hosts/exchange_s": seconds,
            "hosts/exchange_bytes": float(num_bytes),
        }

    # -- what the round of process 0 does ----------------------------------------------------------------------------

    def on_launch(self, placement: Placement, request: Request, now: int) -> None:
        self._owners[request.key] = placement.worker // self._workers_per_process
        self._command(placement.worker, partial(OtherHost.launch, placement=placement, request=request, now=now))

    def on_abort(self, placed: Mapping[int, Placement], keep: bool, now: int) -> None:
        ids: dict[int, list[int]] = {}
        for request_id, placement in placed.items():
            ids.setdefault(placement.worker // self._workers_per_process, []).append(request_id)
        for process, own in ids.items():
            abort = partial(OtherHost.abort, request_ids=own, keep=keep, now=now)
            self._command(process * self._workers_per_process, abort)

    def on_completion(self, completion: Completion) -> None:
        self._has_begun = True
        self._command(completion.sort_key.worker, partial(OtherHost.deliver, completion=completion))

    def _command_all(self, act: Act) -> None:
        """Every other host does something, once it receives what has happened."""
        for host in self.others:
            self._command(host.process * self._workers_per_process, act)

    def _command(self, worker: int, act: Act) -> None:
        process = worker // self._workers_per_process
        if process == 0:
            return
        host = self.others[process - 1]
        if self._has_begun:
            self._pending.append((host, act))
        else:  # nothing has happened yet: every host begins the round by itself
            host.acts.append((AT_ONCE, act))

    def _batch(self) -> None:
        """A batch of the stream has been written."""
        assert self.leading is not None
        published, number = self._published, len(self._published.arrivals)
        published.arrivals.append(self._clock.now_ns + self._times.latency_ns)
        published.low_watermarks.append(self.leading.low_watermark)
        published.events.append(self._num_events)
        for host, act in self._pending:
            host.acts.append((number, act))
        self._pending.clear()
        for host in self.others:
            host.batch_published(number)
