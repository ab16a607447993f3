"""An executor that keeps a shadow of the KV cache and checks every plan, with the requests and engines of its tests.

`CheckingExecutor` holds, for every position of every block, the token that would have its KV there. So a block given to
two requests, a prefix read before it was written, or a slot reused too early shows as a wrong token in a row's context.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from checked_blocks import check_blocks
from plan_rows import decode_rows
from replay_executor import ReplayExecutor

from jaxrl.scheduling.layouts.kv_plan import KvPlan
from jaxrl.scheduling.layouts.relayout import Relayout, ResidentRow, TimeTaken
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import TOKENS_PER_STEP, TRASH_BLOCK, Capacity, Plan, PlanResult, Request, Ticket
from jaxrl.scheduling.tokens.stacks import WHOLE, KvStacks, most_ahead
from jaxrl.sim.executor import fillers
from jaxrl.types import Sample, SampleKey, SamplingParams

STOP = 2


@dataclass
class _Row:
    request: Request
    cached: int  # positions with their KV written
    num_generated: int


class CheckingExecutor:
    """Runs plans through a ReplayExecutor and checks, in the order of the device, the rules that a plan must obey."""

    def __init__(self, inner: ReplayExecutor, lengths: dict[SampleKey, int]) -> None:
        self.inner = inner
        self.lengths = lengths
        self.sizes = inner.sizes
        self.plans: list[Plan] = []
        self._due: deque[Plan] = deque()
        self._cache: dict[tuple[int, int, int], tuple[int, int]] = {}  # (group, block, offset) -> (token, stack)
        self._rows: dict[tuple[int, int], _Row] = {}
        self._requests: dict[int, Request] = {}  # as last seen in a chunk
        self._prefilling: dict[tuple[int, int], tuple[int, int]] = {}  # (group, slot) -> (request id, next start)
        # request id -> where a prefill that began in other executors may go on: each knows its own last stay
        self._arrived: dict[int, set[int]] = {}
        self._responses: dict[tuple[SampleKey, int], list[int]] = {}

    def check(self, request: Request) -> None:
        self.inner.check(request)

    def submit(self, plan: Plan) -> Ticket:
        if not self._due:
            del self.plans[plan.index :]  # where a batcher goes on after plans that were dropped (`rewind`)
        assert plan.index == len(self.plans)
        assert len(self._due) <= 1, "the device is one plan ahead, not two"
        self.plans.append(plan)
        self._due.append(plan)
        self._check_shape(plan)
        return self.inner.submit(plan)

    def collect(self, ticket: Ticket) -> PlanResult:
        result = self.inner.collect(ticket)
        plan = self._due.popleft()
        self._run_prefill(plan)
        self._run_decode(plan, result)
        return result

    @property
    def tp(self) -> int:
        return self.inner.tp

    def capacity(self, tp: int) -> Capacity:
        return self.inner.capacity(tp)

    def start_in(self, tp: int) -> None:
        """Chooses a layout while nothing is live."""
        assert not self._due
        self.sizes = self.capacity(tp)
        self.inner.start_in(tp)
        self._cache, self._rows, self._prefilling = {}, {}, {}

    def switch(self, move: Relayout) -> TimeTaken:
        """Copies the shadow as the plan says; rows and prefills go to their new slots."""
        assert not self._due
        capacity, size = move.capacity, self.sizes.block_size
        cache = {}
        for copy in move.kv.copies:
            assert 0 < copy.target_block < capacity.num_blocks
            for offset in range(size):
                source = (copy.source_group, copy.source_block, offset)
                if source in self._cache:
                    cache[copy.target_group, copy.target_block, offset] = self._cache[source]
        by_id = {row.request.request_id: row for row in self._rows.values()}
        self._rows = {(row.dp_group, row.slot): by_id[row.request.request_id] for row in move.rows}
        for row in move.rows:
            known = self._rows[row.dp_group, row.slot]
            assert (row.position, row.token) == (known.cached, self._expected(row.request, known.cached))
        self._prefilling = {
            (seat.dp_group, seat.slot): (request_id, seat.num_written) for request_id, seat in move.seats.items()
        }
        self._cache = cache
        times = self.inner.switch(move)
        self.sizes = capacity
        return times

    def accept_migration(self, source: CheckingExecutor, kv: KvPlan, rows: Sequence[ResidentRow]) -> None:
        """Copies the shadow of another executor's blocks as the plan says, beside its own."""
        assert not self._due
        assert not source._due
        assert source.sizes.block_size == self.sizes.block_size
        for copy in kv.copies:
            for offset in range(self.sizes.block_size):
                token = source._cache.get((copy.source_group, copy.source_block, offset))
                if token is not None:
                    self._cache[copy.target_group, copy.target_block, offset] = token
        known = {(row.request.request_id, row.cached): row for row in (*source._rows.values(), *self._rows.values())}
        self._rows = {(row.dp_group, row.slot): replace(known[row.request.request_id, row.position]) for row in rows}
        for row in rows:
            assert row.token == self._expected(row.request, row.position)
        self._requests |= {row.request.request_id: row.request for row in rows}
        for request_id, starts in source._arrived.items():  # it may go on before a chunk has run
            self._arrived.setdefault(request_id, set()).update(starts)
        for request_id, start in source._prefilling.values():
            self._arrived.setdefault(request_id, set()).add(start)
        self.inner.accept_migration(source.inner, kv, rows)

    def _check_shape(self, plan: Plan) -> None:
        assert plan.prefill or plan.num_decoding
        chunked = [c.request.request_id for c in plan.prefill]
        decoding = [r.request_id for r in decode_rows(plan)]
        assert len(set(chunked)) == len(chunked)
        assert len(set(decoding)) == len(decoding)
        last = {c.request.request_id for c in plan.prefill if c.is_last}
        assert not decoding or last <= set(decoding), "a row whose prefill ends decodes in the same plan, if any does"
        assert not (set(chunked) - last) & set(decoding), "a row in the middle of its prefill does not"
        spent = Counter[int]()
        owners: dict[tuple[int, int], set[int]] = {}
        for chunk in plan.prefill:
            assert chunk.tokens
            spent[chunk.dp_group] += len(chunk.tokens)
            owners.setdefault((chunk.dp_group, chunk.slot), set()).add(chunk.request.request_id)
        for row in decode_rows(plan):
            owners.setdefault((row.dp_group, row.slot), set()).add(row.request_id)
        assert all(count <= self.sizes.max_prefill_tokens for count in spent.values())
        for (group, slot), owner in owners.items():
            assert len(owner) == 1, f"slot {slot} of group {group} has {owner}"
            assert 0 <= group < self.sizes.num_groups
            assert 0 <= slot < self.sizes.num_slots
        self._check_tables(plan)

    def _check_tables(self, plan: Plan) -> None:
        """No block twice in a plan, unless it is one place of the prompt of one `share`."""
        self._requests.update((chunk.request.request_id, chunk.request) for chunk in plan.prefill)
        tables = {row.request_id: (row.dp_group, row.block_table) for row in decode_rows(plan)}
        tables |= {chunk.request.request_id: (chunk.dp_group, chunk.block_table) for chunk in plan.prefill}
        users: dict[tuple[int, int], set[tuple[object, int]]] = {}
        for request_id, (group, table) in tables.items():
            request = self._requests[request_id]
            own = [(i, block) for i, block in enumerate(table) if block != TRASH_BLOCK]
            assert len({block for _, block in own}) == len(own)
            assert all(TRASH_BLOCK < block < self.sizes.num_blocks for _, block in own)
            assert len(table) % len(self.sizes.stacks) == 0
            for i, block in own:
                shareable = (len(request.prompt_ids) - 1) // self.sizes.block_size
                may_share = request.share is not None and i // len(self.sizes.stacks) < shareable
                users.setdefault((group, block), set()).add((request.share if may_share else request_id, i))
        assert all(len(user) == 1 for user in users.values()), users

    def _run_prefill(self, plan: Plan) -> None:
        for chunk in plan.prefill:
            request, at = chunk.request, (chunk.dp_group, chunk.slot)
            known, due = self._prefilling.get(at, (-1, -1))
            begun = self._arrived.pop(request.request_id, ())
            if (
                chunk.start != due or known != request.request_id
            ) and chunk.start not in begun:  # a new stay, at most after shared blocks
                assert chunk.start % self.sizes.block_size == 0
                assert chunk.start <= len(request.prompt_ids) - 1
                assert chunk.start == 0 or request.share is not None
            # a row that it left, at a preemption, says nothing of where it is now
            self._prefilling = {row: one for row, one in self._prefilling.items() if one[0] != request.request_id}
            self._prefilling[at] = (request.request_id, chunk.start + len(chunk.tokens))
            for i, token in enumerate(chunk.tokens):
                assert token == self._expected(request, chunk.start + i)
                self._write(chunk.dp_group, chunk.block_table, chunk.start + i, token)
        for chunk in plan.prefill:
            end = chunk.start + len(chunk.tokens)
            self._check_context(chunk.dp_group, chunk.block_table, chunk.request, chunk.start, end)
            if chunk.is_last:
                assert end == len(chunk.request.prompt_ids) + chunk.num_generated
                # a row that the request left at a preemption is no row of it any more
                own = chunk.request.request_id
                self._rows = {at: row for at, row in self._rows.items() if row.request.request_id != own}
                self._rows[chunk.dp_group, chunk.slot] = _Row(chunk.request, end, chunk.num_generated)

    def _run_decode(self, plan: Plan, result: PlanResult) -> None:
        fresh = {chunk.request.request_id for chunk in plan.prefill if chunk.is_last}
        decoding = decode_rows(plan)
        counts = dict(zip(result.request_ids.tolist(), result.counts.tolist(), strict=True))
        assert counts.keys() == {row.request_id for row in decoding} | fresh
        for chunk in plan.prefill:
            if chunk.is_last and not decoding:  # its first token, and no row decodes
                assert counts[chunk.request.request_id] == 1
                self._rows[chunk.dp_group, chunk.slot].num_generated += 1
        began = {named.request_id: self._rows[named.dp_group, named.slot].cached for named in decoding}
        for named in decoding:
            row, gained = self._rows[named.dp_group, named.slot], counts[named.request_id]
            request = row.request
            assert request.request_id == named.request_id
            reach = min(row.cached + plan.num_steps, len(request.prompt_ids) + request.params.max_tokens - 1)
            if row.num_generated < self._length(request):
                covered = len(named.block_table) // len(self.sizes.stacks) * self.sizes.block_size
                assert reach <= covered, "the table must cover what may be written"
            row.num_generated += gained
            for _ in range(gained - (request.request_id in fresh)):
                self._write(named.dp_group, named.block_table, row.cached, self._expected(request, row.cached))
                row.cached += 1
        for named in decoding:
            row = self._rows[named.dp_group, named.slot]
            if counts[named.request_id]:
                first = began[named.request_id]
                self._check_context(named.dp_group, named.block_table, row.request, first, row.cached)

    def _length(self, request: Request) -> int:
        return min(self.lengths[request.key], request.params.max_tokens)

    def _expected(self, request: Request, position: int) -> int:
        """The token at a position of a request's sequence."""
        num_prompt = len(request.prompt_ids)
        if position < num_prompt:
            return request.prompt_ids[position]
        length = self._length(request)
        if (request.key, length) not in self._responses:
            self._responses[request.key, length] = fillers(request, length).tolist()
        return self._responses[request.key, length][position - num_prompt]

    def _write(self, group: int, table: tuple[int, ...], position: int, token: int) -> None:
        for stack in range(len(self.sizes.stacks)):
            block = table[position // self.sizes.block_size * len(self.sizes.stacks) + stack]
            self._cache[group, block, position % self.sizes.block_size] = (token, stack)

    def _check_context(self, group: int, table: tuple[int, ...], request: Request, first: int, end: int) -> None:
        """All that queries at positions from `first` to `end` see is there, in the blocks of each stack."""
        for stack, window in enumerate(self.sizes.stacks.windows):
            for p in range(max(first - window + 1, 0) if window else 0, end):
                block = table[p // self.sizes.block_size * len(self.sizes.stacks) + stack]
                found = self._cache.get((group, block, p % self.sizes.block_size))
                assert block != TRASH_BLOCK, f"{request.key}: position {p} has been freed"
                assert found == (self._expected(request, p), stack), f"{request.key}: position {p} has been clobbered"


def make_request(
    request_id: int, num_prompt: int = 3, max_tokens: int = 20, prompt: int = 0, sample: int = 0, share: bool = False
) -> Request:
    return Request(
        request_id=request_id,
        key=SampleKey(0, prompt, sample),
        prompt_ids=tuple(40_000 + prompt * 100 + i for i in range(num_prompt)),
        params=SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,)),
        share=("prompt", prompt) if share else None,
    )


def make_engine(
    lengths: dict[SampleKey, int],
    config: BatcherConfig | None = None,
    num_groups: int = 1,
    num_slots: int = 4,
    num_blocks: int = 64,
    block_size: int = 4,
    max_prefill_tokens: int = 32,
    layouts: dict[int, Capacity] | None = None,
    tp: int = 1,
    windows: tuple[int, ...] = (0,),
    **more,
) -> tuple[Engine, CheckingExecutor]:
    sizes = (num_groups, num_slots, num_blocks, block_size, max_prefill_tokens)
    stacks = stacks_of(windows, max_prefill_tokens, (config or BatcherConfig(decode_steps=4)).decode_steps)
    inner = ReplayExecutor(lengths, *sizes, layouts=layouts, tp=tp, stacks=stacks)
    executor = CheckingExecutor(inner, lengths)
    return Engine(executor, config or BatcherConfig(decode_steps=4), **more), executor


def stacks_of(windows: tuple[int, ...], max_prefill_tokens: int, decode_steps: int) -> KvStacks:
    ahead = most_ahead(max_prefill_tokens, TOKENS_PER_STEP * decode_steps + 1)
    return KvStacks(windows, ahead) if any(windows) else WHOLE


def engine_in(
    tp: int, lengths: dict[SampleKey, int], layouts: dict[int, Capacity], config: BatcherConfig | None = None, **more
) -> tuple[Engine, CheckingExecutor]:
    """An engine that may change its layout, in that of `tp`."""
    own = layouts[tp]
    sizes = (own.num_groups, own.num_slots, own.num_blocks, own.block_size, own.max_prefill_tokens)
    return make_engine(lengths, config, *sizes, layouts=layouts, tp=tp, windows=own.stacks.windows, **more)


def assert_whole(sample: Sample, request: Request, length: int) -> None:
    """A sample has exactly the tokens that its identity says."""
    length = min(length, request.params.max_tokens)
    assert sample.token_ids.tolist() == fillers(request, length).tolist()
    assert sample.finish_reason == ("stop" if length < request.params.max_tokens else "length")
    assert len(sample.versions) == length


def assert_empty(engine: Engine) -> None:
    assert engine.is_idle
    blocks, capacity = engine.batcher.blocks, engine.batcher.capacity
    check_blocks(blocks)
    assert all(blocks.num_free(g) == capacity.num_blocks - 1 for g in range(capacity.num_groups))
    assert all(len(engine.batcher.free_slots(g)) == capacity.num_slots for g in range(capacity.num_groups))
    assert not engine.batcher._share_prompts
    assert not engine.batcher._flights
