"""Ranking groups in a run: ranks the prompts of rounds, and moves responses between workers.

Source: RhymeRL §6. Departures (§6.3): an outlier moves to the worker with the longest ranking group that still decodes
in this round, so that it prolongs no round. Of several such workers it takes the one with the fewest responses. Each
response moves at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxrl.mechanisms.ranking_groups import RankingGroups
from jaxrl.mechanisms.ranking_groups.next_round_prefetch import NextRoundPrefetches
from jaxrl.mechanisms.ranking_groups.rule import Outliers, RankedRound, Ranking
from jaxrl.scheduling.layouts.plan_cost import cheaper_move, step_seconds
from jaxrl.scheduling.mechanism import RoundEnd, RoundInfo, RoundState
from jaxrl.scheduling.rounds.events import Command, Launch
from jaxrl.types import Prompt, Sample, SampleKey

if TYPE_CHECKING:
    from jaxrl.run.run import Run
    from jaxrl.scheduling.tokens.local_workers import By


class RankingSession(RankingGroups):
    """The ranking groups of a run. With a latency profile groups are ranked by predicted times, else they have equal
    shares of the workers."""

    def __init__(self, run: Run) -> None:
        assert run.history is not None, "ranks by lengths that nothing keeps"
        options, engines, predictor = run.config.rollout.ranking_groups, run.workers.engines, run.machine.predictor()
        step_s = None if predictor is None else step_seconds(predictor, engines[0])
        self._ranking = Ranking(options, len(engines), run.history, step_s, is_timed=run.is_timeless)
        self._buffer = run.executors
        self._by: By = _moves(run)
        self._round: RankedRound | None = None
        self._outliers: Outliers | None = None
        self._is_training = False  # the round under way is one of training
        self._num_launched = self._num_carried = self._num_moved = 0
        self._began_s = self._looked_s = self._idle_s = 0.0
        self._unplaced: int | None = None  # the step of a round whose launches have no workers yet
        self.step_watcher = self._learn

    def attach(self, state: RoundState) -> None:
        self._requests, self._engines, self._clock = state.requests, state.workers, state.clock

        def start(prompt: Prompt, key: SampleKey, worker: int) -> int:
            return state.start(prompt, key, worker, None)

        self.ahead = self.parking = NextRoundPrefetches(self._engines, self._buffer, state.weights, start, state.clock)

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
        self._round = self._outliers = None
        self._num_launched = self._num_carried = self._num_moved = 0
        self._began_s = self._looked_s = self._clock()
        self._idle_s = 0.0
        self._is_training = info.is_training
        self._unplaced = info.step if info.is_training else None
        if info.is_training:
            offer = None if info.next_launches is None else partial(self._next_launches, info.next_launches, info.step)
            self.ahead.expect(offer, info.step - 1)

    def _next_launches(self, launched: Callable[[], list[Launch] | None], step: int) -> list[Launch] | None:
        launches = launched()
        return None if launches is None else self._ranking.ahead(launches, step + 1)

    def on_commands(self, commands: Sequence[Command]) -> Sequence[Command]:
        if (step := self._unplaced) is not None:
            commands, self._unplaced = self._ranking.begin(commands, step), None
        launches = [command for command in commands if isinstance(command, Launch)]
        self._num_launched += sum(len(launch.keys) for launch in launches)
        self._num_carried += sum(len(launch.resumed) for launch in launches)
        if launches and self._ranking.now is not self._round:
            self._round, self._outliers = self._ranking.now, self._ranking.outliers()
        return commands

    def on_finished(self, samples: Sequence[Sample], *, is_stopping: bool) -> None:
        for sample in samples:
            self.on_aborted(sample.key, keep=False)

    def on_aborted(self, key: SampleKey, *, keep: bool) -> None:
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

    def look(self) -> None:
        """Lets idle workers begin with the next round."""
        now_s = self._clock()
        self._idle_s += sum(engine.is_idle for engine in self._engines.engines) * (now_s - self._looked_s)
        self._looked_s = now_s
        self.ahead.look()

    while_waiting = look

    def round_cancelled(self) -> None:
        self.ahead.cancel()

    def round_ends(self, end: RoundEnd) -> dict[str, float]:
        if not self._is_training:
            return {}
        self._ranking.end()
        workers_s = (self._clock() - self._began_s) * len(self._engines.engines)
        launched = max(self._num_launched, 1)
        return {
            **({"rollout/ranking/groups": 0.0} if self._round is None else self._round.metrics()),
            "rollout/ranking/moved_share": self._num_moved / launched,
            "rollout/ranking/carried_share": self._num_carried / launched,
            "rollout/ranking/idle_share": self._idle_s / workers_s if workers_s > 0 else 0.0,
            "rollout/ranking/head_start_s": self.ahead.end(),
        }

    def _learn(self, measured: Mapping[str, float]) -> None:
        from jaxrl.record import metrics as numbers

        update_s = numbers.seconds_of(numbers.UPDATE_PHASES, measured)
        self._ranking.learned(update_s, measured.get("rollout/spec/tokens_per_step", 1.0))

    def state_dict(self) -> dict[str, Any]:
        return self._ranking.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ranking.load_state_dict(state)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _num_tokens(self, request_id: int | None) -> int:
        """The tokens of a response so far; 0 if it has ended and its event has not reached the round."""
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


def _moves(run: Run) -> By:
    """How outliers move. A profile of one degree alone has no costs of moving KV."""
    move, predictor = run.config.rollout.ranking_groups.move, run.machine.predictor()
    if move != "auto":
        return "migrate" if move == "kv" else "recompute"
    if predictor is None or not predictor.profile.switches or run.config.hosts.num > 1:
        return "recompute"
    return partial(cheaper_move, predictor)
