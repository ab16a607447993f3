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

import heapq
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from jaxrl.scheduling.tokens.blocks import BlockManager
from jaxrl.scheduling.tokens.plan import (
    TOKENS_PER_STEP,
    Capacity,
    DecodeRow,
    Plan,
    PlanResult,
    PrefillChunk,
    Request,
    Seat,
    VerifyCounts,
    VerifyRule,
    check_request,
)
from jaxrl.scheduling.tokens.plan_builder import PlanBuilder
from jaxrl.scheduling.tokens.progress import (
    Admitted,
    Completed,
    Counters,
    Ended,
    Named,
    Preempted,
    Progress,
    StopCheck,
    TraceEvent,
    finish_reason,
)

UNLIMITED = 1 << 30
_by_arrival = attrgetter("arrival")


@dataclass(frozen=True, slots=True)
class BatcherConfig:
    """Options of continuous batching.

    Attributes:
      decode_steps: the most decode steps of one plan (`rollout.decode_steps`).
      leave_after: while requests wait for a slot or for blocks, a plan is left after this many rows have stopped.
      max_model_len: the longest prompt + response that the model takes; None: no limit.
      spread_samples: each request goes to the dp group with most room, wherever its prompt's blocks are.
      verify_rule: makes what says which plans verify proposed tokens; None: none does.
    """

    decode_steps: int = 16
    leave_after: int = 1
    max_model_len: int | None = None
    spread_samples: bool = False
    verify_rule: Callable[[], VerifyRule] | None = None

    def __post_init__(self) -> None:
        if self.decode_steps < 1 or self.leave_after < 1:
            raise ValueError(
                f"rollout.decode_steps ({self.decode_steps}) and leave_after ({self.leave_after}) must be >= 1"
            )


class Batcher:
    """Continuous batching over the dp groups of one worker."""

    def __init__(
        self, config: BatcherConfig, capacity: Capacity, trace: Callable[[TraceEvent], None] | None = None
    ) -> None:
        self.config = config
        self.capacity = capacity
        self.counters = Counters()
        self.trace = trace
        self.blocks = BlockManager(capacity.num_groups, capacity.num_blocks, capacity.block_size, capacity.stacks)
        self.verify_rule = None if config.verify_rule is None else config.verify_rule()
        self.next_index = 0
        self._arrivals = 0
        self._requests: dict[int, Progress] = {}  # everything live, by request id, in the order of arrival
        self._preempted: list[Progress] = []  # sorted by arrival
        self._waiting: dict[int, Progress] = {}  # never yet on the device
        self._running: list[Progress] = []  # sorted by arrival
        self._free_slots = [list(range(capacity.num_slots)) for _ in range(capacity.num_groups)]  # heaps
        self._flights: deque[tuple[int, list[Named], bool]] = deque()  # the bool: all tokens will be made
        self._in_flight: Counter[int] = Counter()  # request id -> plans in flight that name it
        self._share_prompts: dict[object, tuple[tuple[int, ...], int]] = {}  # share -> (prompt, live requests)

    # Requests in and out

    @property
    def is_idle(self) -> bool:
        """Nothing to run and nothing in flight."""
        return not self._requests and not self._flights

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_live(self) -> int:
        return len(self._requests)

    def live(self) -> tuple[int, ...]:
        """Ids of all unfinished requests, in the order of arrival."""
        return tuple(self._requests)

    def progress(self, request_id: int) -> Progress:
        """A live request's state, to read."""
        return self._requests[request_id]

    def add(self, request: Request) -> None:
        """Lets a request wait, behind all others. Raises ValueError if it is malformed or can never run."""
        self.check(request)
        progress = Progress(request, self._arrivals)
        self._arrivals += 1
        self._requests[request.request_id] = self._waiting[request.request_id] = progress
        if request.share is not None:
            prompt, count = self._share_prompts.get(request.share, (request.prompt_ids, 0))
            self._share_prompts[request.share] = (prompt, count + 1)

    def abort(self, request_ids: Iterable[int]) -> list[Progress]:
        """Ends live requests where they are; tokens still in flight for them are dropped."""
        ids = list(request_ids)
        unknown = sorted(set(ids) - self._requests.keys())
        if unknown or len(set(ids)) < len(ids):
            raise ValueError(f"abort({ids}): every id must be live and named once; not live: {unknown}")
        ended = [self._requests[i] for i in ids]
        for progress in ended:
            self._end(progress)
        return ended

    def forget_verified(self) -> None:
        """What verification brought so far decides nothing from here on."""
        self.verify_rule = None if self.config.verify_rule is None else self.config.verify_rule()

    # Planning

    def schedule(self) -> Plan | None:
        """The next plan; None if no row can do anything before a plan in flight is collected."""
        groups = self.capacity.num_groups
        builder = PlanBuilder(budget=[self.capacity.max_prefill_tokens] * groups, headroom=[0] * groups)
        for progress in list(self._running):  # oldest first, so that only requests not yet in the plan are preempted
            if progress.slot >= 0:
                self._continue(builder, progress)
        is_short = self._admit(builder)
        if not builder.named:
            assert self._flights or not self._requests, "requests wait, nothing runs, and none can be admitted"
            return None
        if builder.lacks_budget:
            builder.put_off_decode()
        tells_top = any(named.progress.request.params.top_logprobs for named in builder.named)
        verifies = not tells_top and self._verifies(builder)
        if verifies:
            builder.give_room(self.blocks, TOKENS_PER_STEP * self.config.decode_steps)
        plan = Plan(
            index=self.next_index,
            prefill=tuple(builder.prefill),
            decode=tuple(sorted(builder.decode, key=lambda row: (row.dp_group, row.slot))),
            num_steps=self.config.decode_steps if builder.decode else 0,
            leave_after=self.config.leave_after if is_short else UNLIMITED,
            verifies=verifies,
            tells_top=tells_top,
        )
        for entry in builder.named:
            entry.progress.pending += entry.max_new
            self._in_flight[entry.progress.request.request_id] += 1
        named = sorted(builder.named, key=lambda named: (named.dp_group, named.slot))
        self._flights.append((plan.index, named, plan.leave_after == UNLIMITED and not verifies))
        self.next_index += 1
        return plan

    def _verifies(self, builder: PlanBuilder) -> bool:
        """Whether the plan verifies proposed tokens."""
        if self.verify_rule is None or all(row.history is None for row in builder.decode):
            return False
        return self.verify_rule.decides(*builder.fullest())

    def _continue(self, builder: PlanBuilder, progress: Progress) -> None:
        """Gives a running request its place in the plan, preempting younger ones for its blocks."""
        group, left = progress.group, len(progress.prefix) - progress.prefilled
        num_chunk = min(left, builder.budget[group])
        if not left and self._reaches_its_limit(progress):
            return
        builder.lacks_budget |= num_chunk < left
        if num_chunk < left:  # without windows, all blocks of its prefill were allocated when it was admitted
            need, grows_from = progress.prefilled + num_chunk, len(progress.prefix)
        else:
            written = len(progress.prefix) if left else progress.num_written
            need = grows_from = min(written + self.config.decode_steps, progress.limit)
        first = progress.prefilled if left else progress.first
        while not self.blocks.extend(progress.request.request_id, need, first):
            youngest = next(p for p in reversed(self._running) if p.group == group)
            self._preempt(youngest)
            builder.closed.add(group)  # a request let in now would be the next to be preempted
            if youngest is progress:
                return
        self._name(builder, progress, num_chunk, grows_from)

    def _reaches_its_limit(self, progress: Progress) -> bool:
        """Whether the plans in flight bring a decoding request to its last token, unless it stops before."""
        return progress.num_written + 1 >= progress.limit and all(whole for _, _, whole in self._flights)

    def _name(self, builder: PlanBuilder, progress: Progress, num_chunk: int, grows_from: int) -> None:
        """Writes a request into the plan: `num_chunk` tokens of prefill, and a decode row once that is complete."""
        request, group, start = progress.request, progress.group, progress.prefilled
        table = self.blocks.table(request.request_id)
        grown = min(grows_from + self.config.decode_steps, progress.limit)
        builder.headroom[group] += self.blocks.more_for(request.request_id, grown)
        progress.prefilled += num_chunk
        is_decoding = progress.prefilled == len(progress.prefix)
        if num_chunk:
            tokens = progress.prefix[start : progress.prefilled]
            kept = len(progress.prefix) - len(request.prompt_ids)
            builder.prefill.append(
                PrefillChunk(request, group, progress.slot, tokens, start, table, is_decoding, num_generated=kept)
            )
            builder.budget[group] -= num_chunk
            self.counters.prefill_tokens += num_chunk
            self.blocks.publish(request.request_id, progress.prefilled)
        if is_decoding:
            most = self.config.decode_steps
            builder.decode.append(DecodeRow(request.request_id, group, progress.slot, table, most, progress.history))
        if num_chunk or is_decoding:
            ends_prefill = is_decoding and num_chunk > 0
            max_new = self.config.decode_steps * is_decoding + ends_prefill
            builder.named.append(Named(progress, group, progress.slot, max_new, ends_prefill))

    def _admit(self, builder: PlanBuilder) -> bool:
        """Gives free rows to waiting requests; returns whether one got no row for lack of slots or blocks."""
        admitted: list[Progress] = []
        everywhere = set(range(self.capacity.num_groups))
        if self.num_waiting:
            builder.room = [self._room(group) for group in range(self.capacity.num_groups)]
        for progress in self._queue():
            if builder.closed == everywhere:
                break
            if not any(builder.budget[g] for g in everywhere - builder.closed):
                builder.lacks_budget |= bool(self._with_room(builder, progress, everywhere))
                break
            if self._in_flight[progress.request.request_id]:
                continue
            group = self._choose_group(builder, progress)
            if group is not None:
                self._start(builder, progress, group)
                builder.room[group] = self._room(group)
                admitted.append(progress)
        for progress in admitted:
            if self._waiting.pop(progress.request.request_id, None) is None:
                self._preempted.remove(progress)
        return self.num_waiting > 0 and bool(builder.closed or not any(self._free_slots))

    def _choose_group(self, builder: PlanBuilder, progress: Progress) -> int | None:
        """The dp group to admit a request to, or None if it must wait.

        The group that has its prompt's blocks, or its conversation's, if there is room; else the one with most room,
        because running the prompt once more costs less than waiting for a row. With `spread_samples`, always the one
        with most room: a prompt's responses then load several groups, as behind a router that balances requests. If no
        group has room, all are closed, so that no later request takes the room that this one waits for. If only prefill
        budget is lacking, later requests may go on.
        """
        request = progress.request
        home: tuple[int, ...] = ()
        if request.session is not None and (parked := self.blocks.parked_in(request.session)) is not None:
            home = (parked,)
        elif not self.config.spread_samples and self.blocks.num_shareable(len(request.prompt_ids)):
            home = self.blocks.groups_holding(request.share)
        everywhere = range(self.capacity.num_groups)
        candidates = self._with_room(builder, progress, home) or self._with_room(builder, progress, everywhere)
        if not candidates:
            builder.closed.update(range(self.capacity.num_groups))
            return None
        with_budget = [g for g in candidates if builder.budget[g]]
        builder.lacks_budget |= not with_budget
        return max(with_budget, key=builder.room.__getitem__) if with_budget else None  # the first of equals

    def _with_room(self, builder: PlanBuilder, progress: Progress, groups: Iterable[int]) -> list[int]:
        """The open dp groups in which a request can start and grow by two plans, with the blocks of one more plan left
        for the running rows."""
        request = progress.request
        num_prompt = len(request.prompt_ids)
        num_grown = num_prompt + progress.num_tokens + 2 * self.config.decode_steps
        num_grown = min(num_grown, progress.limit)
        wanted = self.blocks.most_blocks(num_grown)
        blocks, closed, headroom, free_slots = self.blocks, builder.closed, builder.headroom, self._free_slots
        holding = blocks.groups_holding(request.share)
        with_room = []
        for group in groups:  # every one for every request that starts: thousands, in a simulation of a large machine
            if group not in closed and free_slots[group]:
                of = request.share, num_prompt, request.session, num_grown
                saved = blocks.num_saved(group, *of) if group in holding else 0
                if wanted - saved + headroom[group] <= blocks.num_free(group):
                    with_room.append(group)
        return with_room

    def _room(self, group: int) -> int:
        """How much room a dp group has: the smaller of the free shares of slots and of blocks."""
        slots, blocks = len(self._free_slots[group]), self.blocks.num_free(group)
        return min(slots * self.blocks.capacity, blocks * self.capacity.num_slots)

    def _start(self, builder: PlanBuilder, progress: Progress, group: int) -> None:
        """Gives a waiting request a row and its first chunk."""
        request = progress.request
        progress.prefix = (*request.prompt_ids, *progress.tokens)
        progress.group, progress.slot = group, heapq.heappop(self._free_slots[group])
        prompt_len = len(request.prompt_ids)
        goes_on = request.session is not None and self.blocks.parked_in(request.session) == group
        if goes_on:
            num_there = self.blocks.num_resumed(group, request.session, progress.prefix)
        else:
            num_there = self.blocks.num_published(group, request.share, prompt_len) * self.capacity.block_size
        num_chunk = min(len(progress.prefix) - num_there, builder.budget[group])
        builder.lacks_budget |= num_there + num_chunk < len(progress.prefix)
        need = grows_from = len(progress.prefix)
        if num_there + num_chunk == need:
            need = grows_from = min(need + self.config.decode_steps, progress.limit)
        elif not self.capacity.stacks.is_whole:
            need = num_there + num_chunk
        if goes_on:
            found = self.blocks.resume(request.request_id, group, need, request.session, progress.prefix)
        else:
            found = self.blocks.allocate(request.request_id, group, need, request.share, prompt_len)
        assert found == num_there, "admitted without room"
        progress.prefilled = num_there
        insort(self._running, progress, key=_by_arrival)
        self.counters.admissions += 1
        self.counters.shared_tokens += num_there
        if self.trace is not None:
            self.trace(Admitted(self.next_index, request.key, group, progress.slot, num_there))
        self._name(builder, progress, num_chunk, grows_from)

    def _preempt(self, progress: Progress) -> None:
        """Takes a running request's row; the request keeps its tokens and waits in front of those that never ran."""
        self.counters.preemptions += 1
        if self.trace is not None:
            self.trace(Preempted(self.next_index, progress.request.key, progress.group, progress.slot))
        self._release(progress)
        insort(self._preempted, progress, key=_by_arrival)

    # Results

    def update(self, result: PlanResult, stop_check: StopCheck | None = None) -> list[Ended]:
        """Takes in a plan's outcome; returns the requests that ended, by (dp group, slot)."""
        index, flight, _ = self._flights.popleft()
        assert index == result.index, f"plan {index} is due, and the result is of plan {result.index}"
        self.counters.plans += 1
        self.counters.steps += result.num_steps
        self.counters.offered_row_steps += result.num_steps * self.capacity.num_groups * self.capacity.num_slots
        ended: list[Ended] = []
        if self.verify_rule is not None:
            counts = sum((row.verified for row in result.rows.values() if row.verified is not None), VerifyCounts())
            if counts.steps:  # else its rows had stopped before
                self.counters.add_verified(counts)
                self.verify_rule.saw(counts)
        for named in flight:
            progress, request_id = named.progress, named.progress.request.request_id
            progress.pending -= named.max_new
            self._in_flight[request_id] -= 1
            if not self._in_flight[request_id]:
                del self._in_flight[request_id]
            row = result.rows.get(request_id)
            if row is None or not len(row.token_ids):
                continue
            assert len(row.token_ids) <= named.max_new, f"plan {index}, request {request_id}: more tokens than asked"
            decoded = len(row.token_ids) - named.ends_prefill
            self.counters.busy_row_steps += decoded if row.verified is None else row.verified.steps
            if progress.ended:
                self.counters.dropped_tokens += len(row.token_ids)
                continue
            progress.append(row, result.policy_version)
            reason = finish_reason(progress, row, stop_check)
            if reason is not None:
                ended.append(Ended(progress, reason, index, named.dp_group, named.slot))
                self._park(progress)
                self._end(progress)
                if self.trace is not None:
                    key, length = progress.request.key, progress.num_tokens
                    self.trace(Completed(index, key, named.dp_group, named.slot, length, reason))
        return ended

    # What others look at

    def fullest(self, plan: Plan) -> tuple[int, int]:
        """The most rows, and the most tokens, that a dp group has in a plan just made: tokens before its steps."""
        rows, tokens = [0] * self.capacity.num_groups, [0] * self.capacity.num_groups
        for row in plan.decode:
            rows[row.dp_group] += 1
            tokens[row.dp_group] += self._requests[row.request_id].num_written + 1 - row.max_new
        return max(rows), max(tokens)

    def rows(self) -> Iterator[tuple[Progress, int]]:
        """The requests that have a row, in the order of arrival, each with the tokens of its response so far. Only what
        never changes and the dp group may be read from a `Progress` here: a batcher may count tokens elsewhere."""
        return ((progress, progress.num_tokens) for progress in self._running)

    # Another layout

    def running(self) -> tuple[Progress, ...]:
        """The requests that have a row, in the order of arrival: to read."""
        return tuple(self._running)

    def reseat(self, capacity: Capacity, blocks: BlockManager, seats: Mapping[int, Seat]) -> None:
        """Goes on with other pools (`jaxrl.scheduling.layouts.relayout`); no plan may be in flight.

        Args:
          capacity, blocks: of the new layout; `blocks` has given the requests in `seats` their blocks.
          seats: by request id, the places of requests that keep their KV. All others that had a row keep their tokens
            and wait in front of those that never ran.
        """
        assert not self._flights, "a layout changes while plans are in flight"
        self._free_slots = [list(range(capacity.num_slots)) for _ in range(capacity.num_groups)]
        for progress in list(self._running):
            seat = seats.get(progress.request.request_id)
            if seat is None:
                self._running.remove(progress)
                progress.group = progress.slot = -1
                insort(self._preempted, progress, key=_by_arrival)
            else:
                progress.group, progress.slot = seat.dp_group, seat.slot
                progress.prefilled = min(seat.num_written, len(progress.prefix))
                self._free_slots[seat.dp_group].remove(seat.slot)  # sorted, and so a heap still
        assert seats.keys() == {progress.request.request_id for progress in self._running}
        self.capacity, self.blocks = capacity, blocks

    def seat(self, seats: Mapping[int, Seat]) -> None:
        """Gives waiting requests rows; their blocks are allocated already, with the KV that their seats state."""
        for request_id, seat in seats.items():
            progress = self._waiting.pop(request_id)
            tokens = (*progress.request.prompt_ids, *progress.tokens)
            progress.prefix = tokens[:-1] if seat.decodes else tokens
            progress.group, progress.slot, progress.prefilled = seat.dp_group, seat.slot, seat.num_written
            self._free_slots[seat.dp_group].remove(seat.slot)
            heapq.heapify(self._free_slots[seat.dp_group])
            insort(self._running, progress, key=_by_arrival)

    def free_slots(self, group: int) -> tuple[int, ...]:
        """The free slots of a dp group, ascending."""
        return tuple(sorted(self._free_slots[group]))

    # Bookkeeping

    def _queue(self) -> Iterator[Progress]:
        return chain(self._preempted, self._waiting.values())

    def _park(self, progress: Progress) -> None:
        """Leaves the KV of a conversation whose turn has ended for the next one."""
        request = progress.request
        if request.session is not None and progress.slot >= 0:
            tokens = (*request.prompt_ids, *progress.tokens)
            self.blocks.park(request.request_id, request.session, tokens[:-1])  # the newest has no KV yet

    def _release(self, progress: Progress) -> None:
        """Gives back a row and its blocks."""
        self.blocks.free(progress.request.request_id)
        heapq.heappush(self._free_slots[progress.group], progress.slot)
        self._running.remove(progress)
        progress.group = progress.slot = -1

    def _end(self, progress: Progress) -> None:
        """Removes a request, whatever its state."""
        request = progress.request
        progress.ended = True
        del self._requests[request.request_id]
        if progress.slot >= 0:
            self._release(progress)
        elif self._waiting.pop(request.request_id, None) is None:
            self._preempted.remove(progress)
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
