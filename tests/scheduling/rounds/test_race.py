"""Inside a round: when dynamic sampling looks at rewards, and when samples are scored."""

from __future__ import annotations

from fake_rollout import FakePrompts
from rounds import START, Table, aborted, check_table, filtering, finish, fresh_batches, key, names, verdict

from jaxrl.scheduling.rounds.batches import RoundTime


def test_where_nothing_races_replacements_come_at_a_logical_time_as_well():
    """A prompt brought in by a verdict enters a plan, and decodes beside others: no clock may say which."""
    rule = fresh_batches(3, 2, **filtering(max_unscored_groups=1))
    current = rule.plan(FakePrompts(10), RoundTime(1, 0))
    for event in (START, finish(key(0, 0)), finish(key(0, 1)), finish(key(1, 0))):
        current.handle(event)
    assert current.handle(verdict(key(0, 0), 1.0)) == current.handle(verdict(key(0, 1), 1.0)) == [], "not yet"
    assert names(current.handle(finish(key(1, 1)))) == [
        ("score", key(1, 1)),
        *(("launch", p, key(p, 0), key(p, 1)) for p in (3, 4, 5)),
    ], "two are complete, one verdict may be due; of one judged one was filtered, so more than one is launched"


def test_a_group_whose_scorings_all_fail_leaves_as_failed():
    rule = fresh_batches(1, 2, **filtering())
    current = rule.plan(FakePrompts(10), RoundTime(1, 0))
    for event in (
        START,
        *(finish(key(0, i)) for i in (0, 1)),
        verdict(key(0, 0), 0.0, "timeout"),
        verdict(key(0, 1), 0.0, "crash"),
        *(finish(key(1, i)) for i in (0, 1)),
        *(verdict(key(1, i)) for i in (0, 1)),
        *(aborted(key(2, i)) for i in (0, 1)),
    ):
        current.handle(event)
    result = rule.settle(current)
    assert result.left == {(0, 0): "failed"}
    assert result.metrics["rollout/failed_prompts"] == 1


def test_rewards_after_the_rollout():
    current = fresh_batches(2, 1, score_when="rollout").plan(FakePrompts(10), RoundTime(1, 0))
    table: Table = [
        (START, [("launch", 0, key(0, 0)), ("launch", 1, key(1, 0))]),
        (finish(key(1, 0)), []),
        (finish(key(0, 0)), [("score", key(1, 0)), ("score", key(0, 0))]),
        (verdict(key(1, 0)), []),
        (verdict(key(0, 0)), []),
    ]
    check_table(current, table)
    # with dynamic sampling: generate, score, and generate what is missing
    sampling = fresh_batches(1, 2, score_when="rollout", **filtering())
    current = sampling.plan(FakePrompts(10), RoundTime(1, 0))
    table = [
        (START, [("launch", 0, key(0, 0), key(0, 1))]),
        (finish(key(0, 1)), []),
        (finish(key(0, 0)), [("score", key(0, 1)), ("score", key(0, 0)), ("await", key(0, 0))]),
        (verdict(key(0, 1), 1.0), []),
        (verdict(key(0, 0), 1.0), [("launch", p, key(p, 0), key(p, 1)) for p in (1, 2)]),
        (finish(key(1, 0)), []),
        (finish(key(1, 1)), []),
        (finish(key(2, 0)), []),
        (finish(key(2, 1)), [*(("score", key(p, i)) for p in (1, 2) for i in (0, 1)), ("await", key(1, 1))]),
        (verdict(key(1, 0)), []),
        (verdict(key(1, 1)), [("cancel", key(2, 0), key(2, 1))]),
    ]
    check_table(current, table)
