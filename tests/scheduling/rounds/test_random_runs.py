"""Rules on random workloads with crashes and failed rewards: each prompt leaves exactly once, runs repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
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
from jaxrl.mechanisms.partial_rollout import PartialRollout
from jaxrl.mechanisms.tail_batching import TailBatching
from jaxrl.scheduling.rounds.events import Launch
from jaxrl.scheduling.rounds.race import BatchSettings
from jaxrl.types import Sample, SampleKey


def tail_lengths(seed: int) -> Callable[[SampleKey], int]:
    """Most are short, some prompts long in every attempt, some responses very long."""

    def length(k: SampleKey) -> int:
        of_prompt = tangled(seed, k.prompt_index) % 6
        own = tangled(seed, k.epoch, k.prompt_index, k.sample_index, k.attempt)
        return 1 + own % 4 + (10 if of_prompt == 0 else 0) + (25 if own % 9 == 0 else 0)

    return length


def random_rewards(seed: int) -> Callable[[SampleKey], Any]:
    """Three in ten scorings fail; whatever the machine does, the same ones."""

    def reward(k: SampleKey) -> Any:
        number = tangled(seed, k.prompt_index, k.sample_index, k.attempt, k.epoch)
        return (0.0, ("timeout", "crash", "error")[number % 3]) if number % 10 < 3 else (float(number % 2), "ok")

    return reward


@dataclass(frozen=True)
class World:
    """Prompts, the machine that they run on, and the steps in or after which a process is killed."""

    seed: int
    num_prompts: int
    num_slots: int
    plan_tokens: int
    crashes: dict[int, Any]

    def rollout(self, slow: int, eager: bool = False) -> FakeRollout:
        """`slow` ticks times 0 to 4 until a verdict is there."""
        return FakeRollout(
            tail_lengths(self.seed),
            random_rewards(self.seed),
            self.num_slots,
            self.plan_tokens,
            delay=lambda k: slow * (tangled(self.seed, k.prompt_index, k.sample_index) % 5),
            eager=eager,
        )


worlds = st.builds(
    World,
    st.integers(0, 1000),
    st.integers(1, 12),
    st.integers(2, 20),
    st.integers(1, 4),
    st.dictionaries(st.integers(1, 9), st.sampled_from(["boundary", "round"])),
)
factors = st.sampled_from([1.0, 1.25, 1.5, 2.0, 2.5])
sampling_options = st.builds(
    DynamicSampling.Options,
    enable=st.just(True),
    max_num_gen_batches=st.just(1000),
    max_unscored_groups=st.integers(-1, 3),
)


# -- tail batching -----------------------------------------------------------------------------------------------------


@st.composite
def tail_batchings(draw: st.DrawFn) -> tuple[BatchSettings, TailBatching.Options]:
    filtering = draw(st.none() | st.builds(DynamicSampling, sampling_options, st.sampled_from([0, 0, 5])))
    batch = BatchSettings(
        draw(st.integers(1, 4)),
        draw(st.integers(2 if filtering else 1, 3)),
        score_when=draw(st.sampled_from(["sample", "group"])),
        group_filter=filtering,
        max_active_requests=draw(st.sampled_from([0, 8, 12])),
    )
    options = TailBatching.Options(
        enable=True,
        prompt_factor=draw(factors),
        response_factor=draw(factors),
        at_end=draw(st.sampled_from(["flush", "leave"])),
    )
    least = TailBatching(batch, options).least_age_bound
    return batch, options.replace(max_age_steps=draw(st.sampled_from([0, 1, 2, 4]).map(lambda a: a and max(a, least))))


@given(configuration=tail_batchings(), world=worlds, total=st.integers(1, 7), steps_per_version=st.integers(1, 3))
def test_random_runs_of_tail_batching_keep_the_book(
    configuration: tuple[BatchSettings, TailBatching.Options], world: World, total: int, steps_per_version: int
):
    batch, options = configuration

    def make(slow: int, eager: bool = False) -> FakeTraining:
        rule = TailBatching(batch, options)
        return FakeTraining(rule, FakePrompts(world.num_prompts), world.rollout(slow, eager), total, steps_per_version)

    training = run_with_crashes_and_queue_checks(lambda: make(0), total, world.crashes)
    for result in training.results:
        assert len(result.groups) == batch.num_prompts
        assert all(len(group.samples) == batch.group_size for group in result.groups)
        assert all(sample.reward is not None for group in result.groups for sample in group.samples)
        assert result.metrics["rollout/resumed_share"] == 0
        if options.max_age_steps:
            assert result.metrics["rollout/trained_age_steps/max"] <= options.max_age_steps
            assert result.metrics["rollout/queue_age_steps/max"] <= options.max_age_steps
    if options.at_end == "flush":
        assert training.rule.num_carried == 0
        assert training.departures.counts["trained"] == total * batch.num_prompts
        if not batch.group_filter:
            assert training.prompts.position == total * batch.num_prompts
    # the clock of the reward pool decides nothing
    for slow, eager in ((2, True), (5, False)):
        other = make(slow, eager)
        for result in training.results:
            assert fingerprint(other.run_step()) == fingerprint(result)


def run_with_crashes_and_queue_checks(make: Callable[[], FakeTraining], total: int, crashes: Any) -> FakeTraining:
    """Runs; and checks that the queue is first in, first out."""
    training = run_with_crashes(make, total, crashes)
    straight = make()
    before: list[Any] = []
    for result in training.results:
        assert fingerprint(straight.run_step()) == fingerprint(result)
        assert isinstance(straight.rule, TailBatching)
        after = [deferred.key for deferred in straight.rule.queue]
        waited = [prompt_key for prompt_key in before if prompt_key in after]
        assert waited == after[: len(waited)]
        if not straight.rule.batch.group_filter:  # which may filter a prompt behind the last one of a batch
            assert before[len(before) - len(waited) :] == waited
        assert result.kind == "long" or waited == before
        before = after
    state = straight.rule.state()
    for name in ("groups", "first"):
        assert np.array_equal(state["queue"][name], training.rule.state()["queue"][name])
    tokens = count_tokens(straight)
    assert straight.rollout.num_drawn == sum(tokens.values())
    return training


# -- partial rollout ---------------------------------------------------------------------------------------------------


@st.composite
def partial_rollouts(draw: st.DrawFn) -> tuple[BatchSettings, PartialRollout.Options]:
    filtering = draw(st.none() | st.builds(DynamicSampling, sampling_options, st.sampled_from([0, 0, 5])))
    lag = draw(st.integers(0, 1))
    batch = BatchSettings(
        draw(st.integers(1, 4)),
        draw(st.integers(2 if filtering else 1, 3)),
        group_filter=filtering,
        max_active_requests=draw(st.sampled_from([0, 3, 7])),
        version_lag=lag,
    )
    options = PartialRollout.Options(
        enable=True,
        over_provision=draw(st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.5])),
        max_restarts=draw(st.integers(0, 2)),
        at_end=draw(st.sampled_from(["flush", "leave"])),
    )
    least = PartialRollout(batch, options).least_staleness
    return batch, options.replace(max_staleness=draw(st.just(-1) | st.integers(least, least + 2)))


@given(configuration=partial_rollouts(), world=worlds, total=st.integers(1, 8))
def test_random_runs_of_partial_rollout_keep_the_book(
    configuration: tuple[BatchSettings, PartialRollout.Options], world: World, total: int
):
    batch, options = configuration

    def make(slow: int, eager: bool = False) -> FakeTraining:
        rule, prompts = PartialRollout(batch, options), FakePrompts(world.num_prompts)
        return FakeTraining(rule, prompts, world.rollout(slow, eager), total, version_lag=batch.version_lag)

    training = run_with_crashes(lambda: make(0), total, world.crashes)
    for trained_version, result in enumerate(training.results):
        assert len(result.groups) == batch.num_prompts
        if not (batch.group_filter and options.max_staleness < 0):
            # else filtered groups that were launched after the batch's last one are left over too, however many
            most = PartialRollout(batch, options).max_under_way[0] - batch.num_prompts
            assert result.metrics["rollout/queue_length"] <= most
        for group in result.groups:
            assert sorted(s.key.sample_index for s in group.samples) == list(range(batch.group_size))
            for sample in group.samples:
                check_trained(sample, trained_version, batch.version_lag, options, tail_lengths(world.seed))
    if options.at_end == "flush":
        assert training.rule.num_carried == 0
        assert training.departures.counts["trained"] == total * batch.num_prompts
    for slow, eager in ((0, False), (2, True), (5, False)):
        other = make(slow, eager)
        for result in training.results:
            assert fingerprint(other.run_step()) == fingerprint(result)
            check_resumption(other)
        buffered = len(other.rule.state()["queue"]["samples"]["token_ids"])
        tokens = count_tokens(other)
        assert other.rollout.num_drawn == sum(tokens.values()) + buffered
        if options.max_staleness < 0 and not any(r.metrics.get("rollout/discarded_prompts") for r in training.results):
            assert tokens["thrown"] == 0


def check_trained(
    sample: Sample, version: int, lag: int, options: PartialRollout.Options, length: Callable[[SampleKey], int]
) -> None:
    """Whole, scored, with each token's own records, and within the cap; `version` is the one that is trained."""
    assert sample.reward is not None
    assert len(sample) == length(sample.key)
    assert np.all(np.diff(sample.versions) >= 0)
    assert sample.versions.max() <= max(version - lag, 0)
    expected = make_sample(sample.key, sample.versions.tolist(), "stop")
    for name in ("token_ids", "rollout_logprobs", "sampled_logprobs"):
        assert np.array_equal(getattr(sample, name), getattr(expected, name))
    if options.max_staleness < 0:
        assert sample.key.attempt == 0
    else:
        assert version - sample.versions.min() <= options.max_staleness
        assert sample.key.attempt <= options.max_restarts


def check_resumption(training: FakeTraining) -> None:
    """Without a cap, incomplete prompts are launched in the order in which they were drawn: old ones first."""
    assert isinstance(training.rule, PartialRollout)
    if training.rule.options.max_staleness >= 0:
        return
    drawn = FakePrompts(training.prompts.num_prompts).next(training.prompts.position)
    place = {prompt.key: i for i, prompt in enumerate(drawn)}
    launches = [c for c in training.rollout.commands if isinstance(c, Launch) and c.keys]
    places = [place[command.prompt.key] for command in launches]
    assert places == sorted(places)


# -- the baselines -----------------------------------------------------------------------------------------------------
