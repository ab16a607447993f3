"""Ranking groups on the workers of a backend: outliers move, and what the round was like is measured.

Purpose: `RankingSession` tells the books of a ranked round (`jaxrl.scheduling.rounds.outliers`) what has ended, and
moves the outliers that they name to a worker that runs for longer.

Source: RhymeRL §6.3. Departures: an outlier goes to the worker with the longest ranking group that still draws in this
round (of several the one with the fewest responses), so that it prolongs no round. Outliers of the longest group stay
where they are; see `jaxrl.scheduling.rounds.outliers` about the next step. Each response moves once at the most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from jaxrl.config import Config
from jaxrl.runtime.head_start import HeadStarts
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.pace import cheaper_move, step_seconds
from jaxrl.scheduling.rounds.composition import is_timeless
from jaxrl.scheduling.rounds.events import Launch
from jaxrl.scheduling.rounds.outliers import Outliers
from jaxrl.scheduling.rounds.ranking_groups import LengthHistory, RankedRound, RankingGroups
from jaxrl.scheduling.tokens.engine import Finished
from jaxrl.scheduling.tokens.workers import By, Workers
from jaxrl.types import SampleKey


def build_ranking(
    config: Config, history: LengthHistory, engines: Workers, predictor: LatencyPredictor | None
) -> tuple[RankingGroups, By]:
    """What ranks the rounds of a configuration, and how outliers move.

    Args:
      history: lengths of earlier responses.
      predictor: of a worker, over a profile that holds its degree; None: groups have equal shares of the workers.
    """
    options = config.rollout.ranking_groups
    step_s = None if predictor is None else step_seconds(predictor, engines.engines[0])
    num_workers, is_timed = len(engines.engines), is_timeless(config)
    ranking = RankingGroups(options, num_workers, history, step_s, is_timed=is_timed)
    if options.move != "auto":
        return ranking, "migrate" if options.move == "kv" else "recompute"
    if predictor is None or not predictor.profile.switches:  # one degree alone tells nothing of moving KV
        return ranking, "recompute"
    return ranking, partial(cheaper_move, predictor)


class RankingSession:
    """Looks after the ranked rounds of a backend.

    Args:
      ranking: ranks the rounds.
      engines: of the workers.
      ahead: what there is of the next round.
      by: how outliers move.
      clock: seconds from any origin.
    """

    def __init__(
        self,
        ranking: RankingGroups,
        engines: Workers,
        ahead: HeadStarts,
        by: By,
        clock: Callable[[], float],
    ) -> None:
        self.ahead = ahead
        self._ranking, self._engines = ranking, engines
        self._by: By = by
        self._clock = clock
        self._round: RankedRound | None = None
        self._books: Outliers | None = None
        self._num_launched = self._num_carried = self._num_moved = 0
        self._began_s = self._looked_s = self._idle_s = 0.0

    def begin(self) -> None:
        """A round begins; no worker has anything of it yet."""
        self._round = self._books = None
        self._num_launched = self._num_carried = self._num_moved = 0
        self._began_s = self._looked_s = self._clock()
        self._idle_s = 0.0

    def launched(self, command: Launch) -> None:
        self._num_launched += len(command.keys)
        self._num_carried += len(command.resumed)
        if self._ranking.now is not self._round:
            self._round, self._books = self._ranking.now, self._ranking.outliers()

    def ended(self, finished: Sequence[Finished]) -> list[Finished]:
        """Responses have ended; returns those of the round, the others are kept for the next."""
        own = [one for one in finished if not self.ahead.took(one)]
        for one in own:
            self.aborted(one.sample.key)
        return own

    def aborted(self, key: SampleKey) -> None:
        """A response of the round is gone."""
        if self._books is not None:
            self._books.ended(key)

    def after_plan(self, requests: Mapping[SampleKey, int]) -> None:
        """Moves outliers, and then looks; `requests`: those of this round. Outliers move in logical time alone: where a
        batch depends on which responses end first, a verdict that comes late changes nothing of it."""
        if self._books is not None and self._round is not None:
            for key in self._books.take(lambda key: self._num_tokens(requests.get(key))):
                self._move(requests[key], self._books.rank(key), self._round.ranks)
        self.look()

    def look(self) -> None:
        """Lets workers that are done go on with the next round."""
        now_s = self._clock()
        idle = sum(engine.is_idle for engine in self._engines.engines)
        self._idle_s += idle * (now_s - self._looked_s)
        self._looked_s = now_s
        self.ahead.look()

    def end(self) -> dict[str, float]:
        """The round is over; its metrics."""
        workers_s = (self._clock() - self._began_s) * len(self._engines.engines)
        launched = max(self._num_launched, 1)
        ranked = {"rollout/ranking/groups": 0.0} if self._round is None else self._round.metrics()
        return {
            **ranked,
            "rollout/ranking/moved_share": self._num_moved / launched,
            "rollout/ranking/carried_share": self._num_carried / launched,
            "rollout/ranking/idle_share": self._idle_s / workers_s if workers_s > 0 else 0.0,
            "rollout/ranking/head_start_s": self.ahead.end(),
        }

    def _num_tokens(self, request_id: int | None) -> int:
        """Of a response so far; 0 where it has ended, and the round has not been told."""
        worker = None if request_id is None else self._engines.worker_of(request_id)
        if request_id is None or worker is None:
            return 0
        return self._engines.engines[worker].batcher.progress(request_id).num_tokens

    def _move(self, request_id: int, rank: int, ranks: Mapping[int, int]) -> None:
        """Takes an outlier to a worker with a longer group, if one still draws."""
        source = self._engines.worker_of(request_id)
        if source is None:  # it has ended in a plan that was collected to move another
            return
        longer = [
            worker
            for worker, longest in ranks.items()
            if longest > rank and worker != source and self._engines.num_live(worker) and self.ahead.draws_now(worker)
        ]
        if longer:
            target = min(longer, key=lambda worker: (-ranks[worker], self._engines.num_live(worker), worker))
            self._engines.move([request_id], target, self._by)
            self._num_moved += self._engines.worker_of(request_id) == target
