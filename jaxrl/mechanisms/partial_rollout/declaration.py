"""What active partial rollout goes with (APRIL §2)."""

from collections.abc import Sequence

from jaxrl.config import Config
from jaxrl.mechanisms.room import UNFINISHED, Room, Searched


def _problem(config: Config, racing: Sequence[str]) -> str | None:
    if config.reward.score_when == "rollout":
        return (
            "partial rollout scores a prompt's samples when all of them have ended, whatever comes later: "
            "reward.score_when must be 'sample' or 'group' (which mean the same there), found 'rollout'"
        )
    return None


ROOM = Room(
    "partial rollout",
    "rollout.partial_rollout",
    lambda config: config.rollout.partial_rollout.enable,
    decides=frozenset({UNFINISHED}),
    races=True,
    problem=_problem,
    searched=Searched(("over_provision",), (1.5, 2.0, 2.5, 3.0), warm_up=8),
)
