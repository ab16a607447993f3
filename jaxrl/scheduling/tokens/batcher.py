"""Continuous batching: decides which requests run in the next plan, in which rows and with which blocks.

Purpose: `Batcher.schedule()` makes the next `Plan`; `Batcher.update(result)` takes in the result of an earlier one.

Source: iteration-level scheduling (Orca, Yu et al. 2022), preemption by recomputation as in vLLM (Kwon et al. 2023),
chunked prefill (Sarathi-Serve, Agrawal et al. 2024); nano-vllm's scheduler for the shape.

Departures: the device is one plan ahead, so a plan is made before the outcome of the previous plan is known. Three
rules follow from that.

- A row gets blocks for all positions that the plans in flight and the new plan may write, but never for more than
  prompt + max_tokens. A request is let in only if every running row could still get the blocks of one more plan.
- The row and blocks of a request that stops, is aborted or is preempted are reused in the very next plan. That is safe
  because plans run in order: a plan in flight may still write to the blocks that it names, but the next owner's prefill
  comes later and writes every position before it is read. A slot's state is overwritten by the next owner's last chunk,
  and until then no plan names the slot, so it does not advance.
- Tokens that arrive late count for a preempted request (which may turn out to be finished) but not for an aborted one.
  So a request is not let in while a plan in flight names its id: its new prefill must include those tokens.

Prefill goes first: while prompts that have a row, or could have one, wait for prefill budget, a plan decodes nothing. A
decode step costs nearly the same for few rows as for many, so to decode while rows are still empty only adds steps.
Decode cannot starve: each filled row shortens the wait, and once all rows are full, only decode can empty one.

Where layers have windows, a long prompt gets its blocks chunk by chunk, so that those behind the windows of one chunk
can serve the next. What lies behind the windows of every query still to come, from the newest token that has been
collected on, is given back when the row needs blocks; that too may be reused in the same plan.

Fairness: requests are served in the order of arrival. When a pool runs dry, the youngest request of its dp group is
preempted, and preempted requests come first when there is room again. So the oldest always advances: no livelock.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter

import numpy as np

from jaxrl.scheduling.tokens.blocks import BlockManager
from jaxrl.scheduling.tokens.plan import (
    TOKENS_PER_STEP,
    Capacity,
    Plan,
    PlanResult,
    PrefillChunk,
    Request,
    ScheduledRows,
    Seat,
    Tables,
    VerifyCounts,
    VerifyRule,
    check_request,
)
from jaxrl.scheduling.tokens.progress import Admitted, Completed, Counters, Finished, Preempted, TraceEvent
from jaxrl.scheduling.tokens.rows import Response, Rows, StopCheck

UNLIMITED = 1 << 30
_FEW = 4  # rows that get blocks one by one, in less time than arrays take
_by_arrival = attrgetter("arrival")


@dataclass(frozen=True, slots=True)
class BatcherConfig:
    """Options of continuous batching.

    Attributes:
      decode_steps: the most decode steps of one plan (`rollout.decode_steps`).
      max_model_len: the longest prompt + response that the model takes; None: no limit.
      spread_samples: each request goes to the dp group with most room, wherever its prompt's blocks are.
      verify_rule: makes what says which plans verify proposed tokens; None: none does.
    """

    decode_steps: int = 16
    max_model_len: int | None = None
    spread_samples: bool = False
    verify_rule: Callable[[], VerifyRule] | None = None


@dataclass(slots=True)
class _Draft:
    """A plan that is being made: what is in it, and what is left for more."""

    budget: list[int]  # prefill tokens left, per dp group
    lacks_budget: bool = False  # a prefill waits for the next plan
    closed: set[int] = field(default_factory=set)  # dp groups that let no request in
    room: list[int] = field(default_factory=list)  # how much room each dp group has, while requests are let in
    headroom: list[int] | None = None  # blocks that the rows of each dp group may want in the next plan
    prefill: list[PrefillChunk] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)  # seats, in the order in which they were given


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """The rows of a plan, by ascending seat; for the arrays see `ScheduledRows`."""

    seats: np.ndarray
    ids: np.ndarray
    is_new: np.ndarray
    max_new: np.ndarray  # without drafts
    decodes: bool  # else prefill goes first
    tells_top: bool
    is_watched: bool


@dataclass(slots=True)
class _Flight:
    index: int
    rows: ScheduledRows
    is_watched: bool  # what some row gains must be looked at
    most: np.ndarray  # tokens that it can bring each row
    num_most: int  # their sum
    has_new: bool  # chunks end the prefill of some rows, perhaps
    filling: set[int]  # request ids with a chunk after which their prefill continues
    is_whole: bool  # all of its tokens will be made
    left: dict[int, Response] = field(default_factory=dict)  # by request id, those that have left their row since


class Batcher:
    def __init__(
        self, config: BatcherConfig, capacity: Capacity, trace: Callable[[TraceEvent], None] | None = None
    ) -> None:
        self.config = config
        self.capacity = capacity
        self.counters = Counters()
        self.trace = trace
        self.blocks = BlockManager.of(capacity)
        self.verify_rule = None if config.verify_rule is None else config.verify_rule()
        self.next_index = 0
        self._arrivals = 0
        self._requests: dict[int, Response] = {}  # everything live, by request id, in the order of arrival
        self._preempted: list[Response] = []  # sorted by arrival
        self._waiting: dict[int, Response] = {}  # never yet on the device
        self._rows = Rows(capacity.num_groups, capacity.num_slots)
        self._flights: deque[_Flight] = deque()
        none = np.zeros(0, np.int64)
        self._steady = _Columns(none, none, none, none, decodes=False, tells_top=False, is_watched=False)
        self._share_prompts: dict[object, tuple[tuple[int, ...], int]] = {}  # share -> (prompt, live requests)

    # Requests in and out

    @property
    def is_idle(self) -> bool:
        return not self._requests and not self._flights

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_running(self) -> int:
        return len(self._rows.taken())

    @property
    def num_live(self) -> int:
        return len(self._requests)

    def live(self) -> tuple[int, ...]:
        """Ids of all unfinished requests, in the order of arrival."""
        return tuple(self._requests)

    def progress(self, request_id: int) -> Response:
        """A live response, to read."""
        return self._requests[request_id]

    def add(self, request: Request) -> None:
        """Lets a request wait, behind all others. Raises ValueError if it is malformed or can never run."""
        self.check(request)
        response = Response(request, self._arrivals)
        self._arrivals += 1
        self._requests[request.request_id] = self._waiting[request.request_id] = response
        if request.share is not None:
            prompt, count = self._share_prompts.get(request.share, (request.prompt_ids, 0))
            self._share_prompts[request.share] = (prompt, count + 1)

    def abort(self, request_ids: Iterable[int]) -> list[Response]:
        """Ends live requests where they are; tokens still in flight for them are dropped."""
        ids = list(request_ids)
        unknown = sorted(set(ids) - self._requests.keys())
        if unknown or len(set(ids)) < len(ids):
            raise ValueError(f"abort({ids}): every id must be live and named once; not live: {unknown}")
        ended = [self._requests[i] for i in ids]
        for response in ended:
            self._end(response)
        return ended

    def forget_verified(self) -> None:
        """Resets the verification's statistics, so that they do not affect later decisions."""
        self.verify_rule = None if self.config.verify_rule is None else self.config.verify_rule()

    # Planning

    def schedule(self) -> Plan | None:
        """The next plan; None if no row can do anything before a plan in flight is collected."""
        draft = _Draft([self.capacity.max_prefill_tokens] * self.capacity.num_groups)
        running = self._go_on(draft)
        is_short = self._admit(draft, running)
        if not draft.prefill and not len(running):
            assert self._flights or not self._requests, "requests wait, nothing runs, and none can be admitted"
            return None
        columns = self._columns(draft, running)
        seats, is_new, max_new = columns.seats, columns.is_new, columns.max_new
        verifies = columns.decodes and not columns.tells_top and self._verifies(seats)
        if verifies:
            max_new = self._with_room_for_drafts(draft, running, columns)
        histories = [self._rows[seat].request.history for seat in seats.tolist()] if verifies else None
        plan = Plan(
            index=self.next_index,
            prefill=tuple(draft.prefill),
            rows=ScheduledRows(
                columns.ids, seats, self.capacity.num_slots, is_new, max_new, partial(self._tables, seats), histories
            ),
            num_steps=self.config.decode_steps if columns.decodes else 0,
            leave_after=1 if is_short else UNLIMITED,  # while requests wait for a slot or for blocks
            verifies=verifies,
            tells_top=columns.tells_top,
        )
        has_new = len(draft.prefill) > 0
        most = max_new + is_new if has_new else max_new
        self._rows.written[seats] += most
        if has_new:
            self._rows.is_new[seats] = False
        filling = {chunk.request.request_id for chunk in draft.prefill if not chunk.is_last}
        is_whole = not is_short and not verifies
        self._flights.append(
            _Flight(plan.index, plan.rows, columns.is_watched, most, int(most.sum()), has_new, filling, is_whole)
        )
        self.next_index += 1
        return plan

    def _columns(self, draft: _Draft, running: np.ndarray) -> _Columns:
        """The rows of the plan; `running`: seats of those that had theirs before."""
        if not draft.prefill and running is self._steady.seats:
            return self._steady
        rows, seats = self._rows, running
        if draft.prefill:
            seats = np.sort(np.append(running, draft.admitted).astype(np.int64))
            seats = seats[(rows.unfilled[seats] == 0) & (rows.is_new[seats] | (not draft.lacks_budget))]
        assert draft.prefill or not draft.lacks_budget, "prefill budget is lacking because another request has it"
        decodes = len(seats) > 0 and not draft.lacks_budget
        columns = _Columns(
            seats,
            rows.ids[seats],
            rows.is_new[seats],
            np.full(len(seats), self.config.decode_steps if decodes else 0),
            decodes,
            bool(rows.tells_top[seats].any()) or any(chunk.request.params.top_logprobs for chunk in draft.prefill),
            bool(rows.is_watched[seats].any()),
        )
        if not draft.prefill:
            self._steady = columns
        return columns

    def _tables(self, seats: np.ndarray) -> Tables:
        rows = self._rows.tables[seats]
        widths = self.blocks.held[rows] * len(self.blocks.stacks)
        return self.blocks.tables[rows, : widths.max(initial=0)], widths

    def _verifies(self, seats: np.ndarray) -> bool:
        if self.verify_rule is None or not self._rows.has_history[seats].any():
            return False
        return self.verify_rule.decides(*self._fullest(seats, self._rows.written[seats] + 1))

    def _fullest(self, seats: np.ndarray, tokens: np.ndarray) -> tuple[int, int]:
        """The most rows, and the most of these tokens, that a dp group has."""
        groups, num_groups = seats // self.capacity.num_slots, self.capacity.num_groups
        return int(np.bincount(groups, minlength=num_groups).max()), int(np.bincount(groups, tokens, num_groups).max())

    def _with_room_for_drafts(self, draft: _Draft, running: np.ndarray, columns: _Columns) -> np.ndarray:
        """`max_new`, with more for rows with a history, as far as blocks are free that no row may want in the next
        plan; the oldest first. No row loses its place for what is proposed for another."""
        rows, most, max_new = self._rows, TOKENS_PER_STEP * self.config.decode_steps, columns.max_new.copy()
        headroom = self._headroom(draft, running)
        places = {seat: place for place, seat in enumerate(columns.seats.tolist()) if rows.has_history[seat]}
        for seat in (*running[np.argsort(rows.arrivals[running])].tolist(), *draft.admitted):
            if (place := places.get(seat)) is None:
                continue
            response, group, is_new = rows[seat], seat // self.capacity.num_slots, bool(columns.is_new[place])
            need = min(int(rows.written[seat]) + is_new + most, response.limit)
            first = 0 if is_new else int(rows.lengths[seat]) - 1  # this plan's chunk sees more
            request_id = response.request.request_id
            more = self.blocks.blocks_for(need) - int(self.blocks.held[rows.tables[seat]]) * len(self.blocks.stacks)
            if more <= self.blocks.num_free(group) - headroom[group] and self.blocks.extend(request_id, need, first):
                max_new[place] = most
        return max_new

    def _go_on(self, draft: _Draft) -> np.ndarray:
        """Gives running rows blocks for the plan, and chunks to those in their prefill, the oldest first; preempts
        younger ones for their blocks. Returns the seats that have a place in the plan."""
        rows, seats = self._rows, self._rows.taken()
        is_due = rows.written[seats] > rows.enough[seats]
        if not is_due.any():
            return seats
        due = seats[is_due]
        due = due[np.argsort(rows.arrivals[due])]
        left_out: np.ndarray | list[int] = []
        if all(
            flight.is_whole for flight in self._flights
        ):  # they bring these their last token, unless one stops before
            is_left_out = (rows.written[due] + 1 >= rows.limits[due]) & (rows.unfilled[due] == 0)
            left_out, due = due[is_left_out], due[~is_left_out]
        if len(due) <= _FEW or not self._extend_all(due):
            for seat in due.tolist():
                if rows.ids[seat] >= 0:
                    self._go_on_alone(draft, rows[seat])
            seats = rows.taken()
        return seats[~np.isin(seats, left_out)] if len(left_out) else seats

    def _extend_all(self, seats: np.ndarray) -> bool:
        """Gives rows blocks for the plan, in this order; False, with nothing changed, where one has to be looked at by
        itself."""
        rows, blocks, steps = self._rows, self.blocks, self.config.decode_steps
        if rows.unfilled[seats].any():
            return False
        tables, limits = rows.tables[seats], rows.limits[seats]
        more = -(-np.minimum(rows.written[seats] + steps, limits) // blocks.block_size) - blocks.held[tables]
        if not blocks.extend_all(tables, seats // self.capacity.num_slots, np.maximum(more, 0)):
            return False
        room = blocks.held[tables] * blocks.block_size
        rows.enough[seats] = np.minimum(limits - 2, np.where(room < limits, room - steps, limits))
        return True

    def _go_on_alone(self, draft: _Draft, response: Response) -> None:
        """`_go_on` for one row."""
        rows, seat, group, limit = self._rows, response.seat, response.group, response.limit
        unfilled, steps = int(rows.unfilled[seat]), self.config.decode_steps
        num_chunk, request_id = min(unfilled, draft.budget[group]), response.request.request_id
        first = response.prefilled if unfilled else int(rows.lengths[seat]) - 1
        need = min(int(rows.written[seat]) + (unfilled > 0) + steps, limit)
        if num_chunk < unfilled:  # without windows, all blocks of its prefill were allocated when it was admitted
            draft.lacks_budget = True
            need = first + num_chunk
        while not self.blocks.extend(request_id, need, first):
            youngest = rows.youngest(group)
            self._preempt(youngest)
            draft.closed.add(group)  # a request let in now would be the next to be preempted
            if youngest is response:
                return
        self._prefill(draft, response, num_chunk)
        if num_chunk == unfilled:
            room = int(self.blocks.held[rows.tables[seat]]) * self.blocks.block_size
            rows.enough[seat] = min(limit - 2, room - steps if room < limit else limit)

    def _prefill(self, draft: _Draft, response: Response, num_chunk: int) -> None:
        """Writes the next `num_chunk` tokens of a row's prefix into the plan."""
        if not num_chunk:
            return
        request, group, start, end = (
            response.request,
            response.group,
            response.prefilled,
            response.prefilled + num_chunk,
        )
        is_last = end == len(response.prefix)
        kept = len(response.prefix) - response.num_prompt
        tokens, table = response.prefix[start:end], self.blocks.table(request.request_id)
        draft.prefill.append(PrefillChunk(request, group, response.slot, tokens, start, table, is_last, kept))
        draft.budget[group] -= num_chunk
        self._rows.unfilled[response.seat] -= num_chunk
        self._rows.is_new[response.seat] = is_last
        self.counters.prefill_tokens += num_chunk
        self.blocks.publish(request.request_id, end)

    def _headroom(self, draft: _Draft, running: np.ndarray) -> list[int]:
        """Blocks that the rows of each dp group may want in the next plan; `running` are those that continue. It is
        worked out where somebody asks, and grows with each request that is let in later."""
        if draft.headroom is not None:
            return draft.headroom
        groups, wanted = running // self.capacity.num_slots, self._wanted(running)
        draft.headroom = headroom = np.bincount(groups, wanted, self.capacity.num_groups).astype(np.int64).tolist()
        return headroom

    def _wanted(self, seats: np.ndarray) -> np.ndarray:
        """Blocks that rows of the plan may want in the next one."""
        rows, steps = self._rows, self.config.decode_steps
        limits, lengths = rows.limits[seats], rows.lengths[seats]
        written = rows.written[seats] + rows.is_new[seats]
        grown = np.where(rows.unfilled[seats] > 0, lengths, np.minimum(written + steps, limits))
        return self.blocks.more_for(rows.tables[seats], np.minimum(grown + steps, limits))

    def _admit(self, draft: _Draft, running: np.ndarray) -> bool:
        """Gives free rows to waiting requests; returns whether one got no row for lack of slots or blocks.

        Args:
          running: seats that have a place in the plan.
        """
        if not self.num_waiting:
            return False
        admitted: list[Response] = []
        everywhere = set(range(self.capacity.num_groups))
        draft.room = [self._room(group) for group in range(self.capacity.num_groups)]
        self._headroom(draft, running)
        for response in chain(self._preempted, self._waiting.values()):
            if draft.closed == everywhere:
                break
            if not any(draft.budget[g] for g in everywhere - draft.closed):
                draft.lacks_budget |= bool(self._with_room(draft, response, everywhere))
                break
            if any(response.request.request_id in flight.left for flight in self._flights):
                continue
            group = self._choose_group(draft, response)
            if group is not None:
                self._start(draft, response, group)
                draft.room[group] = self._room(group)
                admitted.append(response)
        for response in admitted:
            if self._waiting.pop(response.request.request_id, None) is None:
                self._preempted.remove(response)
        return self.num_waiting > 0 and bool(draft.closed or not any(self._rows.num_free))

    def _choose_group(self, draft: _Draft, response: Response) -> int | None:
        """The dp group to admit a request to, or None if it must wait.

        The group that has its prompt's blocks, or its conversation's, if there is room; else the one with most room,
        because running the prompt once more costs less than waiting for a row. With `spread_samples`, always the one
        with most room: a prompt's responses then load several groups, as behind a router that balances requests. If no
        group has room, all are closed, so that no later request takes the room that this one waits for. If only prefill
        budget is lacking, later requests may continue.
        """
        request = response.request
        home: tuple[int, ...] = ()
        if request.session is not None and (parked := self.blocks.parked_in(request.session)) is not None:
            home = (parked,)
        elif not self.config.spread_samples and self.blocks.num_shareable(len(request.prompt_ids)):
            home = self.blocks.groups_holding(request.share)
        everywhere = range(self.capacity.num_groups)
        candidates = self._with_room(draft, response, home) or self._with_room(draft, response, everywhere)
        if not candidates:
            draft.closed.update(range(self.capacity.num_groups))
            return None
        with_budget = [g for g in candidates if draft.budget[g]]
        draft.lacks_budget |= not with_budget
        return max(with_budget, key=draft.room.__getitem__) if with_budget else None  # the first of equals

    def _with_room(self, draft: _Draft, response: Response, groups: Iterable[int]) -> list[int]:
        """The open dp groups in which a request can start and grow by two plans, with the blocks of one more plan left
        for the running rows."""
        request, blocks, closed, num_free = response.request, self.blocks, draft.closed, self._rows.num_free
        num_prompt, headroom = response.num_prompt, draft.headroom
        assert headroom is not None
        num_grown = min(num_prompt + response.num_tokens + 2 * self.config.decode_steps, response.limit)
        wanted, holding = blocks.most_blocks(num_grown), blocks.groups_holding(request.share)
        with_room = []
        for group in groups:  # every one for every request that starts: thousands, in a simulation of a large machine
            if group not in closed and num_free[group]:
                of = request.share, num_prompt, request.session, num_grown
                saved = blocks.num_saved(group, *of) if group in holding else 0
                if wanted - saved + headroom[group] <= blocks.num_free(group):
                    with_room.append(group)
        return with_room

    def _room(self, group: int) -> int:
        """How much room a dp group has: the smaller of the free shares of slots and of blocks."""
        slots, blocks = self._rows.num_free[group], self.blocks.num_free(group)
        return min(slots * self.blocks.capacity, blocks * self.capacity.num_slots)

    def _start(self, draft: _Draft, response: Response, group: int) -> None:
        request, prompt_len = response.request, response.num_prompt
        prefix = (*request.prompt_ids, *response.tokens)
        goes_on = request.session is not None and self.blocks.parked_in(request.session) == group
        if goes_on:
            num_there = self.blocks.num_resumed(group, request.session, prefix)
        else:
            num_there = self.blocks.num_published(group, request.share, prompt_len) * self.capacity.block_size
        num_chunk = min(len(prefix) - num_there, draft.budget[group])
        need = len(prefix)
        if num_there + num_chunk == need:
            need = min(need + self.config.decode_steps, response.limit)
        else:
            draft.lacks_budget = True
            if not self.capacity.stacks.is_whole:
                need = num_there + num_chunk
        if goes_on:
            found = self.blocks.resume(request.request_id, group, need, request.session, prefix)
        else:
            found = self.blocks.allocate(request.request_id, group, need, request.share, prompt_len)
        assert found == num_there, "admitted without room"
        first = group * self.capacity.num_slots
        seat = first + int(np.argmin(self._rows.ids[first : first + self.capacity.num_slots]))  # a free one has -1
        response.take_row(self._rows, seat, prefix, len(prefix) - num_there, self.blocks.row(request.request_id))
        self.counters.admissions += 1
        self.counters.shared_tokens += num_there
        if self.trace is not None:
            self.trace(Admitted(self.next_index, request.key, group, response.slot, num_there))
        self._prefill(draft, response, num_chunk)
        draft.admitted.append(seat)
        assert draft.headroom is not None
        draft.headroom[group] += int(self._wanted(np.array([seat]))[0])

    def _preempt(self, response: Response) -> None:
        """Takes a running request's row; the request keeps its tokens and waits in front of those that never ran."""
        self.counters.preemptions += 1
        if self.trace is not None:
            self.trace(Preempted(self.next_index, response.request.key, response.group, response.slot))
        self._release(response)
        insort(self._preempted, response, key=_by_arrival)

    # Results

    def update(self, result: PlanResult, stop_check: StopCheck | None = None) -> list[Finished]:
        """Takes in a plan's outcome; returns the requests that ended, by (dp group, slot)."""
        flight, rows = self._flights.popleft(), self._rows
        seats, ids = flight.rows.seats, flight.rows.request_ids
        assert flight.index == result.index, f"plan {flight.index} is due, and the result is of plan {result.index}"
        assert result.request_ids is ids or np.array_equal(result.request_ids, ids), "a result of other rows"
        num_tokens = int(result.counts.sum())
        self._count(flight, result, num_tokens)
        is_there = rows.ids[seats] == ids if flight.left else None
        if num_tokens != flight.num_most:
            missing = flight.most - result.counts
            assert (missing >= 0).all(), f"plan {result.index}: more tokens than asked"
            own = slice(None) if is_there is None else is_there
            rows.written[seats[own]] -= missing[own]
        rows.gain(result, seats, is_there)
        if is_there is None and not flight.is_watched and not result.stopped.any():
            return []
        return self._ended(flight, result, np.ones(len(seats), bool) if is_there is None else is_there, stop_check)

    def _count(self, flight: _Flight, result: PlanResult, num_tokens: int) -> None:
        self.counters.plans += 1
        self.counters.steps += result.num_steps
        self.counters.offered_row_steps += result.num_steps * len(self._rows.ids)
        if result.verified is None:
            self.counters.busy_row_steps += num_tokens
            if flight.has_new:
                self.counters.busy_row_steps -= int(np.count_nonzero(result.counts[flight.rows.is_new]))
            return
        verified = VerifyCounts(*result.verified.sum(axis=1).tolist())
        self.counters.busy_row_steps += verified.steps
        if self.verify_rule is not None and verified.steps:  # else its rows had stopped before
            self.counters.add_verified(verified)
            self.verify_rule.saw(verified)

    def _ended(
        self, flight: _Flight, result: PlanResult, is_there: np.ndarray, stop_check: StopCheck | None
    ) -> list[Finished]:
        """Ends requests for which a plan has brought the last tokens. `is_there`: which of its rows are still theirs;
        what the others have brought goes to responses that have left their row."""
        rows, seats, counts, finished = self._rows, flight.rows.seats, result.counts, list[Finished]()
        ids, looked_at = flight.rows.request_ids, result.stopped | rows.is_watched[seats]
        for row in np.flatnonzero((counts > 0) & (looked_at | ~is_there)).tolist():
            request_id, (group, slot) = int(ids[row]), divmod(int(seats[row]), rows.num_slots)
            response = rows[int(seats[row])] if is_there[row] else flight.left[request_id]
            if response.has_ended:
                self.counters.dropped_tokens += int(counts[row])
                continue
            if not is_there[row]:
                response.append(result, row)
            response.append_top(result, row)
            reason = response.finish_reason(stopped=bool(result.stopped[row]), stop_check=stop_check)
            if reason is None:
                continue
            self._park(response)
            self._end(response)
            finished.append(Finished(request_id, response.sample(reason), result.index, group, slot))
            if self.trace is not None:
                key, length = response.request.key, response.num_tokens
                self.trace(Completed(result.index, key, group, slot, length, reason))
        return finished

    # What others look at

    def fullest(self, plan: Plan) -> tuple[int, int]:
        """The most rows, and the most tokens, that a dp group has in a plan just made: tokens before its steps."""
        if not plan.num_decoding:
            return 0, 0
        seats = plan.rows.seats
        return self._fullest(seats, self._rows.written[seats] + 1 - plan.rows.max_new)

    @property
    def num_row_tokens(self) -> int:
        """Tokens of all that have a row, their prompts among them."""
        return int(self._rows.lengths[self._rows.taken()].sum())

    # Another layout

    def running(self) -> tuple[Response, ...]:
        """The requests that have a row, in the order of arrival: to read."""
        return tuple(sorted((self._rows[seat] for seat in self._rows.taken().tolist()), key=_by_arrival))

    def reseat(self, capacity: Capacity, blocks: BlockManager, seats: Mapping[int, Seat]) -> None:
        """Continues with other pools (`jaxrl.scheduling.layouts.relayout`); no plan may be in flight.

        Args:
          capacity, blocks: of the new layout; `blocks` has given the requests in `seats` their blocks.
          seats: by request id, the places of requests that keep their KV. All others that had a row keep their tokens
            and wait in front of those that never ran.
        """
        assert not self._flights, "a layout changes while plans are in flight"
        running = self.running()
        assert seats.keys() <= {response.request.request_id for response in running}
        for response in running:
            response.leave_row()
        self._rows = Rows(capacity.num_groups, capacity.num_slots)
        self.capacity, self.blocks = capacity, blocks
        for response in running:
            if (seat := seats.get(response.request.request_id)) is None:
                insort(self._preempted, response, key=_by_arrival)
            else:
                self._seat(response, seat, response.prefix)

    def seat(self, seats: Mapping[int, Seat]) -> None:
        """Gives waiting requests rows; their blocks are allocated already, with the KV that their seats state."""
        for request_id, seat in seats.items():
            response = self._waiting.pop(request_id)
            tokens = (*response.request.prompt_ids, *response.tokens)
            self._seat(response, seat, tokens[:-1] if seat.decodes else tokens)

    def _seat(self, response: Response, seat: Seat, prefix: tuple[int, ...]) -> None:
        number = seat.dp_group * self.capacity.num_slots + seat.slot
        unfilled, table = max(len(prefix) - seat.num_written, 0), self.blocks.row(response.request.request_id)
        response.take_row(self._rows, number, prefix, unfilled, table)

    def free_slots(self, group: int) -> tuple[int, ...]:
        first = group * self.capacity.num_slots
        return tuple(np.flatnonzero(self._rows.ids[first : first + self.capacity.num_slots] < 0).tolist())

    # Bookkeeping

    def _park(self, response: Response) -> None:
        """Leaves the KV of a conversation whose turn has ended for the next one."""
        request = response.request
        if request.session is not None and response.seat >= 0:
            tokens = (*request.prompt_ids, *response.tokens)
            self.blocks.park(request.request_id, request.session, tokens[:-1])  # the newest has no KV yet

    def _release(self, response: Response) -> None:
        request_id, seat = response.request.request_id, response.seat
        for flight in self._flights:
            at = flight.rows.seats.searchsorted(seat)
            if request_id in flight.filling or request_id in flight.rows.request_ids[at : at + 1]:
                flight.left[request_id] = response
        self.blocks.free(request_id)
        response.leave_row()

    def _end(self, response: Response) -> None:
        request = response.request
        response.has_ended = True
        del self._requests[request.request_id]
        if response.seat >= 0:
            self._release(response)
        elif self._waiting.pop(request.request_id, None) is None:
            self._preempted.remove(response)
        if request.share is not None:
            prompt, count = self._share_prompts.pop(request.share)
            if count > 1:
                self._share_prompts[request.share] = (prompt, count - 1)

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that is malformed or can never run."""
        which = f"request {request.request_id} ({request.key})"
        if request.request_id in self._requests:
            raise ValueError(f"{which}: a request with this id is live")
        if self._share_prompts.get(request.share, (request.prompt_ids,))[0] != request.prompt_ids:
            raise ValueError(f"{which}: `share` {request.share!r} is in use with another prompt")
        check_request(request, self.capacity, self.config.max_model_len)
