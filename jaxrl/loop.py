"""THE loop: collect -> score -> advantages -> pack -> gradients -> update -> sync weights -> save.

Purpose: one file for every run, real or simulated. It imports no jax: the backend (rollout and rewards), the trainer
and the store come in as protocols. What a round launches, which groups it yields, and what becomes of the others is the
batch rule's decision (`jaxrl.scheduling.rounds.batches`).

A step starts and ends at a *boundary*: there, the trainer's state and `Loop.host_state` hold everything that decides
the future, and a checkpoint holds both. A run that is stopped or killed inside a step starts that step again. A
boundary is saved once its step's line of metrics is written, so no checkpoint is ahead of the metrics: saving is the
first thing in the next step, and its seconds are that step's.

`policy_version` counts weight syncs: the rollout of step s (from 1) uses version s - 1.

**One-step-off** (`trainer.one_step_off`; RollPacker §6.7). The rollout for step s + 1 comes before update s, so its
tokens are of version s - 1 and one version old when they are trained on. Its groups wait in `Loop` and are part of a
checkpoint. Rollout and update take turns on the same devices, or run at the same time, each on its own devices
(`Together`). Neither reads what the other writes, so both ways give the same numbers. A resumed run may switch
one-step-off on or off.

**A head start** (`rollout.ranking_groups`; RhymeRL §6.2). When update s has ended and round s + 1 still runs beside it,
workers that are done may begin with round s + 2 (`jaxrl.runtime.head_start`), whose prompts are drawn then.

**Gradients beside the rollout** (`trainer.stream`; RollPacker §4.4). A `Stream` is offered groups that are certain to
be in the batch of the next update: those of the round under way, or with one-step-off those of the batch that waits,
because its update is the next one. What it has taken when the round is over is in the trainer's minibatch already. If
it fails, the trainer has not moved yet: the run ends at the boundary before the step.

**What a step's metrics count.** A batch and the round that made it: `rollout/*`, `reward/*` and the round's seconds,
`timing_s/{data,gen,reward}`, are in the line of the step that trains on them, whenever the round ran. So are the
update's, `timing_s/stream` (the end of gradients that began beside a rollout) among them. `timing_s/step` is the time
from one boundary to the next. With one-step-off three figures connect the two: `timing_s/earlier` (of this batch's
round, seconds that ran before this step), `timing_s/ahead` (seconds of the next step's round, in this step) and
`timing_s/overlap` (seconds in which rollout and update ran at once). A step is the sum of its phases and `ahead`, less
`earlier` and `overlap`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxrl.config import Config
from jaxrl.record import metrics as numbers
from jaxrl.record.alarms import Alarms
from jaxrl.scheduling.rounds.batches import BatchRule, RoundResult, RoundTime
from jaxrl.scheduling.rounds.carried import check_lengths, pack_groups, unpack_groups
from jaxrl.scheduling.rounds.events import Command, Event, HeadStart, Interrupted, Launch, RoundStarted, Verdict
from jaxrl.scheduling.rounds.ranking_groups import RankingGroups
from jaxrl.scheduling.rounds.round import Departures, Round
from jaxrl.scheduling.rounds.shaping import RewardShaping
from jaxrl.train.learning import Critic, Stream, Trainer, learn
from jaxrl.types import Group, Prompt, RunFailed, SamplingParams, TrainBatch

STATE_SCHEMA = 2
_STOP = "a stop was asked for"
Placed = Callable[[list[Command]], list[Command]]  # a round's first commands -> the same, with workers
A = TypeVar("A")
B = TypeVar("B")


class Backend(Protocol):
    """Rollout and rewards: `jaxrl.runtime.backend.RolloutBackend`.

    `wait` raises `Interrupted` where a stop was asked for, or where the run cannot go on; the loop then cancels the
    round. `expect`: what the round after the one that has begun launches is offered; with ranking groups alone."""

    @property
    def generating(self) -> bool: ...

    def enter_rollout(self, policy_version: int) -> None: ...

    def leave_rollout(self) -> None: ...

    def begin(self, step: int, params: SamplingParams, kind: str = "all", /) -> None: ...

    def expect(self, offer: Callable[[], HeadStart | None] | None, /) -> None: ...

    def wait(self) -> Event: ...

    def apply(self, command: Command) -> None: ...

    def cancel(self) -> None: ...

    def end(self, result: RoundResult | None = None, /) -> dict[str, float]: ...


class Kept(Protocol):
    """What outlives a round beside the loop, and is part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


class Prompts(Protocol):
    """`jaxrl.data.prompts.PromptSource`."""

    def next(self, num_prompts: int, /) -> list[Prompt]: ...

    def get(self, epoch: int, index: int, /) -> Prompt: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


class Together(Protocol):
    """Does two things at the same time, and returns or raises when both have ended. `has_ended`: whether the second has
    ended well; asked by the first."""

    def __call__(self, first: Callable[[], A], second: Callable[[], B], /) -> tuple[A, B]: ...

    @property
    def has_ended(self) -> bool: ...


class Phases(Protocol):
    """`jaxrl.record.timeline.Timeline`."""

    def phase(self, name: str, track: str = ..., **args: Any) -> AbstractContextManager[None]: ...

    def take_phases(self, *names: str) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Collected:
    """What a round has brought: the groups to train on, and its metrics, its seconds with them."""

    groups: list[Group]
    metrics: dict[str, float]

    @property
    def seconds(self) -> float:
        """How long the round took."""
        return numbers.seconds_of(numbers.ROUND_PHASES, self.metrics)


@dataclass(slots=True)
class Hooks:
    """What the loop calls: callbacks of the run that it belongs to.

    on_phase: a phase has begun. on_step: a step's metrics and groups. on_eval: an evaluation's metrics and groups.
    save: write a checkpoint of (step, host state). stop: whether to stop at the next opportunity. beat: an update has
    ended.
    """

    on_phase: Callable[[int, str], None]
    on_step: Callable[[int, dict[str, float], Sequence[Group]], None]
    on_eval: Callable[[int, dict[str, float], Sequence[Group]], None]
    save: Callable[[int, dict[str, Any]], None]
    stop: Callable[[], bool]
    beat: Callable[[], None] = lambda: None


class Loop:
    """One run from `step` to `total_steps`."""

    def __init__(
        self,
        config: Config,
        prompts: Prompts,
        validation: Sequence[Prompt],
        backend: Backend,
        trainer: Trainer,
        phases: Phases,
        hooks: Hooks,
        *,
        rule: BatchRule,
        stop_token_ids: tuple[int, ...],
        total_steps: int,
        num_devices: int,
        together: Together | None = None,
        stream: Stream | None = None,
        critic: Critic | None = None,
        ranking: RankingGroups | None = None,
        kept: Mapping[str, Kept] | None = None,
    ) -> None:
        """`together`: runs the next step's rollout beside an update; needs devices of its own, and no `stream`.
        `critic`: of an estimator that has one. `ranking`: ranks training rounds; needs `together`. `kept`: by the names
        of their parts of a checkpoint."""
        self.config = config
        self.step = 0
        self.total_steps = total_steps
        self.departures = Departures()
        self.rule = rule
        self._prompts = prompts
        self._validation = validation
        self._backend = backend
        self._trainer = trainer
        self._phases = phases
        self._hooks = hooks
        self._stop_token_ids = stop_token_ids
        self._num_devices = num_devices
        self._together = together
        self._stream = stream
        self._critic = critic
        self._ranking = ranking
        self._kept = kept or {}
        self._shaping = RewardShaping.configured(config)
        self._alarms = Alarms(config)
        self._saved_step: int | None = None
        self._running_step = 0
        self._failing: str | None = None  # why the run has to end at the next boundary
        self._ahead: Collected | None = None  # for the next step

    @property
    def num_carried(self) -> int:
        """Prompts drawn from the data and still in the system: a run that ended now would leave them behind."""
        return self.rule.num_carried + (0 if self._ahead is None else len(self._ahead.groups))

    # -- state ---------------------------------------------------------------------------------------------------------

    def host_state(self) -> dict[str, Any]:
        """Everything outside the trainer that decides the future, at a step boundary. JSON values and arrays."""
        return {
            "schema": STATE_SCHEMA,
            "step": self.step,
            "seed": self.config.trainer.seed,
            "data": self._prompts.state(),
            "departures": self.departures.state_dict(),
            "rule": {
                "name": self.rule.name,
                "num_carried": self.rule.num_carried,
                "state": self.rule.state_dict(),
            },
            "ahead": None
            if self._ahead is None
            else pack_groups(self._ahead.groups) | {"metrics": dict(self._ahead.metrics)},
            **{name: each.state_dict() for name, each in self._kept.items()},
        }

    def load_host_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved boundary.

        Raises ValueError for another schema, if prompts wait in the state of a rule that this run does not use, or if
        samples wait that are too long for this run.
        """
        if state["schema"] != STATE_SCHEMA:
            raise ValueError(f"checkpoint: state of schema {state['schema']}; this version reads schema {STATE_SCHEMA}")
        self.step = self._saved_step = int(state["step"])
        self._prompts.load_state(state["data"])
        self.departures.load_state_dict(state["departures"])
        for name, each in self._kept.items():
            each.load_state_dict(state.get(name, {}))
        saved, ahead = state["rule"], state["ahead"]
        if saved["name"] == self.rule.name:
            self.rule.load_state_dict(saved["state"])
        elif saved["num_carried"]:
            raise ValueError(
                f"checkpoint: {saved['num_carried']} prompts wait in the state of {saved['name']}, and this run uses "
                f"{self.rule.name}: they would be lost. Go on with {saved['name']}, or start a new run from the "
                "parameters alone (trainer.init_from)"
            )
        if ahead is not None:
            groups = unpack_groups(ahead, self._prompts)
            samples = [sample for group in groups for sample in group.samples]
            check_lengths("in the batch that waits", samples, self.config.data.max_response_length)
            self._ahead = Collected(groups, dict(ahead["metrics"]))

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Trains to the last step; returns False if a stop was asked for and it ended before.

        Raises:
          RunFailed: the run cannot go on. What a checkpoint may hold has been saved.
        """
        self._backend.enter_rollout(self.step)
        if self.config.trainer.val_before_train and self.step == 0 and self._validation:
            self._evaluate()
            self._phases.take_phases()  # its time belongs to no step
            self._end_if_failing()
        while self.step < self.total_steps and not self._hooks.stop():
            boundary = self.host_state()
            try:
                self._run_step()
            except Interrupted as early:
                # the trainer has not moved since the boundary: the step will run again as if it had never begun
                if self._stream is not None:
                    self._stream.abandon()
                if self._saved_step != boundary["step"]:
                    self._hooks.save(boundary["step"], boundary)
                if str(early):
                    raise RunFailed(f"{early}; saved after step {boundary['step']}") from early
                return False
            self._end_if_failing()
        self._save()
        if self._ranking is not None:
            self._backend.cancel()  # where a stop was asked for, the next round may have begun
        return self.step >= self.total_steps

    def _end_if_failing(self) -> None:
        if self._failing is not None:
            self._save()
            raise RunFailed(f"{self._failing}; saved after step {self.step}")

    def _run_step(self) -> None:
        step = self._running_step = self.step + 1
        trainer = self.config.trainer
        with self._phases.phase("step", step=step):
            if self.step and trainer.save_freq and self.step % trainer.save_freq == 0:
                self._save()
            earlier = self._ahead
            now = self._collect(step, () if trainer.one_step_off else None) if earlier is None else earlier
            batch, learned = self._roll_out_and_learn(now, step)
            for group in now.groups:
                self.departures.leave(group.prompt.key, "trained")
            self.step = step
            with self._phase("sync"):
                self._backend.enter_rollout(step)
            if self._evaluates(step):
                self._evaluate()
        seconds = {"timing_s/save": 0.0} | self._phases.take_phases()
        measured = now.metrics | numbers.off_policy_metrics(now.groups, step) | learned | seconds
        rounds = (None if each is None else each.seconds for each in (earlier, self._ahead))
        measured |= numbers.seconds_of_other_steps(measured, *rounds)
        measured |= numbers.throughput(batch, measured, self._num_devices)
        if self._ranking is not None:
            update_s = numbers.seconds_of(numbers.UPDATE_PHASES, measured)
            self._ranking.learned(update_s, measured.get("rollout/spec/tokens_per_step", 1.0))
        self._hooks.on_step(step, measured, now.groups)

    def _roll_out_and_learn(self, now: Collected, step: int) -> tuple[TrainBatch, dict[str, float]]:
        """Runs update `step` on `now`; with one-step-off, the next step's rollout before it or beside it."""
        ahead = self.config.trainer.one_step_off and step < self.total_steps
        if self._together is None or not ahead:
            self._ahead = self._collect(step + 1, now.groups) if ahead else None
            self._backend.leave_rollout()
            return self._learn_from(now.groups, step)
        try:
            with self._phases.phase("together"):
                self._ahead, result = self._together(
                    lambda: self._collect(step + 1), lambda: self._learn_from(now.groups, step, "update")
                )
        except Interrupted as early:
            raise RunFailed(
                f"step {step + 1}: its rollout ended early ({str(early) or _STOP}), beside update {step}, which cannot "
                "be taken back: run again to go on from the last checkpoint"
            ) from early
        self._backend.leave_rollout()  # as when both take turns: no old weights and no KV lie there
        return result

    def _collect(self, step: int, waiting: Sequence[Group] | None = None) -> Collected:
        """One round for training step `step`: the rule's groups, scored. `waiting`: the next update's, if others."""
        rollout = self.config.rollout
        params = self._sampling(rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p)
        with self._phase("data"):
            current = self.rule.plan(self._prompts, RoundTime(step, self.step, self.total_steps - step + 1))
        if self._stream is not None:
            self._stream.expect(None if waiting is not None and not waiting else self.step + 1)
        certain = current.certain if waiting is None else lambda: waiting
        self._backend.begin(step, params, current.kind)
        placed = None
        if self._ranking is not None:
            placed = partial(self._ranking.begin, step=step)
            beside = waiting is None and step < self.total_steps and not self._evaluates(step - 1)
            self._backend.expect(partial(self._next_round, step + 1) if beside else None)
        try:
            while not current.done:
                generating = self._backend.generating
                with self._phase("gen" if generating else "reward"):
                    while not current.done and self._backend.generating == generating:
                        self._handle(current, self._shaping, placed)
                        if self._stream is not None:
                            self._stream.offer(certain, self.step + 1)
        except Interrupted:
            self._backend.cancel()
            raise
        seconds = dict.fromkeys((f"timing_s/{name}" for name in numbers.ROUND_PHASES), 0.0)
        seconds |= self._phases.take_phases(*numbers.ROUND_PHASES)
        result = self.rule.settle(current)
        for prompt_key, outcome in result.left.items():
            self.departures.leave(prompt_key, outcome)
        measured = numbers.batch_metrics(result.groups, self.config.data.max_response_length)
        if self._shaping is not None:
            measured |= self._shaping.metrics([sample for group in result.groups for sample in group.samples])
        measured |= result.metrics | self._backend.end(result)
        measured |= numbers.hidden_scoring(measured, seconds)
        if self._ranking is not None:
            self._ranking.end()
        return Collected(result.groups, measured | seconds)

    def _next_round(self, step: int) -> HeadStart | None:
        """All that the round for training step `step` launches, once update `step` - 2 has ended; asked beside it, in
        the round before."""
        if self._together is None or self._ranking is None or not self._together.has_ended:
            return None
        time = RoundTime(step, step - 2, self.total_steps - step + 1)
        launches = [Launch(each.prompt, each.keys) for each in self.rule.ahead(self._prompts, time)]
        return HeadStart(step - 2, tuple(self._ranking.ahead(launches, step)))

    def _handle(
        self,
        current: Round,
        shaping: RewardShaping | None = None,
        placed: Placed | None = None,
        *,
        evaluates: bool = False,
    ) -> None:
        event = self._backend.wait()
        if isinstance(event, Verdict):
            failing = self._alarms.rewarded(event.status, str(event.info.get("error", "")))
            if failing is not None:
                raise Interrupted(f"step {self._running_step}: {failing}")
            if evaluates:
                event = event.unshaped
            if shaping is not None:
                event = shaping.shaped(event, len(current.ledger.finished[event.key]))
        commands = current.handle(event)
        for command in placed(commands) if placed is not None and isinstance(event, RoundStarted) else commands:
            self._backend.apply(command)

    def _learn_from(self, groups: list[Group], step: int, track: str = "loop") -> tuple[TrainBatch, dict[str, float]]:
        """Log-probabilities, advantages, gradients, updates; drawn on `track`."""
        phase = partial(self._phase, track=track)
        models = self._trainer, self._critic
        learnt = learn(self.config, *models, self._stream, groups, step, phase, self._hooks.beat)
        batch, measured = learnt.batch, learnt.metrics()
        self._failing = self._alarms.updated(step, learnt.skipped(), measured, batch)
        return batch, measured | numbers.spread("critic/advantages", np.concatenate(batch.advantages))

    # -- evaluation, saving, numbers ---------------------------------------------------------------------------------

    def _evaluates(self, step: int) -> bool:
        """Whether step `step` ends with an evaluation."""
        every = self.config.trainer.test_freq
        return bool(self._validation) and every > 0 and (step % every == 0 or step == self.total_steps)

    def _evaluate(self) -> None:
        """Samples the held-out prompts. A stop that is asked for meanwhile ends it without numbers."""
        val = self.config.rollout.val_kwargs
        params = self._sampling(val.temperature, val.top_k, val.top_p, 0.0)
        with self._phase("testing"):
            current = Round(self._validation, val.n)
            self._backend.begin(self.step, params, "eval")
            try:
                while not current.done:
                    self._handle(current, evaluates=True)
            except Interrupted as early:
                self._backend.cancel()
                self._failing = self._failing or str(early) or None
                return  # the step's update stands; only these numbers are missing
            self._backend.end()
            groups = current.groups()
            measured = numbers.evaluation_metrics(groups, self.config.data.max_response_length)
            self._hooks.on_eval(self.step, measured, groups)

    def _save(self) -> None:
        if self._saved_step != self.step:
            with self._phase("save"):
                self._hooks.save(self.step, self.host_state())
            self._saved_step = self.step

    def _sampling(self, temperature: float, top_k: int, top_p: float, min_p: float) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            top_k=max(top_k, 0),
            top_p=top_p,
            min_p=min_p,
            max_tokens=self.config.data.max_response_length,
            stop_token_ids=self._stop_token_ids,
            stop_strings=tuple(self.config.rollout.stop),
        )

    def _phase(self, name: str, track: str = "loop") -> AbstractContextManager[None]:
        """A phase drawn on `track`; `on_phase` is called for the loop's own phases, not for those beside them."""
        if track == "loop":
            self._hooks.on_phase(self._running_step, name)
        return self._phases.phase(name, track)
