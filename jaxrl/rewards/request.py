"""What a scorer sees of a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl.types import Prompt, Sample


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """What a scorer sees of a sample: the same few values for every kind of scorer, cheap to send to another process.

    Attributes:
      source: the prompt's data set or task.
      response: the decoded response.
      answer: the reference answer, if there is one.
      extra: the prompt's own columns; and `prompt`, `question` (the last user message), `epoch`, `index`,
        `finish_reason` and `response_length` (tokens that the model drew), unless the data has columns of these names.
      limits_s: seconds that each test case of the prompt may take, in their order, for scorers that run test cases
        (`jaxrl.mechanisms.reward_timeouts.rule`); those beyond have the last one, and all where it is empty
        `reward.code.max_timeout_s`.
      num_tokens: that the model has drawn.
    """

    source: str
    response: str
    answer: str | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    limits_s: tuple[float, ...] = ()
    num_tokens: int = 0

    @classmethod
    def of(cls, prompt: Prompt, sample: Sample, limits_s: tuple[float, ...] = ()) -> ScoreRequest:
        ours = {
            "prompt": prompt.text,
            "question": prompt.question or prompt.text,
            "epoch": prompt.epoch,
            "index": prompt.index,
            "finish_reason": sample.finish_reason,
            "response_length": sample.num_drawn,
        }
        return cls(prompt.source, sample.text, prompt.answer, ours | dict(prompt.extra), limits_s, sample.num_drawn)
