"""The simulated devices, trainer, prompts and clock, each against something that computes the same in another way."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_samples import KnownSample, KnownWorkload
from papers.closed_form import drain
from replay_executor import ReplayExecutor, filler
from sim_machine import SMALL, STOP, ConstantCost, Machine, key, play, prompt, recorded, sizes

from jaxrl.config import SimulatedLengths, SimulatedTask
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.events import Launch
from jaxrl.scheduling.rounds.round import Round
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.progress import Preempted
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.cost_model import CostModel, TrainLoad
from jaxrl.sim.executor import SimulatedExecutor, decode_s, fillers
from jaxrl.sim.hardware import H100
from jaxrl.sim.prompts import SimulatedPrompts
from jaxrl.sim.trainer import SimulatedTrainer
from jaxrl.sim.workload import ModelledWorkload
from jaxrl.types import Sample, SampleKey, SamplingParams, TrainBatch

# ---------------------------------------------------------------- oracles


@pytest.mark.parametrize("stops", [(), (1,), (17, 18, 34), (30_010, 2, 99_999), (0, 16, 17)])
@pytest.mark.parametrize("length", [1, 500, 61_000])
def test_fillers_of_a_whole_response_are_those_of_its_positions(length: int, stops: tuple[int, ...]):
    """Beyond 30,011 positions they come round again, and stop tokens are replaced wherever they would stand."""
    for max_tokens in (length, length + 1):
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops)
        request = Request(0, SampleKey(2, 4321, 7, attempt=1), (0,), params)
        assert fillers(request, length).tolist() == [filler(request, i, length) for i in range(length)]


def requests(seed: int, count: int) -> list[Request]:
    rng = random.Random(seed)
    made = []
    for i in range(count):
        stops = (STOP, 17 * rng.randint(0, 20), 17 * 7919 % 30_011)
        params = SamplingParams(max_tokens=rng.randint(3, 40), stop_token_ids=stops)
        of = SampleKey(0, i // 3, i % 3, attempt=i % 2)
        tokens = (0,) * (1 + 7 * (i // 3) % 23)
        made.append(Request(i, of, tokens, params, share=(0, i // 3)))
    return made


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("leave_after", [1, 3])
def test_jumping_gives_what_stepping_gives(seed: int, leave_after: int):
    """Rows, tokens, steps and stops of every plan are those of `ReplayExecutor`, preemptions included."""
    wanted = requests(seed, 30)
    rng = random.Random(100 + seed)
    lengths = {request.key: rng.randint(1, 45) for request in wanted}
    shape = sizes(num_devices=4, tp=2, num_slots=5, num_blocks=21, max_prefill_tokens=24)
    jumping = SimulatedExecutor(shape, lambda of, _: lengths[of], ConstantCost(), SimulatedClock())
    stepping = ReplayExecutor(lengths, 2, 5, 21, 4, 24)
    outcomes = []
    for executor in (jumping, stepping):
        plans, trace = recorded(executor), []
        engine = Engine(executor, BatcherConfig(decode_steps=4, leave_after=leave_after), trace=trace.append)
        samples = engine.generate(wanted)
        ends = [(s.key, s.token_ids.tolist(), s.finish_reason) for s in samples]
        outcomes.append(([brought for _, brought in plans], trace, ends))
    assert outcomes[0] == outcomes[1]
    if leave_after == 1:
        assert any(isinstance(event, Preempted) for event in outcomes[0][1]), "pools were to run dry"


@settings(max_examples=40)
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
    shape = sizes(num_devices=2 * copies, tp=2, num_slots=16, num_blocks=2000, max_prefill_tokens=1000)
    machine = Machine(workload, shape, cost, decode_steps=1)
    backend = machine.begin(max_tokens=400)
    for i in range(12 * copies):  # neighbours go to different groups
        backend.apply([Launch(prompt(i, prompts[i // copies]), (key(i),))])
    ends = [backend.wait() for _ in range(12 * copies)]
    assert [e.time_s for e in ends][::copies] == pytest.approx([end + shift for end in expected], rel=1e-6)
    assert machine.engine.counters.preemptions == 0


def test_what_is_charged_is_what_the_samples_hold():
    workload = ModelledWorkload(3, (SimulatedTask(name="t", response=SimulatedLengths(median=20, sigma=1.0)),), 60)
    machine = Machine(workload, sizes(num_devices=2, num_slots=3, num_blocks=40), decode_steps=4)
    machine.backend.enter_rollout(0)
    machine.backend.begin(RoundInfo(1), SamplingParams(max_tokens=60, stop_token_ids=(STOP,)))
    round = Round([prompt(i, 6) for i in range(8)], 4)
    play(round, machine.backend)
    measured = machine.backend.end()
    samples = [sample for group in round.groups() for sample in group.samples]
    assert {s.key: len(s) for s in samples} == {s.key: workload.length(s.key, 1) for s in samples}
    assert machine.engine.counters.dropped_tokens == 0
    assert machine.executor.num_tokens == sum(len(sample) for sample in samples)
    assert machine.executor.num_prefill_tokens == measured["rollout/prefill_tokens"]
    assert {s.key: s.reward for s in samples} == {s.key: workload.reward(s.key, 1) for s in samples}


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


def test_further_updates_cost_what_they_add():
    cost, clock = CostModel(SMALL, H100), SimulatedClock()
    trainer = SimulatedTrainer(cost, 8, clock)
    for lengths in ([30, 50], [70, 90]):
        trainer.accumulate(batch(lengths))
        trainer.apply()
    load = TrainLoad(280, sum(n * (n + 1) / 2 for n in (40, 60, 80, 100)), updates=2)
    assert clock.now_s == pytest.approx(cost.train_step_s(load, 8), abs=3e-9)
    before = clock.now_s
    assert [len(values) for values in trainer.token_logprobs(batch([3, 5]), "ref")] == [3, 5]
    assert clock.now_s - before == pytest.approx(cost.forward_s(28, 13 * 7 + 15 * 8, 8), abs=2e-9)


def test_prompts_come_once_per_epoch_and_resume():
    workload = ModelledWorkload(0, (SimulatedTask(name="t", response=SimulatedLengths(median=8, sigma=0.5)),), 50)
    prompts = SimulatedPrompts(workload, 7, 100, seed=4)
    taken = prompts.next(10)
    state = prompts.state()
    rest = prompts.next(11)
    keys = [each.key for each in taken + rest]
    assert [epoch for epoch, _ in keys] == [0] * 7 + [1] * 7 + [2] * 7
    assert all({i for e, i in keys if e == epoch} == set(range(7)) for epoch in range(3))
    assert [i for e, i in keys if e == 0] != [i for e, i in keys if e == 1]
    assert len(taken[0].token_ids) == min(workload.prompt_length(taken[0].index), 100)
    again = SimulatedPrompts(workload, 7, 100, seed=4)
    again.load_state(state)
    assert again.next(11) == rest
    assert prompts.get(*taken[3].key) == taken[3]
    assert not {each.index for each in prompts.held_out(5)} & set(range(7))
    with pytest.raises(ValueError, match=r"simulate\.num_prompts, data\.seed"):
        SimulatedPrompts(workload, 8, 100, seed=4).load_state(state)


def test_time_cannot_run_backwards():
    clock = SimulatedClock()
    clock.advance(1.5)
    clock.reach(1_000_000_000)
    assert (clock.now_ns, clock.now_s) == (1_500_000_000, 1.5)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be >= 0 and finite"):
            clock.advance(wrong)
