"""Rounds of process 0 beside hosts that are made up: what merging, deciding and publishing cost there.

`LeadingHost` is process 0 with the run's own code: stream, order, round and rule (tail batching). The other hosts are
`MadeUpWorker`s with a row for each response under way, plans of equal steps and responses of drawn lengths. They report
as a process does: what they tell is written before the clock runs, and read by process 0 while it runs.

Departures: the worker of process 0 itself has nothing to do, so that only process 0's part is timed; the board is in
memory, so what its calls cost is left out.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.mechanisms.tail_batching.options import TailBatchingSection
from jaxrl.mechanisms.tail_batching.rule import TailBatching
from jaxrl.runtime.hosts.event_stream import EventStream
from jaxrl.runtime.hosts.notices import Batch, Counted, Notice, Scored, encode, joined
from jaxrl.runtime.ordered import OrderedEvents
from jaxrl.runtime.plans import PlanRunner
from jaxrl.runtime.round_end import Hosts, RoundCounts
from jaxrl.runtime.verdicts import Arrival
from jaxrl.scheduling.mechanism import RoundInfo, UnderWay
from jaxrl.scheduling.rounds.batches import RoundTime
from jaxrl.scheduling.rounds.events import Abort, CancelScore, Command, Launch, RoundStarted, Score, Verdict
from jaxrl.scheduling.rounds.race import BatchSettings
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.event_merger import AbortResult, Completion, SortKey, WorkerProgress
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.synchronized import SynchronizedWorkers
from jaxrl.sim.replay import ReplayExecutor
from jaxrl.types import Prompt, SampleKey, SamplingParams

STEPS, TICKS = 16, 16 * 256  # of a plan
LOOKAHEAD = 4 * TICKS
_NOTHING = RoundCounts([], 0, {}, {})  # what a host's workers and scoring have counted


@dataclass
class Board:
    """A board in memory, as process 0 sees it. `written`: bytes of the stream so far."""

    num_processes: int
    process: int = 0
    values: dict[str, bytes] = field(default_factory=dict)
    written: int = 0

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        self.written += len(value)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        return self.values.get(key)

    def folder(self, prefix: str) -> list[tuple[str, bytes]]:
        return sorted((key, value) for key, value in self.values.items() if key.startswith(f"{prefix}/"))

    def delete(self, key_or_prefix: str) -> None:
        del self.values[key_or_prefix]


class Prompts:
    """Prompts without end."""

    def __init__(self) -> None:
        self._count = 0

    def next(self, num_prompts: int) -> list[Prompt]:
        first, self._count = self._count, self._count + num_prompts
        return [self.get(0, index) for index in range(first, self._count)]

    def get(self, epoch: int, index: int) -> Prompt:
        return Prompt(epoch, index, (1,) * 64, "", "made up")


class NoScoring:
    """Of process 0, which draws nothing and so scores nothing."""

    num_pending = 0

    def submit(self, *_: Any) -> None: ...

    def cancel(self, keys: Any) -> None: ...

    def completed(self) -> list[Verdict]:
        return []

    def wait(self, timeout_s: float) -> list[Verdict]:
        return []

    def take_metrics(self) -> dict[str, float]:
        return {}


class MadeUpWorker:
    """A worker of another host; `pace`: plans that it makes while the fastest makes one."""

    def __init__(self, number: int, num_rows: int, pace: float) -> None:
        self.number, self._num_rows, self._pace = number, num_rows, pace
        self.begin()

    def begin(self) -> None:
        self.tick = self.busy_period = self._plans = 0
        self._credit = 0.0
        self.waiting: deque[tuple[int, int, int]] = deque()  # (request id, length, effect)
        self.rows = np.zeros((3, 0), np.int64)  # request ids, tokens left, lengths

    def add(self, request_id: int, length: int, effect: int) -> None:
        self.waiting.append((request_id, length, effect))

    def done(self, request_id: int) -> int:
        """Tokens of a response so far."""
        found = np.flatnonzero(self.rows[0] == request_id)
        return int(self.rows[2, found[0]] - self.rows[1, found[0]]) if len(found) else 0

    def drop(self, gone: set[int]) -> None:
        self.rows = self.rows[:, ~np.isin(self.rows[0], list(gone))]
        self.waiting = deque(each for each in self.waiting if each[0] not in gone)

    def plan(self, low_watermark: int) -> WorkerProgress | None:
        """Runs a plan, where the low watermark allows it and its turn has come."""
        self._credit = min(self._credit + self._pace, 1.0 + self._pace)
        busy = self.rows.shape[1] > 0
        if self._credit < 1.0 or not (busy or self.waiting):
            return None
        tick = self.tick if busy else max(self.tick, self.waiting[0][2])
        if tick - LOOKAHEAD > low_watermark:
            return None
        self._credit -= 1.0
        started: list[tuple[int, int, int]] = []
        while self.waiting and self.rows.shape[1] + len(started) < self._num_rows and self.waiting[0][2] <= tick:
            request_id, length, _ = self.waiting.popleft()
            started.append((request_id, length, length))
        if started:
            self.rows = np.concatenate([self.rows, np.array(started, np.int64).T], axis=1)
        self.tick = tick + TICKS
        self.rows[1] -= STEPS
        over = self.rows[1] <= 0
        ends = tuple(
            Completion(request_id, SortKey(self.tick, self.number, self._plans, 0, slot), length, "stop")
            for slot, (request_id, _, length) in enumerate(self.rows[:, over].T.tolist())
        )
        self.rows = self.rows[:, ~over]
        self._plans += 1
        return WorkerProgress(self.number, self.busy_period, self.tick, ends)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What a round has cost process 0: seconds, events that its round has handled, plans that the fastest worker could
    have made meanwhile, bytes of the stream, and bytes and number of the batches of notices."""

    seconds: float
    events: int
    plans: int
    stream_bytes: int
    notice_bytes: int
    batches: int


class LeadingHost:
    """Process 0, beside `num_hosts` others.

    Args:
      num_rows: of each other host's worker. samples: of a prompt.
      spread: the slowest worker is so much slower than the fastest, as a share.
      median, sigma, longest: of lognormal lengths, tokens.
    """

    def __init__(
        self,
        num_hosts: int,
        num_rows: int,
        samples: int,
        spread: float,
        lengths: tuple[float, float, int],
        seed: int = 0,
    ) -> None:
        self._rng, self._lengths = random.Random(seed), lengths
        self.board = Board(num_hosts + 1)
        self.stream = EventStream(self.board, "s")
        executor = ReplayExecutor({}, 1, 1, 1 << 20, 16, 64)
        self.workers = SynchronizedWorkers({0: Engine(executor, BatcherConfig())}, LOOKAHEAD, num_hosts + 1)
        self._round = UnderWay(self.workers, time.perf_counter, lambda: None, _begins_nothing)
        hosts = Hosts(self.stream, lambda samples, owners: None)
        parts = self._round, PlanRunner(self.workers), NoScoring(), lambda _: ""
        self.ordered = OrderedEvents(*parts, hosts=hosts)
        self.others = [
            MadeUpWorker(number, num_rows, 1.0 - spread * self._rng.random()) for number in range(1, num_hosts + 1)
        ]
        batch = BatchSettings(num_hosts * num_rows // samples, samples)
        self.rule = TailBatching(batch, TailBatchingSection(enable=True, at_end="leave"))
        self._prompts, self._params = Prompts(), SamplingParams(max_tokens=lengths[2])
        self._num_ids = self._step = 0
        self._written = [0] * (num_hosts + 1)  # batches of notices, by host
        self._outgoing: dict[int, list[Notice]] = {}  # by host, with its next batch

    def round(self) -> RoundCost:
        """Plays a round."""
        self._step += 1
        self._round.requests.clear()
        self._num_scores = 0
        for worker in self.others:
            worker.begin()
        before, plans, notice_bytes, batches, events = self.board.written, 0, 0, 0, 1
        began = time.thread_time()
        current = self.rule.plan(self._prompts, RoundTime(self._step, self._step - 1))
        self.ordered.begin(RoundInfo(self._step), self._step - 1)
        started = self.ordered.next()
        assert isinstance(started, RoundStarted)
        self._apply(current.handle(started))
        seconds = time.thread_time() - began
        while not current.done:
            plans += 1
            for worker in self.others:
                size = self._post(worker)
                notice_bytes, batches = notice_bytes + size, batches + (size > 0)
            began = time.thread_time()
            while not current.done and (event := self.ordered.next()) is not None:
                events += 1
                self._apply(current.handle(event))
            seconds += time.thread_time() - began
        began = time.thread_time()
        self.rule.settle(current)
        seconds += time.thread_time() - began
        for worker in self.others:
            self._outgoing.setdefault(worker.number, []).append(Counted([_NOTHING.written()]))
            self._post(worker)
        self.ordered.end(_NOTHING)
        return RoundCost(seconds, events, plans, self.board.written - before, notice_bytes, batches)

    def _post(self, worker: MadeUpWorker) -> int:
        """What a host sends after a plan, in a batch; its bytes."""
        notices = self._outgoing.pop(worker.number, [])
        progress = worker.plan(self.workers.low_watermark)
        if progress is not None:
            notices.append(progress)
        if not notices:
            return 0
        batch = Batch(self._step, self.stream._num_written, notices)
        value = joined(batch, encode(batch))
        number = self._written[worker.number]
        self._written[worker.number] = number + 1
        self.board.values[self.stream._notice_key(worker.number, number)] = value
        return len(value)

    def _apply(self, commands: Sequence[Command]) -> None:
        """Carries out what the round commands, and has the made-up hosts receive it."""
        placements = self.workers.placements
        for command in commands:
            match command:
                case Launch(prompt=prompt, keys=keys):
                    for key in keys:
                        request = Request(self._num_ids, key, prompt.token_ids, self._params, share=prompt.key)
                        self._round.launched(key, self._num_ids)
                        self._num_ids += 1
                        chosen = min(range(1, placements.num_workers), key=placements.outstanding)
                        self.ordered.launch(request, chosen)
                        placement = placements.find(request.request_id)
                        assert placement is not None
                        self.others[chosen - 1].add(request.request_id, self._length(), placement.effect)
                case Score(prompt=prompt, sample=sample):
                    self.ordered.score(prompt, sample)
                    host = self.ordered.owner_of(sample.key)
                    verdict = Verdict(0.0, sample.key, 1.0, "ok", {"acc": 1.0}, 0.25)
                    assert host is not None
                    self._outgoing.setdefault(host, []).append(Scored(self._num_scores, Arrival(verdict)))
                    self._num_scores += 1
                case Abort(keys=keys, keep=keep):
                    self._abort(keys, keep)
                case CancelScore(keys=keys):
                    self.ordered.cancel_scores(keys)

    def _abort(self, keys: Sequence[SampleKey], keep: bool) -> None:
        ids = [self._round.requests[key] for key in keys]
        placements, of_hosts = self.workers.placements, dict[int, set[int]]()
        for request_id in ids:
            placement = placements.find(request_id)
            assert placement is not None
            of_hosts.setdefault(placement.worker, set()).add(request_id)
        self.ordered.abort(keys, keep=keep)
        for host, gone in of_hosts.items():
            worker = self.others[host - 1]
            results = [AbortResult(i, worker.done(i), "abort", 0) for i in ids if i in gone]
            self._outgoing.setdefault(host, []).extend(results)
            worker.drop(gone)
            if placements.busy_period(host) != worker.busy_period:
                worker.tick, worker.busy_period = placements.now, placements.busy_period(host)

    def _length(self) -> int:
        median, sigma, longest = self._lengths
        return max(min(round(self._rng.lognormvariate(math.log(median), sigma)), longest), 1)


def _begins_nothing(*_: object) -> int:
    raise AssertionError("no round begins in another")
