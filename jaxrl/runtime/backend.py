"""The real machine behind the loop: an engine on a mesh, a reward pool, and the journal between them and the clock.

Purpose: carries out a round's commands and turns what happens into its events (`jaxrl.scheduling.rounds.events`). While
samples are still decoding, finished ones are being scored in other processes; their verdicts are handed to the round
in the order in which the samples completed, however late they arrive (design §3, logical time). `SimulatedBackend`
(`jaxrl.sim.backend`) carries out the same commands in the same way on a simulated clock.

What a clock decides here is a scorer's time-out or crash: it is journalled before the round hears of it, and a step
that runs again after a crash hears the same.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from jaxrl.data.stops import TextDecoder
from jaxrl.record.journal import Journal
from jaxrl.record.timeline import Timeline
from jaxrl.scheduling.layouts.control import Layouts
from jaxrl.scheduling.layouts.relayout import SwitchFailed
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
from jaxrl.scheduling.tokens.engine import Engine, Finished
from jaxrl.scheduling.tokens.plan import Request, resume
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.types import Prompt, Sample, SampleKey, SamplingParams

_log = logging.getLogger(__name__)
POLL_S = 0.5  # how long to wait for a verdict before looking round again


class Worker(Protocol):
    """What the backend asks of an executor beyond running plans (`jaxrl.rollout.executor.MeshExecutor` has it)."""

    num_groups: int
    num_slots: int
    host_s: float

    @property
    def recompiles(self) -> int: ...

    def sync_weights(self, train_params: Any, policy_version: int, /) -> None: ...

    def allocate(self) -> None: ...

    def release(self, *, weights: bool = False) -> None: ...


class Scoring(Protocol):
    """A reward pool (`jaxrl.rewards.pool`)."""

    def submit(self, prompt: Prompt, sample: Sample, /) -> None: ...

    def cancel(self, keys: Collection[SampleKey], /) -> None: ...

    def completed(self) -> list[Verdict]: ...

    def wait(self, timeout_s: float, /) -> list[Verdict]: ...

    @property
    def num_pending(self) -> int: ...

    def take_metrics(self) -> dict[str, float]: ...


class RolloutBackend:
    """Implements `jaxrl.loop.Backend`.

    Args:
      engine, worker: the engine and the executor under it.
      rewards: scores finished samples beside the rollout.
      tokenizer: decodes responses for scorers and people.
      journal: where decisions of the clock go.
      timeline: rows busy and scoring times are drawn there.
      weights: gives the trainer's current weights, on the devices.
      on_progress: called with (rows busy, rows, tokens so far, samples finished, samples launched) after each plan.
      interrupted: whether a stop was asked for; looked at after every plan, for a response may be long.
      layouts: changes the layout between rounds and inside them; None: it stays.
    """

    def __init__(
        self,
        engine: Engine,
        worker: Worker,
        rewards: Scoring,
        tokenizer: TextDecoder,
        journal: Journal,
        timeline: Timeline,
        weights: Callable[[], Any],
        on_progress: Callable[[int, int, int, int, int], None] = lambda *_: None,
        interrupted: Callable[[], bool] = lambda: False,
        layouts: Layouts | None = None,
    ) -> None:
        self.engine = engine
        self.worker = worker
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._journal = journal
        self._timeline = timeline
        self._weights = weights
        self._on_progress = on_progress
        self._interrupted = interrupted
        self._layouts = layouts
        self._request_ids = itertools.count()
        self._ready = False
        self._step, self._round = -1, 0
        self._params = SamplingParams()
        self._events: deque[Event] = deque()
        self._due: deque[SampleKey] = deque()  # in the order in which the samples completed
        self._awaited: set[SampleKey] = set()  # verdicts without which no plan is made
        self._arrived: dict[SampleKey, Verdict] = {}
        self._requests: dict[SampleKey, int] = {}
        self._num_launched = self._num_finished = 0
        self._before = Counters()
        self._recompiles = 0

    # -- memory phases -----------------------------------------------------------------------------------------------

    def enter_rollout(self, policy_version: int) -> None:
        """Weights from the trainer to the rollout layout, on the devices; then the KV pool in what is left."""
        if self._layouts is not None and not self._ready:
            self._layouts.enter()
        self.worker.sync_weights(self._weights(), policy_version)
        if not self._ready:
            self.worker.allocate()
            self._ready = True

    def leave_rollout(self) -> None:
        """Gives the memory of the KV pool and the rollout weights to the update."""
        if self._ready:
            self.worker.release(weights=True)
            self._ready = False

    # -- one round ---------------------------------------------------------------------------------------------------

    def begin(self, step: int, params: SamplingParams, kind: str = "all") -> None:
        """A round of training step `step` starts; its responses are drawn with `params`. `kind`: for the layout."""
        assert self.engine.is_idle, "a round begins while requests of another are running"
        assert self._ready, "a round begins before enter_rollout"
        # a step may have two rounds, training and evaluation, and a prompt of each may have the same key
        self._round = self._round + 1 if step == self._step else 0
        self._step, self._params = step, params
        self._events.append(RoundStarted(time.monotonic()))
        self._num_launched = self._num_finished = 0
        self._before = replace(self.engine.counters)
        self._recompiles = self.worker.recompiles
        if self._layouts is not None:
            self._layouts.begin(step, self._round, kind)

    @property
    def generating(self) -> bool:
        """Whether samples are still being drawn, or their ends have not been told yet."""
        return not self.engine.is_idle or any(not isinstance(event, Verdict) for event in self._events)

    def wait(self) -> Event:
        """The next event; blocks on the engine while it runs, then on the reward pool.

        Raises `Interrupted` where a stop was asked for and no event is due.
        """
        while not self._events:
            if self._interrupted():
                raise Interrupted
            self._take(self._rewards.completed())
            if self._events:
                break
            if not self.engine.is_idle and not self._awaited:
                self._run_plan()
            elif self._due:
                if not self._rewards.num_pending:
                    raise RuntimeError(f"step {self._step}: the reward pool has lost {self._due[0]}")
                self._take(self._rewards.wait(POLL_S))
            else:
                raise RuntimeError(f"step {self._step}: the round waits, and nothing is running or being scored")
        event = self._events.popleft()
        if isinstance(event, Verdict):
            self._awaited.discard(event.key)
        return event

    def apply(self, command: Command) -> None:
        match command:
            case Launch():
                self._launch(command)
            case Score(prompt=prompt, sample=sample):
                self._score(prompt, sample)
            case Abort(keys=keys, keep=keep):
                self._abort(keys, keep)
            case CancelScore(keys=keys):
                self._cancel_score(keys)
            case AwaitVerdict(key=key):
                self._awaited.add(key)

    def cancel(self) -> None:
        """Drops the round: nothing of it will be heard again."""
        self.engine.abort(self.engine.unfinished())
        self.engine.drain()
        if self._layouts is not None:
            self._layouts.cancel()
        self._rewards.cancel(set(self._due))
        for kept in (self._events, self._due, self._awaited, self._arrived, self._requests):
            kept.clear()

    def end(self) -> dict[str, float]:
        """The round is over; its metrics."""
        assert not self.engine.unfinished(), "a round ends while something of it is running"
        self.engine.drain()  # the device may be one plan ahead, of rows that have all stopped
        assert not self._due, "a round ends while something of it is being scored"
        self._requests.clear()
        now, before = self.engine.counters, self._before
        offered = now.offered_row_steps - before.offered_row_steps
        busy = now.busy_row_steps - before.busy_row_steps
        return {
            "rollout/preemptions": now.preemptions - before.preemptions,
            "rollout/bubble_ratio": 1 - busy / offered if offered else 0.0,
            "rollout/recompiles": self.worker.recompiles - self._recompiles,
            "rollout/decode_steps": now.steps - before.steps,
            "rollout/prefill_tokens": now.prefill_tokens - before.prefill_tokens,
            "rollout/shared_tokens": now.shared_tokens - before.shared_tokens,
            **self._rewards.take_metrics(),
            **(self._layouts.end(now.preemptions - before.preemptions) if self._layouts is not None else {}),
        }

    # -- inside ------------------------------------------------------------------------------------------------------

    def _launch(self, command: Launch) -> None:
        """Starts responses, or goes on with them from their token ids. Those that are finished need nothing."""
        prompt, begun = command.prompt, {sample.key: sample for sample in command.resumed}
        for key in command.keys:
            request = Request(next(self._request_ids), key, prompt.token_ids, self._params, share=prompt.key)
            if key in begun:
                request = resume(request, begun[key])
            self._requests[key] = request.request_id
            self._num_launched += 1
            self.engine.add(request)

    def _abort(self, keys: Sequence[SampleKey], keep: bool) -> None:
        """Ends requests; of those that have ended already, untold, the round hears as `Abort` says."""
        if keep:
            self._tell_finished(self.engine.drain())
        else:
            gone = set(keys)
            untold = [e for e in self._events if isinstance(e, SampleFinished) and e.sample.key in gone]
            self._events = deque(e for e in self._events if all(e is not other for other in untold))
            for event in untold:
                self._tell_aborted(replace(event.sample, finish_reason="abort"), event.dispatch)
        live = [key for key in keys if key in self._requests]
        last = self.engine.counters.plans - 1
        for sample in self.engine.abort([self._requests.pop(key) for key in live]):
            self._tell_aborted(sample, last)

    def _tell_aborted(self, sample: Sample, dispatch: int) -> None:
        self._events.append(SampleAborted(time.monotonic(), sample, dispatch))

    def _tell_finished(self, finished: Iterable[Finished]) -> None:
        now = time.monotonic()
        for one in finished:
            sample = replace(one.sample, text=self._tokenizer.decode(one.sample.token_ids.tolist()))
            self._events.append(SampleFinished(now, sample, one.dispatch))
            self._requests.pop(sample.key)
            self._num_finished += 1
            if self._layouts is not None:
                self._layouts.finished(len(sample))

    def _change_layout(self) -> None:
        """Lets the layout change; a failure that leaves nothing usable stops the run at the last boundary."""
        if self._layouts is None:
            return
        try:
            self._layouts.before_plan()
        except SwitchFailed as failure:
            _log.error("the run stops: %s", failure)
            raise Interrupted(str(failure)) from failure

    def _run_plan(self) -> None:
        self._change_layout()
        with self._timeline.span("engine", "plan", index=self.engine.counters.plans):
            finished = self.engine.step()
        self._tell_finished(finished)
        if self._layouts is not None:
            self._layouts.after_plan()
        busy, rows = self.engine.batcher.num_running, self.worker.num_groups * self.worker.num_slots
        tokens = self.engine.counters.busy_row_steps - self._before.busy_row_steps
        self._timeline.counter("rows", busy=busy)
        self._on_progress(busy, rows, tokens, self._num_finished, self._num_launched)

    def _score(self, prompt: Prompt, sample: Sample) -> None:
        key = sample.key
        self._due.append(key)
        earlier = self._journal.find(self._step, "verdict", self._place(key))
        if earlier is None:
            self._rewards.submit(prompt, sample)
        else:
            verdict = Verdict(time.monotonic(), key, 0.0, earlier["status"], {"error": earlier["error"]})
            self._take([verdict], journalled=True)

    def _take(self, verdicts: list[Verdict], *, journalled: bool = False) -> None:
        """Notes verdicts as they arrive; those of the clock are on the disk before anybody hears of them."""
        for verdict in verdicts:
            if verdict.status in ("timeout", "crash") and not journalled:
                decision = {"status": verdict.status, "error": str(verdict.info.get("error", verdict.status))}
                self._journal.append(self._step, "verdict", self._place(verdict.key), decision)
            self._arrived[verdict.key] = verdict
        self._release_due()

    def _cancel_score(self, keys: Sequence[SampleKey]) -> None:
        gone = set(keys)
        self._rewards.cancel(gone)
        self._due = deque(key for key in self._due if key not in gone)
        self._awaited -= gone
        for key in keys:
            self._arrived.pop(key, None)
        self._events = deque(e for e in self._events if not (isinstance(e, Verdict) and e.key in gone))
        self._release_due()  # one that waited for the verdict of another

    def _release_due(self) -> None:
        """Hands over the verdicts that are here and whose turn it is."""
        while self._due and self._due[0] in self._arrived:
            self._events.append(self._arrived.pop(self._due.popleft()))

    def _place(self, key: SampleKey) -> tuple[int, ...]:
        """Which verdict of the step it is, as the journal names it."""
        return (self._round, key.epoch, key.prompt_index, key.sample_index, key.attempt)
