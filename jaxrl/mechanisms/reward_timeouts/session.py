"""Adaptive time limits in a run: training prompts are scored with them, and their verdicts are learnt from.

Source: RollPacker §4.3; the rule is `jaxrl.mechanisms.reward_timeouts.rule`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.mechanisms.reward_timeouts.rule import AdaptiveTimeouts
from jaxrl.scheduling.mechanism import Mechanism, RoundEnd, RoundInfo
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.types import Prompt


class TimeoutSession(Mechanism):
    """Limits the test cases of training prompts.

    Args:
      timeouts: the rule, with what it has learnt.
    """

    name = "timeouts"

    def __init__(self, timeouts: AdaptiveTimeouts) -> None:
        self.timeouts = timeouts
        self._is_training = False

    def round_begins(self, info: RoundInfo) -> None:
        self._is_training = info.is_training

    def limits(self, prompt: Prompt) -> tuple[float, ...]:
        return self.timeouts.limits(prompt)

    def is_close(self, prompt: Prompt, verdict: Verdict) -> bool:
        return self.timeouts.is_close(prompt, verdict.info)

    def scored(self, prompt: Prompt, limits_s: tuple[float, ...], verdict: Verdict) -> None:
        self.timeouts.learn(prompt, limits_s, verdict.info)

    def round_ends(self, end: RoundEnd) -> dict[str, float]:
        return self.timeouts.take_metrics() if self._is_training else {}

    def state_dict(self) -> dict[str, Any]:
        return self.timeouts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.timeouts.load_state_dict(state)
