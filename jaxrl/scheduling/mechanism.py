"""A mechanism: one class with its options, what it composes with, and the hooks that a run calls.

Purpose: a mechanism (a switch of the README) is a subclass of `Mechanism`. `jaxrl.mechanisms.MECHANISMS` lists them.
The loop (`jaxrl.loop`) and the backend (`jaxrl.run.backend`) call the hooks of those that a run has built, in the
order of that list, and know none by name. Without any they train synchronously, on one batch after another.

Every hook does nothing here, so a mechanism defines only those that it needs. What one mechanism alone needs is no
hook, but an object that it supplies: `phase_order`, `gradient_source`, `score_limits`, `parking`, `device_user`,
`group_rewards` or `step_watcher`, or, for the loop, a `batch_rule`.

When hooks are called:

- Once: `attach`. `enter_rollout`, when weights come to the rollout's devices.
- In a round: `round_begins`; `on_commands` before the commands that answer an event are carried out; `on_request` for
  each request; `before_plan` and `after_plan`; `on_finished` and `on_aborted` as samples end; `while_waiting`, where
  nothing can be done before a verdict comes. Then `round_ends` with its metrics, or `round_cancelled`.
- Before an update: `leave_rollout`.
- At step boundaries: `state_dict` and `load_state_dict`.

Source: docs/architecture.md. The form is that of optax's `GradientTransformation`: one small protocol composes all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jaxrl.scheduling.rounds.batches import BatchRule, RoundResult
from jaxrl.scheduling.rounds.events import Command, Launch, Verdict
from jaxrl.scheduling.rounds.round import BatchSettings
from jaxrl.types import Group, Prompt, Sample, SampleKey, TrainBatch

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.models.config import ModelConfig
    from jaxrl.report.curves import PagePart
    from jaxrl.run.run import Run
    from jaxrl.scheduling.tokens.engine import Finished
    from jaxrl.scheduling.tokens.local_workers import LocalWorkers
    from jaxrl.scheduling.tokens.plan import Request
    from jaxrl.scheduling.tokens.progress import Counters

Phase = Callable[[str], AbstractContextManager[None]]
"""Times a part of a step under a name: `timing_s/<name>` in the step's metrics."""

UNFINISHED = "what becomes of unfinished responses"
"""For `Mechanism.decides`."""

LAYOUTS = "the layouts of workers"
PROMPTS_OF_ROUNDS = "which prompts share a round"
WORKERS = "which worker has a request"
"""For `Mechanism.changes` and `relies_on`."""


# -- a round -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundInfo:
    """A round that begins.

    Attributes:
      certain: returns the groups that are certain to be in the batch of the next update, scored or not; None where none
        is certain, because the batch is that of a later round.
      next_launches: returns all that the next round launches, or None while its weights are not there; None where the
        next round must not begin within this one.
    """

    step: int  # the training step that it is for; of an evaluation, the last one
    index: int = 0  # 0 of a training round, 1 of an evaluation, which may have prompts of the same key
    kind: str = "plain"  # `jaxrl.scheduling.rounds.round.RoundKind`, or "eval"
    update: int = 0  # that comes next
    certain: Callable[[], Sequence[Group]] | None = None
    next_launches: Callable[[], list[Launch] | None] | None = None

    @property
    def is_training(self) -> bool:
        return self.index == 0


@dataclass(slots=True)
class RoundState:
    """The state of the current round. The backend writes it, mechanisms read it.

    Attributes:
      start: starts a response in a worker (None: the least loaded one), anew or behind the tokens of a sample; returns
        the id of its request.
      running: samples that are still generated, by (epoch, prompt index); 0 is kept for each prompt of the round.
      awaited: samples without whose verdicts no plan is made.
    """

    workers: LocalWorkers
    clock: Callable[[], float]  # seconds from any origin
    weights: Callable[[], Any]  # the trainer's current ones, on the devices
    start: Callable[[Prompt, SampleKey, int | None, Sample | None], int]
    deliver: Callable[[Sequence[Finished]], None]  # reports responses to the round as finished
    requests: dict[SampleKey, int] = field(default_factory=dict)  # ids of the live ones
    num_launched: int = 0  # samples
    num_finished: int = 0  # samples that ended by themselves
    num_commands: int = 0
    running: Counter[tuple[int, int]] = field(default_factory=Counter)
    awaited: set[SampleKey] = field(default_factory=set)

    def begin(self) -> None:
        self.num_launched = self.num_finished = self.num_commands = 0
        self.running.clear()

    def launched(self, key: SampleKey, request_id: int) -> None:
        self.num_launched += 1
        self.running[key.epoch, key.prompt_index] += 1
        self.requests[key] = request_id

    def ended(self, key: SampleKey) -> None:
        self.requests.pop(key, None)
        self.running[key.epoch, key.prompt_index] -= 1


@dataclass(frozen=True, slots=True)
class RoundEnd:
    workers: Sequence[Counters]  # of each
    result: RoundResult | None  # what the batch rule made of it; None for an evaluation

    @property
    def done(self) -> Counters:
        """The counters of all workers together."""
        from jaxrl.scheduling.tokens.progress import Counters

        return sum(self.workers, Counters())

    @property
    def scored(self) -> Sequence[Group]:
        """The groups that left the round with rewards: trained on, or filtered."""
        return () if self.result is None else (*self.result.groups, *self.result.filtered)


# -- what one mechanism supplies ---------------------------------------------------------------------------------------


class Step(Protocol):
    """A step of the loop whose update is due, as a `PhaseOrder` runs it."""

    step: int

    @property
    def is_last(self) -> bool: ...

    def collect(self, waiting: Sequence[Group] | None = None) -> Any:
        """Runs the round of the next step. `waiting`: the batch of the next update, where that is not the round's."""
        ...

    def learn(self, track: str = "loop") -> Any:
        """Runs the update of this step, drawn on a track."""
        ...

    def leave_rollout(self) -> None: ...


class PhaseOrder:
    """The order of a step's update and the next step's round. This one runs the update alone."""

    rounds_ahead: ClassVar[int] = 0  # by how many updates a round comes before the update that learns from it

    @property
    def update_has_ended(self) -> bool:
        """Whether the update beside the current round has succeeded, so that the next weights are there."""
        return False

    @property
    def defers_stop(self) -> bool:
        """Whether a requested stop has to wait, because something is running that cannot be undone."""
        return False

    def update(self, step: Step, groups: Sequence[Group]) -> tuple[Any, Any]:
        """Returns what `Step.collect` and `Step.learn` returned; None in place of the first where no round was run."""
        step.leave_rollout()
        return None, step.learn()


class GradientSource(Protocol):
    """Computes gradients of a batch before its update begins."""

    def look(self) -> None:
        """The commands that answer an event of a training round have been carried out."""
        ...

    def update_begins(self, groups: Sequence[Group], phase: Phase) -> list[TrainBatch]:
        """Returns batches of which the trainer has the gradients already."""
        ...

    def update_ends(self) -> Mapping[str, float]:
        """Returns metrics of the update."""
        ...

    def abandon(self) -> None:
        """The step is dropped before its update: the trainer has not moved."""
        ...


class ScoreLimits(Protocol):
    """Time limits for scoring the samples of training rounds."""

    def limits(self, prompt: Prompt) -> tuple[float, ...]:
        """Seconds by test case; empty: the scorer's own."""
        ...

    def is_close(self, prompt: Prompt, verdict: Verdict) -> bool:
        """Whether other time limits might have changed a verdict."""
        ...

    def scored(self, prompt: Prompt, limits_s: tuple[float, ...], verdict: Verdict) -> None:
        """A verdict has come on a sample that was submitted with these limits."""
        ...


class Parking(Protocol):
    """Holds samples outside of the round: until an answer comes, or until the next round launches them."""

    @property
    def has_pending(self) -> bool:
        """Whether parked samples of the round wait for something that may come now."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether workers have something of the next round."""
        ...

    def park(self, finished: Finished) -> bool:
        """Whether it takes a response that has ended: the round does not receive it then."""
        ...

    def adopt(self, key: SampleKey) -> int | Finished | None:
        """Takes over a launched sample: returns its request's id if it is running, the response if it has ended, else
        None."""
        ...

    def release(self, key: SampleKey, *, keep: bool) -> Sample | None:
        """Gives up a parked sample, which is to be aborted. `keep`: a later round may resume it."""
        ...


DeviceUser = Callable[[int], bool]
"""Uses the rollout's devices between two plans, given the number of busy rows (0: no plan is made before a verdict
comes). Returns whether it used them, for one program's time."""

GroupRewards = Callable[[Sequence[Group], RoundInfo], Mapping[str, float]]
"""Changes the rewards of a finished round's complete groups, and returns metrics."""

StepWatcher = Callable[[Mapping[str, float]], None]
"""Receives the metrics of a step that has ended; the next weights are there."""


# -- what it declares --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Searched:
    """What `jaxrl tune` searches of a batch rule."""

    options: tuple[str, ...]  # of its section: factors of the prompts that are launched, then of the samples of each
    values: tuple[float, ...]  # that each option takes by default
    warm_up: int = 0  # steps left out of every mean, until the rule carries what it will
    # steps until its rounds begin anew, given the first factor and the prompts of a batch
    period: Callable[[float, int], int] = lambda factor, num_prompts: 1


@dataclass(frozen=True, slots=True)
class RolloutMemory:
    """Memory of a mechanism on each device of the rollout, beside weights and KV pool."""

    name: str  # of all of it, for messages
    parts: Mapping[str, int]  # bytes by name, as `jaxrl explain-config` lists them
    lower: str = ""  # options with their values, to lower where it leaves too little; empty: none makes it smaller
    positions: int = 0  # of a decode step of a dp group that have logits, beside one for each row
    stays: bool = False  # whether it also lies on devices that leave the rollout before the end of a round
    line: str = ""  # what else `jaxrl explain-config` says of it

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class FreedMemory:
    """Memory of a mechanism on devices that leave the rollout before the end of a round."""

    column: str  # its name in `jaxrl explain-config`, and in the refusal where they do not fit
    parts: Mapping[str, int]  # bytes by name
    advice: str  # what helps then


class Mechanism:
    """Base class: composes with everything, takes no memory, and does nothing."""

    name: ClassVar[str] = ""  # of its part of a checkpoint; empty where it has none
    title: ClassVar[str] = ""  # for messages
    option: ClassVar[str] = ""  # that switches it on
    decides: ClassVar[frozenset[str]] = frozenset()  # two mechanisms that decide the same exclude each other
    changes: ClassVar[frozenset[str]] = frozenset()  # what others may rely on
    relies_on: ClassVar[Mapping[str, str]] = {}  # what no other mechanism may change, with the reason
    races: ClassVar[bool] = False  # which samples of a round count depends on which of them end first
    orders: ClassVar[bool] = False  # which prompts make up a batch depends on which are complete first
    excludes_spanning: ClassVar[str] = ""  # why it does not work where workers span hosts; empty: it does
    evaluates: ClassVar[bool] = False  # whether an evaluation alone has it
    searched: ClassVar[Searched | None] = None

    phase_order: PhaseOrder | None = None
    gradient_source: GradientSource | None = None
    score_limits: ScoreLimits | None = None
    parking: Parking | None = None
    device_user: DeviceUser | None = None
    group_rewards: GroupRewards | None = None
    step_watcher: StepWatcher | None = None

    # -- of a configuration ------------------------------------------------------------------------------------------

    @classmethod
    def is_on(cls, config: Config) -> bool:
        """Whether a configuration asks for it; by default, by `option`: a switch, or a section with `enable`."""
        found: Any = config
        for part in cls.option.split("."):
            found = getattr(found, part)
        return found if isinstance(found, bool) else found.enable

    @classmethod
    def problem(cls, config: Config, racing: Sequence[str]) -> str | None:
        """Why a configuration with it is impossible, as a sentence. `racing`: titles of the mechanisms that race."""
        return None

    @classmethod
    def devices_problem(cls, num_devices: int) -> str | None:
        """Why it cannot run on this many devices."""
        return None

    @classmethod
    def reads_profile(cls, config: Config) -> bool:
        """Whether it reads `rollout.layout.profile`."""
        return False

    @classmethod
    def drops_slowest(cls, config: Config) -> bool:
        """Whether it discards the slowest responses of a prompt."""
        return False

    @classmethod
    def note(cls, config: Config) -> str | None:
        """A message about it at the start of a run."""
        return None

    @classmethod
    def rollout_memory(
        cls, config: Config, num_devices: int, platform: str, weight_bytes: int, is_timeless: bool
    ) -> RolloutMemory | None:
        """The memory that it needs on the rollout's devices. `weight_bytes`: of the rollout's weights, per device.
        `is_timeless`: as in `jaxrl.mechanisms.is_timeless`. Raises ValueError where it cannot work with the memory it
        may have."""
        return None

    @classmethod
    def freed_memory(cls, config: Config, model: ModelConfig, num_devices: int, platform: str) -> FreedMemory | None:
        """The memory that it needs on devices that leave the rollout early; arguments as in
        `jaxrl.training.update_memory.update_phases`."""
        return None

    @classmethod
    def page_part(cls) -> PagePart | None:
        """Its charts on a run's page."""
        return None

    @classmethod
    def batch_rule(cls, config: Config, batch: BatchSettings) -> BatchRule | None:
        """A new batch rule, with nothing carried. Raises ValueError for impossible limits."""
        return None

    @classmethod
    def build(cls, run: Run) -> Mechanism | None:
        """The mechanism of a run that asks for it; None where it has no hooks there."""
        return None

    # -- memory phases -----------------------------------------------------------------------------------------------

    def attach(self, state: RoundState) -> None:
        """Called once, by the backend, before all else."""

    def enter_rollout(self, policy_version: int, *, was_released: bool) -> bool:
        """Weights of a version are due on the rollout's devices. Returns whether it has brought them there itself.
        `was_released`: there are neither weights nor pools."""
        return False

    def leave_rollout(self) -> bool:
        """The update is due. Returns whether weights and pools of the rollout have to stay for it."""
        return False

    # -- a round -----------------------------------------------------------------------------------------------------

    def round_begins(self, info: RoundInfo) -> None:
        """A round begins, with idle workers but for what a mechanism has begun of it."""

    def on_commands(self, commands: Sequence[Command]) -> Sequence[Command]:
        """The round's answer to an event, before it is carried out; the first one is what it launches at its start."""
        return commands

    def on_request(self, request: Request, prompt: Prompt) -> Request:
        """A request before it goes to its worker. It is without the tokens that an earlier attempt kept, which
        `max_tokens` counts too. One of the next round may begin before that round does (`NextRoundPrefetches`)."""
        return request

    def before_plan(self, worker: int | None) -> None:
        """A worker's turn has come. None: it is not chosen yet, and the round has received all that ended before. Then
        the worker of which a plan will be made. Raises Interrupted where the run cannot continue."""

    def after_plan(self, worker: int | None) -> None:
        """A worker has had its turn, and what ended has been delivered to the round. `worker`: whose plan has been
        collected; None: nobody's."""

    def while_waiting(self) -> None:
        """Nothing can be done before a verdict comes."""

    def on_finished(self, samples: Sequence[Sample], *, is_stopping: bool) -> None:
        """Samples have ended by themselves. The round may still abort one before it receives the event.
        `is_stopping`: the round is about to abort the others."""

    def on_aborted(self, key: SampleKey, *, keep: bool) -> None:
        """A sample was aborted. `keep`: a later round may resume it."""

    def round_ends(self, end: RoundEnd) -> Mapping[str, float]:
        """The round has ended; returns its metrics, which are dropped where it is an evaluation."""
        return {}

    def round_cancelled(self) -> None:
        """The round is dropped: no event of it will follow."""

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Its part of a checkpoint, JSON values and arrays."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a checkpoint that has its part. Raises ValueError for a state that it cannot resume from."""
