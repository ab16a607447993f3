"""Rules on random workloads with crashes and failed rewards: each prompt leaves exactly once, runs repeat, and the
clock of the reward pool decides nothing. The bounds of each rule are in `tests/test_compositions.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fake_rollout import (
    FakePrompts,
    FakeRollout,
    FakeTraining,
    count_tokens,
    fingerprint,
    make_sample,
    run_with_crashes,
    tangled,
)
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.mechanisms.dynamic_sampling import DynamicSampling
from jaxrl.mechanisms.over_provisioning import OverProvisioning
from jaxrl.mechanisms.partial_rollout import PartialRollout
from jaxrl.mechanisms.tail_batching import TailBatching
from jaxrl.scheduling.rounds.batches import BatchRule
from jaxrl.scheduling.rounds.race import BatchSettings
from jaxrl.types import SampleKey


def length_of(seed: int, k: SampleKey) -> int:
    """Most are short, some prompts long in every attempt, some responses very long."""
    of_prompt = tangled(seed, k.prompt_index) % 6
    own = tangled(seed, k.epoch, k.prompt_index, k.sample_index, k.attempt)
    return 1 + own % 4 + (10 if of_prompt == 0 else 0) + (25 if own % 9 == 0 else 0)


def reward_of(seed: int, k: SampleKey) -> Any:
    """Three in ten scorings fail; whatever the machine does, the same ones."""
    number = tangled(seed, k.prompt_index, k.sample_index, k.attempt, k.epoch)
    return (0.0, ("timeout", "crash", "error")[number % 3]) if number % 10 < 3 else (float(number % 2), "ok")


@dataclass(frozen=True)
class World:
    """A rule, its prompts, the machine that they run on, and the steps in or after which a process is killed."""

    rule: Callable[[], BatchRule]
    batch: BatchSettings
    seed: int
    num_prompts: int
    num_slots: int
    plan_tokens: int
    crashes: dict[int, Any]

    def training(self, total: int, slow: int = 0, eager: bool = False) -> FakeTraining:
        """`slow` ticks times 0 to 4 until a verdict is there."""
        rollout = FakeRollout(
            lambda k: length_of(self.seed, k),
            lambda k: reward_of(self.seed, k),
            self.num_slots,
            self.plan_tokens,
            delay=lambda k: slow * (tangled(self.seed, k.prompt_index, k.sample_index) % 5),
            eager=eager,
        )
        prompts = FakePrompts(self.num_prompts)
        return FakeTraining(self.rule(), prompts, rollout, total, version_lag=self.batch.version_lag)


@st.composite
def worlds(draw: st.DrawFn, kind: Any) -> World:
    sampling = st.builds(
        DynamicSampling.Options,
        enable=st.just(True),
        max_num_gen_batches=st.just(1000),
        max_unscored_groups=st.integers(-1, 3),
    )
    filtering = draw(st.none() | st.builds(DynamicSampling, sampling, st.sampled_from([0, 0, 5])))
    batch = BatchSettings(
        draw(st.integers(1, 4)),
        draw(st.integers(2 if filtering else 1, 3)),
        group_filter=filtering,
        max_active_requests=draw(st.sampled_from([0, 8, 12])),
        version_lag=draw(st.integers(0, 1)) if kind is not OverProvisioning else 0,
    )
    options: Any = {"enable": True}
    if kind is not OverProvisioning:
        options["at_end"] = draw(st.sampled_from(["flush", "leave"]))
    if kind is PartialRollout:
        options |= {
            "over_provision": draw(st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.5])),
            "max_restarts": draw(st.integers(0, 2)),
        }
        least = kind(batch, kind.Options(**options)).least_staleness
        options["max_staleness"] = draw(st.just(-1) | st.integers(least, least + 2))
    else:
        factors = st.sampled_from([1.0, 1.25, 1.5, 2.0, 2.5])
        options |= {"prompt_factor": draw(factors), "response_factor": draw(factors)}
    if kind is TailBatching:
        options["relaunch"] = draw(st.sampled_from(["same", "new", "resume"]))
        options["max_staleness"] = draw(st.just(-1) | st.integers(batch.version_lag, 3))
    return World(
        lambda: kind(batch, kind.Options(**options)),
        batch,
        draw(st.integers(0, 1000)),
        draw(st.integers(1, 12)),
        draw(st.integers(2, 20)),
        draw(st.integers(1, 4)),
        draw(st.dictionaries(st.integers(1, 9), st.sampled_from(["boundary", "round"]))),
    )


@pytest.mark.parametrize("kind", [OverProvisioning, TailBatching, PartialRollout])
@given(data=st.data(), total=st.integers(1, 8))
def test_random_runs_keep_the_book(kind: Any, data: st.DataObject, total: int):
    world = data.draw(worlds(kind))
    training = run_with_crashes(lambda: world.training(total), total, world.crashes)
    for result in training.results:
        assert len(result.groups) == world.batch.num_prompts
        for group in result.groups:
            assert len(group.samples) == world.batch.group_size
            for sample in group.samples:
                assert sample.reward is not None
                assert len(sample) == length_of(world.seed, sample.key)
                assert np.all(np.diff(sample.versions) >= 0)
                expected = make_sample(sample.key, sample.versions.tolist(), "stop")
                for name in ("token_ids", "rollout_logprobs", "sampled_logprobs"):
                    assert np.array_equal(getattr(sample, name), getattr(expected, name))
    if getattr(getattr(training.rule, "options", None), "at_end", "") == "flush":
        assert training.rule.num_carried == 0
        assert training.departures.counts["trained"] == total * world.batch.num_prompts
    for slow, eager in ((0, False), (2, True), (5, False)):
        other = world.training(total, slow, eager)
        for result in training.results:
            assert fingerprint(other.run_step()) == fingerprint(result)
        carried = other.rule.state()["queue"].get("samples", {"token_ids": []})
        assert other.rollout.num_drawn == sum(count_tokens(other).values()) + len(carried["token_ids"])
