"""Overlong reward shaping: a response near the length limit loses reward, the more the nearer it comes.

Purpose: `OverlongPenalty` changes the verdicts of training rounds before the round hears of them. So the reward that is
logged, the one that dynamic sampling compares, and the one that advantages are made of are the same shaped one.
Evaluations are not shaped.

Source: DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 13): no penalty up to L_max - L_cache tokens, then linearly down to
-1 at L_max. Names and the factor are verl's (`reward_model.overlong_buffer`).

Departures: a response cannot be longer than L_max here (`data.max_response_length`), so the equation's third case is
the end of its second. A sample whose scoring failed keeps reward 0: it was not judged, and a group of such samples must
stay one of equal rewards, which dynamic sampling counts as failed.

What the scorer said is kept in the sample's `reward_info` as verl's manager does: `acc` (unless the scorer gives one),
`overlong_reward` (the penalty, 0 or below) and `overlong`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl.config.options import Config
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Sample


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """What a response loses for its length.

    Attributes:
      max_length: tokens of the longest response.
      buffer: the last so many of them, over which the penalty grows.
      factor: the penalty of the longest response.
    """

    max_length: int
    buffer: int
    factor: float

    @classmethod
    def configured(cls, config: Config) -> OverlongPenalty | None:
        """What `reward.overlong_buffer` asks for; None where it is off."""
        options = config.reward.overlong_buffer
        return cls(config.data.max_response_length, options.len, options.penalty_factor) if options.enable else None

    def reward(self, length: int) -> float:
        """What a response of so many tokens gets on top: 0 up to `max_length` - `buffer`, - `factor` at the end."""
        exceeding = length - (self.max_length - self.buffer)
        return min(-exceeding / self.buffer * self.factor, 0.0)

    def shaped(self, verdict: Verdict, length: int) -> Verdict:
        """The verdict on a response of so many tokens, as training takes it."""
        if verdict.status != "ok":
            return verdict
        extra = self.reward(length)
        info = {"acc": verdict.reward, **verdict.info, "overlong_reward": extra, "overlong": extra < 0}
        return replace(verdict, reward=verdict.reward + extra, info=info)

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Of a batch: the mean penalty (0 or above) and the share of samples that have one."""
        lost = np.array([-sample.reward_info.get("overlong_reward", 0.0) for sample in samples])
        return {
            "reward/overlong_penalty/mean": float(lost.mean()),
            "reward/overlong_penalty/share": float(np.mean(lost > 0)),
        }
