"""Parts of a reward beside the scorer's own (`reward.parts`): format, length, and functions of the user's.

Purpose: `build_parts` makes them, and `Weighted` is a scorer that adds them up: the scorer's reward times its domain's
weight, plus each part times its own. They run where the scorer runs, in a worker process and within its time limit: a
pattern may take for ever on a text that a model wrote.

What each part came to, before it is weighted, stays in the sample's `reward_info` under `parts`, and what the scorer
itself said under `own_reward`, which evaluations take, and `acc`, unless the scorer gives one.

Source: weighted sums as in DeepSeek-R1 (accuracy and format); a penalty that grows with the length as in DAPO's
equation 13. Departure: `length` falls over all that follows `free_tokens`, where DAPO's buffer lies at the end
(`reward.overlong_buffer`, which shapes training alone).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxrl.config import Config
from jaxrl.config.functions import read_user_file
from jaxrl.config.rewards import PartSection
from jaxrl.rewards.request import as_reward
from jaxrl.rewards.scorers import CustomScorer, Scorer, ScoreRequest


class Part(Protocol):
    """A number for a response. May raise, which makes the whole sample an error."""

    def load(self) -> None: ...

    def value(self, request: ScoreRequest) -> float: ...


@dataclass(frozen=True, slots=True)
class FormatPart:
    """1 if the whole response matches the pattern, else 0."""

    pattern: str

    def load(self) -> None:
        re.compile(self.pattern, re.DOTALL)

    def value(self, request: ScoreRequest) -> float:
        return float(re.fullmatch(self.pattern, request.response, re.DOTALL) is not None)


@dataclass(frozen=True, slots=True)
class LengthPart:
    """0 up to `free_tokens`, then linearly down to -1 at `max_tokens`."""

    free_tokens: int
    max_tokens: int

    def load(self) -> None: ...

    def value(self, request: ScoreRequest) -> float:
        over = max(request.num_tokens - self.free_tokens, 0)
        return 0.0 - min(over / (self.max_tokens - self.free_tokens), 1.0)  # not -0.0, as a page would show it


@dataclass(frozen=True, slots=True)
class CustomPart:
    """The number of a function of the user's, which has the signature of a custom scorer."""

    scorer: CustomScorer

    def load(self) -> None:
        self.scorer.load()

    def value(self, request: ScoreRequest) -> float:
        return as_reward(self.scorer(request)[0])


@dataclass(frozen=True, slots=True)
class Weighted:
    """A scorer whose reward is a weighted sum.

    Attributes:
      scorer: None: another pool has it, and what comes back here is the sum of the parts.
      weight: of the scorer's reward.
      parts: by name, each with its weight.
    """

    scorer: Scorer | None
    weight: float
    parts: Mapping[str, tuple[float, Part]] = field(default_factory=dict)

    @property
    def preload(self) -> tuple[str, ...]:
        return () if self.scorer is None else self.scorer.preload

    @property
    def loads(self) -> str:
        names = [f"reward.parts.{name}: loading it" for name in self.parts]
        return " and ".join([*([] if self.scorer is None else [self.scorer.loads]), *names])

    def load(self) -> None:
        if self.scorer is not None:
            self.scorer.load()
        for _, part in self.parts.values():
            part.load()

    def __call__(self, request: ScoreRequest) -> tuple[float, dict[str, Any]]:
        values = {name: part.value(request) for name, (_, part) in self.parts.items()}
        shaped = sum(weight * values[name] for name, (weight, _) in self.parts.items())
        info: dict[str, Any] = {"parts": values} if values else {}
        if self.scorer is None:
            return shaped, info
        reward, said = self.scorer(request)
        own = as_reward(reward)
        return self.weight * own + shaped, {"acc": own, **said, "own_reward": own, **info}


def build_parts(config: Config) -> dict[str, tuple[float, Part]]:
    """The parts of `reward.parts`, with their weights. Raises ValueError for a file that cannot be read."""
    return {name: (each.weight, _build(name, each, config)) for name, each in config.reward.parts.items()}


def _build(name: str, section: PartSection, config: Config) -> Part:
    option = f"reward.parts.{name}"
    match section.kind:
        case "format":
            return FormatPart(section.pattern)
        case "length":
            return LengthPart(section.free_tokens, config.data.max_response_length)
        case "custom":
            return CustomPart(CustomScorer(read_user_file(f"{option}.path", section.path), section.name, option))
