"""Active partial rollout: tables of events and commands by hand, and small runs."""

from __future__ import annotations

from typing import Any

from rounds import START, Steps, Table, aborted, finish, key, verdict

from jaxrl.mechanisms.partial_rollout import PartialRollout
from jaxrl.scheduling.rounds.round import BatchSettings
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
