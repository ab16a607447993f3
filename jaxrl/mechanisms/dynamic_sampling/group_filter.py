"""Which groups dynamic sampling keeps: those in which a metric differs, or those that a function of the user's names.

Source: DAPO (Yu et al. 2025, §3.2: prompts that all samples or none solve are left out); verl's
`algorithm.filter_groups.metric`, and slime's `dynamic_sampling_filter_path`.

Departures: verl's `seq_final_reward` (the reward after a KL term) is refused: the KL is not known in the rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Group

KeepsGroup = Callable[[Group, Sequence[Verdict]], bool]
"""Whether a group may be trained on, by its scored samples and their verdicts, both sorted by key."""

THE_REWARD = ("reward", "score", "seq_reward")
"""Names of the reward itself: `score` and `seq_reward` are verl's."""

FILTER_ARGUMENTS = ("data_source", "rewards", "infos", "responses", "extra_info")
"""The keyword arguments of a function of the user's."""


def differs_in(metric: str) -> KeepsGroup:
    """Keeps the groups whose samples do not all have the same value of `metric`: the reward, or a value of that name in
    what the scorer returned with it. A scoring that failed has the value 0, as its reward is."""

    def keeps(group: Group, verdicts: Sequence[Verdict]) -> bool:
        values = [value_of(metric, verdict) for verdict in verdicts]
        return any(value != values[0] for value in values)

    return keeps


def value_of(metric: str, verdict: Verdict) -> Any:
    if metric in THE_REWARD:
        return verdict.reward
    return verdict.info[metric] if verdict.status == "ok" else 0.0


def user_filter(function: Callable[..., Any], what: str) -> KeepsGroup:
    """Keeps the groups that a function of the user's says to keep. It must be deterministic: a resumed run asks again.

    Args:
      function: takes `FILTER_ARGUMENTS`, and returns whether to keep the group.
      what: its file and name, for messages.
    """

    def keeps(group: Group, verdicts: Sequence[Verdict]) -> bool:
        prompt = group.prompt
        extra: Mapping[str, Any] = {
            "prompt": prompt.text,
            "answer": prompt.answer,
            "epoch": prompt.epoch,
            "index": prompt.index,
            **prompt.extra,
        }
        values = (
            prompt.source,
            [verdict.reward for verdict in verdicts],
            [dict(sample.reward_info) for sample in group.samples],
            [sample.text for sample in group.samples],
            extra,
        )
        try:
            answer = function(**dict(zip(FILTER_ARGUMENTS, values, strict=True)))
        except (Exception, SystemExit) as error:
            raise ValueError(f"{what} failed on prompt {prompt.key} with {type(error).__name__}: {error}") from error
        if hasattr(answer, "item"):  # a scalar of numpy
            answer = answer.item()
        if not isinstance(answer, bool):
            raise ValueError(f"{what} must return True or False, found {answer!r:.200} for prompt {prompt.key}")
        return answer

    return keeps
