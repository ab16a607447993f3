"""The batcher of a simulation: with nothing to decide, a plan costs work for rows that change, not for all rows.

Purpose: a simulated step with thousands of responses of thousands of tokens has millions of (plan, row) pairs. In
nearly all, a row is named again and gains as many tokens as every other. `LockstepBatcher` makes the same decisions as
`Batcher`: the same plans, block by block, the same trace and counters. tests/sim/test_lockstep.py compares the two.

While no request waits and every running row decodes, the rows form a *lane*. The lane counts the steps that its plans
promised and took, once for all rows. It handles a single row only when that row needs a block, reaches its limit, stops
or is aborted; the plans of the first two are known beforehand. Anything else that could matter (a new request, a pool
that runs dry, another layout, a look at a row's state) dissolves the lane: its counts are written into each `Progress`,
and `Batcher` goes on from there.

Departures: needs an executor that returns `Gains`. With `Gains`, every row that does not stop gains a token in each
step, and its tokens can be read later; so they are copied once, when the row leaves the lane.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxrl.scheduling.tokens.batcher import UNLIMITED, Batcher, BatcherConfig
from jaxrl.scheduling.tokens.blocks import BlockManager
from jaxrl.scheduling.tokens.plan import Capacity, DecodeRow, Plan, PlanResult, Request, Seat
from jaxrl.scheduling.tokens.progress import Completed, Ended, Named, Progress, StopCheck, TraceEvent, finish_reason
from jaxrl.sim.executor import Gains, LanePlan


@dataclass(slots=True)
class _Flight:
    """A plan of the lane in flight: the rows that it names, and which of them have left the lane since."""

    rows: tuple[DecodeRow, ...]
    gone: dict[int, Progress] = field(default_factory=dict)


_Due = tuple[int, Progress, int]
"""A row to look at: its arrival (unique); the row; its `num_written` when the lane was formed."""


@dataclass(slots=True)
class _Lane:
    """Rows that decode together."""

    members: dict[int, Progress]  # by request id
    named: dict[int, DecodeRow]  # those that the next plan names, in the order of their seats
    ids: np.ndarray  # of `named`, int64
    seats: np.ndarray  # and where they are: dp group * num_slots + slot, int64
    written: np.ndarray  # and their `num_written` when the lane was formed, int64
    due: defaultdict[int, list[_Due]] = field(default_factory=lambda: defaultdict(list))  # by the lane's plan
    num_plans: int = 0  # of the lane so far
    taken: int = 0  # steps with tokens that the members' arrays do not hold yet
    version: int = -1  # of the weights that made those
    gains: Gains | None = None  # of the plan that was collected last
    flights: dict[int, _Flight] = field(default_factory=dict)  # by the plan's index

    def leave(self, progress: Progress, num_more: int = 0) -> None:
        """Takes a row out, with its tokens of all plans counted so far and `num_more` more."""
        request_id = progress.request.request_id
        self.copy_tokens(progress, num_more)
        del self.members[request_id]
        self.name_no_more(request_id)
        for flight in self.flights.values():
            flight.gone[request_id] = progress

    def name_no_more(self, request_id: int) -> None:
        """Leaves a row out of all further plans."""
        if self.named.pop(request_id, None) is not None:
            others = self.ids != request_id
            self.ids, self.seats, self.written = self.ids[others], self.seats[others], self.written[others]

    def copy_tokens(self, progress: Progress, num_more: int = 0) -> None:
        """Gives a member the tokens of the steps taken."""
        count = self.taken + num_more
        if count:
            assert self.gains is not None, "steps were taken in plans that were not collected"
            first = progress.num_tokens
            progress.append(self.gains.tokens(progress.request.request_id, first, first + count), self.version)

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
        self._lane: _Lane | None = None
        self.num_lanes = 0  # formed so far

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

    # What others look at: the lane goes on

    def fullest(self, plan: Plan) -> tuple[int, int]:
        lane = self._lane
        if lane is None or plan.index not in lane.flights:
            return super().fullest(plan)
        assert plan.index == self.next_index - 1, "the plan was just made"
        group_R, num_groups = lane.seats // self.capacity.num_slots, self.capacity.num_groups
        before_R = lane.written + 1 + (lane.num_plans - 1) * self.config.decode_steps
        rows_G = np.bincount(group_R, minlength=num_groups)
        return int(rows_G.max()), int(np.bincount(group_R, before_R, num_groups).max())

    def rows(self) -> Iterator[tuple[Progress, int]]:
        taken = 0 if self._lane is None else self._lane.taken  # all that run are in it
        return ((progress, num_tokens + taken) for progress, num_tokens in super().rows())

    # Plans

    def schedule(self) -> Plan | None:
        if self._lane is None and self._is_steady():
            self._lane = self._form()
            self.num_lanes += 1
        if self._lane is not None:
            if self._look_at_due(self._lane):
                return self._repeat(self._lane)
            self._dissolve()
        return super().schedule()

    def update(self, result: PlanResult, stop_check: StopCheck | None = None) -> list[Ended]:
        lane = self._lane
        if lane is None or result.index not in lane.flights:
            return super().update(result, stop_check)
        gains, flight = result.rows, lane.flights.pop(result.index)
        assert isinstance(gains, Gains), "a lane of rows, and their tokens cannot be had later"
        index, _, _ = self._flights.popleft()
        assert index == result.index, f"plan {index} is due, and the result is of plan {result.index}"
        self.counters.plans += 1
        self.counters.steps += result.num_steps
        self.counters.offered_row_steps += result.num_steps * self.capacity.num_groups * self.capacity.num_slots
        self.counters.busy_row_steps += gains.num_tokens
        self.counters.dropped_tokens += sum(gains.count(request_id) for request_id in flight.gone)
        lane.collect(gains, result.policy_version)
        ended: list[Ended] = []
        for request_id, row in gains.stopped():
            if request_id in flight.gone:
                continue
            progress = lane.members[request_id]
            group, slot = progress.group, progress.slot
            lane.leave(progress, len(row.token_ids))
            reason = finish_reason(progress, row, stop_check)
            assert reason is not None, "a row that stopped has a reason"
            ended.append(Ended(progress, reason, result.index, group, slot))
            self._end(progress)
            if self.trace is not None:
                key, length = progress.request.key, progress.num_tokens
                self.trace(Completed(result.index, key, group, slot, length, reason))
        lane.taken += result.num_steps
        return ended

    def _end(self, progress: Progress) -> None:
        if self._lane is not None and progress.request.request_id in self._lane.members:
            self._lane.leave(progress)
        super()._end(progress)

    # The lane

    def _is_steady(self) -> bool:
        """Whether all plans from now on name the same rows for the same steps, until something happens."""
        return (
            bool(self._running)
            and not self.num_waiting
            and all(whole for _, _, whole in self._flights)
            and all(progress.is_resident and not progress.request.params.stop_strings for progress in self._running)
        )

    def _form(self) -> _Lane:
        by_seat = sorted(self._running, key=lambda progress: (progress.group, progress.slot))
        members = {progress.request.request_id: progress for progress in by_seat}
        lane = _Lane(
            members,
            {i: DecodeRow(i, p.group, p.slot, self.blocks.table(i)) for i, p in members.items()},
            np.array(list(members), np.int64),
            np.array([p.group * self.capacity.num_slots + p.slot for p in by_seat], np.int64),
            np.array([p.num_written for p in by_seat], np.int64),
        )
        for request_id, progress in members.items():
            self._look_later(lane, progress, progress.num_written, self.blocks.num_held(request_id))
        return lane

    def _look_later(self, lane: _Lane, progress: Progress, written: int, num_blocks: int) -> None:
        """Notes when to look at a row again: before the plan that needs a block for it, or that must not name it."""
        held, limit, steps = num_blocks * self.capacity.block_size, progress.limit, self.config.decode_steps
        reached = limit - 1 if held >= limit else min(limit - 1, held + 1 - steps)
        plan = max(-(-(reached - written) // steps), lane.num_plans)
        lane.due[plan].append((progress.arrival, progress, written))

    def _look_at_due(self, lane: _Lane) -> bool:
        """Gives blocks to the rows that need them, oldest first, and leaves out rows that the plans in flight bring to
        their last token. False if a pool runs dry: `Batcher` then goes on from the row that got no block."""
        promised = lane.num_plans * self.config.decode_steps
        for _, progress, written in sorted(lane.due.pop(lane.num_plans, ()), key=_arrival):
            request_id, now = progress.request.request_id, written + promised
            if progress.ended:
                continue
            if now + 1 >= progress.limit:
                lane.name_no_more(request_id)
                continue
            if not self.blocks.extend(request_id, min(now + self.config.decode_steps, progress.limit)):
                return False
            table = self.blocks.table(request_id)
            lane.named[request_id] = DecodeRow(request_id, progress.group, progress.slot, table)
            self._look_later(lane, progress, written, len(table))
        return True

    def _repeat(self, lane: _Lane) -> Plan | None:
        """The next plan: the rows of the previous plan that are still there."""
        if not lane.named:
            assert self._flights or not self._requests, "requests run, and no plan names one"
            return None
        plan = LanePlan(
            index=self.next_index,
            decode=tuple(lane.named.values()),
            num_steps=self.config.decode_steps,
            leave_after=UNLIMITED,
            ids=lane.ids,
            seats=lane.seats,
        )
        lane.flights[plan.index] = _Flight(plan.decode)
        self._flights.append((plan.index, [], True))
        lane.num_plans += 1
        self.next_index += 1
        return plan

    def _dissolve(self) -> None:
        """Writes the lane's counts into each row."""
        lane, self._lane = self._lane, None
        if lane is None:
            return
        for progress in lane.members.values():
            lane.copy_tokens(progress)
        for place, (index, _, whole) in enumerate(self._flights):
            if index in lane.flights:
                self._flights[place] = (index, self._named(lane, lane.flights[index]), whole)

    def _named(self, lane: _Lane, flight: _Flight) -> list[Named]:
        """A plan of the lane in flight, as `Batcher` keeps it."""
        named = []
        for row in flight.rows:
            progress = lane.members.get(row.request_id) or flight.gone[row.request_id]
            progress.pending += self.config.decode_steps
            self._in_flight[row.request_id] += 1
            named.append(Named(progress, row.dp_group, row.slot, self.config.decode_steps, ends_prefill=False))
        return named


def _arrival(entry: _Due) -> int:
    return entry[0]
