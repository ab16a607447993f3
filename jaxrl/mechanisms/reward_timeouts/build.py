"""Adaptive time limits from their options."""

from jaxrl.config import Config
from jaxrl.mechanisms.reward_timeouts.rule import AdaptiveTimeouts
from jaxrl.mechanisms.reward_timeouts.session import TimeoutSession


def build(config: Config) -> TimeoutSession | None:
    """The mechanism, of a real or a simulated run; None: limits are fixed."""
    timeouts = AdaptiveTimeouts.configured(config)
    return None if timeouts is None else TimeoutSession(timeouts)
