"""What a real run has when its mechanisms are built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from jax.sharding import Mesh

from jaxrl.config import Config
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.mechanisms.turns.pool import EnvironmentPool
from jaxrl.record.journal import Journal
from jaxrl.record.layouts import LayoutLog
from jaxrl.record.timeline import Timeline
from jaxrl.rewards.pool import RewardPool
from jaxrl.rollout.worker_set import WorkerSet
from jaxrl.scheduling.layouts.latency_profile import Profile
from jaxrl.scheduling.rounds.history import HistoryStore
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.sharding.compiled import CompiledPrograms
from jaxrl.train.teacher import Teacher
from jaxrl.train.trainer import Trainer


@dataclass(slots=True)
class RunParts:
    """The parts of a run that mechanisms are built from, and what building one adds.

    Attributes:
      config: of the run.
      mesh: of the rollout; None: its devices are on other hosts.
      engines, workers: of the rollout; the executors are those of the workers.
      trainer: of the policy. teacher: of its tokens; None: there is none.
      tokenizer: of the policy.
      pool: scores samples. environments: answer turns; None: there are none.
      journal, timeline, layout_log: of the run's record.
      profile: the checked file of `rollout.layout.profile`; None: no mechanism asks for it.
      row_sizes: row counts of a worker's decode programs, by the degrees that its rounds may use.
      is_timeless: whether a round brings the same batch whichever of its responses end first.
      tell_waiting: shows how many turns wait for answers, as `jaxrl.record.live.LiveView.waiting`.
      beat: tells the watchdog what is being done.
      stack: closes what a mechanism has opened, when the run is over.
      history: what earlier responses are kept for, once a mechanism keeps them.
      beside_rollout: each blocks until a mechanism's work on the rollout's devices is done.
      notes: what a start says of a mechanism.
      rollout_programs, update_programs: to be compiled with those of the rollout, and of the update.
    """

    config: Config
    mesh: Mesh | None
    engines: LocalWorkers
    workers: WorkerSet
    trainer: Trainer
    teacher: Teacher | None
    tokenizer: Tokenizer
    pool: RewardPool
    environments: EnvironmentPool | None
    journal: Journal
    timeline: Timeline
    layout_log: LayoutLog | None
    profile: Profile | None
    row_sizes: Mapping[int, tuple[int, ...]]
    is_timeless: bool
    tell_waiting: Callable[[int, str, float], None]
    beat: Callable[[str], None]
    stack: ExitStack
    history: HistoryStore | None = None
    beside_rollout: list[Callable[[], None]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rollout_programs: list[CompiledPrograms] = field(default_factory=list)
    update_programs: list[CompiledPrograms] = field(default_factory=list)

    def wait_quiet(self) -> None:
        """Waits for what runs on the rollout's devices: plans of workers, and what mechanisms run beside them."""
        self.workers.wait_quiet()
        for wait in self.beside_rollout:
            wait()
