"""The events of a round over several workers: one sequence, the same in every process.

Purpose: `OrderedEvents` is the source of events (`jaxrl.runtime.events.RoundEvents`) for workers that run ahead of the
round (`jaxrl.scheduling.tokens.synchronized`). Process 0 leads: it merges the progress of all workers, receives
verdicts and abort results, and delivers the next event to its own round; what it has delivered, it publishes as the
stream that all others handle. With all workers in one process there is no stream, and the same code delivers the same
events.

What is delivered when:

- The results of aborts come before anything else, in the order of the command.
- A verdict is delivered when it has come, in the order in which samples were sent for scoring. Where that is decides
  nothing, unless the round awaits it, and then nothing but verdicts is delivered. A rule that launches or aborts at
  another verdict would depend on a clock: an assertion.
- All else that ended, in the order of `jaxrl.scheduling.tokens.event_merger`.

A sample of another process has the right length, versions and finish reason, and no content (arrays of one zero each)
until its tokens are exchanged, at the round's end.

Source: docs/architecture.md. RollPacker §4.3 for rewards beside the rollout: a response is scored where it was drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxrl.record.journal import Journal
from jaxrl.runtime.hosts.notices import Counted, Decided, Failed, Item, LowWatermark, Notice, Scored, Stop, shortened
from jaxrl.runtime.plans import PlanRunner
from jaxrl.runtime.round_end import Hosts, MissingTokens, RoundCounts, TextOf
from jaxrl.runtime.verdicts import Arrival, OwnScoring, Scoring, recorded
from jaxrl.scheduling.mechanism import Mechanism, RoundInfo, UnderWay
from jaxrl.scheduling.rounds.events import Event, Interrupted, RoundStarted, SampleAborted, SampleFinished
from jaxrl.scheduling.tokens.engine import Finished
from jaxrl.scheduling.tokens.event_merger import AbortResult, Completion, WorkerProgress
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.synchronized import SynchronizedWorkers
from jaxrl.types import Prompt, RunFailed, Sample, SampleKey

SCORING_POLL_S = 0.005
"""How long one of two things is waited for, other processes and the own scoring, before the other is looked at."""


class OrderedEvents:
    """Implements `jaxrl.runtime.events.RoundEvents` over `SynchronizedWorkers`: what happens in a round, in one order.

    Args:
      under_way: what there is of the round, with the workers of this process. plans: runs their plans.
      scoring: of this process. text_of: makes a response's text.
      mechanisms: called with what ends.
      journal: where decisions of a clock go, in process 0; None: nowhere.
      hosts: the other processes; None: there are none.

    Attributes:
      launched: of this round, by request id.
    """

    def __init__(
        self,
        under_way: UnderWay,
        plans: PlanRunner,
        scoring: Scoring,
        text_of: TextOf,
        mechanisms: Sequence[Mechanism] = (),
        journal: Journal | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        assert isinstance(under_way.workers, SynchronizedWorkers)
        workers = self._workers = under_way.workers
        self._under_way, self._plans, self._text_of, self._clock = under_way, plans, text_of, under_way.clock
        self._mechanisms, self._journal, self._hosts = mechanisms, journal, hosts
        self._scoring = OwnScoring(scoring, under_way.clock, journal, mechanisms)
        stream = self._stream = None if hosts is None else hosts.stream
        self._leads = stream is None or stream.process == 0
        self._process, self._num_processes = (0, 1) if stream is None else (stream.process, stream.num_processes)
        self._num_workers = workers.placements.num_workers
        first = self._process * self._num_workers // self._num_processes
        mine = range(first, first + max(self._num_workers // self._num_processes, 1))
        assert workers.numbers == tuple(mine), "workers of another process"
        if stream is not None:
            workers.before_waiting = stream.pump
        self._merger = workers.new_merger() if self._leads else None
        self._stop_agreed = False
        self._stop_asked = False
        self._why: str | None = None  # a stop to be published, and why
        self.launched: dict[int, Request] = {}
        self._forget()

    def _forget(self) -> None:
        self.launched.clear()
        self._turn: int | None = None  # the worker to be served next
        self._started: Event | None = None  # the first event, until it is delivered
        self._version = 0
        self._owners: dict[SampleKey, int] = {}  # the process that draws a response
        self._due_aborts: deque[int] = deque()  # request ids, in the order of the commands
        self._abort_results: dict[int, AbortResult] = {}  # those that came; in process 0
        self._aborted: dict[int, Sample] = {}  # samples of this process, until their abort results are delivered
        self._num_scores = 0
        self._scores: dict[int, tuple[SampleKey, Prompt]] = {}  # by number: sent and no verdict delivered
        self._numbers: dict[SampleKey, int] = {}
        self._arrived: dict[int, Arrival] = {}  # in process 0
        self._awaited: set[int] = set()
        self._decides = True  # commands may follow the last event
        self._counts: dict[int, Mapping[str, Any]] = {}

    # -- a round -----------------------------------------------------------------------------------------------------

    def begin(self, info: RoundInfo, policy_version: int) -> None:
        self._forget()
        self._scoring.begin(info.step, info.index)
        self._started = RoundStarted(self._clock())
        self._version = policy_version
        self._workers.begin()
        if self._merger is not None:
            self._merger.begin()
        if self._stream is not None:
            self._stream.begin()

    @property
    def stop_agreed(self) -> bool:
        return self._stop_agreed

    @property
    def generating(self) -> bool:
        return (bool(self._workers.placements.num_live) and not self._awaited) or bool(self._due_aborts)

    @property
    def num_plannable(self) -> int | None:
        if self._plans.stuck is not None:
            self.ask_stop(self._plans.stuck)
            return None
        self._turn = self._workers.turn
        return None if self._turn is None else self._workers.num_unfinished

    @property
    def is_scoring(self) -> bool:
        return True

    def run_plan(self) -> int | None:
        assert self._turn is not None, "no worker can be served"
        return self._plans.run_synchronized(self._workers, self._turn)

    def _process_of(self, worker: int) -> int:
        """The process that has a worker, or speaks for it."""
        return worker * self._num_processes // self._num_workers

    def owner_of(self, key: SampleKey) -> int | None:
        """The process that drew a response of this round; None for one that was not launched in it."""
        return self._owners.get(key)

    def launch(self, request: Request, worker: int | None) -> None:
        assert self._decides, "a rule launches at a verdict that it does not await"
        placement = self._workers.launch(request, worker)
        self.launched[request.request_id] = request
        self._owners[request.key] = self._process_of(placement.worker)
        if self._merger is not None:
            self._merger.launched(request.request_id)

    def finished(self, finished: Sequence[Finished]) -> None:
        raise AssertionError("no round begins in another where workers are synchronised")

    def abort(self, keys: Sequence[SampleKey], *, keep: bool) -> None:
        """Ends responses; what became of each is delivered next."""
        assert self._decides, "a rule aborts at a verdict that it does not await"
        request_ids, find = [self._under_way.requests[key] for key in keys], self._workers.placements.find
        workers = {i: placement.worker for i in request_ids if (placement := find(i)) is not None}
        for result, sample in self._workers.abort(request_ids, keep=keep):
            self._aborted[result.request_id] = sample
            self._take_abort_result(result)
        self._due_aborts.extend(request_ids)
        if self._merger is not None:
            for request_id, worker in workers.items():
                self._merger.aborted(request_id, worker)
            self._update_idle(set(workers.values()))

    def score(self, prompt: Prompt, sample: Sample) -> None:
        """Has a response scored where it was drawn; one of an earlier round in one process after the other."""
        number, self._num_scores = self._num_scores, self._num_scores + 1
        self._scores[number], self._numbers[sample.key] = (sample.key, prompt), number
        if self._owners.get(sample.key, number % self._num_processes) == self._process:
            self._scoring.send(prompt, sample)

    def cancel_scores(self, keys: Collection[SampleKey]) -> None:
        """No verdict on these is delivered."""
        numbers = [self._numbers.pop(key) for key in keys if key in self._numbers]
        for number in numbers:
            self._scores.pop(number)
            self._arrived.pop(number, None)
            self._awaited.discard(number)
        self._scoring.cancel(set(keys))

    def await_verdict(self, key: SampleKey) -> None:
        """Nothing but verdicts is delivered before this one."""
        self._awaited.add(self._numbers[key])

    def cancel(self) -> None:
        self._scoring.clear({key for key, _ in self._scores.values()})
        self._workers.cancel()
        self._forget()
        if self._stream is not None:
            self._stream.pump()

    def end_scoring(self) -> Mapping[str, float]:
        return self._scoring.end()

    def exchange(self, samples: Sequence[Sample]) -> None:
        if self._hosts is not None:
            missing = MissingTokens([(sample, self.owner_of(sample.key)) for sample in samples])
            self._hosts.exchange(missing.samples, missing.owners)
            missing.fill(self._process, self._text_of)

    def take_metrics(self) -> dict[str, float]:
        return {} if self._stream is None else self._stream.take_metrics()

    def end(self, counts: RoundCounts) -> Sequence[RoundCounts]:
        """As in `RoundEvents`; waits for all processes."""
        is_over = not (self._workers.placements.num_live or self._due_aborts or self._scores)
        assert is_over, "a round ends while something of it is running"
        return [RoundCounts.read(each) for each in self._all_counts(counts.written())]

    def _all_counts(self, counts: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        if self._stream is None:
            return [counts]
        if not self._leads:
            self._stream.send(Counted([counts]))
            self._stream.pump()
            while not isinstance(item := self._next_item(), Counted):
                self._stream.wait(1.0)
            self._stop_agreed |= item.stops
            return list(item.counts)
        self._counts[0] = counts
        while len(self._counts) < self._num_processes:
            self._stream.wait(1.0, next(p for p in range(self._num_processes) if p not in self._counts))
            self._take_notices()
        found = [self._counts[process] for process in range(self._num_processes)]
        self._stop_agreed |= self._why is not None
        self._stream.publish(Counted(found, self._stop_agreed))
        self._stream.pump()
        return found

    # -- events ------------------------------------------------------------------------------------------------------

    def ask_stop(self, why: str = "") -> None:
        """Has all processes stop at the same place of the stream. Raises Interrupted where this one leads."""
        if self._leads:
            self._why = why
            self._stop_if_asked()
        elif not self._stop_asked:
            assert self._stream is not None
            self._stream.send(Stop(why))
            self._stop_asked = True

    def next(self) -> Event | None:
        if self._started is not None:
            event, self._started = self._started, None
            return event
        event = self._next()
        match event:
            case SampleFinished(sample=sample):
                self._under_way.ended(sample.key)
                self._under_way.num_finished += 1
                for each in self._mechanisms:
                    each.finished([sample], is_stopping=False)
            case SampleAborted(sample=sample):
                self._under_way.ended(sample.key)
                for each in self._mechanisms:
                    each.aborted(sample.key)
        return event

    def _next(self) -> Event | None:
        if not self._leads:
            item = self._next_item()
            if item is None:
                self._receive()
                item = self._next_item()
            return None if item is None else self._event(item)
        self._stop_if_asked()
        item = self._next_to_publish()
        if item is None:
            self._receive()
            self._stop_if_asked()
            item = self._next_to_publish()
        if item is not None:
            if self._stream is not None:
                self._stream.publish(item)
            return self._event(item)
        assert self._merger is not None
        if not (self._due_aborts or self._awaited):
            low_watermark = self._merger.low_watermark()
            if low_watermark > self._workers.low_watermark and self._stream is not None:
                self._stream.publish(LowWatermark(low_watermark))
            self._workers.raise_low_watermark(low_watermark)
        if self._stream is not None:
            self._stream.pump()
        return None

    def wait(self, timeout_s: float) -> None:
        if not self._leads:
            assert self._stream is not None
            if self._scoring.num_pending:
                self._take(self._scoring.wait(SCORING_POLL_S))
            else:
                self._stream.wait(timeout_s)
            return
        process = self._awaited_process()
        if process == self._process:
            if not self._scoring.num_pending:
                key = next(iter(self._scores.values()))[0]
                raise RuntimeError(f"step {self._scoring.step}: the reward pool has lost {key}")
            is_alone = self._stream is None
            self._take(self._scoring.wait(timeout_s if is_alone else min(timeout_s, SCORING_POLL_S)))
        else:
            assert self._stream is not None
            self._stream.wait(min(timeout_s, SCORING_POLL_S) if self._scoring.num_pending else timeout_s, process)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _awaited_process(self) -> int:
        """The process that the next event has to come from."""
        assert self._merger is not None
        if self._due_aborts:
            return self._owners[self.launched[self._due_aborts[0]].key]
        slowest = self._merger.slowest()
        if self._scores and (self._awaited or slowest is None):
            number, (key, _) = next(iter(self._scores.items()))
            return self._owners.get(key, number % self._num_processes)
        if slowest is None:
            raise RuntimeError(f"step {self._scoring.step}: the round waits, and nothing is running or being scored")
        process = self._process_of(slowest)
        assert process != self._process, f"worker {slowest} holds the low watermark and does not go on"
        return process

    def _receive(self) -> None:
        """Receives what happened here and elsewhere."""
        for progress in self._workers.take_progress():
            if self._merger is not None:
                self._merger.add(progress)
            else:
                self._send(progress)
        self._take(self._scoring.completed())
        if self._stream is not None and not self._leads:
            self._stream.pump()
        elif self._stream is not None:
            self._take_notices()

    def _take(self, arrivals: Sequence[Arrival]) -> None:
        """Takes in verdicts of this process."""
        for arrival in arrivals:
            number = self._numbers.get(arrival.verdict.key)
            if number is None:
                continue
            if self._leads:
                self._scored(number, arrival if self._stream is None else shortened(arrival))
            else:
                self._send(Scored(number, arrival))

    def _take_notices(self) -> None:
        """In process 0: receives what others have sent."""
        assert self._stream is not None
        self._stream.pump()
        for process, notice in self._stream.notices():
            match notice:
                case WorkerProgress():
                    assert self._merger is not None
                    self._merger.add(notice)
                case AbortResult():
                    self._take_abort_result(notice)
                case Scored():
                    self._scored(notice.number, notice.arrival)
                case Decided():
                    if self._journal is not None:
                        self._journal.append(notice.step, notice.kind, notice.key, notice.decision)
                case Stop(why=why):
                    self._why = self._why or why
                case Counted(counts=counts):
                    self._counts[process] = counts[0]
                case Failed():
                    self._stream.publish(notice)
                    self._stream.pump()
                    self._fail(notice)

    def _send(self, notice: Notice) -> None:
        assert self._stream is not None
        self._stream.send(notice)

    def _take_abort_result(self, result: AbortResult) -> None:
        if self._leads:
            self._abort_results[result.request_id] = result
        else:
            self._send(result)

    def _scored(self, number: int, arrival: Arrival) -> None:
        """In process 0: a verdict has come. What a clock decided is in the journal before any round receives it."""
        if number not in self._scores:
            return  # not wanted any more
        if arrival.is_decided and self._journal is not None:
            place, verdict = self._scoring.place(arrival.verdict.key), arrival.verdict
            self._journal.append(self._scoring.step, "verdict", place, recorded(verdict))
        self._arrived[number] = arrival

    def _stop_if_asked(self) -> None:
        why, self._why = self._why, None
        if why is None:
            return
        self._stop_agreed = True
        if self._stream is not None:
            self._stream.publish(Stop(why))
            self._stream.pump()
        raise Interrupted(why) if why else Interrupted

    def _next_item(self) -> Item | None:
        """Of a process that follows: the next item that is an event."""
        assert self._stream is not None
        while (item := self._stream.next_item()) is not None:
            match item:
                case LowWatermark(tick=tick):
                    self._workers.raise_low_watermark(tick)
                case Stop(why=why):
                    self._stop_agreed = True
                    raise Interrupted(why) if why else Interrupted
                case Failed():
                    self._fail(item)
                case _:
                    return item
        return None

    def _fail(self, failed: Failed) -> None:
        raise RunFailed(f"host {failed.process}: {failed.why}")

    def _next_to_publish(self) -> Item | None:
        """In process 0: what is delivered and published next."""
        assert self._merger is not None
        if self._due_aborts:
            return self._abort_results.pop(self._due_aborts[0], None)
        number = next(iter(self._scores), None)
        if number is not None and number in self._arrived:
            return Scored(number, self._arrived.pop(number))
        return None if self._awaited else self._merger.next()

    def _event(self, item: Item) -> Event:
        """An item of the stream as an event of this round."""
        self._decides = True
        now_s = self._clock()
        match item:
            case Completion(request_id=request_id, sort_key=sort_key):
                assert not self._awaited, f"{item}: a verdict is due"
                assert not self._due_aborts, f"{item}: an abort result is due"
                finished = self._workers.deliver(item)
                self._update_idle({sort_key.worker})
                if finished is None:
                    sample = self._placeholder_sample(request_id, item.length, item.reason)
                else:
                    sample = replace(finished.sample, text=self._text_of(finished.sample))
                return SampleFinished(now_s, sample, sort_key.dispatch)
            case AbortResult(request_id=request_id):
                due = self._due_aborts.popleft()
                assert due == request_id, f"{item}: the abort result of request {due} is due"
                own = self._aborted.pop(request_id, None)
                sample = self._placeholder_sample(request_id, item.length, item.reason) if own is None else own
                if item.reason == "abort":
                    return SampleAborted(now_s, sample, item.dispatch)
                if own is not None:
                    sample = replace(sample, text=self._text_of(sample))
                return SampleFinished(now_s, sample, item.dispatch)
            case Scored(number=number, arrival=arrival):
                key, prompt = self._scores.pop(number)
                assert arrival.verdict.key == key, f"{item}: the verdict of {key} is due"
                self._numbers.pop(key)
                self._decides = number in self._awaited
                self._awaited.discard(number)
                self._scoring.learn(prompt, arrival)
                return arrival.verdict if self._num_processes == 1 else arrival.verdict.at(now_s)
        raise AssertionError(f"{item}: it is no event")

    def _update_idle(self, workers: Collection[int]) -> None:
        if self._merger is not None:
            for worker in workers:
                if not self._workers.placements.num_live_in(worker):
                    self._merger.became_idle(worker)

    def _placeholder_sample(self, request_id: int, length: int, reason: Any) -> Sample:
        """A response of another process, without its content."""
        request = self.launched[request_id]
        kept = len(request.generated)
        versions = _repeated(np.int32(self._version), length)
        if kept:
            before = np.asarray(request.generated_versions, np.int32)
            versions = np.concatenate([before, np.full(length - kept, self._version, np.int32)])
        ids, logprobs = _repeated(np.int32(0), length), _repeated(np.float32(0), length)
        return Sample(request.key, ids, logprobs, logprobs, versions, reason)


def _repeated(value: np.generic, length: int) -> np.ndarray:
    """[length], read-only: one value that stands for all; `np.broadcast_to` takes ten times as long."""
    return np.ndarray((length,), value.dtype, value, strides=(0,))
