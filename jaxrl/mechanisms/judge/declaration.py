"""What a judge on the devices of the rollout goes with (RollPacker §4.3)."""

from typing import Literal

from jaxrl.config.rewards import RewardSection
from jaxrl.mechanisms.room import Room


def judge_kind(reward: RewardSection) -> Literal["judge", "model"] | None:
    """The kind of reward that a model on the run's devices gives; None: there is no such model."""
    if "model" in reward.kinds:
        return "model"
    return "judge" if "judge" in reward.kinds and reward.judge.model else None


ROOM = Room(
    "a judge on the devices",
    "reward.judge.model",
    lambda config: judge_kind(config.reward) is not None,
    float_types=lambda config: [config.reward.judge.dtype],
)
