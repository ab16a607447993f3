"""The memory of rounds that begin before the one under way has ended."""

from jaxrl.config import Config
from jaxrl.mechanisms.room import RolloutMemory


def rollout_memory(config: Config, weight_bytes: int, *, is_timed: bool) -> RolloutMemory | None:
    """Weights of two versions exist where workers that are done with a round may begin with the next one.

    Args:
      is_timed: whether a clock may decide that (`ranking_session`).
    """
    if not config.rollout.ranking_groups.enable or not is_timed:
        return None
    return RolloutMemory("the next round's weights", {"rollout weights of the next round": weight_bytes})
