"""What dynamic sampling goes with (DAPO §3.2; RollPacker §7)."""

from collections.abc import Sequence

from jaxrl.config import Config
from jaxrl.mechanisms.room import Room


def _problem(config: Config, racing: Sequence[str]) -> str | None:
    options = config.algorithm.filter_groups
    if options.metric == "seq_final_reward":
        return (
            "algorithm.filter_groups.metric must not be seq_final_reward: the KL in it is not known when groups are "
            "filtered; use reward, or a name in what the scorer returns"
        )
    if config.rollout.n < 2 and not options.path:
        return (
            f"dynamic sampling needs rollout.n >= 2, found {config.rollout.n}: the rewards of a group of one are all "
            "equal, so every prompt would be left out"
        )
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
