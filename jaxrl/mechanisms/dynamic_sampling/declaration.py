"""What dynamic sampling goes with (DAPO §3.2; RollPacker §7)."""

from collections.abc import Sequence

from jaxrl.config import Config
from jaxrl.mechanisms.room import Room


def _problem(config: Config, racing: Sequence[str]) -> str | None:
    if racing and config.reward.score_when == "rollout":
        return (
            f"dynamic sampling with {racing[0]} needs rewards during the rollout, which say when it ends: "
            "reward.score_when must be 'sample' or 'group', found 'rollout'"
        )
    return None


ROOM = Room(
    "dynamic sampling",
    "algorithm.filter_groups.enable",
    lambda config: config.algorithm.filter_groups.enable,
    orders=True,
    problem=_problem,
)
