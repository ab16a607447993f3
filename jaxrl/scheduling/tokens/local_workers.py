"""Several workers behind the interface of one: requests are dealt to engines, and responses end in one logical order.

Purpose: `LocalWorkers` is what `jaxrl.run.backend.RolloutBackend` drives. Each engine has an executor on separate
devices, here or on another host, with its own pool, layout and pace (docs/architecture.md). Requests are dealt when
they are added, and may move later; a worker may be closed, so that its devices do something else, and opened again.

A launch may say which worker each of its requests goes to (`jaxrl.scheduling.rounds.events.Launch`).

Logical time: each worker has a tick, which every collected plan advances by the plan's cost in integer ticks, predicted
from the plan and its load alone. A `step` submits the next plan of the worker that runs dry first. If all workers have
`MAX_IN_FLIGHT` plans or none to make, it waits for the oldest plan of the worker whose plan should end first. So while
the host waits for one worker, each other one has a plan to run and one queued. A finished response is held back until
no worker can still return an earlier one. Responses are delivered in the order (tick, worker, dispatch, dp group,
slot). No clock is read, so the order of everything follows from the plans.

The price: a command between two steps reaches the other workers' devices a plan later than with one plan in flight. And
a worker makes the others wait if its plan takes a full plan longer than predicted. In order of arrival (`arrival`)
nobody waits: the worker whose plan is done is served, and its responses are delivered at once. That order can only be
repeated if it is recorded.

Source: docs/architecture.md (logical time). Departures: the systems of RollPacker and PAT order by arrival.

With one engine, a step is that of the engine alone, and so are plans and their order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from jaxrl.scheduling.tokens.engine import MAX_IN_FLIGHT, Engine, Finished
from jaxrl.scheduling.tokens.plan import Request, Ticket
from jaxrl.scheduling.tokens.progress import Counters, PlanTimes
from jaxrl.types import Sample

if TYPE_CHECKING:
    from jaxrl.scheduling.layouts.relayout import How

Deal = Literal["tokens", "prompts"]
"""The worker of a new request; tokens: the open one with the fewest tokens outstanding (ties: the first), prompts: the
one of the prompt's first request, which is chosen so."""

Arrival = Callable[[Mapping[int, Ticket]], int]
"""Called with the oldest plan in flight of each worker: waits for one plan and returns its worker."""

Ticks = Callable[[int, PlanTimes], int]
"""(worker, a plan's load) -> what the plan costs. It may not look at `duration_s`, which a clock measured."""

By: TypeAlias = "How | Callable[[Engine, Engine, Collection[int]], How]"
"""How requests move, or what says it of (source, target, their ids): `cheaper_move` with a predictor
(`jaxrl.scheduling.layouts.plan_cost`)."""

_NEVER = 1 << 62

PREFILL_TOKENS_PER_STEP = 256
"""Prefill tokens that cost roughly as much as a decode step: the number whose products with the weights take as long as
reading the weights once. Peak bf16 FLOP/s over bytes/s is 295 on an H100 and 206 on an H200."""


def step_ticks(_: int, times: PlanTimes) -> int:
    """Decode steps, all alike, and prefill tokens; a tick is a prefill token's time."""
    return times.num_steps * PREFILL_TOKENS_PER_STEP + times.prefill_tokens


class LocalWorkers:
    """Several engines as one.

    Args:
      engines: each over an executor on separate devices, all of one block size and with the same weights.
      deal: see `Deal`.
      ticks: what a plan costs; a pure function.
      arrival: in whose order plans are collected; None: in logical order.

    Attributes:
      engines: by the worker's index.

    Example::

        workers = LocalWorkers([Engine(executor, config) for executor in executors])
        workers.add(request)
        while not workers.is_idle:
            for finished in workers.step():
                print(finished.sample)
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        deal: Deal = "tokens",
        ticks: Ticks = step_ticks,
        arrival: Arrival | None = None,
    ) -> None:
        assert engines
        assert all(engine.is_idle for engine in engines)
        self.engines = tuple(engines)
        self._deal_by = deal
        self._cost, self._arrival = ticks, arrival
        self._open = set(range(len(engines)))
        self._ticks = [0] * len(engines)
        self._last_delivered = 0  # the latest tick that was delivered
        self._passed: list[dict[int, int]] = [{} for _ in engines]  # by dispatch, the tick after that plan
        self._expected = [0] * len(engines)  # what the oldest plan in flight should cost
        self._planned: set[int] = set()  # workers with no more to plan, until one is collected or requests come or go
        self._held: list[tuple[tuple[int, int, int, int, int], Finished]] = []  # a heap, by the order of delivery
        self._changed = set(range(len(engines)))  # workers of which what follows is not right any more
        self._busy_until = [_NEVER] * len(engines)  # of busy workers, their ticks
        self._dues = [(_NEVER, 0, worker) for worker in range(len(engines))]  # of busy workers, the order of service
        self._worker_of: dict[int, int] = {}  # of every live request, in the order in which they were added
        self._limit_of: dict[int, int] = {}  # the most tokens that it may have, its prompt among them
        self._limits = [0] * len(engines)  # of each worker's live requests, summed
        self._num_live = [0] * len(engines)
        self._done: list[int | None] = [0] * len(engines)  # tokens that its rows have by now; None: to be counted
        self._first: dict[tuple[int, int], int] = {}  # (epoch, prompt index) -> the worker of its first request
        if len(engines) > 1:  # one alone needs no logical time
            for worker, engine in enumerate(engines):
                engine.watchers.append(partial(self._pass, worker))

    @property
    def counters(self) -> Counters:
        return sum((engine.counters for engine in self.engines[1:]), self.engines[0].counters)

    @property
    def is_idle(self) -> bool:
        """No request is unfinished, no plan is in flight, and every finished request has been delivered."""
        return not self._held and all(engine.is_idle for engine in self.engines)

    def unfinished(self) -> tuple[int, ...]:
        """Ids of the requests that are waiting or running, in the order in which they were added."""
        if len(self.engines) == 1:
            return self.engines[0].unfinished()
        live = {request_id for engine in self.engines for request_id in engine.unfinished()}
        return tuple(request_id for request_id in self._worker_of if request_id in live)

    def add(self, request: Request, worker: int | None = None) -> None:
        """Gives a request to a worker: to `worker`, an open one, or else to the one that `deal` chooses.

        Raises ValueError if it can never run there.
        """
        assert request.request_id not in self._worker_of, f"request {request.request_id}: one with this id is live"
        if self.is_idle:
            self._begin_anew()
        worker = self._deal(request, self._open) if worker is None else worker
        assert worker in self._open, f"worker {worker} is closed"
        now = self._now()
        was_idle = self.engines[worker].is_idle
        self.engines[worker].add(request)
        self._changed.add(worker)
        if was_idle:
            self._ticks[worker] = max(self._ticks[worker], now)
        limit = len(request.prompt_ids) + request.params.max_tokens
        self._worker_of[request.request_id], self._limit_of[request.request_id] = worker, limit
        self._num_live[worker] += 1
        self._limits[worker] += limit
        self._planned.discard(worker)

    def abort(self, request_ids: Iterable[int]) -> list[Sample]:
        """Ends requests at once and returns their samples so far, in the order of the ids.

        A request that ended by itself and was not delivered counts as aborted. Tokens of plans in flight are lost;
        `drain` first to keep them.
        """
        ids = list(request_ids)
        held = {one.request_id: one.sample for _, one in self._held}
        self._changed.update(range(len(self.engines)))
        assert len(set(ids)) == len(ids), f"abort({ids}): an id is named twice"
        samples = {i: replace(held[i], finish_reason="abort") for i in ids if i in held}
        if samples:
            self._held = [held for held in self._held if held[1].request_id not in samples]
            heapq.heapify(self._held)
        for worker, engine in enumerate(self.engines):
            own = [i for i in ids if self._worker_of.get(i) == worker]
            samples.update(zip(own, engine.abort(own), strict=True))
            self._leave(own)
        return [samples[i] for i in ids]

    @property
    def num_unfinished(self) -> int:
        return sum(engine.batcher.num_live for engine in self.engines)

    def next_worker(self) -> int | None:
        """The worker to serve next; None where no worker has anything to do. In order of arrival it waits until one has
        something to do."""
        if len(self.engines) == 1:
            return None if self.engines[0].is_idle else 0
        self._refresh()
        ahead, _, worker = min(self._dues)
        if ahead == MAX_IN_FLIGHT and self._arrival is not None:
            waiting = [worker for ahead, _, worker in self._dues if ahead == MAX_IN_FLIGHT]
            oldest = {worker: self.engines[worker].oldest for worker in waiting}
            tickets = {worker: ticket for worker, ticket in oldest.items() if ticket is not None}
            worker = self._arrival(tickets) if tickets else worker
        return None if ahead == _NEVER else worker

    def makes_plan(self, worker: int) -> bool:
        """Whether the next `step` of a worker makes a plan; one of several then waits for none."""
        if len(self.engines) == 1:
            return True
        return worker not in self._planned and self.engines[worker].num_in_flight < MAX_IN_FLIGHT

    def waits(self, worker: int) -> bool:
        """Whether the next `step` of a worker waits for a plan, should one be in flight."""
        return len(self.engines) == 1 or not self.makes_plan(worker)

    def step(self, worker: int | None = None) -> list[Finished]:
        """Submits the next plan of a worker, or waits for its oldest; returns what can be delivered now. One alone
        submits its next plan and then waits for the one before.

        Args:
          worker: the one to serve; by default `next_worker`.
        """
        worker = self.next_worker() if worker is None else worker
        if worker is not None:
            self._hold(worker, self._serve(worker))
        return self._deliver(self._low_watermark() if self._arrival is None else None)

    def drain(self) -> list[Finished]:
        """Collects everything in flight without a new plan, and returns everything that has ended."""
        self.settle()
        return self._deliver(None)

    def settle(self, worker: int | None = None) -> None:
        """Collects everything in flight, of one worker or of all; the next `step` or `drain` returns what ended."""
        for each in range(len(self.engines)) if worker is None else (worker,):
            self._collect(each)

    def num_live(self, worker: int) -> int:
        """Requests of a worker that wait or run, as far as its plans were collected."""
        return self._num_live[worker]

    def worker_of(self, request_id: int) -> int | None:
        """Where a live request is; None where it has ended."""
        return self._worker_of.get(request_id)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_running(self) -> int:
        return sum(engine.batcher.num_running for engine in self.engines)

    @property
    def num_rows(self) -> int:
        """Rows of the open workers."""
        capacities = [self.engines[worker].batcher.capacity for worker in self._open]
        return sum(capacity.num_groups * capacity.num_slots for capacity in capacities)

    def is_open(self, worker: int) -> bool:
        return worker in self._open

    def tick(self, worker: int) -> int:
        """A worker's logical time: what its plans have cost since all workers were idle, and the time it was idle."""
        return self._ticks[worker]

    def outstanding(self, worker: int) -> int:
        """Tokens that a worker's requests may still take: prompts and kept tokens of those that wait, and what is left
        of every request's limit."""
        done = self._done[worker]
        if done is None:
            done = self._done[worker] = self.engines[worker].batcher.num_row_tokens
        return self._limits[worker] - done

    def move(self, request_ids: Iterable[int], target: int, by: By = "migrate") -> int:
        """Lets live requests continue in another worker, with their tokens, log-probabilities and versions; the tokens
        whose KV was copied.

        Plans in flight of the workers that take part are collected first. Requests that ended in them do not move, and
        are delivered in their turn; nor do those that are in `target` already.

        Args:
          request_ids: live requests, each named once.
          target: an open worker.
          by: with their KV, or their tokens alone, whose KV is computed again; asked for each worker that they leave.

        Raises:
          ValueError: before anything of its worker moves: a request that can never run in `target`.
          SwitchFailed: KV could not be copied; the requests are where they were, and `target` computes its own again.
        """
        ids = list(request_ids)
        assert target in self._open, f"worker {target} is closed"
        assert len(set(ids)) == len(ids), f"move({ids}): an id is named twice"
        sources: dict[int, list[int]] = {}
        for request_id in ids:
            sources.setdefault(self._worker_of[request_id], []).append(request_id)
        sources.pop(target, None)
        return sum(self._move(source, target, leaving, by) for source, leaving in sorted(sources.items()))

    def close(self, worker: int, by: By = "recompute", leaving: Collection[int] = ()) -> int:
        """Takes a worker out: its requests move to the open ones, dealt like new ones, and it gets no more. Returns the
        tokens whose KV was copied.

        Args:
          leaving: workers that will be closed next: no request moves there, only to move again.

        Afterwards nothing of it is live or in flight. Where a move fails, as in `move`, the worker stays open, with the
        requests that have not moved.
        """
        staying = self._open - {worker, *leaving}
        assert staying, f"close({worker}): of the open workers ({sorted(self._open)}) one must be left"
        self._open.remove(worker)
        self._collect(worker)
        engine, targets = self.engines[worker], dict[int, list[int]]()
        added = [0] * len(self.engines)
        for request_id in engine.unfinished():
            target = self._deal(engine.batcher.progress(request_id).request, staying, added)
            targets.setdefault(target, []).append(request_id)
            added[target] += self._limit_of[request_id]
        try:
            return sum(self._move(worker, target, ids, by) for target, ids in sorted(targets.items()))
        except BaseException:
            self._open.add(worker)
            raise

    def open(self, worker: int) -> None:
        """Lets a closed worker take requests again."""
        assert worker not in self._open, f"worker {worker} is open"
        self._open.add(worker)

    # -- dealing -----------------------------------------------------------------------------------------------------

    def _deal(self, request: Request, workers: Collection[int], added: Sequence[int] = ()) -> int:
        """Which of `workers` gets a request; `added`: tokens that each worker will get beside those that it has."""
        prompt = request.key.epoch, request.key.prompt_index
        if self._deal_by == "prompts" and self._first.get(prompt) in workers:
            return self._first[prompt]

        def load(worker: int) -> int:
            return self.outstanding(worker) + (added[worker] if added else 0)

        chosen = min(sorted(workers), key=load) if len(workers) > 1 else next(iter(workers))
        if self._deal_by == "prompts":
            self._first[prompt] = chosen
        return chosen

    def _leave(self, request_ids: Collection[int]) -> None:
        for request_id in request_ids:
            worker = self._worker_of.pop(request_id)
            self._num_live[worker] -= 1
            self._limits[worker] -= self._limit_of.pop(request_id)
            self._planned.discard(worker)
            self._changed.add(worker)
            self._done[worker] = None

    def _move(self, source: int, target: int, request_ids: Sequence[int], by: By) -> int:
        from jaxrl.scheduling.layouts.relayout import migrate_requests, recompute_requests

        self._collect(source)
        live = [i for i in request_ids if i in self._worker_of]
        if not live:
            return 0
        between = self.engines[source], self.engines[target]
        how = by(*between, live) if callable(by) else by
        if how == "migrate":
            self._collect(target)
        now, was_idle = self._now(), self.engines[target].is_idle
        moved = (migrate_requests if how == "migrate" else recompute_requests)(*between, live)
        # They resume no earlier than they stopped.
        self._ticks[target] = max(self._ticks[target], self._ticks[source], now if was_idle else 0)
        for request_id in live:
            for worker, change in ((source, -1), (target, 1)):
                self._num_live[worker] += change
                self._limits[worker] += change * self._limit_of[request_id]
            self._worker_of[request_id] = target
        self._planned -= {source, target}
        self._changed |= {source, target}
        self._done[source] = self._done[target] = None
        return moved

    # -- logical time ------------------------------------------------------------------------------------------------

    def _serve(self, worker: int) -> list[Finished]:
        engine = self.engines[worker]
        self._changed.add(worker)
        if len(self.engines) == 1:
            return engine.step()
        if not self.makes_plan(worker):
            self._planned.discard(worker)
            return engine.collect()
        if not engine.submit():
            self._planned.add(worker)
        return engine.take_ended()

    def _begin_anew(self) -> None:
        """Resets logical time when all workers are idle. Nothing before then affects later decisions, so a run that
        resumes here continues identically."""
        self._ticks = [0] * len(self.engines)
        self._changed.update(range(len(self.engines)))
        self._last_delivered = 0
        self._first.clear()
        for engine in self.engines:
            engine.batcher.forget_verified()

    def _now(self) -> int:
        """When a worker that was idle starts: with the slowest busy one, else after what was delivered last."""
        low_watermark = self._low_watermark()
        return self._last_delivered if low_watermark is None else low_watermark

    def _due(self, worker: int) -> tuple[int, int, int]:
        """The order in which busy workers are served, before the host waits for any: first those without a plan, then
        those with only one."""
        ahead = self.engines[worker].num_in_flight if self.makes_plan(worker) else MAX_IN_FLIGHT
        return ahead, self._ticks[worker] + self._expected[worker], worker

    def _low_watermark(self) -> int | None:
        """No end of this tick or an earlier one is still to come; None: none at all is."""
        self._refresh()
        least = min(self._busy_until)
        return None if least == _NEVER else least

    def _refresh(self) -> None:
        """Looks again at the workers that have changed: with many of them, looking at all would take longer than what
        they do."""
        for worker in self._changed:
            is_busy = not self.engines[worker].is_idle
            self._busy_until[worker] = self._ticks[worker] if is_busy else _NEVER
            self._dues[worker] = self._due(worker) if is_busy else (_NEVER, 0, worker)
        self._changed.clear()

    def _ticks_of(self, worker: int, times: PlanTimes) -> int:
        """At least one, so that what ends in a plan ends after everything that ended before it."""
        return max(self._cost(worker, times), 1)

    def _pass(self, worker: int, times: PlanTimes) -> None:
        self._changed.add(worker)
        self._ticks[worker] += self._ticks_of(worker, times)
        self._passed[worker][times.index] = self._ticks[worker]

    def _collect(self, worker: int) -> None:
        self._planned.discard(worker)
        self._changed.add(worker)
        self._hold(worker, self.engines[worker].drain())

    def _hold(self, worker: int, ended: Sequence[Finished]) -> None:
        """Takes in what ended in the plans collected so far."""
        passed, self._passed[worker] = self._passed[worker], {}
        several = len(self.engines) > 1
        for one in ended:
            tick = passed[one.dispatch] if several else 0
            heapq.heappush(self._held, ((tick, worker, one.dispatch, one.dp_group, one.slot), one))
        self._changed.add(worker)
        self._leave([one.request_id for one in ended])
        self._done[worker] = None
        times = self.engines[worker].next_times()
        self._expected[worker] = 0 if times is None else self._ticks_of(worker, times)

    def _deliver(self, low_watermark: int | None) -> list[Finished]:
        """The responses that ended up to a tick, or all of them, in logical order."""
        found: list[Finished] = []
        while self._held and (low_watermark is None or self._held[0][0][0] <= low_watermark):
            (tick, *_), finished = heapq.heappop(self._held)
            self._last_delivered = max(self._last_delivered, tick)
            found.append(finished)
        return found
