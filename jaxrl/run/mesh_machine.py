"""The devices of a real run, for mechanisms that compute on them (`jaxrl.run.run.Run.machine`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from jaxrl.config import Config
from jaxrl.mechanisms.one_step_off import ConcurrentPhases
from jaxrl.record.timeline import Timeline
from jaxrl.rollout.worker_set import WorkerSet
from jaxrl.run.build import row_sizes
from jaxrl.sharding.compiled import CompiledPrograms
from jaxrl.sharding.mesh import platform_of

if TYPE_CHECKING:
    from jaxrl.mechanisms.speculation.index import IndexBuilder
    from jaxrl.mechanisms.stream_trainer.gradients import TrainStream
    from jaxrl.rollout.remote import RemoteWorkers
    from jaxrl.scheduling.layouts.latency import LatencyPredictor
    from jaxrl.scheduling.layouts.latency_profile import Profile
    from jaxrl.training.teacher import MeshTeacher
    from jaxrl.training.trainer import MeshTrainer


class MeshMachine:
    """Devices of this host (`mesh`: of the rollout; `trainer` and `teacher`), or of hosts whose actors have them.
    `rollout_programs` and `update_programs` are further programs to compile with the rollout's, and with the
    update's."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh | None,
        workers: WorkerSet | RemoteWorkers,
        stack: ExitStack,
        trainer: MeshTrainer | None = None,
        teacher: MeshTeacher | None = None,
        profile: Profile | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.mesh = mesh
        self.rollout_programs: list[CompiledPrograms] = []
        self.update_programs: list[CompiledPrograms] = []
        self._config, self._workers, self._stack = config, workers, stack
        self._trainer, self._teacher, self._profile, self._timeline = trainer, teacher, profile, timeline
        self._beside: list[Callable[[], None]] = []  # each waits for what a mechanism runs there

    @property
    def platform(self) -> str:
        assert self.mesh is not None, "asked of devices on this host alone"
        return platform_of(self.mesh.devices.flat[0])

    @property
    def degrees(self) -> Sequence[int]:
        """The tensor-parallel degrees that a worker's rounds may use."""
        return tuple(row_sizes(self._config, self._workers))

    def predictor(self) -> LatencyPredictor | None:
        """A new one of a worker's steps; None where nothing says what they take."""
        if self._profile is None:
            return None
        from jaxrl.scheduling.layouts.latency import LatencyPredictor

        return LatencyPredictor(self._profile, self._config.rollout.layout, row_sizes(self._config, self._workers))

    def concurrently(self) -> ConcurrentPhases:
        return self._stack.enter_context(closing(ConcurrentPhases()))

    def gradient_streams(self, freed: Sequence[tuple[int, ...]]) -> Mapping[tuple[int, ...], TrainStream]:
        """A stream of gradients on the devices of each set of workers, of which one may be freed. Their programs are
        compiled with the update's. Raises ValueError where the devices have no halves."""
        from jaxrl.mechanisms.stream_trainer.gradients import TrainStream
        from jaxrl.sharding.split_mesh import Half

        trainer = self._trainer
        assert trainer is not None, "a stream of gradients needs the trainer's devices on this host"
        streams = {each: TrainStream(trainer, Half(trainer.mesh, i), self._teacher) for i, each in enumerate(freed)}
        self.add_programs([stream.programs for stream in streams.values()], of_update=True)
        teachers = [each for stream in streams.values() if (each := stream.teacher_programs) is not None]
        self.add_programs(teachers, of_update=True)
        return streams

    def index_builder(self) -> IndexBuilder:
        from jaxrl.mechanisms.speculation.index import IndexBuilder

        return IndexBuilder(self._timeline)

    def release_workers(self, workers: Sequence[int]) -> None:
        assert isinstance(self._workers, WorkerSet), "workers on other hosts are not freed one by one"
        self._workers.release_some(workers)

    def wait_quiet(self) -> None:
        """Waits until nothing runs on the rollout's devices."""
        self._workers.wait_quiet()
        for wait in self._beside:
            wait()

    def on_wait_quiet(self, wait: Callable[[], None]) -> None:
        self._beside.append(wait)

    def add_programs(self, programs: Sequence[CompiledPrograms], *, of_update: bool) -> None:
        (self.update_programs if of_update else self.rollout_programs).extend(programs)

    def on_close(self, close: Callable[[], Any]) -> None:
        self._stack.callback(close)
