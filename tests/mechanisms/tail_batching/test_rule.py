"""Tail batching: tables of events and commands by hand, and small runs."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
from fake_rollout import FakePrompts, tangled
from rounds import (
    START,
    aborted,
    batch_keys,
    check_table,
    filtering,
    finish,
    fresh_batches,
    key,
    long_every_fifth,
    run_steps,
    verdict,
)

from jaxrl.mechanisms.tail_batching import TailBatching
from jaxrl.scheduling.rounds.batches import RoundTime
from jaxrl.scheduling.rounds.race import BatchSettings, PlannedGroup


def tail_batching(num_prompts: int, group_size: int, *, shared: Any = None, **options: Any) -> TailBatching:
    """The rule with options `rollout.tail_batching`; `shared` is what else all rules are given."""
    batch = BatchSettings(num_prompts, group_size, **(shared or {}))
    return TailBatching(batch, TailBatching.Options(enable=True, **options))


def test_a_short_round_keeps_the_first_responses_of_the_first_prompts():
    rule = tail_batching(2, 2)  # ceil(1.25 * 2) = 3 prompts of 3 responses
    current = rule.plan(FakePrompts(10), RoundTime(1, 0))
    assert current.kind == "short"
    launches = [("launch", p, key(p, 0), key(p, 1), key(p, 2)) for p in range(3)]
    check_table(
        current,
        [
            (START, launches),
            (finish(key(1, 2), 3), [("score", key(1, 2))]),
            (finish(key(0, 0), 4), [("score", key(0, 0))]),
            (finish(key(1, 0), 5), [("score", key(1, 0)), ("abort", key(1, 1))]),
            (aborted(key(1, 1), 5), []),
            (verdict(key(1, 2)), []),
            (finish(key(2, 1), 6), [("score", key(2, 1))]),
            (
                finish(key(0, 2), 7),
                [("score", key(0, 2)), ("abort", key(0, 1)), ("abort", key(2, 0), key(2, 2)), ("cancel", key(2, 1))],
            ),
            (verdict(key(0, 0)), []),
            (aborted(key(0, 1), 7), []),
            (verdict(key(1, 0)), []),
            (aborted(key(2, 0), 7), []),
            (verdict(key(0, 2)), []),
            (aborted(key(2, 2), 0), []),
        ],
    )
    result = rule.settle(current)
    assert batch_keys(result.groups) == [[key(0, 0), key(0, 2)], [key(1, 0), key(1, 2)]]
    assert [(d.key, d.attempt, d.first_step) for d in rule.queue] == [((0, 2), 0, 1)]
    assert result.left == {}
    expected = {
        "rollout/long_round": 0,
        "rollout/launched_prompts": 3,
        "rollout/launched_samples": 9,
        "rollout/kept_prompts": 2,
        "rollout/kept_samples": 4,
        "rollout/aborted_samples": 4,
        "rollout/filtered_prompts": 0,
        "rollout/failed_prompts": 0,
        "rollout/filtered_tokens": 0,
        "rollout/thrown_tokens": 5 + 7 + 7 + 0 + 6,  # four aborted, and (2, 1), which had ended
        "rollout/length_bias": (19 / 4) / (44 / 9),
        "rollout/trained_age_steps/mean": 0,
        "rollout/trained_age_steps/max": 0,
        "rollout/resumed_share": 0,
        "rollout/deferred_prompts": 1,
        "rollout/queue_length": 1,
        "rollout/queue_age_steps/mean": 0,
        "rollout/queue_age_steps/max": 0,
        "rollout/queue_age_rounds/mean": 0,
        "rollout/queue_age_rounds/max": 0,
    }
    assert result.metrics == expected


def test_four_short_rounds_and_a_long_one():
    """RollPacker §3: P0 = 4, R0 = 4, η = 1.25: one prompt of five is deferred, and the fifth round runs those four."""
    rule = tail_batching(4, 4, relaunch="new")
    training, results = run_steps(rule, long_every_fifth, 6)
    assert [result.kind for result in results] == ["short"] * 4 + ["long", "short"]
    assert [result.metrics["rollout/launched_samples"] for result in results] == [25] * 4 + [16, 25]
    assert [result.metrics["rollout/queue_length"] for result in results] == [1, 2, 3, 4, 0, 1]
    assert [result.metrics["rollout/queue_age_steps/max"] for result in results] == [0, 1, 2, 3, 0, 0]
    assert [result.metrics["rollout/queue_age_steps/mean"] for result in results] == [0, 0.5, 1, 1.5, 0, 0]
    assert results[4].metrics["rollout/trained_age_steps/max"] == 4
    assert results[4].metrics["rollout/thrown_tokens"] == 0
    long = results[4].groups
    assert [group.prompt.index for group in long] == [4, 9, 14, 19]
    assert batch_keys(long)[0] == [key(4, i, attempt=1) for i in range(4)]
    for result in results[:4]:
        # the first four of five responses, of lengths 10 .. 14
        assert all([s.key.sample_index for s in group.samples] == [0, 1, 2, 3] for group in result.groups)
    assert training.departures.counts["trained"] == 24


@pytest.mark.parametrize("relaunch", ["same", "new"])
def test_with_the_same_bits_a_run_trains_on_the_responses_of_plain_batches(relaunch: str):
    """So their lengths have no bias, whatever came first; with new bits slow prompts have a second chance."""
    batches = []
    for rule in (fresh_batches(4, 3), tail_batching(4, 3, response_factor=1.0, relaunch=relaunch)):
        training, results = run_steps(rule, lambda k: 1 + tangled(5, *astuple(k)) % 90, 12, total=12)
        assert training.departures.counts["trained"] == 48
        batches.append({s.key: len(s) for result in results for group in result.groups for s in group.samples})
        waited = [result for result in results if result.kind != "short"]
        assert waited
        assert all(result.metrics["rollout/length_bias"] == 1 for result in waited), "all that was launched"
    plain, own = batches
    assert (plain == own) == (relaunch == "same")
    assert relaunch == "same" or sum(own.values()) < 0.95 * sum(plain.values())


def test_factors_scale_prompts_and_responses_apart():
    for prompts, responses, launched in ((1.0, 1.5, [4, 24]), (1.5, 1.0, [6, 24]), (1.1, 1.0, [5, 20])):
        rule = tail_batching(4, 4, prompt_factor=prompts, response_factor=responses)
        _, (result,) = run_steps(rule, long_every_fifth, 1)
        metrics = result.metrics
        assert [metrics["rollout/launched_prompts"], metrics["rollout/launched_samples"]] == launched
    # the factor is taken as it is written: in binary, 1.1 * 50 is a little above 55
    assert tail_batching(50, 4, prompt_factor=1.1).num_spare == 5


def test_the_age_bound_brings_the_long_round_forward():
    rule = tail_batching(4, 4, max_age_steps=2)
    _, results = run_steps(rule, long_every_fifth, 6)
    # the prompt deferred in step 1 must be run by step 3, with two new prompts to fill the batch
    assert [result.kind for result in results] == ["short", "short", "long"] * 2
    assert [group.prompt.index for group in results[2].groups] == [4, 9, 10, 11]
    assert results[2].metrics["rollout/trained_age_steps/max"] == 2
    assert all(len(group.samples) == 4 for result in results for group in result.groups)


@pytest.mark.parametrize(("at_end", "carried"), [("flush", 0), ("leave", 2)])
def test_what_becomes_of_the_queue_when_training_ends(at_end: Any, carried: int):
    rule = tail_batching(4, 4, at_end=at_end)
    training, results = run_steps(rule, long_every_fifth, 7, total=7)
    assert rule.num_carried == carried
    kinds = [result.kind for result in results]
    # flush: of the 28 prompts that can be trained on, 4 * 5 are drawn by short rounds, 4 wait, and 8 are left: 5 and 3
    last = ["short", "long"] if at_end == "flush" else ["short", "short"]
    assert kinds == ["short"] * 4 + ["long", *last]
    assert training.prompts.position == 28 + carried
    assert all(len(result.groups) == 4 for result in results)


def test_an_age_bound_that_cannot_be_kept_is_refused():
    with pytest.raises(ValueError, match=r"max_age_steps \(1 steps\) must be >= 2"):
        tail_batching(4, 4, prompt_factor=3.0, max_age_steps=1)


def test_what_dynamic_sampling_learnt_delays_no_long_round_without_it():
    """A run that is resumed with dynamic sampling switched off goes on with the queue alone."""
    prompts, other = FakePrompts(20), tail_batching(2, 1)
    other.queue.extend(PlannedGroup.first(prompt, 1, 1, 1) for prompt in prompts.next(2))
    state = other.state() | {"filtered_share": [40.0, 30.0]}
    kinds = []
    for shared in ({}, filtering()):
        rule = tail_batching(2, 2, shared=shared, prompt_factor=1.5)
        rule.load_state(state, prompts)
        kinds.append(rule.plan(FakePrompts(20, 2), RoundTime(2, 1)).kind)
    assert kinds == ["long", "short"]
