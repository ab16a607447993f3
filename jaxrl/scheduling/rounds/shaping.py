"""Reward shaping: a wrong answer loses reward, and so does a response near the length limit.

`RewardShaping` changes the verdicts of training rounds before the round receives them. So logs, filters and advantages
use the same shaped reward. Evaluations are not shaped.

Source: DAPO (Yu et al. 2025, arXiv:2503.14476): rewards of 1 and -1 (eq. 7), and for length (eq. 13) no penalty up to
L_max - L_cache tokens, then linearly down to -1 at L_max. Names and the factor are verl's
(`reward_model.overlong_buffer`). Departures: a response cannot be longer than L_max here (`data.max_response_length`),
so the equation's third case is the end of its second. A sample whose scoring failed has the reward of a wrong answer,
at any length: a group of such samples must stay one of equal rewards, which a filter counts as failed.

`reward_info` keeps the scorer's output as verl's manager does: `acc` (unless the scorer gives one), `overlong_reward`
(the penalty, 0 or below), `overlong`, and `wrong_reward` (what a wrong answer has lost).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Sample

if TYPE_CHECKING:
    from jaxrl.config import Config


@dataclass(frozen=True, slots=True)
class RewardShaping:
    """What a response loses for being wrong (the reward `wrong`), and for its length: over the last `buffer` of
    `max_length` tokens the penalty grows to `factor`. `buffer` 0: no penalty."""

    max_length: int
    buffer: int
    factor: float
    wrong: float = 0.0

    @classmethod
    def configured(cls, config: Config) -> RewardShaping | None:
        options, wrong = config.reward.overlong_buffer, config.reward.wrong_reward
        if not options.enable and not wrong:
            return None
        return cls(config.data.max_response_length, options.len * options.enable, options.penalty_factor, wrong)

    def reward(self, length: int) -> float:
        """The penalty for a length: 0 up to `max_length` - `buffer`, - `factor` at the end."""
        exceeding = length - (self.max_length - self.buffer)
        return min(-exceeding / self.buffer * self.factor, 0.0) if self.buffer else 0.0

    def shaped(self, verdict: Verdict, length: int) -> Verdict:
        """The verdict on a response of this length, as training uses it."""
        info, extra = dict(verdict.info), 0.0
        if verdict.status == "ok":
            info.setdefault("acc", verdict.reward)
        if self.buffer and verdict.status == "ok":
            extra = self.reward(length)
            info |= {"overlong_reward": extra, "overlong": extra < 0}
        if self.wrong:
            info["wrong_reward"] = self.wrong * (1 - verdict.unshaped.reward)
            extra += info["wrong_reward"]
        return replace(verdict, reward=verdict.reward + extra, info=info)

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        if not self.buffer:
            return {}
        lost = np.array([-sample.reward_info.get("overlong_reward", 0.0) for sample in samples])
        return {
            "reward/overlong_penalty/mean": float(lost.mean()),
            "reward/overlong_penalty/share": float(np.mean(lost > 0)),
        }
