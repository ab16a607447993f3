"""Tail batching: tables of events and commands by hand, and small runs."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
from fake_rollout import FakePrompts, tangled, through_disk
from rounds import (
    START,
    Steps,
    aborted,
    batch_keys,
    check_table,
    finish,
    fresh_batches,
    key,
    long_every_fifth,
    names,
    verdict,
)

from jaxrl.mechanisms.tail_batching import TailBatching
from jaxrl.scheduling.rounds.batches import RoundTime
from jaxrl.scheduling.rounds.round import BatchSettings


def tail_batching(num_prompts: int, group_size: int, *, shared: Any = None, **options: Any) -> TailBatching:
    """The rule with options `rollout.tail_batching`; `shared` is what else all rules are given."""
    batch = BatchSettings(num_prompts, group_size, **(shared or {}))
    return TailBatching(batch, TailBatching.Options(enable=True, **options))


def test_four_short_rounds_and_a_long_one():
    """RollPacker §3: P0 = 4, R0 = 4, η = 1.25: one prompt of five is deferred, and the fifth round runs those four."""
    rule = tail_batching(4, 4, relaunch="new")
    results = Steps(rule, long_every_fifth).run(6)
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


@pytest.mark.parametrize(
    ("max_staleness", "launched"),
    [(-1, [key(1, 0), ("has", key(1, 1)), ("on", key(1, 0), [0] * 5)]), (0, [key(1, 0), key(1, 1)])],
)
def test_a_prompt_that_waits_with_its_tokens(max_staleness: int, launched: list[Any]):
    """P0 = 1 of 2, R0 = 2 of 3. Responses 0 and 1 wait, whichever have ended; over the cap, they start again."""
    options: Any = {"relaunch": "resume", "max_staleness": max_staleness}
    rule, again = (tail_batching(1, 2, prompt_factor=2.0, response_factor=1.5, **options) for _ in range(2))
    prompts = FakePrompts(10)
    current = rule.plan(prompts, RoundTime(1, 0))
    score = [("score", key(0, 2)), ("score", key(0, 0))]
    check_table(
        current,
        [
            (START, [("launch", p, key(p, 0), key(p, 1), key(p, 2)) for p in range(2)]),
            (finish(key(1, 1), 2), []),
            (finish(key(0, 2), 3), []),
            (finish(key(0, 0), 4), [("abort", key(0, 1)), *score, ("stop", key(1, 0)), ("abort", key(1, 2))]),
            (aborted(key(0, 1), 1), []),
            (aborted(key(1, 0), 5), []),
            (aborted(key(1, 2), 6), []),
            (verdict(key(0, 2)), []),
            (verdict(key(0, 0)), []),
        ],
    )
    metrics = rule.settle(current).metrics
    assert [metrics[f"rollout/{name}_tokens"] for name in ("buffered", "thrown")] == [2 + 5, 1 + 6]
    again.load_state(through_disk(rule.state()), prompts)
    current = again.plan(prompts, RoundTime(2, 1))
    assert current.kind == "long"
    assert names(current.handle(START)) == [("launch", 1, *launched)]


@pytest.mark.parametrize("relaunch", ["same", "new"])
def test_with_the_same_bits_a_run_trains_on_the_responses_of_plain_batches(relaunch: str):
    """So their lengths have no bias, whatever came first; with new bits slow prompts have a second chance."""
    batches = []
    for rule in (fresh_batches(4, 3), tail_batching(4, 3, response_factor=1.0, relaunch=relaunch)):
        results = Steps(rule, lambda k: 1 + tangled(5, *astuple(k)) % 90, total=12).run(12)
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
        (result,) = Steps(rule, long_every_fifth).run(1)
        metrics = result.metrics
        assert [metrics["rollout/launched_prompts"], metrics["rollout/launched_samples"]] == launched
    # the factor is taken as it is written: in binary, 1.1 * 50 is a little above 55
    assert tail_batching(50, 4, prompt_factor=1.1).num_spare == 5
