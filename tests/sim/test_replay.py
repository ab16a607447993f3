"""Replayed plans: the decode loop's rule for leaving, step by step, and the fillers."""

from __future__ import annotations

import numpy as np
import pytest
from plan_rows import DecodeRow, scheduled
from replay_executor import ReplayExecutor, filler

from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Plan, PlanResult, PrefillChunk, Request, resume
from jaxrl.types import Sample, SampleKey, SamplingParams

STOP = 2


def make_request(i: int, max_tokens: int = 50, stop: tuple[int, ...] = (STOP,)) -> Request:
    return Request(i, SampleKey(0, i, 0), (1, 2, 3), SamplingParams(max_tokens=max_tokens, stop_token_ids=stop))


def make_executor(lengths: list[int], **more) -> ReplayExecutor:
    known = {SampleKey(0, i, 0): n for i, n in enumerate(lengths)}
    return ReplayExecutor(known, 1, 8, 99, block_size=4, max_prefill_tokens=64, **more)


def run(executor: ReplayExecutor, index: int, new: list[Request], old: list[int], **more) -> PlanResult:
    """Submits a plan that starts `new` requests and advances `old` ones; the slot is the request's id."""
    chunks = [
        PrefillChunk(r, 0, r.request_id, r.prompt_ids, 0, (1,), True, 0 if r.kept is None else len(r.kept)) for r in new
    ]
    started = [request.request_id for request in new]
    rows = scheduled([DecodeRow(i, 0, i, (1, 2), 16) for i in [*old, *started]], 8, started)
    return executor.collect(executor.submit(Plan(index, tuple(chunks), rows, **more)))


def gained(result: PlanResult) -> dict[int, tuple[int, bool]]:
    columns = result.request_ids.tolist(), result.counts.tolist(), result.stopped.tolist()
    return {request_id: (count, stopped) for request_id, count, stopped in zip(*columns, strict=True)}


@pytest.mark.parametrize(
    ("lengths", "num_steps", "leave_after", "steps", "expected"),
    [
        ([9, 9], 4, 99, 4, {0: (5, False), 1: (5, False)}),
        ([3, 9], 4, 99, 4, {0: (3, True), 1: (5, False)}),
        ([3, 9], 4, 1, 2, {0: (3, True), 1: (3, False)}),
        ([3, 3, 9], 4, 1, 2, {0: (3, True), 1: (3, True), 2: (3, False)}),  # both stop in the step
        ([2, 4, 9], 8, 2, 3, {0: (2, True), 1: (4, True), 2: (4, False)}),
        ([1, 9], 4, 1, 0, {0: (1, True), 1: (1, False)}),  # the first token may end a row, and counts
        ([2, 3], 9, 99, 2, {0: (2, True), 1: (3, True)}),  # no row is active any more
        ([9, 9], 0, 99, 0, {0: (1, False), 1: (1, False)}),
    ],
)
def test_leaving_early(
    lengths: list[int], num_steps: int, leave_after: int, steps: int, expected: dict[int, tuple[int, bool]]
):
    executor = make_executor(lengths)
    requests = [make_request(i) for i in range(len(lengths))]
    result = run(executor, 0, requests, [], num_steps=num_steps, leave_after=leave_after)
    assert (result.num_steps, gained(result)) == (steps, expected)


def test_a_row_that_has_stopped_gains_nothing_and_does_not_count_as_stopping_again():
    executor = make_executor([2, 9])
    run(executor, 0, [make_request(0), make_request(1)], [], num_steps=2)
    result = run(executor, 1, [], [0, 1], num_steps=3, leave_after=1)
    assert (result.num_steps, gained(result)) == (3, {0: (0, False), 1: (3, False)})


def kept_tokens(token_ids: list[int]) -> Sample:
    logprobs = np.zeros(len(token_ids), np.float32)
    return Sample(SampleKey(0, 0, 0), np.array(token_ids, np.int32), logprobs, logprobs, np.zeros(len(token_ids), int))


def test_tokens_depend_on_identity_and_position_alone():
    request = make_request(0, stop=(STOP, 17))
    whole = run(make_executor([6]), 0, [request], [], num_steps=20).token_ids.tolist()
    assert whole == [filler(request, i, 6) for i in range(6)]
    assert whole[-1] == STOP
    assert not {STOP, 17} & set(whole[:-1])
    kept = resume(request, kept_tokens(whole[:4]))
    assert run(make_executor([6]), 0, [kept], [], num_steps=20).token_ids.tolist() == whole[4:]


def test_lengths_are_cut_at_max_tokens_without_a_stop_token():
    result = run(make_executor([6]), 0, [make_request(0, max_tokens=5)], [], num_steps=20)
    assert gained(result) == {0: (5, True)}
    assert STOP not in result.token_ids


def test_time_is_charged_by_plan_and_steps():
    executor = make_executor([6], cost=lambda plan, steps: 10.0 * len(plan.prefill) + steps)
    engine = Engine(executor, BatcherConfig(decode_steps=3))
    seconds: list[float] = []
    engine.watchers.append(lambda times: seconds.append(times.duration_s))
    engine.generate([make_request(0)])
    assert sum(seconds) == 10.0 + 5, "a plan for a row that had stopped costs no step"


def test_lengths_that_do_not_fit_are_refused():
    executor = make_executor([2])
    with pytest.raises(ValueError, match="no length is recorded"):
        run(executor, 0, [make_request(1)], [])
    kept = resume(make_request(0), kept_tokens([5, 6]))
    with pytest.raises(ValueError, match="must exceed the tokens kept"):
        run(executor, 0, [kept], [])
