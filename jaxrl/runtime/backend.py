"""The machine behind the loop, real or simulated: workers, a scoring, and the clock of both.

Purpose: carries out a round's commands and turns what happens into its events (`jaxrl.scheduling.rounds.events`). While
samples are still decoding, finished ones are being scored; their verdicts are handed to the round in the order in which
the samples completed, even when one arrives late.

Source: docs/architecture.md. Rewards beside the rollout: RollPacker §4.3.

Real and simulated runs differ in what they give to the backend: a mesh, a pool of processes, a tokenizer, a journal and
the machine's clock; or modelled devices and scoring, both on one simulated clock, and no journal. The host waits for a
plan's end before it looks for verdicts: the round first hears of the responses that ended in the plan, then of the
verdicts that came in meanwhile.

A clock, or something outside the run, decides only one thing here: verdicts, such as that a scorer timed out. Those are
journalled before the round hears of them (`jaxrl.runtime.verdicts`), so a step that runs again after a crash gets the
same. A simulated clock needs no journal.

Several workers that keep one logical order (`PacedWorkers`), here or in other processes, have their events from
`jaxrl.runtime.ordered`; a round's commands then take effect a lookahead later.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxrl.data.stops import TextDecoder
from jaxrl.record.journal import Journal
from jaxrl.rewards.reward_metrics import RewardMetrics as VerdictTally
from jaxrl.runtime.head_start import HeadStarts, Offer, WeightBuffer
from jaxrl.runtime.history import HistorySession
from jaxrl.runtime.lanes import PlanTimeline
from jaxrl.runtime.ordered import OrderedEvents
from jaxrl.runtime.plans import PlanRunner, Worker
from jaxrl.runtime.ranking import RankingSession
from jaxrl.runtime.round_end import Hosts, MissingTokens, RoundCounts, merged, samples_of, work_metrics
from jaxrl.runtime.streaming import StreamSession
from jaxrl.runtime.verdicts import Scoring, Verdicts
from jaxrl.scheduling.layouts.control import Layouts
from jaxrl.scheduling.rounds.adaptive_timeout import AdaptiveTimeouts
from jaxrl.scheduling.rounds.batches import RoundResult
from jaxrl.scheduling.rounds.events import (
    Abort,
    AwaitVerdict,
    CancelScore,
    Command,
    Event,
    Interrupted,
    Launch,
    RoundStarted,
    SampleAborted,
    SampleFinished,
    Score,
    Verdict,
)
from jaxrl.scheduling.rounds.judge_turns import Judge, busy_rows
from jaxrl.scheduling.rounds.ranking_groups import RankingGroups
from jaxrl.scheduling.tokens.engine import Engine, Finished
from jaxrl.scheduling.tokens.paced import PacedWorkers
from jaxrl.scheduling.tokens.plan import Request, resume
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.scheduling.tokens.workers import By, Workers
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams

POLL_S = 0.5  # how long to wait for a verdict before looking again


def text_by(tokenizer: TextDecoder) -> Callable[[Sample], str]:
    """Makes a response's text from its tokens."""
    return lambda sample: tokenizer.decode(sample.token_ids.tolist())


class RolloutBackend:
    """Implements `jaxrl.loop.Backend`.

    Args:
      engine, worker: the engine and the executor under it; or several workers' engines, and their executors together;
        of several processes, those of this one.
      rewards: scores finished samples beside the rollout.
      text_of: makes a response's text, for scorers and people.
      weights: gives the trainer's current weights, on the devices.
      clock: seconds from any origin, for the times of events; `rewards` uses the same clock.
      journal: where decisions of the clock go; None: they are not kept, and there are no earlier ones.
      timeline: where plans and busy rows are drawn; None: nowhere.
      on_progress: called with (rows busy, rows, tokens so far, samples finished, samples launched) after each plan.
      beat: called whenever the pool has been asked for verdicts: it works, and ends what takes longer than its limits.
      interrupted: whether a stop was asked for; asked after every plan, because a response may be long.
      layouts: changes the layout between rounds and inside them; None: it stays.
      stream: frees workers in the middle of a round, for gradients; None: none is freed.
      history: what responses of earlier rounds are kept for; None: they are not kept.
      timeouts: as in `jaxrl.runtime.verdicts.Verdicts`.
      tally: counts the verdicts that the round hears of.
      judge: scores on these devices, in turns, what `rewards` gives it; None: nothing does.
      hosts: the other processes of the run, for `PacedWorkers`; None: there are none.
      on_event: called with every event that is handed to the round.
    """

    def __init__(
        self,
        engine: Engine | Workers | PacedWorkers,
        worker: Worker,
        rewards: Scoring,
        text_of: Callable[[Sample], str],
        weights: Callable[[], Any],
        *,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
        timeline: PlanTimeline | None = None,
        on_progress: Callable[[int, int, int, int, int], None] = lambda *_: None,
        beat: Callable[[], None] = lambda: None,
        interrupted: Callable[[], bool] = lambda: False,
        layouts: Layouts | None = None,
        stream: StreamSession | None = None,
        history: HistorySession | None = None,
        timeouts: AdaptiveTimeouts | None = None,
        tally: VerdictTally | None = None,
        judge: Judge | None = None,
        hosts: Hosts | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.engine = Workers([engine]) if isinstance(engine, Engine) else engine
        self.worker = worker
        self._verdicts = Verdicts(rewards, clock, journal, timeouts)
        self._tally = VerdictTally() if tally is None else tally
        self._sources: dict[SampleKey, str] = {}  # of samples whose verdict the round has still to hear
        self._ordered: OrderedEvents | None = None
        if isinstance(self.engine, PacedWorkers):
            assert stream is None, "gradients beside the rollout move requests between workers"
            to_others = None if hosts is None else hosts.stream
            self._ordered = OrderedEvents(self.engine, self._verdicts.own, text_of, clock, journal, to_others)
        self._hosts, self._on_event = hosts, on_event
        self._text_of = text_of
        self._weights = weights
        self._clock = clock
        self._timeline = timeline
        self._on_progress = on_progress
        self._beat = beat
        self._interrupted = interrupted
        self._layouts = layouts
        self._stream = stream
        self._ranking: RankingSession | None = None
        self._history = history
        self._judge = judge
        self._request_ids = itertools.count()
        self._ready, self._version = False, 0  # of the rollout's weights
        self._unused: int | None = None  # the same, where no round has begun with them
        self._step, self._round = -1, 0
        self._params = SamplingParams()
        self._events: deque[Event] = deque()
        self._awaited: set[SampleKey] = set()  # no plan is made before these verdicts are there
        self._requests: dict[SampleKey, int] = {}
        self._num_launched = self._num_finished = 0
        self._under_way = Counter[tuple[int, int]]()  # samples by (epoch, prompt index), of every prompt of the round
        self._plans = PlanRunner(self.engine, self._requests, timeline, layouts, history)
        self._recompiles = 0

    def rank(self, ranking: RankingGroups, buffer: WeightBuffer, by: By) -> None:
        """From here on, rounds in ranking groups are looked after, and the next one may begin in the present one.

        Args:
          ranking: ranks them. buffer: the executors. by: how outliers move.
        """
        ahead = HeadStarts(self.direct, buffer, self._weights, self._start, self._clock)
        self._ranking = RankingSession(ranking, self.direct, ahead, by, self._clock)

    # -- memory phases -----------------------------------------------------------------------------------------------

    def enter_rollout(self, policy_version: int) -> None:
        """Brings the weights into the rollout layout and allocates the KV pool, unless they wait there unused."""
        if self._unused == policy_version:
            return
        self._version = policy_version
        if self._ranking is not None and self._ranking.ahead.is_on:
            self._ranking.ahead.enter(policy_version)
            return
        if self._layouts is not None and not self._ready:
            self._layouts.enter()
        self.worker.sync_weights(self._weights(), policy_version)
        self.worker.allocate()  # also where all but a worker that was freed in the last round have their pools
        self._ready, self._unused = True, policy_version

    def leave_rollout(self) -> None:
        """Gives the memory of the KV pool and the rollout weights to the update; not while the next round has begun."""
        if self._judge is not None:
            self._judge.release()
        if self._ready and not (self._ranking is not None and self._ranking.ahead.is_on):
            self.worker.release(weights=True)
            self._ready, self._unused = False, None

    @property
    def stop_agreed(self) -> bool:
        """Whether all processes of the run have agreed to stop; with several, the loop may ask nothing else."""
        return self._ordered is not None and self._ordered.stop_agreed

    # -- one round ---------------------------------------------------------------------------------------------------

    def begin(self, step: int, params: SamplingParams, kind: str = "all") -> None:
        """A round of training step `step` starts; its responses are drawn with `params`. `kind`: "eval" for held-out
        prompts, else the batch rule's kind of round, for the layout."""
        assert self.engine.is_idle or self._num_ahead, "a round begins while requests of another are running"
        assert self._ready, "a round begins before enter_rollout"
        # A step may have two rounds with prompts of the same key, training and evaluation. Their order says nothing:
        # with one-step-off the training round of the next step comes between.
        self._round = int(kind == "eval")
        self._step, self._params, self._unused = step, params, None
        self._verdicts.begin(step, self._round)
        if self._ordered is not None:
            self._ordered.begin(self._version)
        self._events.append(RoundStarted(self._clock()))
        self._num_launched = self._num_finished = 0
        self._under_way.clear()
        self._plans.begin()
        self._recompiles = self.worker.recompiles
        if self._layouts is not None:
            self._layouts.begin(step, self._round, kind)
        if self._stream is not None:
            self._stream.begin(kind)
        if self._ranking is not None:
            self._ranking.begin()
        if self._history is not None:
            self._history.begin(kind)

    def expect(self, offer: Offer | None) -> None:
        """Of the round that has begun: what the next one will launch is offered between plans; None: nothing is."""
        assert self._ranking is not None, "nothing ranks rounds here"
        self._ranking.ahead.expect(offer)

    @property
    def _num_ahead(self) -> int:
        """Responses of the next round that were begun."""
        return 0 if self._ranking is None else self._ranking.ahead.num_begun

    @property
    def direct(self) -> Workers:
        """The workers, where what is commanded takes effect at once."""
        assert isinstance(self.engine, Workers)
        return self.engine

    @property
    def generating(self) -> bool:
        """Whether samples are being drawn, or the round has not yet been told that they ended.

        Not while the round awaits a verdict, because no plan is made before it is there. It ends when the last response
        has been told; a plan of rows that have all stopped may then still be in flight.
        """
        if self._ordered is not None:
            return (bool(self._ordered.num_live) and not self._ordered.is_awaiting) or self._ordered.has_answers_due
        drawing = bool(self._requests) and not self._awaited
        return drawing or any(not isinstance(event, Verdict) for event in self._events)

    def wait(self) -> Event:
        """The next event; blocks on the engine while it runs, then on the scoring.

        Raises:
          Interrupted: a stop was asked for and no event is due.
          RunFailed: another process has failed.
        """
        while not self._events:
            if self._ordered is not None:
                self._go_on(self._ordered)
                continue
            if self._interrupted():
                raise Interrupted
            self._events += self._verdicts.completed()
            if self._events:
                break
            if not self.engine.is_idle and not self._awaited:
                self._has_judged(busy_rows(len(self.engine.unfinished()), self.engine.num_rows))
                self._run_plan()
            elif self._verdicts.due is not None:
                if not self._has_judged(0):
                    self._events += self._verdicts.wait(POLL_S)
                self._beat()
                if self._stream is not None:
                    self._stream.feed()
                if self._ranking is not None:
                    self._ranking.look()
            else:
                raise RuntimeError(f"step {self._step}: the round waits, and nothing is running or being scored")
        event = self._events.popleft()
        if isinstance(event, Verdict):
            self._awaited.discard(event.key)
            self._tally.add(self._sources.pop(event.key), event)
        self._on_event(event)
        return event

    def apply(self, command: Command) -> None:
        match command:
            case Launch():
                self._launch(command)
            case Score(prompt=prompt, sample=sample):
                self._sources[sample.key] = prompt.source
                (self._verdicts.send if self._ordered is None else self._ordered.score)(prompt, sample)
            case Abort(keys=keys, keep=keep) if self._ordered is not None:
                self._ordered.abort([self._requests[key] for key in keys], keep=keep)
            case Abort(keys=keys, keep=keep):
                self._abort(keys, keep)
            case CancelScore(keys=keys):
                for key in keys:
                    self._sources.pop(key, None)
                self._cancel_score(keys) if self._ordered is None else self._ordered.cancel_scores(keys)
            case AwaitVerdict(key=key):
                self._awaited.add(key) if self._ordered is None else self._ordered.await_verdict(key)

    def cancel(self) -> None:
        """Drops the round: no event of it will follow."""
        if self._ordered is not None:
            self._ordered.cancel()
        else:
            self.direct.abort(self.engine.unfinished())
            self.engine.drain()
        self._plans.follow()
        if self._layouts is not None:
            self._layouts.cancel()
        if self._stream is not None:
            self._stream.cancel()
        if self._ranking is not None:
            self._ranking.ahead.cancel()
        if self._history is not None:
            self._history.cancel()
        self._verdicts.clear()
        for kept in (self._events, self._awaited, self._requests, self._sources, self._tally):
            kept.clear()

    def end(self, result: RoundResult | None = None) -> dict[str, float]:
        """The round is over; its metrics. `result`: what its rule has made of it; None: an evaluation's, or none has
        any use for it."""
        assert not (self._requests if self._num_ahead else self.engine.unfinished()), "a round ends while it is running"
        if not self._num_ahead:
            self.engine.drain()  # a plan of rows that have all stopped may still be in flight
        self._plans.follow()
        self._requests.clear()
        assert self._verdicts.due is None, "a round ends while something of it is being scored"
        workers = self._plans.counted()
        layouts, states = {}, []
        if self._layouts is not None:
            layouts, states = self._layouts.end([each.preemptions for each in workers]), self._layouts.told()
        recompiles = self.worker.recompiles - self._recompiles
        counts = [RoundCounts(workers, recompiles, self._verdicts.own.end(), layouts, states)]
        learned = () if result is None else (*result.groups, *result.judged)
        if self._ordered is not None:
            counts = [RoundCounts.read(each) for each in self._ordered.end(counts[0].written())]
            if self._layouts is not None:
                self._layouts.heard([state for each in counts for state in each.states])
            if self._hosts is not None and result is not None:
                found = samples_of(result if self._history is not None else replace(result, judged=[]))
                missing = MissingTokens([(sample, self._ordered.owner_of(sample.key)) for sample in found])
                self._hosts.exchange(missing.samples, missing.owners)
                missing.fill(self._hosts.stream.process, self._text_of)
        done = sum((each.total for each in counts), Counters())
        return {
            **work_metrics(done),
            **self._tally.take(merged(counts)),
            **({} if self._hosts is None else self._hosts.stream.take_metrics()),
            **self._verdicts.own.limit_metrics(),
            **(self._stream.end() if self._stream is not None else {}),
            **(self._ranking.end() if self._ranking is not None and not self._round else {}),
            **(self._history.end(learned, done) if self._history is not None else {}),
        }

    # -- inside ------------------------------------------------------------------------------------------------------

    def _has_judged(self, busy_rows: int) -> bool:
        """Lets the judge take a turn; whether it did."""
        if self._judge is None or not self._judge.turn(busy_rows, self.engine.num_rows):
            return False
        for engine in self.engine.engines:
            engine.paused()
        return True

    def _launch(self, command: Launch) -> None:
        """Starts responses, or goes on with them from their token ids. Finished ones need no work."""
        prompt, begun = command.prompt, {sample.key: sample for sample in command.resumed}
        if self._ranking is not None:
            self._ranking.launched(command)
        for key, worker in itertools.zip_longest(command.keys, command.workers):
            self._num_launched += 1
            self._under_way[prompt.key] += 1
            ahead = None if self._ranking is None else self._ranking.ahead.adopt(key)
            if ahead is None:
                self._requests[key] = self._start(prompt, key, worker, begun.get(key))
            elif isinstance(ahead, Finished):
                self._requests[key] = ahead.request_id
                self._tell_finished([ahead])
            else:
                self._requests[key] = ahead

    def _start(self, prompt: Prompt, key: SampleKey, worker: int | None, begun: Sample | None = None) -> int:
        """Gives a response to a worker, with the tokens that it has; returns the id of its request."""
        history = None if self._history is None else self._history.index_of(prompt)
        request = Request(
            next(self._request_ids), key, prompt.token_ids, self._params, share=prompt.key, history=history
        )
        start = self.direct.add if self._ordered is None else self._ordered.launch
        start(request if begun is None else resume(request, begun), worker)
        return request.request_id

    def _go_on(self, ordered: OrderedEvents) -> None:
        """Of workers in one order: takes the next event; or else does what can be done, or waits."""
        assert isinstance(self.engine, PacedWorkers)
        event = ordered.next()
        if event is not None:
            self._events.append(event)
            self._heard(event)
            return
        if self._interrupted():
            ordered.ask_stop()
        if self._plans.stuck is not None:
            ordered.ask_stop(self._plans.stuck)
        worker = None if self._plans.stuck is not None else self.engine.turn
        rows = self.engine.num_rows
        if worker is not None:
            self._has_judged(busy_rows(self.engine.num_unfinished, rows))
            self._show(self._plans.run_paced(self.engine, worker))
        elif not self._has_judged(0):
            ordered.wait(POLL_S)
            self._beat()

    def _heard(self, event: Event) -> None:
        """A response of workers in one order has ended, or was aborted."""
        if isinstance(event, Verdict | RoundStarted):
            return
        sample = event.sample
        self._requests.pop(sample.key)
        self._under_way[sample.key.epoch, sample.key.prompt_index] -= 1
        if isinstance(event, SampleFinished):
            self._num_finished += 1
            if self._layouts is not None:
                self._layouts.finished(len(sample))
            if self._history is not None:
                self._history.ended([sample])

    def _abort(self, keys: Sequence[SampleKey], keep: bool) -> None:
        """Ends requests. `Abort` says what the round hears of those that had ended already without being told."""
        if keep:
            self._tell_finished(self.direct.drain(), is_stopping=True)
        else:
            gone = set(keys)
            untold = [e for e in self._events if isinstance(e, SampleFinished) and e.sample.key in gone]
            self._events = deque(e for e in self._events if all(e is not other for other in untold))
            for event in untold:
                self._tell_aborted(replace(event.sample, finish_reason="abort"), event.dispatch)
        live = [key for key in keys if key in self._requests]
        last = self.engine.counters.plans - 1
        for sample in self.direct.abort([self._requests.pop(key) for key in live]):
            self._tell_aborted(sample, last)

    def _tell_aborted(self, sample: Sample, dispatch: int) -> None:
        if self._ranking is not None:
            self._ranking.aborted(sample.key)
        self._under_way[sample.key.epoch, sample.key.prompt_index] -= 1
        self._events.append(SampleAborted(self._clock(), sample, dispatch))

    def _tell_finished(self, finished: Sequence[Finished], *, is_stopping: bool = False) -> None:
        now_s = self._clock()
        if self._ranking is not None:
            finished = self._ranking.ended(finished)
        for one in finished:
            sample = replace(one.sample, text=self._text_of(one.sample))
            self._events.append(SampleFinished(now_s, sample, one.dispatch))
            self._requests.pop(sample.key)
            self._num_finished += 1
            self._under_way[sample.key.epoch, sample.key.prompt_index] -= 1
            if self._layouts is not None:
                self._layouts.finished(len(sample))
        if self._history is not None:
            self._history.ended([one.sample for one in finished])
        if self._stream is not None and finished:
            done, launched = self._num_finished, self._num_launched
            if self._stream.counts == "prompts":
                done, launched = list(self._under_way.values()).count(0), len(self._under_way)
            self._stream.ended([len(one.sample) for one in finished], done, launched, is_stopping=is_stopping)

    def _run_plan(self) -> None:
        """Serves the worker whose turn it is."""
        if self._stream is not None and self._requests:  # else the plan is of rows that have all stopped
            self._stream.before_plan()
        finished, collected = self._plans.run(self.direct)
        self._tell_finished(finished)
        if self._ranking is not None:
            self._ranking.after_plan(self._requests)
        self._show(collected)

    def _show(self, worker: int | None) -> None:
        """A plan of a worker has been collected. Where nothing is generated, all its rows had stopped before."""
        if worker is not None:
            self._plans.show(worker, self._progress if self.generating else None)

    def _progress(self, busy: int, rows: int, tokens: int) -> None:
        self._on_progress(busy, rows, tokens, self._num_finished, self._num_launched)

    def _cancel_score(self, keys: Sequence[SampleKey]) -> None:
        gone = set(keys)
        self._verdicts.cancel(gone)
        self._awaited -= gone
        self._events = deque(e for e in self._events if not (isinstance(e, Verdict) and e.key in gone))
