"""The events of a round as the backend receives them: one protocol, and the source for workers that obey at once.

Purpose: `RoundEvents` is what stands between the backend and its workers and scoring. `DirectEvents` is for the workers
of one process, whose commands take effect at once, and which requests may leave for each other; `OrderedEvents`
(`jaxrl.runtime.ordered`) for workers that are synchronised with those of other processes, whose commands take effect a
lookahead later.

Source: docs/architecture.md, which says why there are two: one engine alone must not wait for a lookahead, and moves of
requests between workers are asked for where all that has ended has been delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from jaxrl.record.journal import Journal
from jaxrl.runtime.plans import PlanRunner
from jaxrl.runtime.round_end import RoundCounts, TextOf
from jaxrl.runtime.verdicts import Scoring, Verdicts
from jaxrl.scheduling.mechanism import Mechanism, RoundInfo, UnderWay
from jaxrl.scheduling.rounds.events import Event, Interrupted, RoundStarted, SampleAborted, SampleFinished, Verdict
from jaxrl.scheduling.tokens.engine import Finished
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.types import Prompt, Sample, SampleKey


class RoundEvents(Protocol):
    """The events of a round, and the commands that it gives."""

    @property
    def stop_agreed(self) -> bool:
        """Whether all processes of the run have agreed to stop."""
        ...

    @property
    def generating(self) -> bool:
        """As `jaxrl.runtime.backend.RolloutBackend.generating`."""
        ...

    @property
    def num_plannable(self) -> int | None:
        """Requests of this process that wait or run, where `run_plan` may serve a worker now; None: none may. Raises
        Interrupted where a worker cannot go on."""
        ...

    @property
    def is_scoring(self) -> bool:
        """Whether there is something to wait for: verdicts, or other processes."""
        ...

    # -- a round

    def begin(self, info: RoundInfo, policy_version: int) -> None: ...

    def next(self) -> Event | None:
        """The next event, or None where something has to happen first; never waits. Raises Interrupted where the round
        stops here, RunFailed where another process has failed."""
        ...

    def ask_stop(self, why: str = "") -> None:
        """A stop was asked for. Raises Interrupted where the round stops here."""
        ...

    def run_plan(self) -> int | None:
        """Serves the worker whose turn it is; the worker of this process of which a plan has been collected."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Waits for a verdict, or for messages of other processes. Raises RuntimeError where nothing will come."""
        ...

    def cancel(self) -> None:
        """Drops the round."""
        ...

    def end_scoring(self) -> Mapping[str, float]:
        """The round is over; what the scoring has counted in it."""
        ...

    def end(self, counts: RoundCounts) -> Sequence[RoundCounts]:
        """The round is over; what every process has counted in it, by their numbers."""
        ...

    def exchange(self, samples: Sequence[Sample]) -> None:
        """Fills in, in place, the content of samples that other processes have drawn."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What messages and waiting have cost in the round; nothing where there are no other processes."""
        ...

    # -- its commands

    def launch(self, request: Request, worker: int | None) -> None: ...

    def finished(self, finished: Sequence[Finished]) -> None:
        """Reports samples to the round that had ended before it launched them."""
        ...

    def abort(self, keys: Sequence[SampleKey], *, keep: bool) -> None: ...

    def score(self, prompt: Prompt, sample: Sample) -> None: ...

    def cancel_scores(self, keys: Collection[SampleKey]) -> None: ...

    def await_verdict(self, key: SampleKey) -> None: ...


class DirectEvents:
    """Implements `RoundEvents` over the workers of one process, whose commands take effect at once.

    Args:
      under_way: what there is of the round, with the workers. plans: runs their plans.
      scoring: scores finished samples. text_of: makes a response's text.
      mechanisms: called with what ends.
      journal: where decisions of the clock go; None: nowhere.
    """

    stop_agreed = False

    def __init__(
        self,
        under_way: UnderWay,
        plans: PlanRunner,
        scoring: Scoring,
        text_of: TextOf,
        mechanisms: Sequence[Mechanism],
        journal: Journal | None,
    ) -> None:
        self._under_way, self._plans, self._text_of = under_way, plans, text_of
        self._workers, self._clock = under_way.direct, under_way.clock
        self._mechanisms = mechanisms
        self._verdicts = Verdicts(scoring, self._clock, journal, mechanisms)
        self._events: deque[Event] = deque()
        self._awaited: set[SampleKey] = set()  # no plan is made before these verdicts are there

    @property
    def generating(self) -> bool:
        drawing = bool(self._under_way.requests) and not self._awaited
        return drawing or any(not isinstance(event, Verdict) for event in self._events)

    @property
    def num_plannable(self) -> int | None:
        if self._workers.is_idle or self._awaited:
            return None
        return len(self._workers.unfinished())

    @property
    def is_scoring(self) -> bool:
        return self._verdicts.due is not None

    # -- a round -----------------------------------------------------------------------------------------------------

    def begin(self, info: RoundInfo, policy_version: int) -> None:
        self._verdicts.begin(info.step, info.index)
        self._events.append(RoundStarted(self._clock()))

    def next(self) -> Event | None:
        if not self._events:
            self._events += self._verdicts.completed()
        if not self._events:
            return None
        event = self._events.popleft()
        if isinstance(event, Verdict):
            self._awaited.discard(event.key)
        return event

    def ask_stop(self, why: str = "") -> None:
        raise Interrupted(why) if why else Interrupted

    def run_plan(self) -> int | None:
        finished, collected = self._plans.run(self._workers)
        self.finished(finished)
        return collected

    def wait(self, timeout_s: float) -> None:
        self._events += self._verdicts.wait(timeout_s)

    def cancel(self) -> None:
        self._workers.abort(self._workers.unfinished())
        self._workers.drain()
        self._verdicts.clear()
        self._events.clear()
        self._awaited.clear()

    def end_scoring(self) -> Mapping[str, float]:
        assert self._verdicts.due is None, "a round ends while something of it is being scored"
        return self._verdicts.own.end()

    def end(self, counts: RoundCounts) -> Sequence[RoundCounts]:
        return [counts]

    def exchange(self, samples: Sequence[Sample]) -> None:
        """All are of this process."""

    def take_metrics(self) -> dict[str, float]:
        return {}

    # -- its commands ------------------------------------------------------------------------------------------------

    def launch(self, request: Request, worker: int | None) -> None:
        self._workers.add(request, worker)

    def abort(self, keys: Sequence[SampleKey], *, keep: bool) -> None:
        """Ends requests. `Abort` says what becomes of those that had ended already and were not delivered."""
        if keep:
            self.finished(self._workers.drain(), is_stopping=True)
        else:
            gone = set(keys)
            undelivered = [e for e in self._events if isinstance(e, SampleFinished) and e.sample.key in gone]
            self._events = deque(e for e in self._events if all(e is not other for other in undelivered))
            for event in undelivered:  # drawn no more since it ended
                self._aborted(replace(event.sample, finish_reason="abort"), event.dispatch)
        requests = self._under_way.requests
        live = [requests[key] for key in keys if key in requests]
        last = self._workers.counters.plans - 1
        for key in keys:
            for each in self._mechanisms if key not in requests else ():
                if (sample := each.given_up(key, keep=keep)) is not None:
                    self._under_way.ended(key)
                    self._aborted(replace(sample, finish_reason="abort"), last)
        for sample in self._workers.abort(live):
            self._under_way.ended(sample.key)
            self._aborted(sample, last)

    def score(self, prompt: Prompt, sample: Sample) -> None:
        self._verdicts.send(prompt, sample)

    def cancel_scores(self, keys: Collection[SampleKey]) -> None:
        gone = set(keys)
        self._verdicts.cancel(gone)
        self._awaited -= gone
        self._events = deque(e for e in self._events if not (isinstance(e, Verdict) and e.key in gone))

    def await_verdict(self, key: SampleKey) -> None:
        self._awaited.add(key)

    # -- what ended --------------------------------------------------------------------------------------------------

    def finished(self, finished: Sequence[Finished], *, is_stopping: bool = False) -> None:
        """Samples have ended by themselves. `is_stopping`: the round is about to end the others."""
        now_s, ended = self._clock(), list[Sample]()
        for one in finished:
            if any(each.keeps(one) for each in self._mechanisms):
                continue
            sample = replace(one.sample, text=self._text_of(one.sample))
            self._events.append(SampleFinished(now_s, sample, one.dispatch))
            self._under_way.ended(sample.key)
            self._under_way.num_finished += 1
            ended.append(sample)
        if ended:
            for each in self._mechanisms:
                each.finished(ended, is_stopping=is_stopping)

    def _aborted(self, sample: Sample, dispatch: int) -> None:
        for each in self._mechanisms:
            each.aborted(sample.key)
        self._events.append(SampleAborted(self._clock(), sample, dispatch))
