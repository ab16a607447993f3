"""The batcher of a simulation: with nothing to decide, a plan costs work for rows that change, not for all rows.

Purpose: a simulated step with thousands of responses of thousands of tokens has millions of (plan, row) pairs. In
nearly all, a row is named again and gains as many tokens as every other. `LockstepBatcher` makes the same decisions as
`Batcher`: the same plans, block by block, the same trace and counters. tests/sim/test_lockstep.py compares the two.

While no request waits and every running row decodes, the rows form a *steady batch*. It counts the steps that its plans
promised and took, once for all rows. It handles a single row only when that row needs a block, reaches its limit, stops
or is aborted; the plans of the first two are known beforehand. Anything else that could matter (a new request, a pool
that runs dry, another layout, a look at a row's state) dissolves the batch: its counts are written into each
`Progress`, and `Batcher` goes on from there.

Departures: needs an executor that returns `Gains`. With `Gains`, every row that does not stop gains a token in each
step, and its tokens can be read later; so they are copied once, when the row leaves the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxrl.scheduling.tokens.batcher import UNLIMITED, Batcher, BatcherConfig
from jaxrl.scheduling.tokens.blocks import BlockManager
from jaxrl.scheduling.tokens.plan import Capacity, Plan, PlanResult, Request, Seat
from jaxrl.scheduling.tokens.progress import Completed, Ended, Named, Progress, StopCheck, TraceEvent, finish_reason
from jaxrl.sim.simulated_rows import Gains, SteadyPlan, SteadyRows

_NONE = np.zeros(0, np.int64)


@dataclass(slots=True)
class _Flight:
    """A plan of the batch in flight: the places of the rows that it names, and which rows have left the batch since."""

    places: np.ndarray
    gone: dict[int, Progress] = field(default_factory=dict)


@dataclass(slots=True)
class _SteadyBatch:
    """Rows that decode together. A row's *place* is its index in these arrays, [rows], by ascending seat.

    Attributes:
      members: by request id; what has left is no longer in here.
      ids, seats: request ids, and dp group * num_slots + slot, both int64.
      arrivals, limits, written: of each `Progress`; `num_written` as it was when the batch was formed.
      held: blocks of each row.
      is_member, is_named: bool: it has not left; the next plan names it.
      due: places to look at before the batch's plan of this number: rows that need a block, or must not be named again.
      num_plans: of the batch so far.
      taken: steps with tokens that the members' arrays do not hold yet; version: of the weights that made those.
      gains: of the plan that was collected last.
      flights: by the plan's index.
    """

    members: dict[int, Progress]
    ids: np.ndarray
    seats: np.ndarray
    arrivals: np.ndarray
    limits: np.ndarray
    written: np.ndarray
    held: np.ndarray
    is_member: np.ndarray
    is_named: np.ndarray
    due: dict[int, list[np.ndarray]] = field(default_factory=dict)
    num_plans: int = 0
    taken: int = 0
    version: int = -1
    gains: Gains | None = None
    flights: dict[int, _Flight] = field(default_factory=dict)
    _named: np.ndarray | None = field(default=None, init=False)  # places that the next plan names; None: to be found
    _place_of: dict[int, int] = field(init=False)  # by request id

    def __post_init__(self) -> None:
        self._place_of = {request_id: place for place, request_id in enumerate(self.ids.tolist())}

    def named(self) -> np.ndarray:
        """Places of the rows that the next plan names, ascending."""
        if self._named is None:
            self._named = np.flatnonzero(self.is_named)
        return self._named

    def leave(self, progress: Progress, num_more: int = 0) -> None:
        """Takes a row out, with its tokens of all plans counted so far and `num_more` more."""
        request_id = progress.request.request_id
        self.copy_tokens(progress, num_more)
        del self.members[request_id]
        place = self._place_of[request_id]
        self.is_member[place] = False
        self.name_no_more(place)
        for flight in self.flights.values():
            flight.gone[request_id] = progress

    def name_no_more(self, places: int | np.ndarray) -> None:
        """Leaves rows out of all further plans."""
        self.is_named[places] = False
        self._named = None

    def look_later(self, places: np.ndarray, block_size: int, steps: int) -> None:
        """Notes when to look at rows again: before the plan that needs a block for it, or that must not name it."""
        room, limits = self.held[places] * block_size, self.limits[places]
        reached = np.where(room >= limits, limits - 1, np.minimum(limits - 1, room + 1 - steps))
        plans = np.maximum(-(-(reached - self.written[places]) // steps), self.num_plans)
        for plan in np.unique(plans).tolist():
            self.due.setdefault(plan, []).append(places[plans == plan])

    def take_due(self) -> np.ndarray:
        """The places to look at before the next plan, in the order of arrival."""
        places = np.concatenate([_NONE, *self.due.pop(self.num_plans, ())])
        places = places[self.is_member[places]]
        return places[np.argsort(self.arrivals[places])]

    def copy_tokens(self, progress: Progress, num_more: int = 0) -> None:
        """Gives a member the tokens of the steps taken; without a copy if no others are older."""
        count = self.taken + num_more
        if not count:
            return
        assert self.gains is not None, "steps were taken in plans that were not collected"
        first, request_id = progress.num_tokens, progress.request.request_id
        if progress.is_all_of(self.version):
            progress.take_whole(self.gains.tokens(request_id, 0, first + count), self.version)
        else:
            progress.append(self.gains.tokens(request_id, first, first + count), self.version)

    def collect(self, gains: Gains, version: int) -> None:
        """Reads tokens from this plan's `gains` from now on; tokens of earlier weights are copied first."""
        if version != self.version and self.taken:
            for progress in self.members.values():
                self.copy_tokens(progress)
            self.taken = 0
        self.gains, self.version = gains, version


class LockstepBatcher(Batcher):
    """Makes the decisions of `Batcher`, over an executor that returns `Gains`."""

    def __init__(
        self, config: BatcherConfig, capacity: Capacity, trace: Callable[[TraceEvent], None] | None = None
    ) -> None:
        super().__init__(config, capacity, trace)
        self._batch: _SteadyBatch | None = None
        self.num_batches = 0  # formed so far

    # Where lockstep ends

    def add(self, request: Request) -> None:
        self._dissolve()
        super().add(request)

    def progress(self, request_id: int) -> Progress:
        self._dissolve()
        return super().progress(request_id)

    def running(self) -> tuple[Progress, ...]:
        self._dissolve()
        return super().running()

    def reseat(self, capacity: Capacity, blocks: BlockManager, seats: Mapping[int, Seat]) -> None:
        self._dissolve()
        super().reseat(capacity, blocks, seats)

    def seat(self, seats: Mapping[int, Seat]) -> None:
        self._dissolve()
        super().seat(seats)

    # What others look at: the batch goes on

    def fullest(self, plan: Plan) -> tuple[int, int]:
        batch = self._batch
        if batch is None or plan.index not in batch.flights:
            return super().fullest(plan)
        assert plan.index == self.next_index - 1, "the plan was just made"
        named, num_groups = batch.flights[plan.index].places, self.capacity.num_groups
        group_R = batch.seats[named] // self.capacity.num_slots
        before_R = batch.written[named] + 1 + (batch.num_plans - 1) * self.config.decode_steps
        rows_G = np.bincount(group_R, minlength=num_groups)
        return int(rows_G.max()), int(np.bincount(group_R, before_R, num_groups).max())

    def rows(self) -> Iterator[tuple[Progress, int]]:
        taken = 0 if self._batch is None else self._batch.taken  # all that run are in it
        return ((progress, num_tokens + taken) for progress, num_tokens in super().rows())

    # Plans

    def schedule(self) -> Plan | None:
        if self._batch is None and self._is_steady():
            self._batch = self._form()
            self.num_batches += 1
        if self._batch is not None:
            if self._look_at_due(self._batch):
                return self._repeat(self._batch)
            self._dissolve()
        return super().schedule()

    def update(self, result: PlanResult, stop_check: StopCheck | None = None) -> list[Ended]:
        batch = self._batch
        if batch is None or result.index not in batch.flights:
            return super().update(result, stop_check)
        gains, flight = result.rows, batch.flights.pop(result.index)
        assert isinstance(gains, Gains), "a steady batch of rows, and their tokens cannot be had later"
        index, _, _ = self._flights.popleft()
        assert index == result.index, f"plan {index} is due, and the result is of plan {result.index}"
        self.counters.plans += 1
        self.counters.steps += result.num_steps
        self.counters.offered_row_steps += result.num_steps * self.capacity.num_groups * self.capacity.num_slots
        self.counters.busy_row_steps += gains.num_tokens
        self.counters.dropped_tokens += sum(gains.count(request_id) for request_id in flight.gone)
        batch.collect(gains, result.policy_version)
        ended: list[Ended] = []
        for request_id, row in gains.stopped():
            if request_id in flight.gone:
                continue
            progress = batch.members[request_id]
            group, slot = progress.group, progress.slot
            batch.leave(progress, len(row.token_ids))
            reason = finish_reason(progress, row, stop_check)
            assert reason is not None, "a row that stopped has a reason"
            ended.append(Ended(progress, reason, result.index, group, slot))
            self._end(progress)
            if self.trace is not None:
                key, length = progress.request.key, progress.num_tokens
                self.trace(Completed(result.index, key, group, slot, length, reason))
        batch.taken += result.num_steps
        return ended

    def _end(self, progress: Progress) -> None:
        if self._batch is not None and progress.request.request_id in self._batch.members:
            self._batch.leave(progress)
        super()._end(progress)

    # The steady batch

    def _is_steady(self) -> bool:
        """Whether all plans from now on name the same rows for the same steps, until something happens."""
        return (
            bool(self._running)
            and not self.num_waiting
            and all(whole for _, _, whole in self._flights)
            and all(progress.is_resident and not progress.request.params.stop_strings for progress in self._running)
            and (self.verify_rule is None or all(progress.history is None for progress in self._running))
        )

    def _form(self) -> _SteadyBatch:
        by_seat = sorted(self._running, key=lambda progress: (progress.group, progress.slot))
        num_slots, num_held = self.capacity.num_slots, self.blocks.num_held
        of_rows = [
            (i := p.request.request_id, p.group * num_slots + p.slot, p.arrival, p.limit, p.num_written, num_held(i))
            for p in by_seat
        ]
        columns = np.ascontiguousarray(np.array(of_rows, np.int64).T)
        masks = np.ones((2, len(by_seat)), bool)
        batch = _SteadyBatch({p.request.request_id: p for p in by_seat}, *columns, *masks)
        batch.look_later(np.arange(len(by_seat)), self.capacity.block_size, self.config.decode_steps)
        return batch

    def _look_at_due(self, batch: _SteadyBatch) -> bool:
        """Gives blocks to the rows that need them, oldest first, and leaves out rows that the plans in flight bring to
        their last token. False if a pool runs dry: `Batcher` then goes on from the row that got no block."""
        places, steps = batch.take_due(), self.config.decode_steps
        if not len(places):
            return True
        now = batch.written[places] + batch.num_plans * steps
        grows = now + 1 < batch.limits[places]
        if not grows.all():
            batch.name_no_more(places[~grows])
            places, now = places[grows], now[grows]
        need = np.minimum(now + steps, batch.limits[places])
        num_more = -(-need // self.capacity.block_size) - batch.held[places]
        ids = batch.ids[places].tolist()
        if self.capacity.stacks.is_whole:
            if not self.blocks.grow(zip(ids, num_more.tolist(), strict=True)):
                return False
        elif not all(self._extend(batch, *each) for each in zip(ids, need.tolist(), strict=True)):
            return False
        batch.held[places] += num_more
        batch.look_later(places, self.capacity.block_size, steps)
        return True

    def _extend(self, batch: _SteadyBatch, request_id: int, num_tokens: int) -> bool:
        """`BlockManager.extend`, with the first position that plans to come may run."""
        progress = batch.members[request_id]
        return self.blocks.extend(request_id, num_tokens, progress.first + batch.taken)

    def _repeat(self, batch: _SteadyBatch) -> Plan | None:
        """The next plan: the rows of the previous plan that are still there."""
        named = batch.named()
        if not len(named):
            assert self._flights or not self._requests, "requests run, and no plan names one"
            return None
        ids, seats = batch.ids[named], batch.seats[named]
        plan = SteadyPlan(
            index=self.next_index,
            decode=SteadyRows(ids, seats, self.capacity.num_slots, self.blocks, self.config.decode_steps),
            num_steps=self.config.decode_steps,
            leave_after=UNLIMITED,
            ids=ids,
            seats=seats,
        )
        batch.flights[plan.index] = _Flight(named)
        self._flights.append((plan.index, [], True))
        batch.num_plans += 1
        self.next_index += 1
        return plan

    def _dissolve(self) -> None:
        """Writes the batch's counts into each row."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        for progress in batch.members.values():
            batch.copy_tokens(progress)
        for place, (index, _, whole) in enumerate(self._flights):
            if index in batch.flights:
                self._flights[place] = (index, self._named(batch, batch.flights[index]), whole)

    def _named(self, batch: _SteadyBatch, flight: _Flight) -> list[Named]:
        """A plan of the batch in flight, as `Batcher` keeps it."""
        named, num_slots = [], self.capacity.num_slots
        of_rows = zip(batch.ids[flight.places].tolist(), batch.seats[flight.places].tolist(), strict=True)
        for request_id, seat in of_rows:
            progress = batch.members.get(request_id) or flight.gone[request_id]
            progress.pending += self.config.decode_steps
            self._in_flight[request_id] += 1
            group, slot = divmod(seat, num_slots)
            named.append(Named(progress, group, slot, self.config.decode_steps, ends_prefill=False))
        return named
