"""Speculation on simulated devices: what history foretells, and steps that verify drafts of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checked_blocks import check_blocks
from plan_rows import decode_rows
from sim_machine import STOP, ConstantCost, sizes
from simulated_runs import House, make_config, make_workload, whole

from jaxrl.config import SimulatedHistory
from jaxrl.mechanisms.speculation.index import DraftIndex
from jaxrl.mechanisms.speculation.rule import DraftConfig, DraftRule, DraftWindow, StepCosts
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import TOKENS_PER_STEP, Plan, Request
from jaxrl.scheduling.tokens.progress import Preempted, TraceEvent
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.drafts import Acceptance, SimulatedDrafts, verify
from jaxrl.sim.executor import SimulatedExecutor, fillers
from jaxrl.types import SampleKey, SamplingParams

HISTORY = DraftIndex.build([], [])
STEPS = 4
WINDOW = DraftWindow(2, 2, 8)


def known(right: Sequence[int]) -> Acceptance:
    """What is foretold where so many tokens from each position on are right; -1: no draft."""
    return Acceptance(np.array(right, np.int16), np.where(np.array(right) < 0, 0, 5).astype(np.int8))


# ---------------------------------------------------------------- a row's steps, worked out by hand


def steps_of(right: Sequence[int], width: int = 8, num_steps: int = 99, max_new: int = 99) -> tuple[list[int], int]:
    """(steps, drafted, accepted, draft steps, tokens), and the window at the end, of a row from its first token."""
    left = np.array([len(right)])
    start = (np.zeros(1, np.int64), left, np.array([max_new]), np.array([WINDOW.least]))
    limits = {"next_window": WINDOW.after, "width": width, "num_steps": num_steps, "num_stops": 1}
    found = verify([known(right)], *start, **limits)
    steps, drafted, accepted, proposing_steps, matched = found.counts[:, 0].tolist()
    assert matched == 5 * proposing_steps
    return [steps, drafted, accepted, proposing_steps, int(found.gained[0])], int(found.windows[0])


ALL_RIGHT = list(range(40, 0, -1))


@pytest.mark.parametrize(
    ("right", "limits", "counts", "window"),
    [
        # 2, 4, 6 and 8 drafted tokens, each with one more, then 8 again, and what is left: 3 + 5 + 7 + 9 + 9 = 33, and
        # 6 of 7 tokens
        (ALL_RIGHT, {}, [6, 34, 34, 6, 40], 8),
        (ALL_RIGHT, {"width": 3}, [11, 29, 29, 10, 40], 8),  # 3, then nine times 4; the last token has no draft
        (ALL_RIGHT, {"max_new": 7}, [2, 2 + 3, 2 + 3, 2, 7], 6),  # a plan ends a row at its room
        (ALL_RIGHT, {"num_steps": 2}, [2, 2 + 4, 2 + 4, 2, 8], 6),
        # drafts that are wrong bring a token a step; no draft for the last token, one for that before
        ([0] * 10, {}, [10, 2 * 8 + 1, 0, 9, 10], 2),
        # stretches of 8 and of 7 tokens, and a wrong one between them: 3 tokens; 5, and the last of them is right; at
        # the wrong token 6 are drafted and none accepted, which closes the window; then 2, 4 and the last
        ([*range(8, -1, -1), *range(7, 0, -1)], {}, [5, 2 + 4 + 6 + 2 + 3, 2 + 4 + 0 + 2 + 3, 5, 16], 6),
        # 3 tokens, which open the window to 4; two without a draft, so that it stays; then 3 of 4, all that is left
        ([2, 1, 0, -1, -1, 3, 2, 1, 0], {}, [4, 2 + 3, 2 + 3, 2, 9], 6),
    ],
)
def test_a_rows_steps_by_hand(right: list[int], limits: dict[str, int], counts: list[int], window: int):
    assert steps_of(right, **limits) == (counts, window)


# ---------------------------------------------------------------- plans


def drafting(verify_tokens: int) -> SimulatedDrafts:
    history = SimulatedHistory(stretch_median=4.0, stretch_sigma=1.5, gap_mean=0.5)
    workload: Any = SimpleNamespace(history=lambda prompt_index: history)
    return SimulatedDrafts(DraftConfig(WINDOW, verify_tokens), workload, 1)


class Watched:
    """An engine over simulated devices whose plans verify drafts, and its plans. Checks of each that a row may write no
    further than it has blocks of its own."""

    def __init__(self, num_slots: int, num_blocks: int, costs: StepCosts | None = None, width: int = 16) -> None:
        self.plans: list[Plan] = []
        self.trace: list[TraceEvent] = []
        self._written: dict[int, int] = {}  # positions of each request that have their KV
        shape = sizes(num_groups=2, num_slots=num_slots, num_blocks=num_blocks, max_prefill_tokens=16)
        executor: Any = SimulatedExecutor(
            shape, 1, lambda of, _: of.prompt_index, ConstantCost(), SimulatedClock(), drafts=drafting(width)
        )
        submit = executor.submit

        def checked(plan: Plan) -> Any:
            self.plans.append(plan)
            for chunk in plan.prefill:
                self._written[chunk.request.request_id] = chunk.start + len(chunk.tokens)
            ticket = submit(plan)
            gained = dict(zip(plan.rows.request_ids.tolist(), ticket.result.counts.tolist(), strict=True))
            owners: dict[tuple[int, int], int] = {}
            for row in decode_rows(plan):
                new = row.request_id in {chunk.request.request_id for chunk in plan.prefill}
                self._written[row.request_id] += max(gained[row.request_id] - new, 0)
                assert self._written[row.request_id] <= len(row.block_table) * shape.block_size
                assert row.max_new == STEPS or (plan.verifies and row.max_new == TOKENS_PER_STEP * STEPS)
                for block in row.block_table:
                    assert owners.setdefault((row.dp_group, block), row.request_id) == row.request_id
            return ticket

        executor.submit = checked
        rule = partial(DraftRule, DraftConfig(WINDOW, width, costs=costs))
        self.engine = Engine(executor, BatcherConfig(decode_steps=STEPS, verify_rule=rule), trace=self.trace.append)


def request(request_id: int, length: int, prompt: int = 1, history: DraftIndex | None = HISTORY) -> Request:
    """It takes its length from the number of its prompt."""
    params = SamplingParams(max_tokens=length, stop_token_ids=(STOP,))
    return Request(request_id, SampleKey(1, length, request_id), (0,) * prompt, params, history=history)


@pytest.mark.parametrize(("num_slots", "num_blocks"), [(4, 200), (3, 16)], ids=["room", "preempting"])
def test_a_row_never_gets_more_than_its_plan_has_blocks_for(num_slots: int, num_blocks: int):
    """Whether all rows have a history or some, and plans that do not speculate between those that do."""
    costs = StepCosts(lambda rows, _: 1.0, lambda rows, _: 1.2 + rows / 3)
    for seed in range(3):
        chance, watched = random.Random(seed), Watched(num_slots, num_blocks, costs)
        asked = [
            request(i, chance.randint(1, 40), chance.randint(1, 12), HISTORY if chance.random() < 0.7 else None)
            for i in range(20)
        ]
        samples = watched.engine.generate(asked)
        for one, sample in zip(asked, samples, strict=True):
            assert sample.token_ids.tolist() == fillers(one, one.params.max_tokens).tolist()
        check_blocks(watched.engine.batcher.blocks)
        assert {plan.verifies for plan in watched.plans if plan.num_decoding} == {True, False}
        assert not any(plan.verifies for plan in watched.plans if not plan.num_decoding)
        assert any(isinstance(event, Preempted) for event in watched.trace) == (num_blocks == 16)
        counters = watched.engine.counters
        num_first = sum(chunk.is_last for plan in watched.plans for chunk in plan.prefill)  # each with a prefill
        assert 0 < counters.accepted_tokens < counters.proposed_tokens
        assert counters.accepted_tokens + counters.busy_row_steps + num_first == sum(map(len, samples))


# ---------------------------------------------------------------- whole runs

SPECULATES = {"rollout.speculation": {"enable": True, "verify_tokens": 32}}
PLACES = {"one worker": {"rollout.num_workers": 1}, "tail batching": {"rollout.tail_batching": {"enable": True}}}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_draws_the_same_with_drafts_in_fewer_steps_and_through_a_kill(place: str):
    """8 prompts come again after two or three steps; then drafts are taken."""
    plain, values = make_workload(3), PLACES[place] | {"trainer.total_training_steps": 8}
    (task,) = plain.tasks
    workload = replace(
        plain, tasks=(task.replace(history=SimulatedHistory(stretch_median=8.0, stretch_sigma=1.0, gap_mean=0.2)),)
    )
    with_drafts, without = whole(make_config(SPECULATES, **values), workload), whole(make_config(values), workload)
    # In the others what is in a batch, or was launched ahead of verdicts and draws anew, depends on what ends first.
    if place == "one worker":
        assert with_drafts.decided()[1] == without.decided()[1]
    steps = [sum(each["rollout/decode_steps"] for each in run.metrics.values()) for run in (with_drafts, without)]
    assert steps[0] < steps[1]
    of_steps = with_drafts.metrics
    assert of_steps[1]["rollout/spec/drafted_share"] == 0, "nothing was drawn before"
    assert all(of_steps[step]["rollout/spec/accept_rate"] > 0.3 for step in (7, 8))
    assert not any(name.startswith("rollout/spec/") for step in without.metrics.values() for name in step)
    killed = House(with_drafts.config, workload)
    assert not killed.run(("kill", 40))
    assert killed.run()
    assert killed.decided() == with_drafts.decided()
