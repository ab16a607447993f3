"""The workers of a process, synchronised with those of others by virtual time: they run ahead of it by a lookahead.

Purpose: `SynchronizedWorkers` drives the engines of one process, where a run has several workers, in one process or in
many. Requests are dealt over the workers of all processes; this one submits plans for its own, sends their progress,
and is given the completions in one order. `jaxrl.scheduling.tokens.event_merger` has the rules. This file adds:

- A worker has up to two plans in flight, as in `jaxrl.scheduling.tokens.engine`. Plan k is made when plan k - 2 has
  been collected and plan k - 1 has not, at the tick after plan k - 2. Where the low watermark does not allow it yet,
  the worker waits, and does not collect plan k - 1 meanwhile: what a plan is made from must not depend on a clock.
- `CommandQueue` keeps the commands that a worker has not carried out. They are carried out, in the order in which they
  came, when a plan is made at their tick or later. A worker without requests goes to the tick of its next one.
- An aborted response has the tokens of the plans that ended by now (`jaxrl.scheduling.tokens.plan_history`).
- When a worker's last live request is gone, everything on its rows is dropped at once. Its plans in flight are waited
  for when its next busy period begins, or at the round's end.

So what a worker plans, and at which tick, follows from the commands and their ticks alone, whoever waits for whom.

That is why several processes can drive one worker whose devices lie in all of them (`is_shared`): each makes the same
plans. What does depend on a clock is how far a worker is ahead when its busy period ends. So each then makes every plan
that the low watermark allows it, as another may have made them already, and a program runs once all have submitted it.
One of the processes speaks for the worker; to the round the others have none.

Source: conservative synchronisation, as in `jaxrl.scheduling.tokens.event_merger`. Departures:
`jaxrl.scheduling.tokens.local_workers` is for one worker, which needs no virtual time, and for mechanisms that move
requests between the workers of one process, whose commands take effect at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from jaxrl.scheduling.tokens.engine import MAX_IN_FLIGHT, Engine, Finished
from jaxrl.scheduling.tokens.event_merger import (
    AbortResult,
    Completion,
    Deal,
    EventMerger,
    Placement,
    RequestPlacements,
    SortKey,
    WorkerProgress,
)
from jaxrl.scheduling.tokens.local_workers import Ticks, step_ticks
from jaxrl.scheduling.tokens.plan import PlanResult, Request
from jaxrl.scheduling.tokens.plan_history import PlanHistory
from jaxrl.scheduling.tokens.progress import Counters, PlanTimes, Progress
from jaxrl.types import Sample


class CommandQueue:
    """Commands that take effect later, in the order in which they came; their ticks never fall.

    A command is a request that starts, or the id of one that ends.
    """

    def __init__(self) -> None:
        self._commands: deque[tuple[int, Request | int]] = deque()

    def add(self, effect: int, command: Request | int) -> None:
        assert not self._commands or effect >= self._commands[-1][0], "a command takes effect before an earlier one"
        self._commands.append((effect, command))

    def take(self, tick: int) -> list[Request | int]:
        """Those that take effect by a tick; they are forgotten here."""
        found: list[Request | int] = []
        while self._commands and self._commands[0][0] <= tick:
            found.append(self._commands.popleft()[1])
        return found

    def next_start(self) -> int | None:
        """When the next request starts; None where none will."""
        return next((effect for effect, command in self._commands if isinstance(command, Request)), None)

    def request(self, request_id: int) -> Request | None:
        """A request that has not started."""
        waiting = (command for _, command in self._commands if isinstance(command, Request))
        return next((each for each in waiting if each.request_id == request_id), None)

    def clear(self) -> None:
        self._commands.clear()


class _Worker:
    """A worker: its engine, its tick, what it has to do, and what it has done."""

    def __init__(self, engine: Engine, cost: Callable[[PlanTimes], int]) -> None:
        self.engine, self._cost = engine, cost
        self.commands = CommandQueue()
        self.history = PlanHistory(engine.counters)
        self.ended: dict[int, tuple[SortKey, Finished]] = {}  # live ones, until they are delivered or aborted
        engine.watchers.append(self._pass)
        engine.keepers.append(self._keep)
        self.begin()

    def begin(self) -> None:
        """A round begins, with nothing in flight."""
        self.tick = 0
        self.first = self.engine.batcher.next_index
        self.has_no_plan = False  # there is none to make before one is collected
        self.is_dropped = False  # plans in flight are of a busy period that has ended
        self.expected = 0  # what the oldest plan in flight should cost
        self.sent_tick = -1  # the tick of the last progress
        self._passed: dict[int, int] = {}  # by dispatch, the tick after the plan
        self.commands.clear()
        self.ended.clear()
        self.history.begin()
        self.engine.batcher.forget_verified()

    @property
    def may_collect(self) -> bool:
        """Whether its next act is to wait for a plan."""
        ahead = self.engine.num_in_flight
        return not self.is_dropped and (ahead == MAX_IN_FLIGHT or (self.has_no_plan and ahead > 0))

    def next_tick(self) -> int | None:
        """The tick at which it asks for its next plan; None where it has nothing to do."""
        if not self.is_dropped and not self.engine.batcher.is_idle:
            return self.tick
        start = self.commands.next_start()
        return None if start is None else max(self.tick, start)

    def drain(self) -> None:
        """Waits for plans in flight that do not count any more."""
        self.engine.drain()
        self._passed.clear()

    def drop(self, now: int) -> None:
        """Its busy period ends now: nothing of it is live any more."""
        if not self.is_dropped:
            self.history.close(now)
            self.is_dropped = True
        self.engine.abort(self.engine.unfinished())
        self.commands.clear()
        self.ended.clear()
        self.tick, self.has_no_plan, self.expected = now, False, 0

    def restart(self) -> None:
        """Begins the next busy period from the state at the end of the last one, whatever was done beyond it."""
        self.drain()
        self.engine.batcher.rewind(self.first + self.history.num_plans)
        self.engine.batcher.forget_verified()
        self.history.restart()
        self.is_dropped = False

    def count_at(self, request_id: int, tick: int) -> tuple[Sample, int]:
        """A request that has not ended by a tick: its sample as it is now, and the tokens that it had then."""
        if request_id in self.ended:
            sort_key, finished = self.ended[request_id]
            since = self.history.gained_since(request_id, tick, sort_key.dispatch)
            return finished.sample, finished.num_before - since
        waiting = self.commands.request(request_id)
        if waiting is not None:
            return Progress(waiting, 0).sample("abort"), len(waiting.generated)
        sample = self.engine.batcher.progress(request_id).sample("abort")
        return sample, len(sample) - self.history.gained_since(request_id, tick)

    def _pass(self, times: PlanTimes) -> None:
        """A plan was collected; at least one tick, so that what ends in it ends after what ended before."""
        if not self.is_dropped:
            self.tick += max(self._cost(times), 1)
            self._passed[times.index] = self.tick

    def _keep(self, result: PlanResult) -> None:
        """The batcher has taken in its result."""
        if not self.is_dropped:
            self.history.collected(self.tick, result.index - self.first, result)

    def update_expected(self) -> None:
        """Works out what the oldest plan in flight should cost."""
        times = self.engine.next_times()
        self.expected = 0 if times is None else max(self._cost(times), 1)

    def sort_keys(self, worker: int, ended: Iterable[Finished]) -> list[tuple[SortKey, Finished]]:
        """The sort keys of what ended in the plans collected since the last call."""
        passed, self._passed = self._passed, {}
        return [
            (SortKey(passed[one.dispatch], worker, one.dispatch - self.first, one.dp_group, one.slot), one)
            for one in ended
        ]


class SynchronizedWorkers:
    """Several engines, here and in other processes, as one.

    Args:
      engines: of this process, by the workers' numbers, each over an executor on devices of its own; all of one block
        size and with the same weights.
      lookahead: ticks after which a command takes effect; the same everywhere.
      num_workers: of all processes; by default there are no others.
      deal: see `jaxrl.scheduling.tokens.event_merger.Deal`.
      ticks: what a plan costs, by the index of its engine in this process; a pure function.
      is_shared: whether other processes drive the same workers. speaks: whether this one tells what they do.

    Attributes:
      before_waiting: called before devices are waited for while the round is being told something; what was told before
        must be on its way, for others to come as far.
      engines: those of this process. numbers: their workers' numbers.
      placements: who has which request.
      low_watermark: up to this tick everything has been delivered and handled, as this process knows.
    """

    def __init__(
        self,
        engines: Mapping[int, Engine] | Sequence[Engine],
        lookahead: int,
        num_workers: int | None = None,
        deal: Deal = "tokens",
        ticks: Ticks = step_ticks,
        *,
        is_shared: bool = False,
        speaks: bool = True,
    ) -> None:
        by_number = dict(engines) if isinstance(engines, Mapping) else dict(enumerate(engines))
        count = len(by_number) if num_workers is None else num_workers
        if not by_number or not all(engine.is_idle for engine in by_number.values()):
            raise ValueError("workers: there must be at least one engine, and all must be idle")
        if not all(0 <= worker < count for worker in by_number):
            raise ValueError(f"workers: numbers {sorted(by_number)} must be of the {count} workers of all processes")
        self.placements = self._new_placements(count, lookahead, deal)
        self.numbers, self.engines = tuple(by_number), tuple(by_number.values())
        costs = (partial(ticks, index) for index in range(len(by_number)))
        self._workers = {n: _Worker(engine, cost) for (n, engine), cost in zip(by_number.items(), costs, strict=True)}
        self._progress: dict[int, list[Completion]] = {}  # of the workers whose progress is to be sent
        self.low_watermark = 0
        self._is_shared, self._speaks = is_shared, speaks
        self.before_waiting: Callable[[], None] = lambda: None

    def _new_placements(self, num_workers: int, lookahead: int, deal: Deal) -> RequestPlacements:
        return RequestPlacements(num_workers, lookahead, deal)

    def new_merger(self) -> EventMerger:
        """What merges the progress of all workers; one process has it."""
        return EventMerger(self.placements)

    # -- a round -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A round begins: nothing is live, at tick 0."""
        assert all(engine.is_idle for engine in self.engines), "a round begins while requests of another are running"
        self.placements.begin()
        for worker in self._workers.values():
            worker.begin()
        self._progress.clear()
        self.low_watermark = 0

    def launch(self, request: Request, worker: int | None = None) -> Placement:
        """Starts a request after the lookahead, where it is dealt to or in `worker`. Raises ValueError if it can never
        run; all workers are alike."""
        self.engines[0].check(request)
        key, limit = request.key, len(request.prompt_ids) + request.params.max_tokens
        placement = self.placements.launch(request.request_id, (key.epoch, key.prompt_index), limit, worker)
        if placement.worker in self._workers:
            self._workers[placement.worker].commands.add(placement.effect, request)
        return placement

    def abort(self, request_ids: Sequence[int], *, keep: bool) -> list[tuple[AbortResult, Sample]]:
        """Ends live requests, wherever they are. Returns what became of those for which this process speaks, with their
        samples.

        Args:
          keep: a response that had ended by now, and was not delivered, counts as ended.
        """
        ids, now = list(request_ids), self.placements.now
        unknown = [i for i in ids if self.placements.find(i) is None]
        if unknown or len(set(ids)) < len(ids):
            raise ValueError(f"abort({ids}): every id must be live and named once; not live: {unknown}")
        where = {i: self._worker_of(i) for i in ids}
        mine = [i for i in ids if where[i] in self._workers] if self._speaks else []
        results = [self._abort_result(self._workers[where[i]], i, keep) for i in mine]
        for request_id in ids:
            idle, worker = self.placements.remove(request_id), self._workers.get(where[request_id])
            if worker is not None:
                worker.ended.pop(request_id, None)
                if idle is None:
                    worker.commands.add(now + self.placements.lookahead, request_id)
                else:
                    self._drop(idle)
        return results

    def deliver(self, completion: Completion) -> Finished | None:
        """A live response has ended. Returns it if it ended in this process, which speaks for its worker."""
        tick, request_id = completion.sort_key.tick, completion.request_id
        self.placements.now = max(self.placements.now, tick)
        self.raise_low_watermark(tick - 1)
        number = self._worker_of(request_id)
        mine = self._workers.get(number)
        found = mine.ended.pop(request_id)[1] if mine is not None and self._speaks else None
        if self.placements.remove(request_id) is not None and mine is not None:
            self._drop(number)
        return None if found is None else replace(found, dispatch=completion.sort_key.dispatch)

    def raise_low_watermark(self, tick: int) -> None:
        """Everything up to a tick has been delivered and handled."""
        if tick > self.low_watermark:
            self.low_watermark = tick
            for worker in self._workers.values():
                if not worker.is_dropped:
                    worker.history.forget(tick)

    def take_progress(self) -> list[WorkerProgress]:
        """The progress of the workers for which this process speaks, since the last call."""
        found, self._progress = self._progress if self._speaks else {}, {}
        return [
            WorkerProgress(number, self.placements.busy_period(number), self._workers[number].tick, tuple(completions))
            for number, completions in found.items()
        ]

    def drain(self) -> None:
        """Waits for the plans in flight; nothing is live."""
        assert not self.placements.num_live, "plans are dropped while requests are live"
        for worker in self._workers.values():
            worker.drain()

    def cancel(self) -> None:
        """Drops the round."""
        for request_id in self.placements.live():
            self.placements.remove(request_id)
        for number in self.numbers:
            self._drop(number)
        self.drain()

    def counted(self) -> list[Counters]:
        """What the workers for which this process speaks have done in the busy periods of this round."""
        return [worker.history.counted for worker in self._workers.values()] if self._speaks else []

    # -- plans -------------------------------------------------------------------------------------------------------

    @property
    def turn(self) -> int | None:
        """The worker of this process that acts next; None where all wait for the low watermark, or have nothing to do.
        Those without a plan in flight come first, then those with one; it waits for a plan only when none may be made.
        """
        able = [number for number, worker in self._workers.items() if self._is_able(worker)]
        return min(able, key=self._due, default=None)

    def makes_plan(self, worker: int) -> bool:
        """Whether the next act of a worker is to ask for a plan."""
        return not self._workers[worker].may_collect

    def prepare(self, worker: int) -> None:
        """Carries out what takes effect by now, before a plan is asked for."""
        own = self._workers[worker]
        if own.is_dropped:
            own.restart()
        tick = own.next_tick()
        assert tick is not None, f"worker {worker} has nothing to do"
        own.tick = tick
        for command in own.commands.take(tick):
            if isinstance(command, Request):
                own.engine.add(command)
            elif command in own.engine.batcher.live():
                own.engine.abort([command])

    def step(self, worker: int) -> None:
        """Asks for a plan of a worker that was prepared and submits it; or waits for its oldest plan."""
        own = self._workers[worker]
        if self.makes_plan(worker):
            own.has_no_plan = not own.engine.submit()
            ended = own.engine.take_ended()
            if not own.has_no_plan:
                own.history.made()
        else:
            own.has_no_plan = False
            ended = own.engine.collect()
        self._hold(worker, own, ended)
        own.update_expected()

    # -- what an engine has ------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """Sums over the workers of this process, with what does not count any more."""
        return sum((engine.counters for engine in self.engines[1:]), self.engines[0].counters)

    @property
    def is_idle(self) -> bool:
        """Nothing is live, here or elsewhere, and no plan is in flight here."""
        return not self.placements.num_live and all(engine.is_idle for engine in self.engines)

    def unfinished(self) -> tuple[int, ...]:
        """Ids of the live requests of all processes, in the order in which they were launched."""
        return self.placements.live()

    def tick(self, worker: int) -> int:
        """The tick of a worker of this process."""
        return self._workers[worker].tick

    @property
    def num_running(self) -> int:
        """Requests that have a row in this process."""
        return sum(engine.batcher.num_running for engine in self.engines)

    @property
    def num_open(self) -> int:
        """Workers of all processes; all take requests."""
        return self.placements.num_workers

    @property
    def num_unfinished(self) -> int:
        """Requests of this process that wait or run."""
        return sum(len(engine.unfinished()) for engine in self.engines)

    @property
    def num_rows(self) -> int:
        """Rows of this process."""
        capacities = [engine.batcher.capacity for engine in self.engines]
        return sum(capacity.num_groups * capacity.num_slots for capacity in capacities)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _worker_of(self, request_id: int) -> int:
        placement = self.placements.find(request_id)
        assert placement is not None, f"request {request_id} is not live"
        return placement.worker

    def _is_able(self, worker: _Worker) -> bool:
        if worker.may_collect:
            return True
        tick = worker.next_tick()
        return tick is not None and tick - self.placements.lookahead <= self.low_watermark

    def _due(self, number: int) -> tuple[int, int, int]:
        worker = self._workers[number]
        ahead = 0 if worker.is_dropped else worker.engine.num_in_flight
        return (MAX_IN_FLIGHT if worker.may_collect else ahead), worker.tick + worker.expected, number

    def _abort_result(self, worker: _Worker, request_id: int, keep: bool) -> tuple[AbortResult, Sample]:
        """What becomes of a live request that is aborted now."""
        now = self._now(worker)
        sort_key, finished = worker.ended.get(request_id, (None, None))
        if sort_key is not None and finished is not None and sort_key.tick <= now:
            sample = finished.sample if keep else replace(finished.sample, finish_reason="abort")
            assert sample.finish_reason is not None
            return AbortResult(request_id, len(sample), sample.finish_reason, sort_key.dispatch), sample
        sample, count = worker.count_at(request_id, now)
        return AbortResult(request_id, count, "abort", worker.history.last_by(now)), cut(sample, count)

    def _drop(self, number: int) -> None:
        worker = self._workers[number]
        if self._is_shared:
            self.before_waiting()
            while self._is_able(worker):
                if self.makes_plan(number):
                    self.prepare(number)
                self.step(number)
        self._progress.pop(number, None)
        worker.drop(self._now(worker))

    def _now(self, worker: _Worker) -> int:
        """The tick at which an abort takes a response's tokens, and a busy period ends: virtual time."""
        return self.placements.now

    def _hold(self, number: int, worker: _Worker, ended: Sequence[Finished]) -> None:
        """Takes in what ended in the plans collected since; what was aborted meanwhile is left out."""
        if not ended and worker.tick == worker.sent_tick:
            return
        worker.sent_tick = worker.tick
        completions = self._progress.setdefault(number, [])
        for sort_key, one in worker.sort_keys(number, ended):
            if self.placements.find(one.request_id) is not None:
                worker.ended[one.request_id] = sort_key, one
                assert one.sample.finish_reason is not None
                completions.append(Completion(one.request_id, sort_key, len(one.sample), one.sample.finish_reason))


def cut(sample: Sample, length: int) -> Sample:
    """The first tokens of a response, with arrays of their own, as one that was aborted."""
    assert 0 <= length <= len(sample), f"{sample.key}: {length} of {len(sample)} tokens"
    return replace(
        sample,
        token_ids=sample.token_ids[:length].copy(),
        rollout_logprobs=sample.rollout_logprobs[:length].copy(),
        sampled_logprobs=sample.sampled_logprobs[:length].copy(),
        versions=sample.versions[:length].copy(),
        finish_reason="abort",
    )
