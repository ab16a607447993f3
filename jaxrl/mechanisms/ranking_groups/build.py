"""Ranking groups of a real run, from their options."""

from jaxrl.mechanisms.parts import RunParts
from jaxrl.mechanisms.ranking_groups.ranked import ranking_session
from jaxrl.mechanisms.ranking_groups.session import RankingSession
from jaxrl.scheduling.layouts.latency import LatencyPredictor


def build(parts: RunParts) -> RankingSession | None:
    """What ranks rounds, with a latency profile by predicted times; None: nothing does."""
    config, predictor = parts.config, None
    if not config.rollout.ranking_groups.enable:
        return None
    if parts.profile is not None:
        predictor = LatencyPredictor(parts.profile, config.rollout.layout, parts.row_sizes)
    return ranking_session(config, parts.history, parts.engines, parts.workers, predictor, is_timed=parts.is_timeless)
