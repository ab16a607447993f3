"""The engine over replayed lengths, watched by an executor with a shadow of the KV cache
(`tests/support/checking.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from checked_blocks import check_blocks
from checking import assert_empty, assert_whole, make_engine, make_request, stacks_of
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine, Finished
from jaxrl.scheduling.tokens.plan import Request, resume
from jaxrl.scheduling.tokens.progress import Completed, TraceEvent
from jaxrl.types import Sample, SampleKey, SamplingParams


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
    key, four = SampleKey(0, 0, 0), SamplingParams(max_tokens=4)
    seven = np.full((20,), 7, np.int32)
    done = Sample(key, seven, seven, seven, seven)
    idle: list[tuple[Callable[[], Any], str]] = [
        (lambda: engine.add(make_request(0, num_prompt=13)), r"rollout\.num_blocks \(9\)"),
        (lambda: engine.add(resume(make_request(0), done)), "finished already"),
        (lambda: resume(make_request(0, sample=1), done), "not of this request"),
        (lambda: engine.abort([3]), "not live"),
    ]
    for act, message in idle:
        with pytest.raises(ValueError, match=message):
            act()
    assert_empty(engine)
    engine.add(make_request(0, share=True))
    busy: list[tuple[Callable[[], Any], str]] = [
        (lambda: engine.add(make_request(0, share=True)), "is live"),
        (lambda: engine.add(Request(1, SampleKey(0, 1, 0), (1,), four, share=("prompt", 0))), "another prompt"),
    ]
    for act, message in busy:
        with pytest.raises(ValueError, match=message):
            act()
    assert engine.unfinished() == (0,)


@dataclass(frozen=True)
class Scenario:
    """A small world, and the actions on it: (step | drain | abort | add, which)."""

    num_groups: int
    num_slots: int
    block_size: int
    spare_blocks: int
    max_prefill_tokens: int
    config: BatcherConfig
    prompts: tuple[tuple[int, bool, tuple[tuple[int, int], ...]], ...]  # (length, shared, (response, max_tokens)...)
    script: tuple[tuple[str, int], ...]
    windows: tuple[int, ...] = (0,)

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
    windows=st.sampled_from([(0,), (0,), (3,), (0, 5), (0, 0, 2)]),
)


def run_scenario(scenario: Scenario, trace: list[TraceEvent]) -> tuple[Engine, dict[int, Sample]]:
    """Adds requests, aborts some and adds them again later, and runs everything to its end."""
    requests = dict(enumerate(scenario.requests()))
    lengths = {request.key: length for request, length in requests.values()}
    stacks = stacks_of(scenario.windows, scenario.max_prefill_tokens, scenario.config.decode_steps)
    longest = max(len(r.prompt_ids) + r.params.max_tokens for r, _ in requests.values())
    need = stacks.most_blocks(longest, scenario.block_size)
    engine, _ = make_engine(
        lengths,
        scenario.config,
        scenario.num_groups,
        scenario.num_slots,
        need + 1 + scenario.spare_blocks,
        scenario.block_size,
        scenario.max_prefill_tokens,
        windows=scenario.windows,
        trace=trace.append,
    )
    out = [request for request, _ in requests.values()]
    done: dict[int, Sample] = {}

    def take(finished: list[Finished]) -> None:
        places = [(f.dispatch, f.dp_group, f.slot) for f in finished]
        assert places == sorted(places)
        for f in finished:
            assert f.request_id not in done
            done[f.request_id] = f.sample
        check_blocks(engine.batcher.blocks)

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
