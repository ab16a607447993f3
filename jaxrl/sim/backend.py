"""The simulated machine behind the loop: the real engine over simulated devices, and reward workers without work.

Purpose: `jaxrl.loop.Backend` for `jaxrl simulate`. What becomes of a round's commands is the same as in
`jaxrl.runtime.backend.RolloutBackend`; time is a `SimulatedClock`, and what is still to come lies in a heap of (time,
sequence, verdict).

Source: design §3 (round level, logical time). Rewards beside the rollout: RollPacker §4.3.

Time. The host waits for a plan's end as the real one does, so it learns of verdicts when it looks again: the responses
that ended in the plan are told first, then the verdicts that came in meanwhile, each with the time at which it came.
Verdicts reach the round in the order in which their samples completed. When nothing decodes any more, the clock jumps
from verdict to verdict.

Departures: a verdict on a response whose scoring reaches the time limit is a time-out with reward 0, as in the reward
pool; crashes and errors of scorers are not modelled. A scoring that is cancelled keeps its worker until its end.
Generation counts as over when the last response has been told, though a plan of rows that have all stopped is still in
flight. Nothing is journalled: a simulated clock decides the same again.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxrl.scheduling.layouts.control import Layouts
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
from jaxrl.sim.clock import SimulatedClock, nanoseconds
from jaxrl.sim.executor import Launched, SimulatedExecutor
from jaxrl.types import Sample, SampleKey, SamplingParams


class Drawing(Protocol):
    """Where rows and scoring are drawn (`jaxrl.sim.clock.SimulatedPhases`)."""

    def complete(self, track: str, name: str, start_ns: int, end_ns: int, /, **args: Any) -> None: ...

    def counter(self, track: str, /, **values: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Scored:
    """When and by which worker a response is scored."""

    worker: int
    start_ns: int
    end_ns: int


class RewardWorkers:
    """`num_workers` processes that score one response each, in the order of submission.

    Args:
      timeout_s: when scoring is cut off; 0: never.
    """

    def __init__(self, num_workers: int, timeout_s: float = 0.0) -> None:
        if num_workers < 1:
            raise ValueError(f"reward.num_workers ({num_workers}) must be >= 1")
        self._timeout_ns = nanoseconds(timeout_s)
        self._free = [(0, worker) for worker in range(num_workers)]  # a heap of (free from, worker)

    def submit(self, now_ns: int, seconds: float) -> tuple[Scored, bool]:
        """Takes a response that needs so many seconds; when it is scored, and whether it is cut off."""
        duration_ns = nanoseconds(seconds)
        timed_out = 0 < self._timeout_ns <= duration_ns
        if timed_out:
            duration_ns = self._timeout_ns
        free_ns, worker = heapq.heappop(self._free)
        start_ns = max(now_ns, free_ns)
        heapq.heappush(self._free, (start_ns + duration_ns, worker))
        return Scored(worker, start_ns, start_ns + duration_ns), timed_out

    def clear(self, now_ns: int) -> None:
        """Drops all work: every worker is free."""
        self._free = [(min(free_ns, now_ns), worker) for free_ns, worker in self._free]
        heapq.heapify(self._free)


class SimulatedBackend:
    """Implements `jaxrl.loop.Backend`.

    Args:
      engine, executor: the engine, and the simulated devices under it.
      launched: where the executor looks lengths up.
      rewards: the reward workers.
      clock: shared with the executor, the trainer and the phases.
      sync_s: seconds of a weight sync.
      on_sync: called when the rollout has new weights (`SimulatedTrainer.synced`).
      drawing: rows busy and scoring times are drawn there.
      on_progress, interrupted, layouts: as in `jaxrl.runtime.backend.RolloutBackend`.
    """

    def __init__(
        self,
        engine: Engine,
        executor: SimulatedExecutor,
        launched: Launched,
        rewards: RewardWorkers,
        clock: SimulatedClock,
        sync_s: float,
        drawing: Drawing,
        on_sync: Callable[[], None] = lambda: None,
        on_progress: Callable[[int, int, int, int, int], None] = lambda *_: None,
        interrupted: Callable[[], bool] = lambda: False,
        layouts: Layouts | None = None,
    ) -> None:
        self.engine = engine
        self.executor = executor
        self._launched = launched
        self._rewards = rewards
        self._clock = clock
        self._sync_s = sync_s
        self._drawing = drawing
        self._on_sync = on_sync
        self._on_progress = on_progress
        self._interrupted = interrupted
        self._layouts = layouts
        self._request_ids = itertools.count()
        self._sequence = itertools.count()
        self._ready = False
        self._step, self._round = -1, 0
        self._params = SamplingParams()
        self._events: deque[Event] = deque()
        self._coming: list[tuple[int, int, Verdict]] = []  # a heap
        self._due: dict[SampleKey, int] = {}  # sequence in the heap, in the order in which the samples completed
        self._awaited: set[SampleKey] = set()  # verdicts without which no plan is made
        self._arrived: dict[SampleKey, Verdict] = {}
        self._requests: dict[SampleKey, int] = {}
        self._num_launched = self._num_finished = 0
        self._before = Counters()
        self._scored = Counter[str]()
        self._scoring_s = 0.0

    # -- memory phases -----------------------------------------------------------------------------------------------

    def enter_rollout(self, policy_version: int) -> None:
        """The rollout gets the trainer's weights."""
        if self._layouts is not None and not self._ready:
            self._layouts.enter()
        self._clock.advance(self._sync_s)
        self.executor.policy_version = policy_version
        self._ready = True
        self._on_sync()

    def leave_rollout(self) -> None:
        self._ready = False

    # -- one round ---------------------------------------------------------------------------------------------------

    def begin(self, step: int, params: SamplingParams, kind: str = "all") -> None:
        """A round of training step `step` starts; its responses are drawn with `params`. `kind`: for the layout."""
        assert self.engine.is_idle, "a round begins while requests of another are running"
        assert self._ready, "a round begins before enter_rollout"
        self._round = self._round + 1 if step == self._step else 0
        self._step, self._params = step, params
        self._events.append(RoundStarted(self._clock.now_s))
        self._num_launched = self._num_finished = 0
        self._before = replace(self.engine.counters)
        if self._layouts is not None:
            self._layouts.begin(step, self._round, kind)

    @property
    def generating(self) -> bool:
        """Whether samples are still being drawn, or their ends have not been told yet."""
        return bool(self._requests) or any(not isinstance(event, Verdict) for event in self._events)

    def wait(self) -> Event:
        """The next event; lets time pass until there is one."""
        while not self._events:
            if self._interrupted():
                raise Interrupted
            self._take_arrived()
            if self._events:
                break
            if not self.engine.is_idle and not self._awaited:
                self._run_plan()
            elif self._coming:
                self._clock.reach(self._coming[0][0])
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
            case Score(sample=sample):
                self._score(sample.key)
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
        self._rewards.clear(self._clock.now_ns)
        kept = (self._events, self._coming, self._due, self._awaited, self._arrived, self._requests, self._scored)
        for each in kept:
            each.clear()
        self._launched.clear()
        self._scoring_s = 0.0

    def end(self) -> dict[str, float]:
        """The round is over; its metrics."""
        assert not self.engine.unfinished(), "a round ends while something of it is running"
        self.engine.drain()  # the device may be one plan ahead, of rows that have all stopped
        assert not self._due, "a round ends while something of it is being scored"
        self._requests.clear()
        self._launched.clear()
        now, before = self.engine.counters, self._before
        offered = now.offered_row_steps - before.offered_row_steps
        busy = now.busy_row_steps - before.busy_row_steps
        scored, seconds = self._scored, self._scoring_s
        self._scored, self._scoring_s = Counter(), 0.0
        return {
            "rollout/preemptions": now.preemptions - before.preemptions,
            "rollout/bubble_ratio": 1 - busy / offered if offered else 0.0,
            "rollout/recompiles": 0,
            "rollout/decode_steps": now.steps - before.steps,
            "rollout/prefill_tokens": now.prefill_tokens - before.prefill_tokens,
            "rollout/shared_tokens": now.shared_tokens - before.shared_tokens,
            "reward/num_scored": scored.total(),
            "reward/errors": 0,
            "reward/timeouts": scored["timeout"],
            "reward/crashes": 0,
            "reward/pool_restarts": 0,
            "reward/seconds": seconds,
            **(self._layouts.end(now.preemptions - before.preemptions) if self._layouts is not None else {}),
        }

    # -- inside ------------------------------------------------------------------------------------------------------

    def _launch(self, command: Launch) -> None:
        prompt = command.prompt
        begun = {sample.key: sample for sample in command.resumed}
        for sample in command.finished:
            self._launched.add(sample.key, int(sample.versions[0]))
        for key in command.keys:
            self._requests[key] = request_id = next(self._request_ids)
            self._num_launched += 1
            request = Request(request_id, key, prompt.token_ids, self._params, share=prompt.key)
            kept = begun.get(key)
            if kept is not None and len(kept):
                self._launched.add(key, int(kept.versions[0]))
                request = resume(request, kept)
            else:
                self._launched.add(key, self.executor.policy_version)
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
        self._launched.remove(sample.key)
        self._events.append(SampleAborted(self._clock.now_s, sample, dispatch))

    def _tell_finished(self, finished: Iterable[Finished]) -> None:
        for one in finished:
            sample = replace(one.sample, text=f"({len(one.sample)} simulated tokens)")
            self._events.append(SampleFinished(self._clock.now_s, sample, one.dispatch))
            self._requests.pop(sample.key)
            self._num_finished += 1
            if self._layouts is not None:
                self._layouts.finished(len(sample))

    def _run_plan(self) -> None:
        if self._layouts is not None:
            self._layouts.before_plan()
        self._tell_finished(self.engine.step())
        if self._layouts is not None:
            self._layouts.after_plan()
        busy, rows = self.engine.batcher.num_running, self.executor.num_groups * self.executor.num_slots
        self._drawing.counter("rows", busy=busy)
        tokens = self.engine.counters.busy_row_steps - self._before.busy_row_steps
        self._on_progress(busy, rows, tokens, self._num_finished, self._num_launched)

    def _score(self, key: SampleKey) -> None:
        sequence = self._due[key] = next(self._sequence)
        scored, timed_out = self._rewards.submit(self._clock.now_ns, self._launched.reward_s(key))
        self._drawing.complete(f"reward worker {scored.worker}", "score", scored.start_ns, scored.end_ns)
        end_s, duration_s = scored.end_ns / 1e9, (scored.end_ns - scored.start_ns) / 1e9
        if timed_out:
            verdict = Verdict(end_s, key, 0.0, "timeout", {"error": f"no verdict after {duration_s} s"}, duration_s)
        else:
            verdict = Verdict(end_s, key, self._launched.reward(key), "ok", {}, duration_s)
        self._scored[verdict.status] += 1
        self._scoring_s += duration_s
        heapq.heappush(self._coming, (scored.end_ns, sequence, verdict))

    def _cancel_score(self, keys: Sequence[SampleKey]) -> None:
        for key in keys:
            self._due.pop(key, None)
            self._arrived.pop(key, None)
            self._awaited.discard(key)
        gone = set(keys)
        self._events = deque(e for e in self._events if not (isinstance(e, Verdict) and e.key in gone))

    def _take_arrived(self) -> None:
        """Notes verdicts that have come in and releases those that are due."""
        while self._coming and self._coming[0][0] <= self._clock.now_ns:
            _, sequence, verdict = heapq.heappop(self._coming)
            if self._due.get(verdict.key) == sequence:  # else it was cancelled
                self._arrived[verdict.key] = verdict
        while self._due and (first := next(iter(self._due))) in self._arrived:
            del self._due[first]
            self._events.append(self._arrived.pop(first))
