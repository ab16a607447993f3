"""The engine over replayed lengths, watched by an executor that keeps a shadow of the KV cache.

`CheckingExecutor` holds, for every position of every block, the token whose KV would be there. So a block given to two
requests, a prefix read before it was written, or a slot reused too early shows as a wrong token in a row's context.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.scheduling.batcher import BatcherConfig
from jaxrl.scheduling.engine import Engine, Finished, resume
from jaxrl.scheduling.plan import TRASH_BLOCK, Plan, PlanResult, Request, Ticket
from jaxrl.scheduling.progress import Admitted, Completed, Preempted, TraceEvent
from jaxrl.sim.executor import ReplayExecutor, filler
from jaxrl.types import Sample, SampleKey, SamplingParams

STOP = 2


@dataclass
class _Row:
    request: Request
    cached: int  # positions whose KV is written
    num_generated: int


class CheckingExecutor:
    """Runs plans through a ReplayExecutor and checks, in the order of the device, what a plan must obey."""

    def __init__(self, inner: ReplayExecutor, lengths: dict[SampleKey, int]) -> None:
        self.inner = inner
        self.lengths = lengths
        self.num_groups = inner.num_groups
        self.num_slots = inner.num_slots
        self.num_blocks = inner.num_blocks
        self.block_size = inner.block_size
        self.max_prefill_tokens = inner.max_prefill_tokens
        self.plans: list[Plan] = []
        self._due: deque[Plan] = deque()
        self._cache: dict[tuple[int, int, int], int] = {}  # (group, block, offset) -> token
        self._rows: dict[tuple[int, int], _Row] = {}
        self._requests: dict[int, Request] = {}  # as last seen in a chunk
        self._prefilling: dict[tuple[int, int], tuple[int, int]] = {}  # (group, slot) -> (request id, next start)

    def check(self, request: Request) -> None:
        self.inner.check(request)

    def submit(self, plan: Plan) -> Ticket:
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

    def _check_shape(self, plan: Plan) -> None:
        """What can be said of a plan by itself."""
        assert plan.prefill or plan.decode
        chunked = [c.request.request_id for c in plan.prefill]
        decoding = [r.request_id for r in plan.decode]
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
        for row in plan.decode:
            owners.setdefault((row.dp_group, row.slot), set()).add(row.request_id)
        assert all(count <= self.max_prefill_tokens for count in spent.values())
        for (group, slot), owner in owners.items():
            assert len(owner) == 1, f"slot {slot} of group {group} has {owner}"
            assert 0 <= group < self.num_groups
            assert 0 <= slot < self.num_slots
        self._check_tables(plan)

    def _check_tables(self, plan: Plan) -> None:
        """No block twice in a plan, unless it is one place of the prompt of one `share`."""
        self._requests.update((chunk.request.request_id, chunk.request) for chunk in plan.prefill)
        tables = {row.request_id: (row.dp_group, row.block_table) for row in plan.decode}
        tables |= {chunk.request.request_id: (chunk.dp_group, chunk.block_table) for chunk in plan.prefill}
        users: dict[tuple[int, int], set[tuple[object, int]]] = {}
        for request_id, (group, table) in tables.items():
            request = self._requests[request_id]
            assert len(set(table)) == len(table)
            assert all(TRASH_BLOCK < block < self.num_blocks for block in table)
            for i, block in enumerate(table):
                may_share = request.share is not None and i < (len(request.prompt_ids) - 1) // self.block_size
                users.setdefault((group, block), set()).add((request.share if may_share else request_id, i))
        assert all(len(user) == 1 for user in users.values()), users

    def _run_prefill(self, plan: Plan) -> None:
        for chunk in plan.prefill:
            request, at = chunk.request, (chunk.dp_group, chunk.slot)
            known, due = self._prefilling.get(at, (-1, -1))
            if chunk.start != due or known != request.request_id:  # a new stay begins, at most after shared blocks
                assert chunk.start % self.block_size == 0
                assert chunk.start <= len(request.prompt_ids) - 1
                assert chunk.start == 0 or request.share is not None
            self._prefilling[at] = (request.request_id, chunk.start + len(chunk.tokens))
            for i, token in enumerate(chunk.tokens):
                assert token == self._expected(request, chunk.start + i)
                self._write(chunk.dp_group, chunk.block_table, chunk.start + i, token)
        for chunk in plan.prefill:
            end = chunk.start + len(chunk.tokens)
            self._check_context(chunk.dp_group, chunk.block_table, chunk.request, end)
            if chunk.is_last:
                assert end == len(chunk.request.prompt_ids) + chunk.num_generated
                self._rows[chunk.dp_group, chunk.slot] = _Row(chunk.request, end, chunk.num_generated)

    def _run_decode(self, plan: Plan, result: PlanResult) -> None:
        fresh = {chunk.request.request_id for chunk in plan.prefill if chunk.is_last}
        assert set(result.rows) == {row.request_id for row in plan.decode} | fresh
        for chunk in plan.prefill:
            if chunk.is_last and not plan.decode:  # its first token, and nobody decodes
                assert len(result.rows[chunk.request.request_id].token_ids) == 1
                self._rows[chunk.dp_group, chunk.slot].num_generated += 1
        for named in plan.decode:
            row, gained = self._rows[named.dp_group, named.slot], len(result.rows[named.request_id].token_ids)
            request = row.request
            assert request.request_id == named.request_id
            reach = min(row.cached + plan.num_steps, len(request.prompt_ids) + request.params.max_tokens - 1)
            if row.num_generated < self._length(request):
                assert reach <= len(named.block_table) * self.block_size, "the table must cover what may be written"
            row.num_generated += gained
            for _ in range(gained - (request.request_id in fresh)):
                self._write(named.dp_group, named.block_table, row.cached, self._expected(request, row.cached))
                row.cached += 1
        for named in plan.decode:
            row = self._rows[named.dp_group, named.slot]
            if len(result.rows[named.request_id].token_ids):
                self._check_context(named.dp_group, named.block_table, row.request, row.cached)

    def _length(self, request: Request) -> int:
        return min(self.lengths[request.key], request.params.max_tokens)

    def _expected(self, request: Request, position: int) -> int:
        """The token at a position of a request's sequence."""
        num_prompt = len(request.prompt_ids)
        if position < num_prompt:
            return request.prompt_ids[position]
        return filler(request, position - num_prompt, self._length(request))

    def _write(self, group: int, table: tuple[int, ...], position: int, token: int) -> None:
        self._cache[group, table[position // self.block_size], position % self.block_size] = token

    def _check_context(self, group: int, table: tuple[int, ...], request: Request, end: int) -> None:
        for p in range(end):
            at = (group, table[p // self.block_size], p % self.block_size)
            assert self._cache.get(at) == self._expected(request, p), f"{request.key}: position {p} has been clobbered"


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
    **more,
) -> tuple[Engine, CheckingExecutor]:
    inner = ReplayExecutor(lengths, num_groups, num_slots, num_blocks, block_size, max_prefill_tokens)
    executor = CheckingExecutor(inner, lengths)
    return Engine(executor, config or BatcherConfig(decode_steps=4), **more), executor


def assert_whole(sample: Sample, request: Request, length: int) -> None:
    """A sample has exactly the tokens that its identity says."""
    length = min(length, request.params.max_tokens)
    assert sample.token_ids.tolist() == [filler(request, i, length) for i in range(length)]
    assert sample.finish_reason == ("stop" if length < request.params.max_tokens else "length")
    assert len(sample.versions) == len(sample.rollout_logprobs) == len(sample.sampled_logprobs) == length


def assert_empty(engine: Engine) -> None:
    """Everything was given back."""
    assert engine.is_idle
    blocks, capacity = engine.batcher.blocks, engine.batcher.capacity
    blocks.check()
    assert all(blocks.num_free(g) == capacity.num_blocks - 1 for g in range(capacity.num_groups))
    assert all(len(slots) == capacity.num_slots for slots in engine.batcher._free_slots)
    assert not engine.batcher._share_prompts
    assert not engine.batcher._in_flight


def test_generate_returns_samples_in_the_order_of_requests():
    requests = [make_request(i, prompt=i) for i in range(7)]
    lengths = {r.key: n for r, n in zip(requests, [9, 1, 30, 4, 5, 20, 2], strict=True)}
    engine, _ = make_engine(lengths)
    samples = engine.generate(requests)
    assert [s.key for s in samples] == [r.key for r in requests]
    for request, sample in zip(requests, samples, strict=True):
        assert_whole(sample, request, lengths[request.key])
    assert_empty(engine)
    assert engine.counters.admissions == 7
    assert engine.counters.prefill_tokens == 21


def test_stream_yields_as_they_finish_and_closing_aborts():
    requests = [make_request(i, prompt=i) for i in range(4)]
    lengths = {r.key: n for r, n in zip(requests, [20, 2, 9, 5], strict=True)}
    engine, _ = make_engine(lengths)
    assert [s.key.prompt_index for s in engine.stream(requests)] == [1, 3, 2, 0]
    listening = engine.stream(requests)
    next(listening)
    listening.close()
    assert_empty(engine)


def test_the_device_is_one_plan_ahead():
    request = make_request(0)
    engine, executor = make_engine({request.key: 6})
    engine.add(request)
    assert engine.step() == []
    assert len(executor.plans) == 1
    assert engine.step() == [], "1 + 4 tokens after plan 0"
    assert len(executor.plans) == 2
    (finished,) = engine.step()
    assert (finished.request_id, finished.dispatch, finished.dp_group, finished.slot) == (0, 1, 0, 0)
    assert len(executor.plans) == 3, "planned before the host knew"
    assert not engine.is_idle
    assert engine.step() == []
    assert_empty(engine)
    assert engine.counters.steps == 5
    assert engine.counters.busy_row_steps == 5
    assert engine.counters.offered_row_steps == 20
    assert engine.counters.bubble_ratio == 0.75


def test_drain_shows_all_the_device_knows():
    request = make_request(0)
    engine, _ = make_engine({request.key: 5})
    engine.add(request)
    engine.step()
    (finished,) = engine.drain()
    assert_whole(finished.sample, request, 5)
    assert engine.drain() == []
    assert_empty(engine)


def test_finished_come_by_group_and_slot():
    requests = [make_request(i, prompt=i) for i in range(6)]
    engine, _ = make_engine(dict.fromkeys((r.key for r in requests), 3), num_groups=2)
    for request in requests:
        engine.add(request)
    engine.step()
    finished = engine.drain()
    places = [(f.dispatch, f.dp_group, f.slot) for f in finished]
    assert places == sorted(places)
    assert [f.request_id for f in finished] == [0, 2, 4, 1, 3, 5]


def test_samples_of_a_prompt_share_its_blocks():
    requests = [make_request(i, num_prompt=10, sample=i, share=True) for i in range(4)]
    engine, executor = make_engine(dict.fromkeys((r.key for r in requests), 4))
    engine.generate(requests)
    assert [c.start for c in executor.plans[0].prefill] == [0, 8, 8, 8], "all in one plan"
    assert engine.counters.shared_tokens == 24
    assert_empty(engine)


def test_a_long_prompt_is_prefilled_in_chunks_before_anybody_decodes():
    short, long = make_request(0, num_prompt=3, prompt=0), make_request(1, num_prompt=20, prompt=1)
    engine, executor = make_engine({short.key: 20, long.key: 3}, max_prefill_tokens=8)
    samples = engine.generate([short, long])
    assert_whole(samples[1], long, 3)
    chunks = [[(c.request.request_id, c.start, len(c.tokens), c.is_last) for c in p.prefill] for p in executor.plans]
    assert chunks[:4] == [[(0, 0, 3, True), (1, 0, 5, False)], [(1, 5, 8, False)], [(1, 13, 7, True)], []]
    assert [len(p.decode) for p in executor.plans[:3]] == [0, 0, 2]


def test_preempted_requests_keep_their_tokens():
    requests = [make_request(i, prompt=i, max_tokens=12) for i in range(3)]
    trace: list[TraceEvent] = []
    engine, _ = make_engine(
        dict.fromkeys((r.key for r in requests), 12), BatcherConfig(decode_steps=2), num_blocks=7, trace=trace.append
    )
    for request, sample in zip(requests, engine.generate(requests), strict=True):
        assert_whole(sample, request, 12)
    assert engine.counters.preemptions == sum(isinstance(e, Preempted) for e in trace) > 0
    assert engine.counters.admissions == sum(isinstance(e, Admitted) for e in trace)
    assert all(e.key.prompt_index > 0 for e in trace if isinstance(e, Preempted)), "the oldest is never preempted"
    assert_empty(engine)


def test_abort_and_resume():
    requests = [make_request(i, prompt=i) for i in range(6)]
    lengths = dict.fromkeys((r.key for r in requests), 18)
    engine, executor = make_engine(lengths)
    for request in requests:
        engine.add(request)
    engine.step()
    engine.step()
    executor.inner.policy_version = 1
    assert engine.unfinished() == (0, 1, 2, 3, 4, 5)
    samples = engine.abort([5, 0, 3])
    assert [len(s) for s in samples] == [0, 5, 5], "the sixth was waiting; of the others one plan was seen"
    assert all(s.finish_reason == "abort" for s in samples)
    resumed = [resume(requests[i], s) for i, s in zip([5, 0, 3], samples, strict=True)]
    for request in resumed:
        engine.add(request)
    finished: dict[int, Finished] = {}
    while not engine.is_idle:
        finished.update((f.request_id, f) for f in engine.step())
    for request in requests:
        assert_whole(finished[request.request_id].sample, request, 18)
    assert finished[0].sample.versions.tolist() == [0] * 5 + [1] * 13
    assert engine.counters.dropped_tokens == 8, "two rows had a plan of four steps in flight"
    assert_empty(engine)


def test_abort_in_the_middle_of_a_prefill():
    request, other = make_request(0, num_prompt=20, share=True), make_request(1, num_prompt=20, sample=1, share=True)
    lengths = {request.key: 3, other.key: 4}
    engine, _ = make_engine(lengths, max_prefill_tokens=8)
    engine.add(request)
    engine.add(other)
    engine.step()
    assert [len(s) for s in engine.abort([0])] == [0]
    samples = []
    while not engine.is_idle:
        samples += [f.sample for f in engine.step()]
    assert_whole(samples[0], other, 4)
    assert_empty(engine)


def test_a_stop_string_ends_a_row_on_the_host():
    params = SamplingParams(max_tokens=20, stop_strings=("seven",))
    request = Request(0, SampleKey(0, 0, 0), (1, 2), params)
    other = make_request(1, prompt=1)
    calls: list[int] = []

    def stop_check(request: Request, tokens: list[int]) -> int | None:
        calls.append(request.request_id)
        return 7 if len(tokens) >= 7 else None

    engine, _ = make_engine({request.key: 20, other.key: 6}, stop_check=stop_check)
    stopped, whole = engine.generate([request, other])
    assert (len(stopped), stopped.finish_reason, len(stopped.versions)) == (7, "stop", 7)
    assert_whole(whole, other, 6)
    assert set(calls) == {0}, "only requests with stop strings are looked at"
    assert engine.counters.dropped_tokens == 4
    assert_empty(engine)


def test_malformed_requests_are_refused_and_change_nothing():
    engine, _ = make_engine({}, BatcherConfig(max_model_len=40), num_blocks=9)
    with pytest.raises(ValueError, match=r"rollout\.num_blocks \(9\)"):
        engine.add(make_request(0, num_prompt=13))
    with pytest.raises(ValueError, match=r"rollout\.max_model_len \(40\)"):
        engine.add(make_request(0, num_prompt=21))
    with pytest.raises(ValueError, match="at least one token"):
        engine.add(make_request(0, num_prompt=0))
    with pytest.raises(ValueError, match="stop_check"):
        engine.add(Request(0, SampleKey(0, 0, 0), (1,), SamplingParams(stop_strings=("x",))))
    with pytest.raises(ValueError, match="log-probabilities"):
        engine.add(Request(0, SampleKey(0, 0, 0), (1,), SamplingParams(max_tokens=4), generated=(5,)))
    seven = np.full((20,), 7, np.int32)
    done = Sample(SampleKey(0, 0, 0), seven, seven, seven, seven)
    with pytest.raises(ValueError, match="finished already"):
        engine.add(resume(make_request(0), done))
    with pytest.raises(ValueError, match="not of this request"):
        resume(make_request(0, sample=1), done)
    with pytest.raises(ValueError, match="not live"):
        engine.abort([3])
    assert_empty(engine)
    engine.add(make_request(0, share=True))
    with pytest.raises(ValueError, match="is live"):
        engine.add(make_request(0, share=True))
    with pytest.raises(ValueError, match="another prompt"):
        engine.add(Request(1, SampleKey(0, 1, 0), (1,), SamplingParams(max_tokens=4), share=("prompt", 0)))
    with pytest.raises(ValueError, match="idle engine"):
        engine.generate([make_request(2)])
    with pytest.raises(ValueError, match="named once"):
        engine.abort([0, 0])
    assert engine.unfinished() == (0,)
    engine.abort([0])
    with pytest.raises(ValueError, match="is live"):
        engine.generate([make_request(2), make_request(2)])
    assert_empty(engine)


@dataclass(frozen=True)
class Scenario:
    """A small world, and what is done to it: (step | drain | abort | add, which)."""

    num_groups: int
    num_slots: int
    block_size: int
    spare_blocks: int
    max_prefill_tokens: int
    config: BatcherConfig
    prompts: tuple[tuple[int, bool, tuple[tuple[int, int], ...]], ...]  # (length, shared, (response, max_tokens)...)
    script: tuple[tuple[str, int], ...]

    def requests(self) -> list[tuple[Request, int]]:
        out = []
        for p, (num_prompt, share, responses) in enumerate(self.prompts):
            for i, (length, max_tokens) in enumerate(responses):
                out.append((make_request(len(out), num_prompt, max_tokens, p, i, share), length))
        return out


RESPONSES = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16)), min_size=1, max_size=4).map(tuple)
SCENARIOS = st.builds(
    Scenario,
    num_groups=st.integers(1, 4),
    num_slots=st.integers(1, 4),
    block_size=st.integers(1, 4),
    spare_blocks=st.integers(0, 12),
    max_prefill_tokens=st.integers(1, 20),
    config=st.builds(BatcherConfig, decode_steps=st.integers(1, 6), leave_after=st.integers(1, 3)),
    prompts=st.lists(st.tuples(st.integers(1, 14), st.booleans(), RESPONSES), min_size=1, max_size=6).map(tuple),
    script=st.lists(
        st.tuples(st.sampled_from(["step", "step", "step", "drain", "abort", "add"]), st.integers(0, 1 << 16)),
        max_size=30,
    ).map(tuple),
)


def run_scenario(scenario: Scenario, trace: list[TraceEvent]) -> tuple[Engine, dict[int, Sample]]:
    """Adds requests, aborts some and adds them again later, and runs everything to its end."""
    requests = dict(enumerate(scenario.requests()))
    lengths = {request.key: length for request, length in requests.values()}
    need = max(-(-(len(r.prompt_ids) + r.params.max_tokens) // scenario.block_size) for r, _ in requests.values())
    engine, _ = make_engine(
        lengths,
        scenario.config,
        scenario.num_groups,
        scenario.num_slots,
        need + 1 + scenario.spare_blocks,
        scenario.block_size,
        scenario.max_prefill_tokens,
        trace=trace.append,
    )
    out = [request for request, _ in requests.values()]
    done: dict[int, Sample] = {}

    def take(finished: list[Finished]) -> None:
        for f in finished:
            assert f.request_id not in done
            done[f.request_id] = f.sample
        engine.batcher.blocks.check()

    for action, which in scenario.script:
        match action:
            case "add" if out:
                engine.add(out.pop(which % len(out)))
            case "step":
                take(engine.step())
            case "drain":
                take(engine.drain())
            case "abort" if engine.unfinished():
                live = engine.unfinished()
                ids = [i for i in live if which >> (i % 16) & 1] or [live[0]]
                out += [resume(requests[i][0], s) for i, s in zip(ids, engine.abort(ids), strict=True)]
    for request in out:
        engine.add(request)
    patience = 50 + 20 * sum(len(r.prompt_ids) + length for r, length in requests.values())
    while not engine.is_idle:
        take(engine.step())
        patience -= 1
        assert patience, "livelock"
    assert set(done) == set(requests)
    return engine, done


@settings(max_examples=400, deadline=None)
@given(SCENARIOS)
def test_every_request_finishes_whole_whatever_happens(scenario: Scenario):
    trace: list[TraceEvent] = []
    engine, done = run_scenario(scenario, trace)
    for i, (request, length) in enumerate(scenario.requests()):
        assert_whole(done[i], request, length)
    assert_empty(engine)
    counters = engine.counters
    assert 0 <= counters.busy_row_steps <= counters.offered_row_steps
    completed = [e for e in trace if isinstance(e, Completed)]
    assert len(completed) == len(done)
    order = [(e.plan_index, e.dp_group, e.slot) for e in completed]
    assert order == sorted(order)


@settings(max_examples=60, deadline=None)
@given(SCENARIOS)
def test_a_replay_of_recorded_lengths_decides_the_same(scenario: Scenario):
    """What is recorded of a run (its lengths) is enough for a replay to admit, preempt and complete alike."""
    first: list[TraceEvent] = []
    _, done = run_scenario(scenario, first)
    recorded = {sample.key: len(sample) for sample in done.values()}
    prompts = tuple(
        (n, share, tuple((recorded[SampleKey(0, p, i)], most) for i, (_, most) in enumerate(responses)))
        for p, (n, share, responses) in enumerate(scenario.prompts)
    )
    second: list[TraceEvent] = []
    run_scenario(replace(scenario, prompts=prompts), second)
    assert first == second
