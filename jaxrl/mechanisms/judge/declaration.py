"""What a judge on the devices of the rollout goes with (RollPacker §4.3)."""

from jaxrl.config.judges import judge_kind
from jaxrl.mechanisms.room import Room

ROOM = Room(
    "a judge on the devices",
    "reward.judge.model",
    lambda config: judge_kind(config.reward) is not None,
    float_types=lambda config: [config.reward.judge.dtype],
)
