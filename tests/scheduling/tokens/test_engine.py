"""The engine over replayed lengths, watched by an executor with a shadow of the KV cache
(`tests/support/checking.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checking import assert_empty, assert_whole, make_engine, make_request

from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.plan import Request, resume
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


@pytest.mark.parametrize("decode_steps", [1, 4, 7])
def test_many_rows_get_blocks_at_once(decode_steps: int):
    requests = [make_request(i, 1 + i % 5, max_tokens=20 + 7 * i, prompt=i) for i in range(20)]
    lengths = {request.key: 60 for request in requests}
    engine, executor = make_engine(lengths, BatcherConfig(decode_steps), num_groups=2, num_slots=10, num_blocks=400)
    for sample, request in zip(engine.generate(requests), requests, strict=True):
        assert_whole(sample, request, 60)
    assert engine.counters.preemptions == 0
    assert max(len(plan.rows.request_ids) for plan in executor.plans) == 20


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
