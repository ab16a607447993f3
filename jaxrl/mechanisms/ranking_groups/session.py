"""Ranking groups on the workers of a backend: outliers move, and what the round was like is measured.

Purpose: `RankingSession` is the mechanism. It has rounds ranked (`jaxrl.mechanisms.ranking_groups.rule`) and the next
one begun ahead (`jaxrl.mechanisms.ranking_groups.next_round_prefetch`), tells the books of a ranked round
(`jaxrl.mechanisms.ranking_groups.outliers`) what has ended, and moves the outliers that they name to a worker that runs
for longer.

Source: RhymeRL §6.3. Departures: an outlier goes to the worker with the longest ranking group that still draws in this
round (of several the one with the fewest responses), so that it prolongs no round. Outliers of the longest group stay
where they are; see `jaxrl.mechanisms.ranking_groups.outliers` about the next step. Each response moves once at the
most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jaxrl.mechanisms.ranking_groups.next_round_prefetch import NextRoundPrefetches, WeightBuffer
from jaxrl.mechanisms.ranking_groups.outliers import Outliers
from jaxrl.mechanisms.ranking_groups.rule import RankedRound, RankingGroups
from jaxrl.scheduling.mechanism import Mechanism, RoundEnd, RoundInfo, RoundState
from jaxrl.scheduling.rounds.events import Command, Launch, NextRoundPrefetch
from jaxrl.scheduling.tokens.local_workers import By
from jaxrl.types import Prompt, Sample, SampleKey


class RankingSession(Mechanism):
    """Looks after the ranked rounds of a backend.

    Args:
      ranking: ranks the rounds.
      buffer: the executors, which may have the next weights beside those in use.
      by: how outliers move.

    Attributes:
      ahead: what there is of the next round.
    """

    name = "ranking"
    ahead: NextRoundPrefetches

    def __init__(self, ranking: RankingGroups, buffer: WeightBuffer, by: By) -> None:
        self._ranking, self._buffer = ranking, buffer
        self._by: By = by
        self._round: RankedRound | None = None
        self._books: Outliers | None = None
        self._is_training = False  # the round under way is one of training
        self._num_launched = self._num_carried = self._num_moved = 0
        self._began_s = self._looked_s = self._idle_s = 0.0
        self._unplaced: int | None = None  # the step of a round whose launches have no workers yet

    def attach(self, state: RoundState) -> None:
        self._requests, self._engines, self._clock = state.requests, state.workers, state.clock

        def start(prompt: Prompt, key: SampleKey, worker: int) -> int:
            return state.start(prompt, key, worker, None)

        parts = self._engines, self._buffer, state.weights, start, state.clock
        self.ahead = self.parking = NextRoundPrefetches(*parts)

    # -- weights -----------------------------------------------------------------------------------------------------

    def enter_rollout(self, policy_version: int, *, was_released: bool) -> bool:
        if not self.ahead.is_on:
            return False
        self.ahead.enter(policy_version)
        return True

    def leave_rollout(self) -> bool:
        return self.ahead.is_on

    # -- a round -----------------------------------------------------------------------------------------------------

    def round_begins(self, info: RoundInfo) -> None:
        """A round begins; no worker has anything of it but what was begun ahead."""
        self._round = self._books = None
        self._num_launched = self._num_carried = self._num_moved = 0
        self._began_s = self._looked_s = self._clock()
        self._idle_s = 0.0
        self._is_training = info.is_training
        self._unplaced = info.step if info.is_training else None
        if info.is_training:
            self.ahead.expect(None if info.next_launches is None else partial(self._next_round, info))

    def _next_round(self, info: RoundInfo) -> NextRoundPrefetch | None:
        """What the next round launches, with the version of its weights; None while these are not there."""
        assert info.next_launches is not None
        launches = info.next_launches()
        if launches is None:
            return None
        return NextRoundPrefetch(info.step - 1, tuple(self._ranking.ahead(launches, info.step + 1)))

    def on_commands(self, commands: Sequence[Command]) -> Sequence[Command]:
        if (step := self._unplaced) is not None:
            commands, self._unplaced = self._ranking.begin(commands, step), None
        for command in commands:
            if isinstance(command, Launch):
                self._launched(command)
        return commands

    def _launched(self, launch: Launch) -> None:
        self._num_launched += len(launch.keys)
        self._num_carried += len(launch.resumed)
        if self._ranking.now is not self._round:
            self._round, self._books = self._ranking.now, self._ranking.outliers()

    def on_finished(self, samples: Sequence[Sample], *, is_stopping: bool) -> None:
        for sample in samples:
            self.on_aborted(sample.key, keep=False)

    def on_aborted(self, key: SampleKey, *, keep: bool) -> None:
        """A response of the round is gone."""
        if self._books is not None:
            self._books.ended(key)

    def after_plan(self, worker: int | None) -> None:
        """Moves outliers, and then looks. Outliers move in logical time alone: where a batch depends on which responses
        end first, a verdict that comes late changes nothing of it."""
        requests = self._requests
        if self._books is not None and self._round is not None:
            for key in self._books.take(lambda key: self._num_tokens(requests.get(key))):
                self._move(requests[key], self._books.rank(key), self._round.ranks)
        self.look()

    def while_waiting(self) -> None:
        self.look()

    def look(self) -> None:
        """Lets workers that are done go on with the next round."""
        now_s = self._clock()
        idle = sum(engine.is_idle for engine in self._engines.engines)
        self._idle_s += idle * (now_s - self._looked_s)
        self._looked_s = now_s
        self.ahead.look()

    def round_cancelled(self) -> None:
        self.ahead.cancel()

    def round_ends(self, end: RoundEnd) -> dict[str, float]:
        """The round is over; its metrics."""
        if not self._is_training:
            return {}
        measured = self._measured()
        self._ranking.end()
        return measured

    def step_ends(self, measured: Mapping[str, float]) -> None:
        from jaxrl.record import metrics as numbers

        update_s = numbers.seconds_of(numbers.UPDATE_PHASES, measured)
        self._ranking.learned(update_s, measured.get("rollout/spec/tokens_per_step", 1.0))

    def state_dict(self) -> dict[str, Any]:
        return self._ranking.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ranking.load_state_dict(state)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _measured(self) -> dict[str, float]:
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
