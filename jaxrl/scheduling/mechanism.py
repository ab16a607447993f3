"""What a mechanism may do, and when: the hooks that a run calls on each of a list of mechanisms.

Purpose: a mechanism (a switch of the README) is a `Mechanism` with some of these methods. The loop (`jaxrl.loop`) and
the backend (`jaxrl.runtime.backend`, with its events, plans and verdicts) hold a list of them and know none by name;
with an empty list they train synchronously, on one batch after another.

Every hook does nothing here, so a mechanism has only those that it needs. Hooks are called in the order of the list.

- Once: `attach`; `enter_rollout`, when the first weights come to the rollout's devices.
- In each training step: `round_begins`, then `place` with the round's first commands, then as things happen
  `commanded`, `launched`, `begun`, `request`; `between_plans`, `before_turn`, `before_plan`, `after_plan`; `keeps`,
  `finished`, `aborted`; `limits`, `is_close`, `scored`; `while_waiting`, `handed`, `after_event`. At its end `compare`
  with what it has brought and `round_ends` with its metrics; or `cancelled`.
- Then the update: `update`, `leave_rollout`, `update_begins`, `update_ends` (one that runs beside a round leaves the
  rollout when both have ended, and its hooks are called in the update's thread); or `update_cancelled`. Then
  `enter_rollout` with the new weights, the round of an evaluation, if one is due, and `step_ends`.
- `state_dict` and `load_state_dict` are for checkpoints, at step boundaries.
- `holds_rollout`, `has_begun`, `update_has_ended` and `defers_stop` are asked where an answer is needed.

Source: docs/architecture.md; the form is that of optax's `GradientTransformation`: one small protocol, and everything
composes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from jaxrl.scheduling.rounds.batches import RoundResult
from jaxrl.scheduling.rounds.events import Command, Event, Launch, Verdict
from jaxrl.scheduling.tokens.engine import Finished
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.types import Group, Prompt, Sample, SampleKey, TrainBatch

Phase = Callable[[str], AbstractContextManager[None]]
"""Around a part of a step that takes time, by its name: `timing_s/<name>` in the step's metrics."""


class Drawing(Protocol):
    """Where a mechanism draws what it does (`jaxrl.record.timeline.Timeline`); seconds are those of the run's clock."""

    def complete(self, track: str, name: str, start_s: float, end_s: float, /, **args: Any) -> None: ...

    def counter(self, track: str, /, **values: float) -> None: ...


@dataclass(frozen=True, slots=True)
class RoundInfo:
    """A round that begins.

    Attributes:
      step: the training step that it is for; of an evaluation, the last one.
      index: 0 of a training round, 1 of an evaluation, which may have prompts of the same key.
      kind: the batch rule's kind of round (`jaxrl.scheduling.rounds.round.RoundKind`), or "eval".
      update: the update that comes next.
      certain: gives the groups that are certain to be in the batch of that update, scored or not; None: none can be
        known, because the batch is that of a later round.
      next_launches: what the round after this one launches, all of it; None where it may not begin within this one, and
        it returns None while its weights are not there.
    """

    step: int
    index: int = 0
    kind: str = "plain"
    update: int = 0
    certain: Callable[[], Sequence[Group]] | None = None
    next_launches: Callable[[], list[Launch] | None] | None = None

    @property
    def is_training(self) -> bool:
        """Whether it is no evaluation."""
        return self.index == 0


@dataclass(slots=True)
class UnderWay:
    """What there is of the round under way; the backend's, and read by its mechanisms.

    Attributes:
      workers: of the run.
      clock: seconds from any origin.
      weights: gives the trainer's current weights, on the devices.
      start: starts a response in a worker (None: the one that has least to do), anew or with the tokens that it has;
        returns the id of its request.
      deliver: tells the round of responses that have ended, as if their workers had just said so.
      requests: ids of the live requests, by sample.
      num_launched, num_finished: samples of the round, those that ended by themselves.
      running: samples that are still drawn, by (epoch, prompt index); with 0, of every prompt of the round.
    """

    workers: LocalWorkers
    clock: Callable[[], float]
    weights: Callable[[], Any]
    start: Callable[[Prompt, SampleKey, int | None, Sample | None], int]
    deliver: Callable[[Sequence[Finished]], None]
    requests: dict[SampleKey, int] = field(default_factory=dict)
    num_launched: int = 0
    num_finished: int = 0
    running: Counter[tuple[int, int]] = field(default_factory=Counter)

    def begin(self) -> None:
        """A round begins."""
        self.num_launched = self.num_finished = 0
        self.running.clear()

    def launched(self, key: SampleKey, request_id: int) -> None:
        self.num_launched += 1
        self.running[key.epoch, key.prompt_index] += 1
        self.requests[key] = request_id

    def ended(self, key: SampleKey) -> None:
        """A sample is drawn no more."""
        self.requests.pop(key, None)
        self.running[key.epoch, key.prompt_index] -= 1


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """A round that is over.

    Attributes:
      workers: what each has counted in it.
      result: what its rule has made of it; None: an evaluation's.
    """

    workers: Sequence[Counters]
    result: RoundResult | None

    @property
    def done(self) -> Counters:
        """What all workers have counted together."""
        return sum(self.workers, Counters())

    @property
    def scored(self) -> Sequence[Group]:
        """The groups that have left it with a reward: trained on, or filtered."""
        return () if self.result is None else (*self.result.groups, *self.result.filtered)


class Step(Protocol):
    """What `Mechanism.update` may ask of the loop. `step`: the one whose update is due."""

    step: int

    @property
    def is_last(self) -> bool:
        """Whether no step comes after this one."""
        ...

    def collect(self, waiting: Sequence[Group] | None = None) -> Any:
        """Runs the round of the next step. `waiting`: the batch of the next update, where that is not the round's
        own."""
        ...

    def learn(self, track: str = "loop") -> Any:
        """Runs the update of this step, drawn on a track."""
        ...

    def leave_rollout(self) -> None:
        """Gives the memory of the rollout to the update."""
        ...


class Mechanism:
    """Hooks, all of which do nothing.

    Attributes:
      name: of its part of a checkpoint; one that has none needs none.
      rounds_ahead: by how many updates a round comes before the update that learns from it.
      compares: whether `compare` does something.
    """

    name: ClassVar[str] = ""
    rounds_ahead: ClassVar[int] = 0
    compares: ClassVar[bool] = False

    def attach(self, under_way: UnderWay) -> None:
        """Called once, by the backend, before all else."""

    # -- memory phases -----------------------------------------------------------------------------------------------

    def enter_rollout(self, policy_version: int, *, was_released: bool) -> bool:
        """Weights of a version are due on the rollout's devices. Returns whether it has brought them there itself.

        Args:
          was_released: there are neither weights nor pools.
        """
        return False

    @property
    def holds_rollout(self) -> bool:
        """Whether weights and pools of the rollout have to stay for the update."""
        return False

    def leave_rollout(self) -> None:
        """The update is due: what lies on the rollout's devices has to go."""

    # -- a round -----------------------------------------------------------------------------------------------------

    def round_begins(self, info: RoundInfo) -> None:
        """A round begins, with idle workers but for what a mechanism has begun of it."""

    def place(self, commands: Sequence[Command], step: int) -> Sequence[Command]:
        """The first commands of a training round, with workers for what they launch."""
        return commands

    def request(self, request: Request, prompt: Prompt) -> Request:
        """A request as its worker gets it."""
        return request

    def launched(self, launch: Launch) -> None:
        """The round launches samples."""

    @property
    def has_begun(self) -> bool:
        """Whether workers have something of the round after the one under way."""
        return False

    def begun(self, key: SampleKey) -> int | Finished | None:
        """Of a sample that is launched: the id of its request if it runs already, what has ended if it has ended, or
        None if it has to be started."""
        return None

    def between_plans(self, busy_rows: int) -> bool:
        """The devices may be used; returns whether they were, for one program's time.

        Args:
          busy_rows: rows for which there is work; 0 where no plan will be made before a verdict comes.
        """
        return False

    def before_turn(self) -> None:
        """A worker is served: a plan is made of it, or waited for."""

    def before_plan(self, worker: int) -> None:
        """A plan will be made of a worker. Raises Interrupted where the run cannot go on."""

    def after_plan(self, worker: int | None) -> None:
        """A worker was served, and what ended has been delivered to the round.

        Args:
          worker: of which a plan has been collected; None: of none.
        """

    def while_waiting(self) -> None:
        """Nothing can be done before a verdict comes."""

    def keeps(self, finished: Finished) -> bool:
        """Whether the mechanism takes a response that has ended for itself, as one of the next round, or because it
        will go on; the round under way does not receive it then."""
        return False

    @property
    def awaits(self) -> bool:
        """Whether something is awaited that responses need before they go on, and may come now: `before_turn` looks,
        and `while_waiting` waits a moment for it, or for a verdict."""
        return False

    def given_up(self, key: SampleKey, *, keep: bool) -> Sample | None:
        """A sample is to be ended. What it has so far, where the mechanism has it and gives it up now. `keep`: a later
        round may go on with it."""
        return None

    def finished(self, samples: Sequence[Sample], *, is_stopping: bool) -> None:
        """Samples have ended by themselves. The round can still abort one before it receives the event (`aborted`).
        `is_stopping`: the round is about to end the others."""

    def aborted(self, key: SampleKey) -> None:
        """A sample was ended."""

    def limits(self, prompt: Prompt) -> tuple[float, ...]:
        """Time limits for scoring a sample of a training round, in seconds, by test case; empty: the scorer's own."""
        return ()

    def is_close(self, prompt: Prompt, verdict: Verdict) -> bool:
        """Whether other time limits might have changed a verdict of a training round."""
        return False

    def scored(self, prompt: Prompt, limits_s: tuple[float, ...], verdict: Verdict) -> None:
        """A verdict on a sample of a training round has come. `limits_s`: those that it was sent with."""

    def handed(self, event: Event) -> None:
        """The round is handed an event."""

    def commanded(self, command: Command) -> None:
        """The round has a command carried out."""

    def after_event(self) -> None:
        """The commands that a training round has answered an event with were carried out."""

    def round_ends(self, end: RoundEnd) -> Mapping[str, float]:
        """The round is over; its metrics, those of an evaluation (`end.result` is None) are dropped."""
        return {}

    def compare(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Groups of a round that is over, all of their samples scored, of a training round those that it has brought:
        rewards may still change. Returns metrics."""
        return {}

    def cancelled(self) -> None:
        """The round is dropped: no event of it will follow."""

    # -- an update ---------------------------------------------------------------------------------------------------

    def update(self, step: Step, groups: Sequence[Group]) -> tuple[Any, Any] | None:
        """Runs the update of a step in an order of its own, and the next step's round before it or beside it.

        Returns:
          What `Step.collect` and `Step.learn` have returned; None in place of the first if no round was run, and None
          alone to leave the update to the loop.
        """
        return None

    @property
    def update_has_ended(self) -> bool:
        """Whether the update beside the round under way has ended well, so that the next weights are there."""
        return False

    @property
    def defers_stop(self) -> bool:
        """Whether a stop that is asked for has to wait: something is under way that cannot be undone."""
        return False

    def update_begins(self, groups: Sequence[Group], phase: Phase) -> list[TrainBatch]:
        """An update begins; returns batches of which the trainer has the gradients already."""
        return []

    def update_ends(self) -> Mapping[str, float]:
        """An update has ended; its metrics."""
        return {}

    def update_cancelled(self) -> None:
        """A step is dropped before its update: the trainer has not moved."""

    def step_ends(self, measured: Mapping[str, float]) -> None:
        """A step has ended, with these metrics."""

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Its part of a checkpoint, JSON values and arrays; None: it has none."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another run was; an empty state: of a run without it. Raises ValueError for one that it cannot
        go on from."""
