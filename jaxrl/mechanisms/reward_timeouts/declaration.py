"""What adaptive time limits go with: everything (RollPacker §4.3)."""

from jaxrl.mechanisms.reward_timeouts.rule import AdaptiveTimeouts
from jaxrl.mechanisms.room import Room

ROOM = Room(
    "adaptive time limits",
    "reward.code.adaptive",
    lambda config: AdaptiveTimeouts.configured(config) is not None,
)
