"""Ranking groups over the workers of a real or a simulated run, from their options."""

from __future__ import annotations

from functools import partial

from jaxrl.config import Config
from jaxrl.mechanisms.ranking_groups.next_round_prefetch import WeightBuffer
from jaxrl.mechanisms.ranking_groups.rule import LengthHistory, RankingGroups
from jaxrl.mechanisms.ranking_groups.session import RankingSession
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.plan_cost import cheaper_move, step_seconds
from jaxrl.scheduling.tokens.local_workers import By, LocalWorkers


def ranking_session(
    config: Config,
    history: LengthHistory | None,
    engines: LocalWorkers,
    buffer: WeightBuffer,
    predictor: LatencyPredictor | None,
    *,
    is_timed: bool,
) -> RankingSession:
    """What ranks rounds.

    Args:
      history: lengths of earlier responses.
      buffer: the executors.
      predictor: of a worker, over a profile that holds its degree; None: groups have equal shares of the workers.
      is_timed: as in `RankingGroups`.
    """
    assert history is not None, "ranks by lengths that nothing keeps"
    assert isinstance(engines, LocalWorkers), "ranking groups let what is commanded take effect at once"
    options = config.rollout.ranking_groups
    step_s = None if predictor is None else step_seconds(predictor, engines.engines[0])
    ranking = RankingGroups(options, len(engines.engines), history, step_s, is_timed=is_timed)
    by: By = "recompute"
    if options.move != "auto":
        by = "migrate" if options.move == "kv" else "recompute"
    elif (
        predictor is not None and predictor.profile.switches and config.hosts.num == 1
    ):  # one degree alone tells nothing of moving KV
        by = partial(cheaper_move, predictor)
    return RankingSession(ranking, buffer, by)
