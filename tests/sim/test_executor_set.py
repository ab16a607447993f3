"""Several workers on modelled devices: no token differs, plans overlap in simulated time, and rows move."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from adaptive_runs import LARGE, config, requests, run
from checked_blocks import check_blocks
from checked_workers import run as run_all
from known_samples import KnownSample, KnownWorkload
from run_parts import made_run
from sim_machine import STOP, ConstantCost, key, play, prompt, sizes
from simulated_runs import samples_of

from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts
from jaxrl.runtime.backend import RolloutBackend
from jaxrl.scheduling.layouts.relayout import How
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.events import Event, SampleFinished
from jaxrl.scheduling.rounds.round import Round
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine, Finished
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.progress import PlanTimes
from jaxrl.sim.clock import SimulatedClock, SimulatedPhases
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.sim.executor_set import SimulatedExecutorSet
from jaxrl.sim.hardware import H100
from jaxrl.sim.scoring import ScoringWorkers
from jaxrl.types import SampleKey, SamplingParams


def with_workers(made: Any, num_workers: int, deal: str = "tokens") -> Any:
    return made.replace(rollout=made.rollout.replace(num_workers=num_workers, deal=deal))


@cache
def fixed_run(num_workers: int, deal: str) -> Any:
    """A run whose layouts stay, which several tests compare others with."""
    return run(with_workers(config(), num_workers, deal))


# ---------------------------------------------------------------- moves

SMALL = sizes(num_devices=2, tp=1, num_slots=6, num_blocks=24, max_prefill_tokens=24)


def walk(executors: Sequence[Any], seed: int, moves: bool) -> tuple[list[Any], LocalWorkers]:
    """The samples of a batch whose requests move between two workers at random, in the order in which they are told."""
    asked, rng = requests(seed)[0], random.Random(seed)
    workers = LocalWorkers([Engine(each, BatcherConfig(decode_steps=4)) for each in executors])
    for request in asked:
        workers.add(request)
    told: list[Finished] = []
    while not workers.is_idle:
        told += workers.step()
        if moves and rng.random() < 0.3 and workers.unfinished():
            live = workers.unfinished()
            by: How = rng.choice(["migrate", "recompute"])
            workers.move(rng.sample(live, rng.randint(1, len(live))), rng.randrange(2), by)
            for engine in workers.engines:
                check_blocks(engine.batcher.blocks)
    samples = [one.sample for one in told]
    return [(s.key, s.token_ids.tolist(), s.finish_reason) for s in samples], workers


@pytest.mark.parametrize("seed", range(2))
def test_rows_that_move_keep_their_tokens(seed: int):
    lengths = requests(seed)[1]

    def simulated() -> list[SimulatedExecutor]:
        clock = SimulatedClock()
        return [SimulatedExecutor(SMALL, lambda of, _: lengths[of], ConstantCost(), clock) for _ in range(2)]

    still, _ = walk(simulated(), seed, moves=False)
    moved, workers = walk(simulated(), seed, moves=True)
    assert sorted(moved) == sorted(still)
    assert workers.counters.admissions > 24, "some were computed again"


def test_moved_kv_takes_what_the_cost_model_says():
    """Two rows of 9 and 3 prompt tokens in two groups: the longer one's blocks set the time."""
    clock, lengths = SimulatedClock(), {key(0, i): 30 for i in range(2)}
    executors = [SimulatedExecutor(SMALL, lambda of, _: lengths[of], ConstantCost(), clock) for _ in range(2)]
    workers = LocalWorkers([Engine(each, BatcherConfig(decode_steps=4)) for each in executors], "prompts")
    params = SamplingParams(max_tokens=40, stop_token_ids=(STOP,))
    for i, length in enumerate((9, 3)):
        workers.add(Request(i, key(0, i), (0,) * length, params))
    workers.step()
    workers.settle()
    before, engine = clock.now_s, workers.engines[0]
    blocks = [-(-(engine.batcher.progress(i).num_written) // SMALL.block_size) for i in range(2)]
    done = workers.move([0, 1], 1)
    assert (done.num_seated, done.num_moved) == (2, SMALL.block_size * sum(blocks))
    assert clock.now_s - before == pytest.approx(0.25 * SMALL.block_size * max(blocks))
    assert [one.request_id for one in run_all(workers)] == [0, 1]


def test_roofline_sends_the_kv_of_a_group_between_workers():
    cost = CostModel(LARGE, H100)
    link = H100.bytes_per_s(8) * cost.efficiency.link
    assert cost.move_s_per_token(2, 2, 8) == pytest.approx(cost.kv_bytes_per_token(2) / link)
    assert cost.move_s_per_token(2, 4, 8) == cost.move_s_per_token(4, 2, 8) == cost.move_s_per_token(2, 2, 8)
    assert cost.move_s_per_token(2, 2, 16) > cost.move_s_per_token(2, 2, 8), "between nodes"


# ---------------------------------------------------------------- time


def constant_ticks(_: int, times: PlanTimes) -> int:
    """What `ConstantCost` charges."""
    return 10 * (times.prefill_tokens > 0) + times.num_steps


@dataclass
class Machine:
    """A backend over workers of one device each, or over one worker with all of them."""

    lengths: dict[SampleKey, int]
    num_workers: int
    num_devices: int = 2
    num_slots: int = 4
    host_s: float = 0.0

    def __post_init__(self) -> None:
        self.clock = SimulatedClock()
        phases = SimulatedPhases(self.clock)
        own = sizes(num_devices=self.num_devices // self.num_workers, num_slots=self.num_slots)
        samples = {k: KnownSample(n, float(k.sample_index)) for k, n in self.lengths.items()}
        workload = KnownWorkload(samples, {k.prompt_index: 4 for k in self.lengths})
        self.executors = SimulatedExecutorSet(
            [
                SimulatedExecutor(own, workload.length, ConstantCost(), self.clock, self.host_s, wake_s=3.0, sync_s=5.0)
                for _ in range(self.num_workers)
            ],
            self.clock,
        )
        engines = [Engine(each, BatcherConfig(decode_steps=2)) for each in self.executors.executors]
        scoring = ScoringWorkers(workload, self.clock, phases)
        parts = LocalWorkers(engines, "prompts", constant_ticks), self.executors, scoring
        self.backend = RolloutBackend(made_run(*parts, clock=lambda: self.clock.now_s, timeline=phases))

    def round(self, prompts: int, samples: int) -> tuple[list[Event], dict[str, float], float]:
        """Events of a round, its metrics, and its seconds."""
        self.backend.enter_rollout(1)
        began = self.clock.now_s
        self.backend.begin(RoundInfo(1), SamplingParams(max_tokens=100, stop_token_ids=(STOP,)))
        events = play(Round([prompt(i) for i in range(prompts)], samples), self.backend)
        return events, self.backend.end(), self.clock.now_s - began


def ends(events: Sequence[Event]) -> list[tuple[SampleKey, float]]:
    return [(event.sample.key, event.time_s) for event in events if isinstance(event, SampleFinished)]


def test_workers_work_at_the_same_time():
    """Two prompts, each on a device of its own: as one worker with two dp groups, and not one after the other."""
    lengths = {key(0): 30, key(1): 21}
    (one, _, alone_s), (two, measured, seconds) = (Machine(lengths, n).round(2, 1) for n in (1, 2))
    assert sorted(dict(ends(one))) == sorted(dict(ends(two)))
    assert alone_s == pytest.approx(10 + 29, abs=2)
    assert seconds == pytest.approx(alone_s, abs=2)
    assert measured["rollout/decode_steps"] == 29 + 20


def test_the_phases_of_all_workers_take_as_long_as_one():
    for num_workers in (1, 2):
        machine = Machine({key(0): 3, key(1): 3}, num_workers)
        machine.backend.enter_rollout(4)
        assert machine.clock.now_s == 5.0 + 3.0
        assert [each.policy_version for each in machine.executors.executors] == [4] * num_workers
        machine.backend.enter_rollout(5)
        assert machine.clock.now_s == 5.0 + 3.0 + 5.0, "all are awake"
        machine.executors.release_some([num_workers - 1])
        machine.backend.enter_rollout(6)
        assert machine.clock.now_s == 13.0 + 5.0 + 3.0, "but for one"


def test_a_tail_on_one_worker_does_not_slow_the_other():
    """Worker 1 draws its samples one by one, at the same pace beside a tail as beside a short response."""
    lengths = {key(1, i): 9 for i in range(6)}
    (short, _, _), (tail, _, seconds) = (
        Machine({key(0, i): first for i in range(6)} | lengths, 2, num_slots=1).round(2, 6) for first in (9, 90)
    )
    beside_short, beside_tail = (dict(ends(events)) for events in (short, tail))
    for i in range(6):
        assert beside_tail[key(1, i)] == pytest.approx(beside_short[key(1, i)], abs=10), "a plan, at most"
    assert seconds == pytest.approx(6 * (10 + 89), rel=0.05)


def test_the_host_is_shared():
    """With half a second of host work a plan, four workers' plans of two steps are submitted in time."""
    lengths = {key(i): 41 for i in range(4)}
    _, _, idle = Machine(lengths, 4, num_devices=4).round(4, 1)
    _, _, busy = Machine(lengths, 4, num_devices=4, host_s=0.5).round(4, 1)
    _, _, late = Machine(lengths, 4, num_devices=4, host_s=1.0).round(4, 1)
    assert idle == pytest.approx(10 + 40, abs=2)
    assert busy == pytest.approx(idle, abs=4)
    assert late > 1.6 * idle, "four submissions take twice as long as a plan"


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("num_workers", [2, 8])
@pytest.mark.parametrize("deal", ["tokens", "prompts"])
def test_a_run_of_several_workers_trains_the_same_in_about_the_same_time(num_workers: int, deal: str):
    """Eight groups of one device: whether they run in lockstep or by themselves, the longest response sets the time."""
    _, one, alone, _ = fixed_run(1, "tokens")
    simulation, several, samples, _ = fixed_run(num_workers, deal)
    assert samples_of(samples) == samples_of(alone)
    assert simulation.run.workers.num_open == num_workers
    for step, measured in several.items():
        assert measured["timing_s/gen"] == pytest.approx(one[step]["timing_s/gen"], rel=0.06)
        assert measured["timing_s/gen"] <= one[step]["timing_s/gen"], "no worker waits for another's slowest row"
        assert measured["rollout/prefill_tokens"] >= one[step]["rollout/prefill_tokens"]
    if deal == "prompts":
        shared = sum(step["rollout/shared_tokens"] for step in several.values())
        spread = fixed_run(num_workers, "tokens")[1]
        assert shared > sum(step["rollout/shared_tokens"] for step in spread.values()), "a prompt is prefilled once"


@pytest.mark.parametrize("layout", [{"switch": True}, {"planner": True}], ids=str)
def test_each_worker_has_a_layout_of_its_own(layout: dict[str, Any]):
    """PAT's node by node: two workers of four devices switch by themselves, and a resumed run goes on the same."""
    made = with_workers(config(**layout), 2)
    _, _, alone, _ = fixed_run(1, "tokens")
    _, fixed, _, _ = fixed_run(2, "tokens")
    simulation, adaptive, samples, saved = run(made)
    assert samples_of(samples) == samples_of(alone)
    assert len(simulation.run.mechanism(AdaptiveLayouts).controls) == 2
    if "switch" in layout:
        switches = [control.switches for control in simulation.run.mechanism(AdaptiveLayouts).controls]
        assert all(switches), "both switched in the last round"
        assert switches[0][0].decision.stay_s != switches[1][0].decision.stay_s, "each by its own rows"
        for step, measured in adaptive.items():
            assert measured["timing_s/gen"] < 0.8 * fixed[step]["timing_s/gen"]
            assert measured["rollout/layout/switches"] >= 2
    _, again, _, _ = run(made, saved[2])
    assert {step: again[step] for step in (3, 4)} == {step: adaptive[step] for step in (3, 4)}


def test_workers_on_devices_of_the_rollouts_own():
    """Four of eight devices roll out beside the update, as one worker or as two: the same in the same time."""
    made = config()
    made = made.replace(trainer=made.trainer.replace(one_step_off=True))
    made = made.replace(rollout=made.rollout.replace(num_devices=4))
    _, one, alone, _ = run(made)
    simulation, two, samples, _ = run(with_workers(made, 2))
    assert [each.sizes.num_devices for each in simulation.run.executors.executors] == [2, 2]
    assert samples_of(samples) == samples_of(alone)
    for step, measured in two.items():
        assert measured["timing_s/step"] == pytest.approx(one[step]["timing_s/step"], rel=0.06)
