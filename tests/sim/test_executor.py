"""The simulated devices, trainer, prompts and clock, each against something that computes the same in another way."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_samples import KnownSample, KnownWorkload
from papers.closed_form import drain
from plan_rows import DecodeRow, scheduled
from sim_machine import SMALL, STOP, ConstantCost, Machine, key, prompt, sizes

from jaxrl.scheduling.rounds.events import Launch
from jaxrl.scheduling.tokens.plan import Plan, PrefillChunk, Request
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.cost_model import CostModel, TrainLoad
from jaxrl.sim.executor import SimulatedExecutor, decode_s, fillers
from jaxrl.sim.hardware import H100
from jaxrl.sim.trainer import SimulatedTrainer
from jaxrl.types import Sample, SampleKey, SamplingParams, TrainBatch

# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("stops", [(), (1,), (17, 18, 34), (30_010, 2, 99_999)])
def test_a_stop_token_stands_only_at_the_end_of_a_response_that_stops(stops: tuple[int, ...]):
    length = 61_000  # beyond 30,011 positions the tokens come round again
    for max_tokens in (length, length + 1):
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops)
        tokens = fillers(Request(0, SampleKey(2, 4321, 7, attempt=1), (0,), params), length)
        assert not {*tokens[:-1].tolist()} & {*stops}
        assert (tokens[-1] in stops) == (bool(stops) and length < max_tokens)
        assert (tokens[1:] != tokens[:-1]).all()


@pytest.mark.parametrize(
    ("lengths", "num_steps", "leave_after", "steps", "expected"),
    [
        ([9, 9], 4, 99, 4, {0: (5, False), 1: (5, False)}),
        ([3, 9], 4, 1, 2, {0: (3, True), 1: (3, False)}),
        ([3, 3, 9], 4, 1, 2, {0: (3, True), 1: (3, True), 2: (3, False)}),  # both stop in the step
        ([2, 4, 9], 8, 2, 3, {0: (2, True), 1: (4, True), 2: (4, False)}),
        ([1, 9], 4, 1, 0, {0: (1, True), 1: (1, False)}),  # the first token may end a row, and counts
        ([2, 3], 9, 99, 2, {0: (2, True), 1: (3, True)}),  # no row is active any more
    ],
)
def test_a_plan_is_left_once_so_many_rows_have_stopped(
    lengths: list[int], num_steps: int, leave_after: int, steps: int, expected: dict[int, tuple[int, bool]]
):
    executor = SimulatedExecutor(
        sizes(num_slots=8), 1, lambda of, _: lengths[of.prompt_index], ConstantCost(), SimulatedClock()
    )
    params = SamplingParams(max_tokens=50, stop_token_ids=(STOP,))
    chunks, started = [], range(len(lengths))
    for i in started:
        chunks.append(PrefillChunk(Request(i, key(i), (1, 2, 3), params), 0, i, (1, 2, 3), 0, (1,), True, 0))
    rows = scheduled([DecodeRow(i, 0, i, (1, 2), 16) for i in started], 8, started)
    result = executor.collect(executor.submit(Plan(0, tuple(chunks), rows, num_steps, leave_after)))
    gained = {i: (int(result.counts[i]), bool(result.stopped[i])) for i in started}
    assert (result.num_steps, gained) == (steps, expected)


@given(rows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 500)), max_size=12), num_steps=st.integers(0, 50))
def test_decode_is_charged_step_by_step(rows: list[tuple[int, int]], num_steps: int):
    cost = CostModel(SMALL, H100)
    expected = 0.0
    for step in range(num_steps):
        active = [context + step for left, context in rows if left > step]
        expected += cost.decode_step_s(2, len(active), sum(active))
    assert decode_s(cost, 2, rows, num_steps) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_rollout_without_a_queue_drains_as_the_closed_form_says(copies: int):
    """The first token comes with the prefill, and the rest one by one, each prompt one token longer by then. Equal dp
    groups end together."""
    rng = random.Random(5)
    prompts = [rng.randint(20, 60) for _ in range(12)]
    lengths = [rng.randint(2, 300) for _ in range(12)]
    cost = CostModel(SMALL, H100)
    expected = drain(cost, 2, [n + 1 for n in prompts], [n - 1 for n in lengths])
    pairs = [sum(n * (n + 1) / 2 for n in each) for each in (prompts, [n + 1 for n in prompts])]
    shift = cost.prefill_s(2, sum(prompts), pairs[0]) - cost.prefill_s(2, sum(prompts) + 12, pairs[1])

    workload = KnownWorkload({key(i): KnownSample(lengths[i // copies]) for i in range(12 * copies)}, {})
    shape = sizes(num_groups=copies, num_slots=16, num_blocks=2000, max_prefill_tokens=1000)
    machine = Machine(workload, shape, 2, cost, decode_steps=1)
    backend = machine.begin(max_tokens=400)
    for i in range(12 * copies):  # neighbours go to different groups
        backend.apply([Launch(prompt(i, prompts[i // copies]), (key(i),))])
    ends = [backend.wait() for _ in range(12 * copies)]
    assert [e.time_s for e in ends][::copies] == pytest.approx([end + shift for end in expected], rel=1e-6)
    assert machine.engine.counters.preemptions == 0


# ---------------------------------------------------------------- trainer, prompts, clock


def batch(lengths: list[int]) -> TrainBatch:
    samples = []
    for i, length in enumerate(lengths):
        sample = Sample.empty(key(i))
        sample.token_ids = np.zeros(length, np.int32)
        samples.append(sample)
    return TrainBatch([prompt(i, 10) for i in range(len(lengths))], samples, [np.zeros(n, np.float32) for n in lengths])


def test_a_training_step_is_charged_once_however_it_is_cut():
    cost = CostModel(SMALL, H100)
    spent = []
    for cuts in ([[30, 50, 70, 90]], [[30, 50], [70, 90]]):
        clock = SimulatedClock()
        trainer = SimulatedTrainer(cost, 8, clock)
        for lengths in cuts:
            trainer.accumulate(batch(lengths))
        assert trainer.apply() == {}
        spent.append(clock.now_ns)
        trainer.synced()
        trainer.accumulate(batch([30, 50, 70, 90]))
        trainer.apply()
        assert clock.now_ns == 2 * spent[-1], "the next step costs as much again"
    assert spent[0] == spent[1]
    load = TrainLoad(280, sum(n * (n + 1) / 2 for n in (40, 60, 80, 100)))
    assert spent[0] == round(cost.train_step_s(load, 8) * 1e9)
