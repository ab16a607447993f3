"""The input of a scorer, and what it may return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrl.schema.declared import MAX_FLOAT
from jaxrl.types import Episode, Prompt, Sample

A_REWARD = f"a finite number (at most {MAX_FLOAT:.3g}, the largest float32)"


def as_reward(value: Any, who: str = "a scorer must return") -> float:
    """A reward: a number, or a scalar of numpy or torch. Raises ValueError, which says `who`, for anything else."""
    try:
        number = value.item()
    except (AttributeError, ValueError, RuntimeError):
        number = value
    if not isinstance(number, int | float) or not abs(number) <= MAX_FLOAT:
        raise ValueError(f"{who} {A_REWARD}, found {value!r:.200}")
    return float(number)


OWN_COLUMNS = ("prompt", "question", "epoch", "index", "finish_reason", "response_length")
"""What `ScoreRequest.extra` has beside the data's columns."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A sample as a scorer sees it: the same few values for every kind of scorer, cheap to send to another process.

    `extra` has the prompt's own columns; and `prompt`, `question` (the last user message), `epoch`, `index`,
    `finish_reason` and `response_length` (tokens that the model drew), unless the data has columns of these names; of a
    conversation (`data.messages_key`) also `messages`, and with turns the `turns` at their end.
    """

    source: str  # the prompt's data set or task
    response: str  # decoded; of one with turns, the model's text of the last turn
    answer: str | None  # the reference answer, if there is one
    extra: Mapping[str, Any] = field(default_factory=dict)
    # seconds for each test case of the prompt in their order, the last also for further ones; empty:
    # `reward.code.max_timeout_s` for all (`jaxrl.mechanisms.reward_timeouts`)
    limits_s: tuple[float, ...] = ()
    num_tokens: int = 0  # that the model has drawn
    turns: tuple[Mapping[str, Any], ...] = ()  # messages of the model and of its environment, behind the prompt's
    turn_rewards: tuple[float, ...] | None = None  # of an environment, by turn
    stop: str = ""  # why the trajectory ended

    @classmethod
    def of(cls, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> ScoreRequest:
        question, drawn = prompt.question or prompt.text, sample.num_drawn
        values = prompt.text, question, prompt.epoch, prompt.index, sample.finish_reason, drawn
        ours = dict(zip(OWN_COLUMNS, values, strict=True))
        request = cls(prompt.source, sample.text, prompt.answer, ours | dict(prompt.extra), limits_s, sample.num_drawn)
        return request if sample.episode is None else request._of_turns(sample.episode)

    def _of_turns(self, episode: Episode) -> ScoreRequest:
        turns: list[Mapping[str, Any]] = []
        for turn in episode.turns:
            turns += [{"role": "assistant", "content": turn.text}, *turn.messages]
        rewards = tuple(turn.reward for turn in episode.turns)
        extra = {**self.extra, "messages": [*self.extra["messages"], *turns]}
        said = replace(self, response=episode.turns[-1].text, extra=extra, turns=tuple(turns))
        return replace(said, turn_rewards=rewards, stop=episode.stop)
