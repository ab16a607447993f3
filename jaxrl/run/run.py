"""A run, put together: one object for training, evaluation and simulation.

Mechanisms are built from a `Run`, and the backend and the loop work on its parts. Runs differ in the machine, whose
devices are here, on other hosts, or modelled, and in who trains, scores and answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from jaxrl.config import Config
from jaxrl.loop import Loop
from jaxrl.mechanisms import build_mechanisms, is_timeless
from jaxrl.run.backend import RolloutBackend
from jaxrl.scheduling.mechanism import Mechanism
from jaxrl.scheduling.rounds.batches import BatchRule
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.training.training_step import Models
from jaxrl.types import Group, Prompt, Sample

if TYPE_CHECKING:
    from jaxrl.data.prompts import PromptSource
    from jaxrl.mechanisms.turns.rule import Conversation
    from jaxrl.record.journal import Journal
    from jaxrl.record.layouts import LayoutLog
    from jaxrl.record.timeline import Timeline
    from jaxrl.rollout.remote import RemoteWorkers
    from jaxrl.rollout.worker_set import WorkerSet
    from jaxrl.run.mesh_machine import MeshMachine
    from jaxrl.run.simulation import SimulatedMachine
    from jaxrl.run.verdicts import Scoring
    from jaxrl.scheduling.rounds.history import HistoryStore
    from jaxrl.sim.clock import SimulatedPhases
    from jaxrl.sim.executor_set import SimulatedExecutorSet
    from jaxrl.sim.prompts import SimulatedPrompts

M = TypeVar("M", bound=Mechanism)
_LATER: Any = None  # set once devices and record are open


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of a run.

    Attributes:
      workers: the engines. executors: what runs their plans. machine: the devices of both.
      weights: returns the trainer's current weights, on the devices.
      scoring: scores finished samples. text_of: makes a response's text, for scorers and people.
      conversation: how turns are answered; None where responses have one turn.
      rule, models, prompts, total_steps: how batches come about, and what learns from them; an evaluation has none.
      validation: held-out prompts; empty where nothing is evaluated.
      stop_token_ids: end a response. num_devices: of rollout and training together.
      clock: seconds from any origin, also of `scoring`.
      timeline: times phases, and draws plans and busy rows.
      journal: of decisions that a clock made; None where the clock is simulated, and decides the same again.
      layout_log: of layout switches.
      on_phase: called with (step, phase). on_step, on_eval: with (step, metrics, groups).
      on_progress: after each plan with (rows busy, rows, tokens so far, samples finished, samples launched).
      on_waiting: with how many turns wait for answers, which one for longest, and since when.
      save: writes a checkpoint of (step, host state).
      stop: whether a stop was asked for; asked after every plan, because a response may be long.
      beat: tells the watchdog that there is progress, and what is done next.
      mechanisms: in the order in which their hooks are called.
      history: of earlier responses, where a mechanism keeps it.
    """

    config: Config
    weights: Callable[[], Any]
    scoring: Scoring
    text_of: Callable[[Sample], str]
    workers: LocalWorkers = _LATER
    executors: WorkerSet | RemoteWorkers | SimulatedExecutorSet = _LATER
    machine: MeshMachine | SimulatedMachine = _LATER
    timeline: Timeline | SimulatedPhases | None = None
    rule: BatchRule | None = None
    models: Models | None = None
    prompts: PromptSource | SimulatedPrompts | None = None
    total_steps: int = 0
    stop_token_ids: tuple[int, ...] = ()
    num_devices: int = 0
    validation: Sequence[Prompt] = ()
    conversation: Conversation | None = None
    clock: Callable[[], float] = time.perf_counter
    journal: Journal | None = None
    layout_log: LayoutLog | None = None
    on_phase: Callable[[int, str], None] = lambda step, phase: None
    on_step: Callable[[int, dict[str, float], Sequence[Group]], None] = lambda step, measured, groups: None
    on_eval: Callable[[int, dict[str, float], Sequence[Group]], None] = lambda step, measured, groups: None
    on_progress: Callable[[int, int, int, int, int], None] = lambda *_: None
    on_waiting: Callable[[int, str, float], None] = lambda *_: None
    save: Callable[[int, dict[str, Any]], None] = lambda step, state: None
    stop: Callable[[], bool] = lambda: False
    beat: Callable[..., None] = lambda *_: None
    mechanisms: tuple[Mechanism, ...] = ()
    history: HistoryStore | None = None

    def backend(self, *, evaluates: bool = False) -> RolloutBackend:
        """Builds the mechanisms, and the backend that calls them. `evaluates`: of an evaluation alone."""
        self.mechanisms = (*build_mechanisms(self, evaluates=evaluates), *self.mechanisms)
        return RolloutBackend(self)

    def loop(self) -> Loop:
        return Loop(self, self.backend())

    def mechanism(self, kind: type[M]) -> M:
        return next(each for each in self.mechanisms if isinstance(each, kind))

    @property
    def is_timeless(self) -> bool:
        return is_timeless(self.config)


def carried(name: str, num_prompts: int) -> dict[str, str]:
    """The summary's entry about prompts that were begun and not trained on; empty without any."""
    return {"prompts begun and not trained on": f"{num_prompts} ({name})"} if num_prompts else {}
