"""What a judge on the devices of the rollout goes with (RollPacker §4.3)."""

from typing import Literal

from jaxrl.config import Config
from jaxrl.config.domains import domains
from jaxrl.config.rewards import RewardSection
from jaxrl.mechanisms.room import Room


def judge_kind(reward: RewardSection) -> Literal["judge", "model"] | None:
    """The kind of reward that a model on the run's devices gives; None: there is no such model."""
    if "model" in reward.kinds:
        return "model"
    return "judge" if "judge" in reward.kinds and reward.judge.model else None


def no_devices_problem(config: Config) -> str | None:
    """Why a reward needs the devices of a run, as a sentence; None if it needs none."""
    found = next((each for each in domains(config.reward).values() if each.place == "devices"), None)
    return found and (
        f"{found.option}.kind is {found.kind}, with a model on the devices, and score has none: name a server in "
        "reward.judge.endpoint, or use eval"
    )


ROOM = Room("a judge on the devices", "reward.judge.model", lambda config: judge_kind(config.reward) is not None)
"""A judge model on the devices of the rollout (RollPacker §4.3)."""
