"""THE loop: collect and score -> log-probabilities -> advantages -> update -> sync weights -> save.

One file for every run, real or simulated; `jaxrl.run.run.Run` has what it is made of. It imports no jax. What a
round launches, which groups it yields, and what becomes of the others is the batch rule's decision
(`jaxrl.scheduling.rounds.batches`).

A step starts and ends at a *boundary*: there, the trainer's state and `Loop.host_state` hold everything that decides
the future, and a checkpoint holds both. A run that is stopped or killed inside a step starts that step again. A
boundary is saved once its step's line of metrics is written, so no checkpoint is ahead of the metrics: saving is the
first thing in the next step, and its seconds are that step's.

`policy_version` counts weight syncs: the rollout of step s (from 1) uses version s - 1.

A mechanism may order a step's update and the next step's round in its own way (`PhaseOrder`); the batch of a round
that came before its step waits in `Loop`, and is part of a checkpoint.

**Metrics of a step.** A round's `rollout/*`, `reward/*` and seconds (`timing_s/{data,gen,reward}`) are in the line of
the step that trains on its batch, whenever the round ran. `timing_s/step` is the time from one boundary to the next.
Where rounds come before their steps, three figures connect the two: `timing_s/earlier` (seconds of this batch's round
before this step), `timing_s/ahead` (seconds of the next step's round in this step) and `timing_s/overlap` (seconds in
which rollout and update ran at once). A step is the sum of its phases and `ahead`, less `earlier` and `overlap`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.record import metrics as numbers
from jaxrl.record.alarms import Alarms
from jaxrl.scheduling.mechanism import PhaseOrder, RoundInfo
from jaxrl.scheduling.rounds.batches import RoundResult, RoundTime
from jaxrl.scheduling.rounds.carried import check_lengths, pack_groups, unpack_groups
from jaxrl.scheduling.rounds.events import Interrupted, Launch, Verdict
from jaxrl.scheduling.rounds.round import Departures, Round
from jaxrl.scheduling.rounds.shaping import RewardShaping
from jaxrl.training.save_schedule import SaveSchedule
from jaxrl.training.training_step import training_step
from jaxrl.types import Group, RunFailed, TrainBatch, check_schema

if TYPE_CHECKING:
    from jaxrl.run.backend import RolloutBackend
    from jaxrl.run.run import Run

STATE_SCHEMA = 5
_OWN_STATE = ("schema", "step", "seed", "data", "departures", "rule", "ahead")  # names in a checkpoint


@dataclass(frozen=True, slots=True)
class Collected:
    """The groups to train on of a round, and its metrics, its seconds among them."""

    groups: list[Group]
    metrics: dict[str, float]

    @property
    def seconds(self) -> float:
        return numbers.seconds_of(numbers.ROUND_PHASES, self.metrics)


class Loop:
    """Runs steps from `step` to `run.total_steps` over a backend."""

    def __init__(self, run: Run, backend: RolloutBackend) -> None:
        assert run.rule is not None, "an evaluation alone has no loop"
        assert run.models is not None
        assert run.prompts is not None
        assert run.timeline is not None
        self.config = config = run.config
        self.step = 0
        self.total_steps = run.total_steps
        self.departures = Departures()
        self.rule = run.rule
        self._run = run
        self._prompts = run.prompts
        self.backend = backend
        self._phases = run.timeline
        self._models = run.models
        self._mechanisms = run.mechanisms
        names = [each.name for each in run.mechanisms if each.name]
        assert len({*names, *_OWN_STATE}) == len(names) + len(_OWN_STATE), f"parts of a checkpoint: {names}"
        self._order = next((each.phase_order for each in run.mechanisms if each.phase_order), PhaseOrder())
        self._gradients = [each.gradient_source for each in run.mechanisms if each.gradient_source]
        self._group_rewards = [each.group_rewards for each in run.mechanisms if each.group_rewards]
        self._parking = [each.parking for each in run.mechanisms if each.parking]
        self._step_watchers = [each.step_watcher for each in run.mechanisms if each.step_watcher]
        self._shaping = RewardShaping.configured(config)
        self._alarms = Alarms(config)
        self._saves = SaveSchedule(config.trainer, run.clock)
        self._saved_step: int | None = None
        self._running_step = 0
        self._failing: str | None = None  # why the run has to end at the next boundary
        self._waiting: Collected | None = None  # what the next step trains on, where its round came before it

    @property
    def num_carried(self) -> int:
        """Prompts taken from the data and still in the system: a run that ended now would leave them behind."""
        return self.rule.num_carried + (0 if self._waiting is None else len(self._waiting.groups))

    # -- state ---------------------------------------------------------------------------------------------------------

    def host_state(self) -> dict[str, Any]:
        """Everything outside the trainer that decides the future, at a step boundary. JSON values and arrays."""
        return {
            "schema": STATE_SCHEMA,
            "step": self.step,
            "seed": self.config.trainer.seed,
            "data": self._prompts.state(),
            "departures": self.departures.state_dict(),
            "rule": {"name": self.rule.name, "num_carried": self.rule.num_carried, "state": self.rule.state()},
            "ahead": None
            if self._waiting is None
            else pack_groups(self._waiting.groups) | {"metrics": dict(self._waiting.metrics)},
            **{each.name: state for each in self._mechanisms if (state := each.state_dict()) is not None},
        }

    def load_host_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a saved boundary. Raises ValueError for another schema, prompts that wait in the state of
        another rule, or samples that are too long for this run."""
        check_schema("checkpoint", state, STATE_SCHEMA)
        self.step = self._saved_step = int(state["step"])
        self._prompts.load_state(state["data"])
        self.departures.load_state_dict(state["departures"])
        for each in self._mechanisms:
            if each.name in state:
                each.load_state_dict(state[each.name])
        saved, ahead = state["rule"], state["ahead"]
        if saved["name"] == self.rule.name:
            self.rule.load_state(saved["state"], self._prompts)
        elif saved["num_carried"]:
            raise ValueError(
                f"checkpoint: {saved['num_carried']} prompts wait in the state of {saved['name']}, and this run uses "
                f"{self.rule.name}: they would be lost. Go on with {saved['name']}, or start a new run from the "
                "parameters alone (trainer.init_from)"
            )
        if ahead is not None:
            groups = unpack_groups(ahead, self._prompts.get)
            samples = [sample for group in groups for sample in group.samples]
            check_lengths("in the batch that waits", samples, self.config.data.max_response_length)
            self._waiting = Collected(groups, dict(ahead["metrics"]))

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Returns False if a stop was asked for before the last step. Raises RunFailed, with the last boundary
        saved."""
        self.backend.enter_rollout(self.step)
        if self.config.trainer.val_before_train and self.step == 0 and self._run.validation:
            self._evaluate()
            self._phases.take_phases()  # its time belongs to no step
            self._end_if_failing()
        while self.step < self.total_steps and not self._run.stop():
            boundary = self.host_state()
            try:
                self._run_step()
            except Interrupted as early:
                # the trainer has not moved since the boundary: the step will run again as if it had never begun
                for each in self._gradients:
                    each.abandon()
                if self._saved_step != boundary["step"]:
                    self._run.save(boundary["step"], boundary)
                if str(early):
                    raise RunFailed(f"{early}; saved after step {boundary['step']}") from early
                return False
            self._end_if_failing()
        self._save()
        if any(each.has_begun for each in self._parking):
            self.backend.cancel()  # where a stop was asked for, the next round may have begun
        return self.step >= self.total_steps

    def _end_if_failing(self) -> None:
        if self._failing is not None:
            self._save()
            raise RunFailed(f"{self._failing}; saved after step {self.step}")

    def _run_step(self) -> None:
        step = self._running_step = self.step + 1
        with self._phases.phase("step", step=step):
            if self._saves.is_due(self.step):
                self._save()
            earlier = self._waiting
            # where rounds are ahead, the batch of the next update is not that of the first round, and not there yet
            now = self._collect(step, () if self._order.rounds_ahead else None) if earlier is None else earlier
            self._waiting, (batch, learned) = self._order.update(CurrentStep(self, step, now.groups), now.groups)
            for group in now.groups:
                self.departures.leave(group.prompt.key, "trained")
            self.step = step
            with self._phase("sync"):
                self.backend.enter_rollout(step)
            if self._evaluates(step):
                self._evaluate()
        seconds = {"timing_s/save": 0.0} | self._phases.take_phases()
        measured = now.metrics | numbers.off_policy_metrics(now.groups, step) | learned | seconds
        rounds = (None if each is None else each.seconds for each in (earlier, self._waiting))
        measured |= numbers.seconds_of_other_steps(measured, *rounds)
        measured |= numbers.throughput(batch, measured, self._run.num_devices)
        for watch in self._step_watchers:
            watch(measured)
        self._run.on_step(step, measured, now.groups)

    def _collect(self, step: int, waiting: Sequence[Group] | None = None) -> Collected:
        """One round for training step `step`: the rule's groups, scored. `waiting`: the batch of the next update. None:
        this round's own; empty: that of a round which has not run yet, so that none of its groups is certain."""
        with self._phase("data"):
            current = self.rule.plan(self._prompts, RoundTime(step, self.step, self.total_steps - step + 1))
        certain = current.certain
        if waiting is not None:
            certain = (lambda: waiting) if waiting else None
        beside = waiting is None and step < self.total_steps and not self._evaluates(step - 1)
        next_launches = partial(self._next_launches, step + 1) if beside else None
        info = RoundInfo(step, 0, current.kind, self.step + 1, certain, next_launches)
        self._play(current, info)
        result = self.rule.settle(current)
        for prompt_key, outcome in result.left.items():
            self.departures.leave(prompt_key, outcome)
        compared: dict[str, float] = {}
        if self._group_rewards:
            with self._phase("reward"):
                compared = self._compare(result.groups, info)
        return Collected(result.groups, self._round_metrics(result, compared))

    def _play(self, current: Round, info: RoundInfo) -> None:
        """A round of training from its first event to its last."""
        self.backend.begin(info, self.config.sampling(self._run.stop_token_ids))
        try:
            while not current.done:
                generating = self.backend.generating
                with self._phase("gen" if generating else "reward"):
                    while not current.done and self.backend.generating == generating:
                        self._handle(current, info.step)
                        for each in self._gradients:
                            each.look()
        except Interrupted:
            self.backend.cancel()
            raise

    def _round_metrics(self, result: RoundResult, compared: Mapping[str, float]) -> dict[str, float]:
        seconds = dict.fromkeys((f"timing_s/{name}" for name in numbers.ROUND_PHASES), 0.0)
        seconds |= self._phases.take_phases(*numbers.ROUND_PHASES)
        measured = numbers.batch_metrics(result.groups, self.config.data.max_response_length)
        if self._shaping is not None:
            measured |= self._shaping.metrics([sample for group in result.groups for sample in group.samples])
        measured |= result.metrics | self.backend.end(result)
        measured |= {name: measured.get(name, 0.0) + value for name, value in compared.items()}
        measured |= numbers.hidden_scoring(measured, seconds)
        return measured | seconds

    def _compare(self, groups: Sequence[Group], info: RoundInfo) -> dict[str, float]:
        return {name: value for each in self._group_rewards for name, value in each(groups, info).items()}

    def _next_launches(self, step: int) -> list[Launch] | None:
        """All that the round for training step `step` launches, once update `step` - 2 has ended; called in the round
        before."""
        if not self._order.update_has_ended:
            return None
        time = RoundTime(step, step - 2, self.total_steps - step + 1)
        return [each.launch() for each in self.rule.ahead(self._prompts, time)]

    def _handle(self, current: Round, training_step: int | None = None) -> None:
        """`training_step`: None for an evaluation, whose rewards are not shaped."""
        event = self.backend.wait()
        if isinstance(event, Verdict):
            episode = current.finished[event.key].episode
            shows_nothing = event.status == "ok" and episode is not None and not episode.was_answered
            failing = None if shows_nothing else self._alarms.rewarded(event.status, event.failure)
            if failing is not None:
                raise Interrupted(f"step {self._running_step}: {failing}")
            if training_step is None:
                event = event.unshaped
            elif self._shaping is not None:
                event = self._shaping.shaped(event, current.finished[event.key].num_drawn)
        self.backend.apply(current.handle(event))

    def _learn_from(self, groups: list[Group], step: int, track: str = "loop") -> tuple[TrainBatch, dict[str, float]]:
        phase = partial(self._phase, track=track)
        begun = [batch for each in self._gradients for batch in each.update_begins(groups, phase)]
        learnt = training_step(self.config, self._models, begun, groups, step, phase, self._run.beat)
        batch, measured = learnt.batch, learnt.metrics()
        for each in self._gradients:
            measured |= each.update_ends()
        self._failing = self._alarms.updated(step, learnt.skipped(), measured, batch)
        return batch, measured | numbers.spread("critic/advantages", np.concatenate(batch.advantages))

    # -- evaluation, saving, numbers ---------------------------------------------------------------------------------

    def _evaluates(self, step: int) -> bool:
        every = self.config.trainer.test_freq
        return bool(self._run.validation) and every > 0 and (step % every == 0 or step == self.total_steps)

    def _evaluate(self) -> None:
        """Samples the held-out prompts. A stop requested meanwhile ends it without numbers."""
        with self._phase("testing"):
            current = Round.of(self._run.validation, self.config.rollout.val_kwargs.n)
            info = RoundInfo(self.step, 1, "eval")
            self.backend.begin(info, self.config.sampling(self._run.stop_token_ids, evaluates=True))
            try:
                while not current.done:
                    self._handle(current)
            except Interrupted as early:
                self.backend.cancel()
                self._failing = self._failing or str(early) or None
                return  # the step's update counts; only these numbers are missing
            self.backend.end()
            groups = current.groups()
            self._compare(groups, info)
            measured = numbers.evaluation_metrics(groups, self.config.data.max_response_length)
            self._run.on_eval(self.step, measured, groups)

    def _save(self) -> None:
        if self._saved_step != self.step:
            with self._phase("save"), self._saves.saving():
                self._run.save(self.step, self.host_state())
            self._saved_step = self.step

    def _phase(self, name: str, track: str = "loop") -> AbstractContextManager[None]:
        """A phase traced on `track`; `on_phase` is called for the loop's own phases, not for those beside them."""
        if track == "loop":
            self._run.on_phase(self._running_step, name)
        return self._phases.phase(name, track)


class CurrentStep:
    """The step of an update, on `groups`, as a `PhaseOrder` runs it."""

    def __init__(self, loop: Loop, step: int, groups: list[Group]) -> None:
        self._loop, self.step, self._groups = loop, step, groups

    @property
    def is_last(self) -> bool:
        return self.step >= self._loop.total_steps

    def collect(self, waiting: Sequence[Group] | None = None) -> Collected:
        """Runs the round of the next step. `waiting`: the batch of the next update, where that is not the round's."""
        return self._loop._collect(self.step + 1, waiting)

    def learn(self, track: str = "loop") -> tuple[TrainBatch, dict[str, float]]:
        return self._loop._learn_from(self._groups, self.step, track)

    def leave_rollout(self) -> None:
        self._loop.backend.leave_rollout()
