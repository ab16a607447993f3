"""Plans that speculate, through an engine over an executor that accepts what chance says."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from checked_blocks import check_blocks
from plan_rows import decode_rows, result_of

from jaxrl.mechanisms.speculation.index import DraftIndex
from jaxrl.mechanisms.speculation.rule import DraftConfig, DraftRule, DraftWindow, StepCosts
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.scheduling.tokens.plan import (
    TOKENS_PER_STEP,
    TRASH_BLOCK,
    Plan,
    PlanResult,
    Request,
    VerifyCounts,
)
from jaxrl.scheduling.tokens.progress import Preempted, TraceEvent
from jaxrl.scheduling.tokens.stacks import WHOLE
from jaxrl.types import SampleKey, SamplingParams

STEPS = 4
HISTORY = DraftIndex.build([np.arange(3, 9, dtype=np.int32)], [1.0])


def drafting(verify_tokens: int = 64, costs: StepCosts | None = None) -> BatcherConfig:
    rule = partial(DraftRule, DraftConfig(DraftWindow(), verify_tokens, costs=costs))
    return BatcherConfig(STEPS, verify_rule=rule)


@dataclass
class Ticket:
    index: int
    result: PlanResult


class Accepting:
    """Gives a row with a history 1 .. `TOKENS_PER_STEP` tokens a step; tokens are positions. Checks that every position
    that may be written has a block of the row's own."""

    num_groups, block_size, max_prefill_tokens, stacks = 2, 4, 16, WHOLE

    def __init__(self, num_slots: int, num_blocks: int, seed: int) -> None:
        self.num_slots, self.num_blocks = num_slots, num_blocks
        self.chance = random.Random(seed)
        self.at: dict[int, tuple[int, int]] = {}  # by request, (position of its newest token, limit); gone: stopped
        self.plans: list[Plan] = []

    def check(self, request: Request) -> None: ...

    def submit(self, plan: Plan) -> Ticket:
        self.plans.append(plan)
        rows: dict[int, list[int]] = {}
        for chunk in plan.prefill:
            if chunk.is_last:
                request = chunk.request
                start = len(request.prompt_ids) + chunk.num_generated
                self.at[request.request_id] = (start - 1, len(request.prompt_ids) + request.params.max_tokens)
                rows[request.request_id] = self._advance(request.request_id, 1)
        owners: dict[tuple[int, int], int] = {}
        counts: dict[int, VerifyCounts] = {}
        for row in decode_rows(plan):
            if row.request_id not in self.at:
                continue
            position, limit = self.at[row.request_id]
            assert min(position + row.max_new, limit - 1) <= len(row.block_table) * self.block_size
            for block in row.block_table:
                assert block != TRASH_BLOCK
                assert owners.setdefault((row.dp_group, block), row.request_id) == row.request_id
            assert row.max_new in (STEPS, TOKENS_PER_STEP * STEPS)
            assert row.max_new == STEPS or plan.verifies
            count = STEPS
            if plan.verifies and row.history is not None:
                count = min(row.max_new, self.chance.randint(STEPS, TOKENS_PER_STEP * STEPS))
            gained = self._advance(row.request_id, count)
            rows.setdefault(row.request_id, []).extend(gained)
            if plan.verifies:
                steps = min(STEPS, len(gained))
                counts[row.request_id] = VerifyCounts(steps, 2 * len(gained), len(gained) - steps, steps, 7 * steps)
        stopped, verified = [i for i in rows if i not in self.at], counts if plan.verifies else None
        return Ticket(plan.index, result_of(plan.rows, plan.index, rows, stopped, verified, num_steps=plan.num_steps))

    def collect(self, ticket: Ticket) -> PlanResult:
        return ticket.result

    def _advance(self, request_id: int, count: int) -> list[int]:
        position, limit = self.at.pop(request_id)
        tokens = list(range(position + 1, min(position + 1 + count, limit)))
        if position + len(tokens) + 1 < limit:
            self.at[request_id] = (position + len(tokens), limit)
        return tokens


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_slots", "num_blocks"), [(4, 200), (3, 16)], ids=["room", "preempting"])
def test_a_row_never_gets_more_than_its_plan_has_blocks_for(seed: int, num_slots: int, num_blocks: int):
    executor = Accepting(num_slots, num_blocks, seed)
    trace: list[TraceEvent] = []
    engine = Engine(executor, drafting(verify_tokens=16), trace=trace.append)
    chance = random.Random(seed)
    requests = [
        Request(
            i,
            SampleKey(0, i, 0),
            tuple(range(chance.randint(1, 12))),
            SamplingParams(max_tokens=chance.randint(1, 40)),
            history=HISTORY if chance.random() < 0.7 else None,
        )
        for i in range(20)
    ]
    samples = engine.generate(requests)
    for request, sample in zip(requests, samples, strict=True):
        first = len(request.prompt_ids)
        assert sample.token_ids.tolist() == list(range(first, first + request.params.max_tokens))
    check_blocks(engine.batcher.blocks)
    assert any(plan.verifies for plan in executor.plans)
    assert not any(plan.verifies and not plan.num_decoding for plan in executor.plans)
    preempted = any(isinstance(event, Preempted) for event in trace)
    assert preempted == (num_blocks == 16)
    counters = engine.counters
    assert 0 < counters.verifying_plans <= sum(plan.verifies for plan in executor.plans)  # some found all ended
    assert 0 < counters.busy_row_steps < sum(map(len, samples))
    num_first = sum(chunk.is_last for plan in executor.plans for chunk in plan.prefill)  # each with a prefill
    assert counters.accepted_tokens + counters.busy_row_steps + num_first == sum(map(len, samples))
    assert counters.matched_tokens == 7 * counters.proposed_row_steps


def test_without_blocks_to_spare_rows_get_what_decoding_needs_and_nothing_else():
    """A row's room for drafts never takes what another may want in the next plan."""
    executor = Accepting(2, 9, seed=0)
    engine = Engine(executor, drafting())
    requests = [Request(i, SampleKey(0, i, 0), (1,), SamplingParams(max_tokens=30), history=HISTORY) for i in range(2)]
    engine.generate(requests)
    given = [row.max_new for plan in executor.plans for row in decode_rows(plan)]
    assert set(given) == {STEPS, TOKENS_PER_STEP * STEPS}
    assert engine.counters.preemptions == 0


def test_without_history_no_plan_speculates():
    executor = Accepting(4, 200, seed=1)
    Engine(executor, drafting()).generate([Request(0, SampleKey(0, 0, 0), (1,), SamplingParams(max_tokens=40))])
    assert not any(plan.verifies for plan in executor.plans)


def test_what_was_accepted_before_decides_nothing_once_all_have_ended():
    """So a run that is resumed at a boundary plans as one that went on."""
    costs = StepCosts(lambda rows, context: 1.0, lambda rows, context: 3.0)

    def rounds(count: int) -> list[list[bool]]:
        executor = Accepting(4, 200, seed=1)
        workers, found = LocalWorkers([Engine(executor, drafting(costs=costs))]), []
        for index in range(count):
            params = SamplingParams(max_tokens=80)
            workers.add(Request(index, SampleKey(0, index, 0), (1,), params, history=HISTORY))
            executor.chance, executor.plans = random.Random(7), []
            while not workers.is_idle:
                workers.step()
            found.append([plan.verifies for plan in executor.plans])
        return found

    (first, second), (alone,) = rounds(2), rounds(1)
    assert first == second == alone
    assert True in first
    assert False in first, "3 tokens a step are not reached"
