"""Ranking groups of a simulated run."""

from jaxrl.mechanisms.ranking_groups.ranked import ranking_session
from jaxrl.mechanisms.ranking_groups.session import RankingSession
from jaxrl.mechanisms.simulated_parts import SimulatedParts
from jaxrl.sim.configured import worker_predictor


def build(parts: SimulatedParts) -> RankingSession | None:
    """What ranks rounds, by the cost model's times; None: nothing does."""
    config = parts.config
    if not config.rollout.ranking_groups.enable:
        return None
    predictor = worker_predictor(config, parts.cost, [parts.tp])
    given = config, parts.history, parts.workers, parts.executors, predictor
    return ranking_session(*given, is_timed=parts.is_timeless)
