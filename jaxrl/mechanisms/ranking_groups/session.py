"""Ranking groups on the workers of a backend: the mechanism ranks rounds, prefetches the next one, and moves outliers.

Source: RhymeRL §6.3. Departures: an outlier goes to the worker with the longest ranking group that still decodes in
this round (of several the one with the fewest responses), so that it prolongs no round. Each response moves once at the
most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jaxrl.mechanisms.ranking_groups.next_round_prefetch import NextRoundPrefetches, WeightBuffer
from jaxrl.mechanisms.ranking_groups.outliers import Outliers
from jaxrl.mechanisms.ranking_groups.rule import RankedRound, RankingGroups
from jaxrl.record import metrics as numbers
from jaxrl.scheduling.mechanism import Mechanism, RoundEnd, RoundInfo, UnderWay
from jaxrl.scheduling.rounds.events import Command, Launch, NextRoundPrefetch
from jaxrl.scheduling.tokens.engine import Finished
from jaxrl.scheduling.tokens.local_workers import By
from jaxrl.types import Prompt, Sample, SampleKey


class RankingSession(Mechanism):
    """Moves outliers between workers, and measures ranked rounds.

    Args:
      buffer: the executors, which may have the next weights beside those in use.
      by: how outliers move.
    """

    name = "ranking"
    ahead: NextRoundPrefetches

    def __init__(self, ranking: RankingGroups, buffer: WeightBuffer, by: By) -> None:
        self._ranking, self._buffer = ranking, buffer
        self._by: By = by
        self._round: RankedRound | None = None
        self._outliers: Outliers | None = None
        self._is_training = False  # the round under way is one of training
        self._num_launched = self._num_carried = self._num_moved = 0
        self._began_s = self._looked_s = self._idle_s = 0.0

    def attach(self, under_way: UnderWay) -> None:
        self._requests, self._engines, self._clock = under_way.requests, under_way.workers, under_way.clock

        def start(prompt: Prompt, key: SampleKey, worker: int) -> int:
            return under_way.start(prompt, key, worker, None)

        self.ahead = NextRoundPrefetches(self._engines, self._buffer, under_way.weights, start, under_way.clock)

    # -- weights -----------------------------------------------------------------------------------------------------

    def enter_rollout(self, policy_version: int, *, was_released: bool) -> bool:
        if not self.ahead.is_on:
            return False
        self.ahead.enter(policy_version)
        return True

    @property
    def holds_rollout(self) -> bool:
        return self.ahead.is_on

    # -- a round -----------------------------------------------------------------------------------------------------

    def round_begins(self, info: RoundInfo) -> None:
        self._round = self._outliers = None
        self._num_launched = self._num_carried = self._num_moved = 0
        self._began_s = self._looked_s = self._clock()
        self._idle_s = 0.0
        self._is_training = info.is_training
        if info.is_training:
            self.ahead.expect(None if info.next_launches is None else partial(self._next_round, info))

    def _next_round(self, info: RoundInfo) -> NextRoundPrefetch | None:
        """What the next round launches, with the version of its weights; None while these are not there."""
        assert info.next_launches is not None
        launches = info.next_launches()
        if launches is None:
            return None
        return NextRoundPrefetch(info.step - 1, tuple(self._ranking.ahead(launches, info.step + 1)))

    def place(self, commands: Sequence[Command], step: int) -> list[Command]:
        return self._ranking.begin(commands, step)

    @property
    def has_begun(self) -> bool:
        return self.ahead.num_begun > 0

    def begun(self, key: SampleKey) -> int | Finished | None:
        return self.ahead.adopt(key)

    def launched(self, launch: Launch) -> None:
        self._num_launched += len(launch.keys)
        self._num_carried += len(launch.resumed)
        if self._ranking.now is not self._round:
            self._round, self._outliers = self._ranking.now, self._ranking.outliers()

    def keeps(self, finished: Finished) -> bool:
        return self.ahead.took(finished)

    def finished(self, samples: Sequence[Sample], *, is_stopping: bool) -> None:
        for sample in samples:
            self.aborted(sample.key)

    def aborted(self, key: SampleKey) -> None:
        if self._outliers is not None:
            self._outliers.ended(key)

    def after_plan(self, worker: int | None) -> None:
        """Outliers move in logical time alone: where a batch depends on which responses end first, a verdict that comes
        late changes nothing of it."""
        requests = self._requests
        if self._outliers is not None and self._round is not None:
            for key in self._outliers.take(lambda key: self._num_tokens(requests.get(key))):
                self._move(requests[key], self._outliers.rank(key), self._round.ranks)
        self.look()

    def while_waiting(self) -> None:
        self.look()

    def look(self) -> None:
        """Lets idle workers begin with the next round."""
        now_s = self._clock()
        idle = sum(engine.is_idle for engine in self._engines.engines)
        self._idle_s += idle * (now_s - self._looked_s)
        self._looked_s = now_s
        self.ahead.look()

    def cancelled(self) -> None:
        self.ahead.cancel()

    def round_ends(self, end: RoundEnd) -> dict[str, float]:
        if not self._is_training:
            return {}
        self._ranking.end()
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

    def step_ends(self, measured: Mapping[str, float]) -> None:
        update_s = numbers.seconds_of(numbers.UPDATE_PHASES, measured)
        self._ranking.learned(update_s, measured.get("rollout/spec/tokens_per_step", 1.0))

    def state_dict(self) -> dict[str, Any]:
        return self._ranking.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ranking.load_state_dict(state)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _num_tokens(self, request_id: int | None) -> int:
        """Of a response so far; 0 where it has ended, and its event has not reached the round."""
        worker = None if request_id is None else self._engines.worker_of(request_id)
        if request_id is None or worker is None:
            return 0
        return self._engines.engines[worker].batcher.progress(request_id).num_tokens

    def _move(self, request_id: int, rank: int, ranks: Mapping[int, int]) -> None:
        """Moves an outlier to a worker with a longer group, if one still decodes."""
        source = self._engines.worker_of(request_id)
        if source is None:  # it has ended in a plan that was collected in order to move another
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
