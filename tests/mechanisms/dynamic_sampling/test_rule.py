"""Dynamic sampling: replacements ahead of verdicts, in logical time, and what becomes of those that are not needed."""

from __future__ import annotations

from statistics import fmean

import pytest
from fake_rollout import (
    FakePrompts,
    FakeRollout,
    FakeTraining,
    check_book,
    fingerprint,
    run_with_crashes,
    tangled,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds import START, batch_keys, filtering, finish, fresh_batches, key, names, verdict

from jaxrl.mechanisms.dynamic_sampling import MOST_PER_MISSING, DynamicSampling
from jaxrl.mechanisms.over_provisioning import OverProvisioning
from jaxrl.mechanisms.partial_rollout import PartialRollout
from jaxrl.mechanisms.tail_batching import TailBatching
from jaxrl.scheduling.rounds.batches import BatchRule, RoundTime
from jaxrl.scheduling.rounds.race import BatchSettings
from jaxrl.types import SampleKey


def lengths(seed: int, k: SampleKey) -> int:
    """Most are short, and a tail up to a limit."""
    number = tangled(seed, k.epoch, k.prompt_index, k.sample_index, k.attempt) % 10_000
    return min(10 + int(20 * (10_000 / (number + 1) - 1)), 400)


def is_filtered(seed: int, k: SampleKey, percent: int) -> bool:
    return tangled(seed + 1, k.epoch, k.prompt_index) % 100 < percent


def rollout(seed: int, percent: int, delay: int = 1) -> FakeRollout:
    """`percent` of the prompts have rewards that are all equal."""
    return FakeRollout(
        lambda k: lengths(seed, k),
        lambda k: (0.0 if is_filtered(seed, k, percent) else float(k.sample_index % 2), "ok"),
        num_slots=800,
        plan_tokens=10,
        delay=lambda k: delay,
        asks_certain=False,
    )


def run(rule: BatchRule, seed: int, percent: int, steps: int = 6) -> tuple[float, float]:
    """Ticks per step, and prompts launched per step."""
    training = FakeTraining(rule, FakePrompts(1000), rollout(seed, percent), steps)
    results = [training.run_step() for _ in range(steps)]
    assert all(len(result.groups) == 16 for result in results)
    return training.rollout._tick / steps, fmean(result.metrics["rollout/launched_prompts"] for result in results)


def test_a_round_with_filtered_groups_takes_little_longer_and_generates_little_more():
    """Sixty percent are filtered: one replacement after the other took five times as long."""
    plain, _ = zip(*(run(fresh_batches(16, 8), seed, 60) for seed in range(2)), strict=True)
    ticks, prompts = zip(*(run(fresh_batches(16, 8, **filtering()), seed, 60) for seed in range(2)), strict=True)
    assert fmean(ticks) <= 1.5 * fmean(plain)
    assert fmean(prompts) <= 1.3 * 16 / (1 - 0.6)


def test_launching_ahead_does_not_choose_by_length():
    """Half of the prompts have long responses, and what is filtered does not depend on it. Neither may a prompt race,
    which nothing asked for, nor may short groups be judged more often than long ones."""
    num_long = num_trained = 0
    for seed in range(3):
        long = lambda k: tangled(seed, k.epoch, k.prompt_index) % 2  # noqa: B023, E731 - used within the turn
        rewards = lambda k: (  # noqa: E731 - equal in a group, or not, by chance
            float(k.sample_index % 2) if tangled(seed, 7, k.prompt_index, k.attempt) % 10 < 4 else 0.0,  # noqa: B023
            "ok",
        )
        played = FakeRollout(
            lambda k: 10 + 300 * long(k) + tangled(seed, k.prompt_index, k.sample_index, k.attempt) % 5,  # noqa: B023
            rewards,
            num_slots=200,
            plan_tokens=40,
            asks_certain=False,
        )
        options = OverProvisioning.Options(enable=True, prompt_factor=1.0, response_factor=1.5)
        rule = OverProvisioning(BatchSettings(16, 2, **filtering()), options)
        training = FakeTraining(rule, FakePrompts(10_000), played, 25)
        for group in (group for _ in range(25) for group in training.run_step().groups):
            num_long += len(group.samples[0]) > 100
            num_trained += 1
    assert abs(num_long / num_trained - 0.5) < 0.015, num_long / num_trained


def test_the_share_follows_what_is_judged():
    sampling = DynamicSampling(DynamicSampling.Options(enable=True))
    assert sampling.share == 0
    assert [sampling.under_way(n) for n in (0, 1, 16)] == [0, 1, 16]
    for i in range(1000):
        sampling = sampling.after(kept=i % 10 >= 6, num_prompts=16)
    assert sampling.share == pytest.approx(0.6, abs=0.03)
    assert sampling.under_way(16) in range(42, 47)
    for _ in range(1000):
        sampling = sampling.after(kept=False, num_prompts=16)
    assert 0.9 < sampling.share < 1
    assert sampling.under_way(16) == MOST_PER_MISSING * 16, "however many are filtered"


def test_a_plain_batch_takes_the_first_that_count_in_the_order_of_launch():
    """Prompt 1 is filtered, 2 and 3 come instead. 3 ends before 0, and the batch is 0 and 2 all the same."""
    rule = fresh_batches(2, 2, **filtering(max_unscored_groups=0))
    current = rule.plan(FakePrompts(10), RoundTime(1, 0))
    for event in (START, finish(key(1, 0)), finish(key(1, 1)), verdict(key(1, 0), 0.0)):
        current.handle(event)
    launched = names(current.handle(verdict(key(1, 1), 0.0)))
    assert [command[:2] for command in launched] == [("launch", 2), ("launch", 3)]
    for p in (3, 2, 0):
        for i in (0, 1):
            current.handle(finish(key(p, i)))
        for i in (0, 1):
            assert not current.done
            current.handle(verdict(key(p, i)))
    assert current.done
    result = rule.settle(current)
    assert batch_keys(result.groups) == [[key(p, 0), key(p, 1)] for p in (0, 2)]
    assert result.left == {(0, 1): "filtered"}
    assert rule.num_carried == 1
    again = rule.plan(FakePrompts(10, 4), RoundTime(2, 1))
    launched = names(again.handle(START))
    assert launched[0] == ("launch", 3, key(3, 0, 1), key(3, 1, 1)), "first of the next round, with new responses"
    assert launched[1][1] == 4


RULES = {
    "plain": lambda batch: fresh_batches(batch.num_prompts, batch.group_size, group_filter=batch.group_filter),
    "tail batching": lambda batch: TailBatching(
        batch, TailBatching.Options(enable=True, prompt_factor=1.5, response_factor=1.5, at_end="leave")
    ),
    "partial rollout": lambda batch: PartialRollout(batch, PartialRollout.Options(enable=True, at_end="leave")),
}


@pytest.mark.parametrize("name", RULES)
@given(
    delays=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    eager=st.booleans(),
    seed=st.integers(0, 100),
    max_unscored=st.integers(-1, 4),
    percent=st.sampled_from([30, 60, 80]),
)
@settings(max_examples=8, deadline=None)
def test_no_arrival_of_a_verdict_changes_a_launch_a_batch_or_a_departure(
    name: str, delays: list[int], eager: bool, seed: int, max_unscored: int, percent: int
):
    """Verdicts come after any delays; launches in their order, batches, departures and the estimate are the same."""
    outcomes = []
    for late in ([0], delays):
        batch = BatchSettings(4, 2, **filtering(max_unscored_groups=max_unscored, max_num_gen_batches=1000))
        rule = RULES[name](batch)
        played = FakeRollout(
            lambda k: 1 + tangled(seed, *_words(k)) % 30,
            lambda k: (0.0 if is_filtered(seed, k, percent) else float(k.sample_index % 2), "ok"),
            num_slots=9,
            delay=lambda k, late=late: late[tangled(7, *_words(k)) % len(late)],
            eager=eager and late is delays,
        )
        training = FakeTraining(rule, FakePrompts(40), played, None)
        steps = []
        for _ in range(4):
            result = training.run_step()
            check_book(training)
            launches = [command for command in names(played.commands) if command[0] == "launch"]
            steps.append((fingerprint(result), launches))
        outcomes.append((steps, rule.filter.state()))
    assert outcomes[0] == outcomes[1]


def _words(k: SampleKey) -> tuple[int, ...]:
    return k.epoch, k.prompt_index, k.sample_index, k.attempt


@pytest.mark.parametrize("name", RULES)
def test_a_resumed_run_goes_on_with_the_estimate_and_the_prompts_that_were_not_needed(name: str):
    def make() -> FakeTraining:
        rule = RULES[name](BatchSettings(4, 2, **filtering()))
        return FakeTraining(rule, FakePrompts(50), rollout(5, 60), None)

    straight = make()
    results = [straight.run_step() for _ in range(6)]
    training = run_with_crashes(make, 6, {2: "boundary", 4: "round", 5: "boundary"})
    assert [fingerprint(each) for each in training.results] == [fingerprint(each) for each in results]
    assert training.rule.state()["filtered_share"] == straight.rule.state()["filtered_share"] != [0, 0]
    state = training.state()
    state["rule"] = {**state["rule"], "filtered_share": [0.0, 0.0]}
    forgetful = make()
    forgetful.load(state)
    assert fingerprint(forgetful.run_step()) != fingerprint(straight.run_step()), "the estimate decides"
