"""The memory of rounds that begin before the one under way has ended."""

from jaxrl.config import Config
from jaxrl.mechanisms.room import PlannedRollout, RolloutMemory


def rollout_memory(config: Config, planned: PlannedRollout) -> RolloutMemory | None:
    """Weights of two versions exist where workers that are done with a round may begin with the next one."""
    if not config.rollout.ranking_groups.enable or not planned.is_timeless:
        return None
    return RolloutMemory("the next round's weights", {"rollout weights of the next round": planned.weight_bytes})
