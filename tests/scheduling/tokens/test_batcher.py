"""The batcher's decisions, plan by plan. Results are made by hand: anything that a device might answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from checked_blocks import check_blocks
from plan_rows import decode_rows, result_of

from jaxrl.scheduling.tokens.batcher import UNLIMITED, Batcher, BatcherConfig
from jaxrl.scheduling.tokens.plan import TOKENS_PER_STEP, Capacity, Plan, Request, resume
from jaxrl.scheduling.tokens.progress import Admitted, Finished, Preempted, TraceEvent
from jaxrl.scheduling.tokens.stacks import KvStacks, most_ahead
from jaxrl.types import Sample, SampleKey, SamplingParams

STOP = 2


def make_batcher(
    decode_steps: int = 4,
    num_groups: int = 1,
    num_slots: int = 2,
    num_blocks: int = 33,
    block_size: int = 4,
    max_prefill_tokens: int = 16,
    spread_samples: bool = False,
) -> tuple[Batcher, list[TraceEvent]]:
    trace: list[TraceEvent] = []
    capacity = Capacity(num_groups, num_slots, num_blocks, block_size, max_prefill_tokens)
    config = BatcherConfig(decode_steps, spread_samples=spread_samples)
    return Batcher(config, capacity, trace.append), trace


def make_request(request_id: int, num_prompt: int = 4, max_tokens: int = 16, share: object = None) -> Request:
    first = 100 * request_id if share is None else 7
    prompt = tuple(range(first, first + num_prompt))
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,))
    return Request(request_id, SampleKey(0, request_id, 0), prompt, params, share)


def plan_of(batcher: Batcher) -> Plan:
    plan = batcher.schedule()
    assert plan is not None
    return plan


def answer(
    batcher: Batcher, index: int, rows: Mapping[int, list[int]], stopped: set[int] | None = None
) -> list[Finished]:
    """Hands in the result of the oldest plan, in which these requests gained these tokens."""
    scheduled, logprobs = batcher._flights[0].rows, (-0.5, -0.25)
    result = result_of(scheduled, index, rows, stopped or (), None, logprobs, num_steps=4, policy_version=index)
    return batcher.update(result)


def starts(plan: Plan) -> list[tuple[int, int, int]]:
    """(request, dp group, slot) of every chunk."""
    return [(c.request.request_id, c.dp_group, c.slot) for c in plan.prefill]


def decoding(plan: Plan) -> list[int]:
    return [row.request_id for row in decode_rows(plan)]


@pytest.mark.parametrize(
    ("num_requests", "max_prefill_tokens", "num_blocks", "leave_after"),
    [
        (2, 16, 33, UNLIMITED),  # no request waits
        (3, 16, 33, 1),  # one waits for a slot
        (2, 4, 33, UNLIMITED),  # one waits for prefill budget: the next plan has some
        (2, 16, 6, 1),  # one waits for blocks
    ],
)
def test_plans_are_left_early_only_if_a_request_could_come_in(
    num_requests: int, max_prefill_tokens: int, num_blocks: int, leave_after: int
):
    batcher, _ = make_batcher(max_prefill_tokens=max_prefill_tokens, num_blocks=num_blocks)
    for i in range(num_requests):
        batcher.add(make_request(i))
    assert plan_of(batcher).leave_after == leave_after


def test_a_prompt_whose_group_has_no_budget_waits_for_it_and_others_pass():
    batcher, _ = make_batcher(num_groups=2, num_slots=4, max_prefill_tokens=9)
    batcher.add(make_request(0, num_prompt=9, share="a"))
    batcher.add(make_request(1, num_prompt=9, share="a"))
    batcher.add(make_request(2, num_prompt=6))
    assert starts(plan_of(batcher)) == [(0, 0, 0), (2, 1, 0)]
    plan = plan_of(batcher)
    assert (starts(plan), plan.prefill[0].start) == ([(1, 0, 1)], 8)


@pytest.mark.parametrize(("num_blocks", "comes_in"), [(7, False), (8, True)])
def test_a_new_request_leaves_the_running_ones_room_for_a_plan(num_blocks: int, comes_in: bool):
    batcher, _ = make_batcher(num_blocks=num_blocks, max_prefill_tokens=64)
    batcher.add(make_request(0, num_prompt=4, max_tokens=20))
    plan_of(batcher)
    batcher.add(make_request(1, num_prompt=4, max_tokens=20))
    plan = plan_of(batcher)
    assert len(decode_rows(plan)[0].block_table) == 3
    # The new request needs 3 blocks for two plans, the other one will need its fourth.
    assert bool(plan.prefill) == comes_in


def crowd() -> tuple[Batcher, list[TraceEvent]]:
    """A pool of 7 blocks after two plans: two requests run, plan 1 is in flight, a third request waits."""
    batcher, trace = make_batcher(num_blocks=8, max_prefill_tokens=64, num_slots=3)
    for i in range(3):
        batcher.add(make_request(i, num_prompt=2, max_tokens=20))
    assert starts(plan_of(batcher)) == [(0, 0, 0), (1, 0, 1)]
    assert decoding(plan_of(batcher)) == [0, 1]
    answer(batcher, 0, {0: [5] * 5, 1: [6] * 5})
    return batcher, trace


def test_the_youngest_is_preempted_and_comes_back_first_with_its_tokens():
    batcher, trace = crowd()
    plan = plan_of(batcher)
    assert decoding(plan) == [0], "14 positions for the first take the last block"
    assert trace[-1] == Preempted(2, SampleKey(0, 1, 0), dp_group=0, slot=1)
    assert plan.leave_after == 1
    assert (batcher.num_running, batcher.num_waiting, batcher.counters.preemptions) == (1, 2, 1)
    answer(batcher, 1, {0: [5] * 4, 1: [6] * 4})
    assert not plan_of(batcher).prefill, "no room"
    (ended,) = answer(batcher, 2, {0: [5, STOP]}, stopped={0})
    assert (ended.sample.finish_reason, ended.dispatch, ended.slot) == ("stop", 2, 0)
    chunk = plan_of(batcher).prefill[0]
    assert (chunk.request.request_id, chunk.slot, chunk.start, chunk.num_generated) == (1, 0, 0, 9)
    assert chunk.tokens == (100, 101, *[6] * 9), "tokens that arrived late are kept"
    assert trace[-1] == Admitted(4, SampleKey(0, 1, 0), 0, 0, 0)
    assert batcher.progress(1).sample("abort").versions.tolist() == [0] * 5 + [1] * 4


def test_what_is_only_parked_keeps_no_request_out_where_one_fits():
    """Where all layers have a window, one that finds its prompt holds as many blocks later as one that does not."""
    stacks = KvStacks((6,), most_ahead(16, 3 * TOKENS_PER_STEP + 1))
    config = BatcherConfig(decode_steps=3)
    batcher = Batcher(config, Capacity(1, 1, stacks.most_blocks(64, 1) + 1, 1, 16, stacks))
    batcher.add(replace(make_request(0, num_prompt=12, share="a"), session="talk"))
    plan_of(batcher)
    answer(batcher, 0, {0: [STOP]}, {0})
    assert batcher.blocks.num_parked(0) == 12
    logprobs, request = np.full(40, -0.5, np.float32), make_request(1, num_prompt=12, max_tokens=52, share="a")
    kept = Sample(request.key, np.full(40, 9, np.int32), logprobs, logprobs, np.zeros(40, np.int32))
    batcher.add(resume(request, kept))
    assert starts(plan_of(batcher)) == [(1, 0, 0)]
    assert batcher.counters.shared_tokens == 11
    check_blocks(batcher.blocks)
