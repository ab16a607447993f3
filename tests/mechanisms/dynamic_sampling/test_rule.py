"""Dynamic sampling: replacements ahead of verdicts, in logical time, and what becomes of those that are not needed."""

from __future__ import annotations

import pytest
from fake_rollout import FakePrompts, tangled
from rounds import START, Steps, batch_keys, filtering, finish, fresh_batches, key, names, verdict

from jaxrl.mechanisms.dynamic_sampling import MOST_PER_MISSING, DynamicSampling
from jaxrl.mechanisms.over_provisioning import OverProvisioning
from jaxrl.scheduling.rounds.batches import RoundTime
from jaxrl.scheduling.rounds.round import BatchSettings


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


def test_launching_ahead_does_not_choose_by_length():
    """Half of the prompts have long responses, and which ones are filtered does not depend on it. Neither may a prompt
    race, which nothing asked for, nor may short groups be judged more often than long ones."""
    found: list[bool] = []
    for seed in (2, 3):
        rule = OverProvisioning(
            BatchSettings(16, 2, **filtering()),
            OverProvisioning.Options(enable=True, prompt_factor=1.0, response_factor=1.5),
        )
        steps = Steps(
            rule,
            lambda k: 3 + 12 * (tangled(seed, k.epoch, k.prompt_index) % 2),  # noqa: B023 - used within the turn
            lambda k: float(k.sample_index % 2) * (tangled(seed, 7, k.epoch, k.prompt_index, k.attempt) % 10 < 4),  # noqa: B023
        )
        found += [len(group.samples[0]) > 9 for result in steps.run(25) for group in result.groups]
    assert abs(sum(found) / len(found) - 0.5) < 0.01
