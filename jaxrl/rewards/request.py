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
    response with turns also `messages`, the whole conversation.
    """

    source: str  # the prompt's data set or task
    response: str  # decoded; of one with turns, the model's text of the last turn
    answer: str | None  # the reference answer, if there is one
    extra: Mapping[str, Any] = field(default_factory=dict)
    # seconds for each test case of the prompt in their order, the last also for further ones; empty:
    # `reward.code.max_timeout_s` for all (`jaxrl.mechanisms.reward_timeouts`)
    limits_s: tuple[float, ...] = ()
    num_tokens: int = 0  # that the model has drawn
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
        messages: list[Mapping[str, Any]] = [*self.extra["messages"]]
        for turn in episode.turns:
            messages += [{"role": "assistant", "content": turn.text}, *turn.messages]
        rewards = tuple(turn.reward for turn in episode.turns)
        said = episode.turns[-1].text
        extra = {**self.extra, "messages": messages}
        return replace(self, response=said, extra=extra, turn_rewards=rewards, stop=episode.stop)
