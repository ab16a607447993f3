"""Active partial rollout: tables of events and commands by hand, and small runs."""

from __future__ import annotations

from typing import Any

import pytest
from fake_rollout import FakePrompts, through_disk
from rounds import START, Steps, Table, aborted, batch_keys, check_table, finish, key, verdict

from jaxrl.mechanisms.partial_rollout import PartialRollout, WaitingGroup
from jaxrl.scheduling.rounds.batches import RoundTime
from jaxrl.scheduling.rounds.race import BatchSettings
from jaxrl.types import SampleKey


def partial_rollout(num_prompts: int, group_size: int, *, shared: Any = None, **options: Any) -> PartialRollout:
    """The rule with options `rollout.partial_rollout`; `shared` is what else all rules are given."""
    batch = BatchSettings(num_prompts, group_size, **(shared or {}))
    return PartialRollout(batch, PartialRollout.Options(enable=True, **options))


def launch(p: int) -> tuple:
    return ("launch", p, key(p, 0), key(p, 1))


def verdicts(*keys: SampleKey) -> Table:
    return [(verdict(k), []) for k in keys]


FIRST_ROUND: Table = [
    (START, [launch(0), launch(1), launch(2)]),
    (finish(key(0, 0), [0]), []),
    (finish(key(1, 0), [0]), []),
    (finish(key(1, 1), [0, 0]), [("score", key(1, 0)), ("score", key(1, 1))]),
    (verdict(key(1, 0)), []),
    (finish(key(0, 1), [0, 0]), [("score", key(0, 0)), ("score", key(0, 1)), ("stop", key(2, 0), key(2, 1))]),
    (finish(key(2, 0), [0, 0]), []),  # it ended in the plan in flight
    *verdicts(key(1, 1), key(0, 0), key(0, 1)),
    (aborted(key(2, 1), [0, 0, 0]), []),
]
NEXT_ROUND: Table = [
    (START, [("launch", 2, key(2, 1), ("has", key(2, 0)), ("on", key(2, 1), [0, 0, 0])), launch(3), launch(4)]),
    (finish(key(3, 0), [1, 1]), []),
    (finish(key(3, 1), [1, 1]), [("score", key(3, 0)), ("score", key(3, 1))]),
    (finish(key(2, 1), [0, 0, 0, 1, 1]), [("score", key(2, 0)), ("score", key(2, 1)), ("stop", key(4, 0), key(4, 1))]),
    (aborted(key(4, 0), [1]), []),
    (aborted(key(4, 1), []), []),
    *verdicts(key(3, 0), key(3, 1), key(2, 0), key(2, 1)),
]


def test_a_round_stops_at_the_last_group_needed_and_the_next_goes_on():
    """N = 2, N' = 3, two samples each."""
    rule = partial_rollout(2, 2, over_provision=1.5)
    prompts = FakePrompts(10)
    current = rule.plan(prompts, RoundTime(1, 0))
    assert current.kind == "partial"
    check_table(current, FIRST_ROUND)
    result = rule.settle(current)
    assert [group.prompt.index for group in result.groups] == [0, 1]
    assert result.metrics["rollout/thrown_tokens"] == 0
    assert result.metrics["rollout/aborted_samples"] == 1
    assert result.metrics["rollout/queue_length"] == 1
    assert result.metrics["rollout/buffered_tokens"] == 5
    assert result.metrics["rollout/resumed_share"] == 0

    state = through_disk(rule.state())
    rule = partial_rollout(2, 2, over_provision=1.5)
    rule.load_state(state, prompts)
    current = rule.plan(prompts, RoundTime(2, 1))
    check_table(current, NEXT_ROUND)
    result = rule.settle(current)
    assert batch_keys(result.groups) == [[key(2, 0), key(2, 1)], [key(3, 0), key(3, 1)]]
    expected = {
        "rollout/launched_prompts": 3,
        "rollout/launched_samples": 5,
        "rollout/kept_samples": 4,
        "rollout/aborted_samples": 2,
        "rollout/thrown_tokens": 0,
        "rollout/resumed_tokens": 3,
        "rollout/buffered_tokens": 1,
        "rollout/trained_age_steps/max": 1,
        "rollout/trained_age_steps/mean": 0.5,
        "rollout/resumed_share": 5 / 11,
        "training/off_policy/spans/max": 2,
        "training/off_policy/spans/mean": 1.25,
        "rollout/long_round": 0,
    }
    assert {name: result.metrics[name] for name in expected} == expected


def test_a_response_over_the_cap_starts_again_once_and_is_then_waited_for():
    """N = 1 of 2. Prompt 0 is long; version 0's tokens are over the cap of 1 in step 3; step 4 waits for what began
    in step 3."""

    def length(k: SampleKey) -> int:
        return (1000 if k.attempt == 0 else 40) if k.prompt_index == 0 else 3

    results = Steps(partial_rollout(1, 1, max_staleness=1), length).run(6)
    assert [result.groups[0].prompt.index for result in results] == [1, 2, 3, 0, 4, 5]
    # in each round the long one gets 3 tokens, and one more from the plan in flight
    assert [result.metrics["rollout/thrown_tokens"] for result in results] == [0, 0, 8, 0, 0, 0]
    assert [result.metrics["rollout/restarted_samples"] for result in results] == [0, 0, 1, 0, 0, 0]
    waited_for = results[3].groups[0].samples[0]
    assert waited_for.key == key(0, 0, attempt=1)
    assert waited_for.versions.tolist() == [2] * 4 + [3] * 36
    assert results[3].metrics["rollout/surplus_prompts"] == 1
    assert results[4].metrics["rollout/launched_samples"] == 0


# -- a function of the user's ------------------------------------------------------------------------------------------


class Asked:
    """A buffer filter that keeps what it was asked, and answers in turn."""

    def __init__(self, *answers: Any) -> None:
        self.groups: list[list[WaitingGroup]] = []
        self.versions: list[int] = []
        self.answers = list(answers)

    def __call__(self, *, groups: Any, policy_version: int) -> Any:
        self.groups.append(list(groups))
        self.versions.append(policy_version)
        return self.answers.pop(0) if self.answers else {}


def filtered(asked: Any, total: int | None = None, **options: Any) -> Steps:
    """N = 1 of 3 with one sample each; prompts 0 and 1 are long."""
    options = {"enable": True, "over_provision": 3.0} | options
    rule = PartialRollout(BatchSettings(1, 1), PartialRollout.Options(**options), asked)
    return Steps(rule, lambda k: {0: 30, 1: 60}.get(k.prompt_index, 3), total=total)


def test_a_buffer_filter_orders_holds_back_and_starts_again():
    asked = Asked({}, {(0, 1): "resume", (0, 0): "wait"}, {(0, 1): "wait", (0, 0): "restart"}, {(0, 0): "restart"})
    steps = filtered(asked)
    steps.run()
    assert asked.groups == [[]]
    steps.run()
    assert asked.groups[1] == [
        WaitingGroup((0, 0), 1, (4,), (False,), (0,), (0,)),
        WaitingGroup((0, 1), 1, (4,), (False,), (0,), (0,)),
    ]
    # one that waits is under way, too
    assert steps.launches == [("launch", 1, key(1, 0), ("on", key(1, 0), [0] * 4)), ("launch", 3, key(3, 0))]
    steps.run()
    assert steps.launches == [("launch", 0, key(0, 0, 1)), ("launch", 4, key(4, 0))]
    (result,) = steps.run()
    assert asked.groups[3][0] == WaitingGroup((0, 0), 3, (4,), (False,), (2,), (1,))
    # max_restarts is 1: it goes on with the tokens that it has; the one that was not named goes on after it
    assert [command[1] for command in steps.launches] == [0, 1, 5]
    assert steps.launches[0][3] == ("on", key(0, 0, 1), [2] * 4)
    assert [each.metrics["rollout/restarted_samples"] for each in steps.results] == [0, 0, 1, 0]
    assert steps.results[2].metrics["rollout/thrown_tokens"] == 4
    assert result.metrics["rollout/queue_length"] == 2
    assert asked.versions == [0, 1, 2, 3]


def test_an_answer_that_is_none_is_refused():
    steps = filtered(Asked({}, {(0, 1): "drop"}))
    steps.run()
    with pytest.raises(ValueError, match=r"must say one of resume, wait, restart for \(0, 1\), found 'drop'$"):
        steps.run()
