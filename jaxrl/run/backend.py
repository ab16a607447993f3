"""The loop's backend, real or simulated: workers that draw, a pool that scores, and one clock for both.

It executes a round's commands and returns events (`jaxrl.scheduling.rounds.events`). Finished samples are scored while
others decode; the round receives their verdicts as `jaxrl.run.verdicts` says. Everything optional is a mechanism
(`jaxrl.scheduling.mechanism`). The backend calls mechanisms' hooks and knows none by name.

Source: rewards beside the rollout are RollPacker §4.3.

The host waits for a plan's end before it looks for verdicts: the round first receives the responses that ended in the
plan, then the verdicts that came in meanwhile.

Commands take effect at once, in the next plan. The order of events follows from the workers' plans alone
(`jaxrl.scheduling.tokens.local_workers`), wherever their devices are.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxrl.rewards.reward_metrics import RewardMetrics
from jaxrl.run.plan_timeline import PlanTracks, RowTracks
from jaxrl.run.verdicts import Verdicts
from jaxrl.scheduling.mechanism import PhaseOrder, RoundEnd, RoundInfo, RoundState
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
from jaxrl.scheduling.tokens.engine import Finished
from jaxrl.scheduling.tokens.plan import Request, resume
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams

if TYPE_CHECKING:
    from jaxrl.run.run import Run

POLL_S = 0.5  # how long to wait for a verdict before looking again


class RolloutBackend:
    """The rollout and the scoring of a run. `wait` raises `Interrupted` where a stop was asked for, or where the run
    cannot continue; the loop then cancels the round."""

    def __init__(self, run: Run) -> None:
        self.engine, self.executors, self.mechanisms = run.workers, run.executors, run.mechanisms
        self._run = run
        self._tally = RewardMetrics.configured(run.config)
        self._device_users = [each.device_user for each in run.mechanisms if each.device_user]
        self._order = next((each.phase_order for each in run.mechanisms if each.phase_order), PhaseOrder())
        self._sources: dict[SampleKey, str] = {}  # of samples whose verdict has still to be delivered
        self._request_ids = itertools.count()
        self._ready, self._version = False, 0  # of the rollout's weights
        self._unused: int | None = None  # the same, where no round has begun with them
        self._step, self._recompiles, self._is_training = -1, 0, True
        self._params = SamplingParams()
        self._state = RoundState(run.workers, run.clock, run.weights, self._start, self._deliver)
        self._plan_tracks = PlanTracks(run.workers.engines, run.timeline)
        self._row_tracks = None if run.timeline is None else RowTracks(run.workers.engines, run.timeline)
        self._before = [Counters() for _ in run.workers.engines]  # what each worker had counted before the round
        limits = next((each.score_limits for each in run.mechanisms if each.score_limits), None)
        self._verdicts = Verdicts(run.scoring, run.clock, run.journal, limits)
        self._events: deque[Event] = deque()
        for each in self.mechanisms:
            each.attach(self._state)
        self._parking = [each.parking for each in run.mechanisms if each.parking]

    # -- memory phases -----------------------------------------------------------------------------------------------

    def enter_rollout(self, policy_version: int) -> None:
        """Brings the weights into the rollout layout and allocates the KV pool, unless they wait there unused."""
        if self._unused == policy_version:
            return
        self._version = policy_version
        released = not self._ready
        entered = [each.enter_rollout(policy_version, was_released=released) for each in self.mechanisms]
        if any(entered):
            return
        self.executors.sync_weights(self._run.weights(), policy_version)
        self.executors.allocate()  # also where all but a worker that was freed in the last round have their pools
        self._ready, self._unused = True, policy_version

    def leave_rollout(self) -> None:
        """Gives the memory of the KV pool and the rollout weights to the update, unless a mechanism holds them."""
        holds = [each.leave_rollout() for each in self.mechanisms]
        if self._ready and not any(holds):
            self.executors.release(weights=True)
            self._ready, self._unused = False, None

    # -- one round ---------------------------------------------------------------------------------------------------

    def begin(self, info: RoundInfo, params: SamplingParams) -> None:
        """A round starts; its responses are drawn with `params`."""
        assert self.engine.is_idle or self._has_begun, "a round begins while requests of another are running"
        assert self._ready, "a round begins before enter_rollout"
        self._step, self._params, self._unused = info.step, params, None
        self._is_training = info.is_training
        self._state.begin()
        self._verdicts.begin(info.step, info.index)
        self._events.append(RoundStarted(self._run.clock()))
        self._before = [replace(engine.counters) for engine in self.engine.engines]
        self._recompiles = self.executors.recompiles
        for each in self.mechanisms:
            each.round_begins(info)

    @property
    def _has_begun(self) -> bool:
        return any(each.has_begun for each in self._parking)

    @property
    def generating(self) -> bool:
        """Whether samples are being drawn, or wait for what they need to continue, or their ends are not delivered yet.
        Not while the round awaits a verdict, because no plan is made before it is there."""
        drawing = bool(self._state.requests) and not self._state.awaited
        undelivered = any(not isinstance(event, Verdict) for event in self._events)
        return drawing or undelivered or any(each.has_pending for each in self._parking)

    def wait(self) -> Event:
        """The next event; blocks on the engine while it runs, then on the scoring."""
        while (event := self._next()) is None:
            if self._run.stop() and not self._order.defers_stop:
                raise Interrupted
            if not (self._state.awaited or self.engine.is_idle):
                self._use_gap(min(self.engine.num_unfinished, self.engine.num_rows))
                for each in self.mechanisms:
                    each.before_plan(None)
                self._serve()
            elif (pending := any(each.has_pending for each in self._parking)) or self._verdicts.due is not None:
                if not self._use_gap(0) and not pending:  # a mechanism waits itself, for either
                    self._events += self._verdicts.wait(POLL_S)
                self._run.beat("")
                for each in self.mechanisms:
                    each.while_waiting()
            else:
                raise RuntimeError(f"step {self._step}: the round waits, and nothing is running or being scored")
        if isinstance(event, Verdict):
            event = self._tally.add(self._sources.pop(event.key), event, is_training=self._is_training)
        return event

    def apply(self, commands: Sequence[Command]) -> None:
        """Carries out the round's answer to an event."""
        for each in self.mechanisms:
            commands = each.on_commands(commands)
        for command in commands:
            self._state.num_commands += 1
            match command:
                case Launch():
                    self._launch(command)
                case Score(prompt=prompt, sample=sample):
                    self._sources[sample.key] = prompt.source
                    self._verdicts.send(prompt, sample)
                case Abort(keys=keys, keep=keep):
                    self._abort(keys, keep=keep)
                case CancelScore(keys=keys):
                    self._cancel_scores(set(keys))
                case AwaitVerdict(key=key):
                    self._state.awaited.add(key)

    def cancel(self) -> None:
        """Drops the round: no event of it will follow."""
        self.engine.abort(self.engine.unfinished())
        self.engine.drain()
        self._verdicts.clear()
        self._follow()
        for each in self.mechanisms:
            each.round_cancelled()
        for kept in (self._state.requests, self._sources, self._tally, self._events, self._state.awaited):
            kept.clear()

    def end(self, result: RoundResult | None = None) -> dict[str, float]:
        """The round has ended; its metrics. `result`: what its rule has made of it; None: an evaluation has no rule."""
        assert not (self._state.requests if self._has_begun else self.engine.unfinished()), (
            "a round ends while it is running"
        )
        if not self._has_begun:
            self.engine.drain()  # a plan of rows that have all stopped may still be in flight
        self._follow()
        self._state.requests.clear()
        assert self._verdicts.due is None, "a round ends while something of it is being scored"
        counted = zip(self.engine.engines, self._before, strict=True)
        end = RoundEnd([engine.counters.since(before) for engine, before in counted], result)
        recompiles = self.executors.recompiles - self._recompiles
        scored = {"rollout/recompiles": recompiles, **self._verdicts.end()}
        measured = {**work_metrics(end.done), **self._tally.take(scored)}
        for each in self.mechanisms:
            measured |= each.round_ends(end)
        return measured

    # -- inside ------------------------------------------------------------------------------------------------------

    def _next(self) -> Event | None:
        if not self._events:
            self._events += self._verdicts.completed()
        if not self._events:
            return None
        event = self._events.popleft()
        if isinstance(event, Verdict):
            self._state.awaited.discard(event.key)
        return event

    def _use_gap(self, busy_rows: int) -> bool:
        """Lets mechanisms use the devices between two plans; returns whether one did."""
        used = [use(busy_rows) for use in self._device_users]
        if not any(used):
            return False
        for engine in self.engine.engines:
            engine.paused()
        return True

    def _launch(self, command: Launch) -> None:
        """Starts responses, or resumes them from their token ids. Finished ones need no work."""
        prompt, resumed = command.prompt, {sample.key: sample for sample in command.resumed}
        for key, worker in itertools.zip_longest(command.keys, command.workers):
            parked = next((found for each in self._parking if (found := each.adopt(key)) is not None), None)
            if isinstance(parked, Finished):
                self._state.launched(key, parked.request_id)
                self._deliver([parked])
            else:
                started = self._start(prompt, key, worker, resumed.get(key)) if parked is None else parked
                self._state.launched(key, started)

    def _start(self, prompt: Prompt, key: SampleKey, worker: int | None, begun: Sample | None = None) -> int:
        """Gives a response to a worker, with the tokens that it has; returns the id of its request."""
        request = Request(next(self._request_ids), key, prompt.token_ids, self._params, share=prompt.key)
        for each in self.mechanisms:
            request = each.on_request(request, prompt)
        self.engine.add(request if begun is None else resume(request, begun), worker)
        return request.request_id

    def _abort(self, keys: Sequence[SampleKey], *, keep: bool) -> None:
        """Ends requests. `Abort` says what becomes of those that had ended already and were not delivered."""
        if keep:
            self._deliver(self.engine.drain(), is_stopping=True)
        else:
            gone = set(keys)
            undelivered = [e for e in self._events if isinstance(e, SampleFinished) and e.sample.key in gone]
            self._events = deque(e for e in self._events if all(e is not other for other in undelivered))
            for event in undelivered:  # drawn no more since it ended
                self._aborted(event.sample, event.dispatch, keep=keep)
        requests = self._state.requests
        live = [requests[key] for key in keys if key in requests]
        last = self.engine.counters.plans - 1
        for key in keys:
            for each in self._parking if key not in requests else ():
                if (sample := each.release(key, keep=keep)) is not None:
                    self._state.ended(key)
                    self._aborted(sample, last, keep=keep)
        for sample in self.engine.abort(live):
            self._state.ended(sample.key)
            self._aborted(sample, last, keep=keep)

    def _aborted(self, sample: Sample, dispatch: int, *, keep: bool) -> None:
        for each in self.mechanisms:
            each.on_aborted(sample.key, keep=keep)
        self._events.append(SampleAborted(self._run.clock(), replace(sample, finish_reason="abort"), dispatch))

    def _cancel_scores(self, keys: Collection[SampleKey]) -> None:
        """No verdict on these is delivered."""
        for key in keys:
            self._sources.pop(key, None)
        self._verdicts.cancel(keys)
        self._state.awaited.difference_update(keys)
        self._events = deque(e for e in self._events if not (isinstance(e, Verdict) and e.key in keys))

    def _deliver(self, finished: Sequence[Finished], *, is_stopping: bool = False) -> None:
        """Samples have ended by themselves. `is_stopping`: the round is about to end the others."""
        now_s, ended = self._run.clock(), list[Sample]()
        for one in finished:
            if any(each.park(one) for each in self._parking):
                continue
            sample = replace(one.sample, text=self._run.text_of(one.sample))
            self._events.append(SampleFinished(now_s, sample, one.dispatch))
            self._state.ended(sample.key)
            self._state.num_finished += 1
            ended.append(sample)
        for each in self.mechanisms if ended else ():
            each.on_finished(ended, is_stopping=is_stopping)

    def _serve(self) -> None:
        """Serves the worker whose turn it is: makes a plan of it, or waits for one, or both where it is alone."""
        worker, collected = self.engine.next_worker(), None
        if worker is None:  # ends that waited for another worker's, whose requests have been aborted since
            finished = self.engine.step()
        else:
            if self.engine.makes_plan(worker):
                for each in self.mechanisms:
                    each.before_plan(worker)
            collected = worker if self.engine.waits(worker) else None
            with self._plan_tracks.step(worker):
                finished = self.engine.step(worker)
            if self._row_tracks is not None:
                self._row_tracks.follow(worker)
        self._deliver(finished)
        for each in self.mechanisms:
            each.after_plan(collected)
        if collected is not None:
            self._show()

    def _show(self) -> None:
        """A plan has been collected. Where nothing is generated, all its rows had stopped before."""
        busy, state = self.engine.num_running, self._state
        if self._run.timeline is not None:
            self._run.timeline.counter("rows", busy=busy)
        if self.generating:
            counts = zip(self.engine.engines, self._before, strict=True)
            tokens = sum(engine.counters.busy_row_steps - before.busy_row_steps for engine, before in counts)
            self._run.on_progress(busy, self.engine.num_rows, tokens, state.num_finished, state.num_launched)

    def _follow(self) -> None:
        """Requests may have been aborted, and plans collected, outside of `_serve`: updates the timeline."""
        for worker in range(len(self.engine.engines)):
            self._plan_tracks.follow(worker)
            if self._row_tracks is not None:
                self._row_tracks.follow(worker)


def work_metrics(done: Counters) -> dict[str, float]:
    """Metrics of what all workers have counted together."""
    return {
        "rollout/preemptions": done.preemptions,
        "rollout/bubble_ratio": done.bubble_ratio,
        "rollout/decode_steps": done.steps,
        "rollout/prefill_tokens": done.prefill_tokens,
        "rollout/shared_tokens": done.shared_tokens,
    }
