"""A run's state on one host: devices, models in training, executors of workers, and its part of the checkpoints.

`Host` is everything of a training run that touches devices. A run on one host has one. On several hosts each actor has
one (`jaxrl.run.cluster`). All of them get the same calls in the same order, because training programs run on the
devices of all hosts. So arguments and results are plain data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl.config import Config
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.config import ModelConfig
from jaxrl.rollout.worker_set import WorkerSet
from jaxrl.run.build import build_workers, share_notes, use_compilation_cache
from jaxrl.run.devices import ProcessDevices, prepare_hosts, with_types
from jaxrl.run.weights import load_weights, refuse_other_model
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.memory import DeviceMemory
from jaxrl.sharding.mesh import make_mesh, platform_of, submeshes
from jaxrl.training.checkpoint import Checkpointer
from jaxrl.training.objectives import LikelihoodObjective
from jaxrl.training.programs import TrainPrograms
from jaxrl.training.steps import whole_step
from jaxrl.training.trainer import MeshTrainer, build_critic

if TYPE_CHECKING:
    from jaxrl.scheduling.layouts.latency_profile import Profile
    from jaxrl.training.teacher import MeshTeacher


class NoGroup:
    """The other hosts of a run, as the programs and checkpoints of this one need them: here there are none.

    Attributes:
      on_machine: hosts of the run that share this machine's memory.
    """

    on_machine = 1

    def first(self, name: str, make: Callable[[], str]) -> str:
        """The first host's `make()`, on all hosts. Each name once."""
        return make()

    def with_least(self, devices: ProcessDevices) -> ProcessDevices:
        """`devices` with the least memory of all hosts."""
        return devices

    def meet(self, name: str) -> None:
        """Returns once all hosts are about to run the program of a name for the first time: a collective on CPUs gives
        up after 30 seconds."""


@dataclass(frozen=True, slots=True)
class HostDevices:
    """The devices of a run, as its controller knows them."""

    config: Config  # with their types
    notes: list[str]  # what a start says of that
    count: int  # of all hosts
    platform: str  # `jaxrl.sharding.mesh.platform_of`
    backend: str  # this and the next: jax's names
    kind: str
    memory: DeviceMemory  # of one device, the least of all hosts


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Which models a run trains."""

    config: Config  # with what the memory of the update allows (`jaxrl.run.build.with_planned_update`)
    init_from: Path | None  # the checkpoint whose weights it begins with; None: those of `model.path`
    updates: int  # of the optimizer, in the whole run
    critic_updates: int = 0
    teacher: ModelConfig | None = None  # of `algorithm.teacher.path`; None: there is none here
    is_supervised: bool = False


class Host:
    """One host of a run. Methods are called in the order in which they stand. `beat`: tells the watchdog that there is
    progress, and what is done next."""

    trainer: MeshTrainer
    store: Checkpointer
    workers: WorkerSet

    def __init__(self, group: NoGroup, beat: Callable[[str], None]) -> None:
        self._group, self._beat = group, beat
        self._stack = ExitStack()
        self.critic: MeshTrainer | None = None
        self.teacher: MeshTeacher | None = None

    # -- a start -----------------------------------------------------------------------------------------------------

    def open(self, config: Config, kind: str, earlier: Config | None) -> HostDevices:
        """Finds the devices. `kind`: the command that trains; `earlier`: the configuration of the start before."""
        self.place = place = self._group.with_least(prepare_hosts(config, self._group.on_machine))
        self.mesh, first, notes = place.mesh, place.devices[0], list[str]()
        self.config = config = with_types(config, platform := platform_of(first), notes.append, earlier, command=kind)
        described = len(place.devices), platform, first.platform, first.device_kind, place.memory
        return HostDevices(config, notes, *described)

    def place_rollout(self, earlier: Config | None) -> tuple[Config, list[str], int, int]:
        """Chooses the devices of the rollout and its tensor-parallel degree; returns the configuration with it, notes,
        and how many devices the trainer and this host's rollout have."""
        config, place, notes = self.config, self.place, list[str]()
        self.rollout_mesh = place.rollout_mesh(config.rollout.hosts_per_worker)
        if own := config.rollout.num_devices:
            num_local = len(place.local_devices)
            training = [device for i, device in enumerate(place.devices) if i % num_local < num_local - own]
            self.mesh = make_mesh(training, place.num_processes)
            self.rollout_mesh = make_mesh(place.local_devices[-own:])
        if config.is_tp_open:
            from jaxrl.run.degree import with_degree

            config = with_degree(config, self.rollout_mesh, notes.append, earlier, place.memory)
        self.config = config
        notes += share_notes(config, place.local_devices)
        Layout(submeshes(self.rollout_mesh, config.workers_per_group)[0], config.rollout.tp)  # refused before all else
        return config, notes, self.mesh.size, self.rollout_mesh.size

    def read_model(self, model: ModelConfig) -> None:
        self.model = model

    def checked_profile(self) -> Profile:
        """`rollout.layout.profile`. Raises ConfigError where it is of another model or machine."""
        from jaxrl.rollout.profiler import checked_profile

        return checked_profile(self.config, self.model, self.rollout_mesh)

    def open_store(self, folder: Path, on_commit: Callable[[int], None]) -> Checkpointer:
        """The checkpoints of the run. Nothing is written."""
        self.store = Checkpointer(
            folder,
            max_to_keep=self.config.trainer.max_ckpt_to_keep,
            on_commit=on_commit,
            progress=lambda: self._beat(""),
            first=self._group.first,
        )
        return self.store

    def whole_step(self, path: str) -> tuple[Path, list[str]]:
        """The step of a checkpoint to begin from, compared with its checksums; and notes about it."""

        def look() -> str:
            notes: list[str] = []
            found = whole_step(path, say=notes.append, progress=lambda: self._beat(""))
            return json.dumps([str(found), notes])

        found, notes = json.loads(self._group.first(f"the step to begin from in {path}", look))
        return Path(found), notes

    def refuse_other_model(self, place: Path) -> None:
        """Raises ValueError where a checkpoint holds another model."""
        refuse_other_model(place, self.config, self.model, self.mesh)

    def load(self, asked: LoadRequest, tokenizer: Tokenizer | None = None) -> str | None:
        """Loads the weights of all models; returns a note about the kernels of training. `tokenizer`: for a teacher."""
        params = load_weights(self.config, self.model, self.mesh, asked.init_from)
        callbacks: Any = {"on_progress": lambda: self._beat(""), "meet": self._group.meet}
        own: Any = {"objective": LikelihoodObjective} if asked.is_supervised else {}
        programs = TrainPrograms(asked.config, self.model, self.mesh, total_updates=asked.updates, **own)
        self.trainer = MeshTrainer(programs, params, **callbacks)
        if asked.critic_updates:
            given = asked.config, self.model, params, self.mesh
            self.critic = build_critic(*given, total_updates=asked.critic_updates, **callbacks)
        if asked.teacher is not None:
            from jaxrl.run.teacher import build_teacher

            assert tokenizer is not None, "a teacher reads prompts"
            self._beat("loading the teacher")
            self.teacher = build_teacher(asked.config, asked.teacher, self.trainer, tokenizer, **callbacks)
        return self.trainer.programs.decoder.attention.note

    @property
    def models(self) -> Sequence[MeshTrainer | MeshTeacher]:
        """Policy, critic and teacher, as far as there are."""
        return [each for each in (self.trainer, self.critic, self.teacher) if each is not None]

    @property
    def params(self) -> Any:
        """The weights in training."""
        return self.trainer.params

    def restore(self, step: int) -> dict[str, Any]:
        """Brings the models to a checkpoint; returns the controller's part of it."""
        state, host = self.store.restore(self._state(MeshTrainer.abstract_state), step)
        self.trainer.load_state(state)
        if self.critic is not None:
            self.critic.load_state(state["critic"])
        return host

    def save(self, step: int, host: Mapping[str, Any]) -> None:
        """Begins to write a checkpoint."""
        self.store.save(step, self._state(MeshTrainer.state), host)

    def _state(self, of: Callable[[MeshTrainer], dict[str, Any]]) -> dict[str, Any]:
        """The policy's, and the critic's under its name."""
        return of(self.trainer) | ({} if self.critic is None else {"critic": of(self.critic)})

    def use_compilation_cache(self) -> None:
        use_compilation_cache(self.config)

    # -- the rollout -------------------------------------------------------------------------------------------------

    def build_workers(self) -> WorkerSet:
        config = self.config
        # if the rollout has its own devices, an update may be running: its weights are not the round's
        weights = None if config.rollout.num_devices else lambda: self.params
        place = replace(self.place, devices=tuple(self.mesh.devices.flat))
        self.workers = build_workers(config, self.model, self.rollout_mesh, weights, place, self._group.meet)
        return self.workers
