"""`LockstepBatcher` against `Batcher`: whatever happens, the same plans block by block, trace, counters and samples."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
from checking import stacks_of
from sim_machine import STOP, ConstantCost, sizes

from jaxrl.scheduling.layouts.switching import recompute
from jaxrl.scheduling.tokens.batcher import Batcher, BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine, Finished
from jaxrl.scheduling.tokens.plan import Plan, Request, resume
from jaxrl.scheduling.tokens.progress import Preempted
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.sim.lockstep import LockstepBatcher
from jaxrl.sim.simulated_rows import SteadyPlan
from jaxrl.types import Sample, SampleKey, SamplingParams

POOLS = {"scarce blocks": 14, "scarce for two": 30, "enough blocks": 60}


@dataclass
class Story:
    """All that can be seen of an engine's life, and how many plans were made in lockstep.

    `looks`: by step, the rows with their tokens; by plan, the rows and tokens of the fullest dp group. To look at them
    changes nothing, so half of the steps are not looked at.
    """

    plans: list[dict[str, Any]]
    looks: list[Any]
    trace: list[Any]
    told: list[Any]
    counters: dict[str, int]
    time_ns: int
    num_lockstep: int


def contents(sample: Sample) -> tuple[Any, ...]:
    arrays = (sample.token_ids, sample.rollout_logprobs, sample.sampled_logprobs, sample.versions)
    return sample.key, sample.finish_reason, *(array.tolist() for array in arrays)


def contents_of(plan: Plan) -> dict[str, Any]:
    """The plan without the arrays for the simulated devices; checks that these arrays say the same."""
    values = asdict(replace(plan, decode=tuple(plan.decode)))
    if isinstance(plan, SteadyPlan):
        rows = [(row.request_id, 4 * row.dp_group + row.slot) for row in plan.decode]
        assert list(zip(values.pop("ids").tolist(), values.pop("seats").tolist(), strict=True)) == rows
    return values


def live(batcher: type[Batcher], seed: int, num_blocks: int, windows: tuple[int, ...] = (0,)) -> Story:
    """An engine with requests that come, are aborted and go on, with new weights, drains and lost caches in between."""
    rng = random.Random(seed)
    config = BatcherConfig(decode_steps=rng.randint(1, 5), leave_after=rng.randint(1, 2))
    stacks = stacks_of(windows, 24, config.decode_steps)
    shape = sizes(num_devices=3, num_slots=4, num_blocks=num_blocks, max_prefill_tokens=24, stacks=stacks)
    lengths: dict[SampleKey, int] = {}
    executor = SimulatedExecutor(shape, lambda of, _: lengths[of], ConstantCost(), clock := SimulatedClock())
    plans, trace, told, looks = [], [], [], []
    submit = executor.submit

    def watched(plan: Plan) -> Any:
        plans.append(contents_of(plan))
        looks.append(engine.batcher.fullest(plan))
        return submit(plan)

    executor.submit = watched
    engine = Engine(executor, config, trace=trace.append, batcher=batcher)
    wanted: dict[int, Request] = {}
    num_lockstep = next_id = 0

    def add(request: Request) -> None:
        wanted[request.request_id] = request
        engine.add(request)

    def note(finished: list[Finished]) -> None:
        told.extend((len(plans), f.request_id, f.dispatch, f.dp_group, f.slot, contents(f.sample)) for f in finished)

    while len(wanted) < 40 or not engine.is_idle:
        what = rng.random()
        if what < 0.15 and len(wanted) < 40:
            for _ in range(rng.randint(1, 8)):
                key = SampleKey(0, next_id // 3, next_id % 3)
                lengths[key] = rng.randint(1, 45)
                params = SamplingParams(max_tokens=rng.randint(8, 40), stop_token_ids=(STOP,))
                add(Request(next_id, key, (0,) * (1 + 7 * (next_id // 3) % 9), params, share=next_id // 3))
                next_id += 1
        elif what < 0.25 and engine.unfinished():
            gone = rng.sample(engine.unfinished(), rng.randint(1, min(3, len(engine.unfinished()))))
            for request_id, sample in zip(gone, engine.abort(gone), strict=True):
                told.append((len(plans), contents(sample)))
                if rng.random() < 0.5:
                    add(resume(wanted[request_id], sample))
        elif what < 0.30:
            executor.policy_version += 1
        elif what < 0.34:
            note(engine.drain())
        elif what < 0.36:
            recompute(engine)
        else:
            note(engine.step())
            num_lockstep += isinstance(engine.batcher, LockstepBatcher) and engine.batcher._batch is not None
            engine.batcher.blocks.check()
        if len(plans) % 2:
            looks.append([(p.request.request_id, p.group, tokens) for p, tokens in engine.batcher.rows()])
    groups = range(engine.batcher.capacity.num_groups)
    assert all(engine.batcher.blocks.num_free(group) == num_blocks - 1 for group in groups)
    return Story(plans, looks, trace, told, asdict(engine.counters), clock.now_ns, num_lockstep)


CASES = [("scarce blocks", (0,)), ("enough blocks", (0,)), ("scarce blocks", (9,)), ("scarce for two", (0, 6))]


@pytest.mark.parametrize(("pool", "windows"), CASES)
def test_lockstep_decides_what_the_batcher_decides(pool: str, windows: tuple[int, ...]):
    stories: list[Story] = []
    for seed in range(12):
        plain, lockstep = (live(each, seed, POOLS[pool], windows) for each in (Batcher, LockstepBatcher))
        stories.append(lockstep)
        assert lockstep.plans == plain.plans
        assert lockstep.trace == plain.trace
        assert lockstep.told == plain.told
        assert lockstep.looks == plain.looks
        assert lockstep.counters == plain.counters
        assert lockstep.time_ns == plain.time_ns
    # and these stories hold what they are about
    preempted = any(isinstance(event, Preempted) for story in stories for event in story.trace)
    assert preempted == (pool != "enough blocks")
    assert sum(story.counters["dropped_tokens"] for story in stories) > 0
    plans = sum(len(story.plans) for story in stories)
    assert 0.2 * plans < sum(story.num_lockstep for story in stories) < 0.95 * plans
