"""The search over factors: what is run, what a run's steps show, and when a table has a best."""

from __future__ import annotations

import pytest

from jaxrl.commands.tune import SEARCHES
from jaxrl.sim.tuning import Table, Trial, Tried, trial

TAIL, PARTIAL = SEARCHES["tail_batching"], SEARCHES["partial_rollout"]


# ---------------------------------------------------------------- what is run


def test_enough_steps_for_the_longest_period_twice():
    assert TAIL.num_steps(TAIL.together([1.1, 1.4]), 128) == 2 * 11  # 13 spare prompts: 10 short rounds fill a long one
    assert TAIL.num_steps(TAIL.together([1.01]), 100) == 2 * 101
    assert TAIL.num_steps([(1.0, 1.5)], 100) == 20, "nothing is deferred"
    assert PARTIAL.num_steps(PARTIAL.together([1.5]), 100) == 20 + PARTIAL.of.warm_up


# ---------------------------------------------------------------- what a run shows


def short(seconds: float, queue: float, age: float = 1.0) -> dict[str, float]:
    return {
        "timing_s/step": seconds,
        "timing_s/gen": seconds - 1,
        "rollout/long_round": 0.0,
        "rollout/queue_length": queue,
        "rollout/queue_age_steps/max": age,
        "rollout/trained_age_steps/max": 0.0,
        "rollout/deferred_prompts": 2.0,
        "rollout/thrown_tokens": 100.0,
        "rollout/filtered_tokens": 20.0,
        "training/off_policy/share": age / 8,
        "rollout/kept_samples": 4.0,
        "response_length/mean": 20.0,
    }


def long(seconds: float, queue: float, age: float) -> dict[str, float]:
    changed = {"rollout/long_round": 1.0, "rollout/trained_age_steps/max": age, "rollout/thrown_tokens": 0.0}
    return short(seconds, queue) | {"rollout/deferred_prompts": 0.0} | changed


def test_prompts_that_wait_at_the_end_are_paid_for():
    steps = [short(10, 2), short(12, 4), long(50, 0, 3), short(11, 2)]
    found = trial(steps, num_prompts=4)
    # half a long round is owed: 2 of 4 prompts wait
    assert found.step_s == pytest.approx((10 + 12 + 50 + 11 + 25) / 4.5)
    assert found.gen_s == pytest.approx((9 + 11 + 49 + 10 + 24.5) / 4.5)
    assert found.long_share == pytest.approx(1.5 / 4.5)
    assert found.thrown_share == pytest.approx(300 / (300 + 4 * 100))
    assert found.queue == pytest.approx(2.0)
    assert found.wait_steps == 3
    assert found.stale_share == pytest.approx(0.125)
    with pytest.raises(
        ValueError, match=r"^--steps \(2\) holds no long round, and 4 of the 4 prompts that make one wait"
    ):
        trial(steps[:2], num_prompts=4)


# ---------------------------------------------------------------- what a table says


def test_the_best_leads_by_more_than_the_noise():
    """Seeds differ by 10 s, the values by 1 s on every seed: the seeds are paired, so that the lead is clear."""

    def tried(factor: float, *step_s: float) -> Tried:
        trials = tuple(Trial(s, s / 2, 0.1, 0.0, 3.0, 2.0, 0.2) for s in step_s)
        return Tried((factor, factor), TAIL.launched((factor, factor), 8, 4), trials)

    table = Table(TAIL, tried(1.0, 40, 50, 60), (tried(1.1, 31, 41, 51.2), tried(1.2, 30, 40, 50)))
    alone = Table(TAIL, tried(1.0, 40), (tried(1.1, 20),))
    assert alone.verdict()[0].endswith("times as fast as plain batches; one seed shows no spread")
    assert (table.best.factors, table.as_good, table.pays) == ((1.2, 1.2), [], True)
