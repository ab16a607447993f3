"""The executors of several workers, each on a submesh (`jaxrl.sharding.mesh.submeshes`), as one. Plans reach a worker
through its own engine. Source: docs/architecture.md (workers; facts about device_put and aliases).

Weights: one program on the complete mesh makes them in the layout of the largest degree in use, in which the workers
are replicas of each other. Each worker's shards become arrays on its devices without a copy
(`jaxrl.sharding.split_mesh`). A worker at a smaller degree gathers the rest inside its submesh. So the trainer's
weights are read once, and no device holds the weights of another worker's layout beside its own.

Over several hosts the one program runs on the devices of all of them, and every process dispatches it. It makes the
layout of the largest degree that the configuration allows, because no process knows which degrees are in use on other
hosts. What comes after it, each host (or group of hosts that a worker spans) does for itself.

A worker whose change of layout failed halfway takes its weights from another worker of its host: the trainer's may be
spread over all devices, and no program runs on a part of them. The only worker on one of several hosts has no such
source, and the run resumes from its last checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.rollout.calls import MeshTicket
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.scheduling.tokens.plan import Ticket
from jaxrl.sharding.compiled import CompileAhead, CompiledPrograms, Meet, alone, compile_threads
from jaxrl.sharding.layout import Layout, tp_degrees
from jaxrl.sharding.reshard import reshard
from jaxrl.sharding.rules import rollout_calls, rollout_shardings
from jaxrl.sharding.split_mesh import submesh_arrays

_POLL_S = 0.0002


class WorkerSet:
    """The executors of this process (`Run.executors`), whose meshes share one source of weights.

    Args:
      mesh: of the rollout, on this host or its group of hosts; each executor has a part of it.
      whole: of all hosts, where there are several: `mesh` is one of its parts, and the trainer's weights are on it.
      meet: where all hosts meet once they have compiled the programs that make the weights.
      source: of several hosts, the trainer's part of this one's devices, where the rollout has its own devices: then
        `whole` is the mesh of the trainer's devices.
    """

    def __init__(
        self,
        mesh: Mesh,
        executors: Sequence[MeshExecutor],
        whole: Mesh | None = None,
        meet: Meet = alone,
        source: Mesh | None = None,
    ) -> None:
        self.mesh, self._meet, self._met, self._source = mesh, meet, False, source
        self._whole, self._is_global = whole or mesh, whole is not None
        self.executors = tuple(executors)
        self._buffered: tuple[int, list[Any]] | None = None  # a version, and each worker's part of its weights
        if len(self.executors) > 1:
            for executor in self.executors:
                executor.way_back = partial(self._take_from_another, executor)

    @property
    def num_devices(self) -> int:
        return self.mesh.size

    @property
    def recompiles(self) -> int:
        return sum(executor.recompiles for executor in self.executors)

    # -- memory phases -----------------------------------------------------------------------------------------------

    def sync_weights(self, train_params: Any, policy_version: int) -> None:
        for executor in self.executors:
            executor.drop_weights()
        parts = self._parts(train_params)
        for executor, part, layout in zip(self.executors, parts, self._layouts(), strict=True):
            executor.take_weights(part, layout, policy_version)

    def buffer_weights(self, train_params: Any, policy_version: int) -> None:
        """Begins to bring the trainer's weights to all workers, beside those in use."""
        assert self._buffered is None, "weights of two versions are ahead"
        self._buffered = policy_version, self._parts(train_params)

    @property
    def is_buffered(self) -> bool:
        arrays = [] if self._buffered is None else jax.tree.leaves(self._buffered[1])
        return bool(arrays) and all(array.is_ready() for array in arrays)

    def take_buffered(self, worker: int) -> None:
        """A worker's own weights go. The last one to take the buffered ones empties the buffer."""
        assert self._buffered is not None, "no weights are buffered"
        version, parts = self._buffered
        executor = self.executors[worker]
        executor.drop_weights()
        executor.take_weights(parts[worker], self._layouts()[worker], version)
        parts[worker] = None
        if not any(part is not None for part in parts):
            self._buffered = None

    def _layouts(self) -> list[Layout]:
        """Each worker's layout at the largest degree in use; with several hosts, at the largest possible degree."""
        tp = max(executor.tp for executor in self.executors)
        if self._is_global:
            tp = self.executors[0].config.max_tp
        return [Layout(executor.layout.mesh, tp) for executor in self.executors]

    def _parts(self, train_params: Any) -> list[Any]:
        """The trainer's weights for each worker, in `_layouts`. Each part owns its buffers: a worker that moves its own
        deletes them."""
        first, layouts = self.executors[0], self._layouts()
        tp = layouts[0].tp
        if self._source is not None:  # a smaller part may have no layout of this degree
            tp = max(degree for degree in tp_degrees(self._source) if degree <= tp)
        together = Layout(self._whole, tp)
        if not self._met and self._is_global:
            form = first.config.dtype, first.config.max_tp
            for program, arguments in rollout_calls(train_params, first.model, together, *form, **first.form):
                program.lower(*arguments).compile()
            self._meet("weights")
            self._met = True
        whole = first.rollout_form(train_params, together)

        def shardings(layout: Layout) -> Any:
            return rollout_shardings(first.model, layout, first.config.max_tp, **first.form)

        if self._source is not None:  # from the trainer's devices of all hosts to the rollout's own of this one
            own = submesh_arrays(whole, shardings(Layout(self._source, tp)))
            whole = reshard(own, shardings(Layout(self.mesh, layouts[0].tp)))
        return [submesh_arrays(whole, shardings(each)) for each in layouts]

    def allocate(self) -> None:
        for executor in self.executors:
            if not executor.has_pool:
                executor.allocate()

    def release(self, *, weights: bool = False) -> None:
        for executor in self.executors:
            executor.release(weights=weights)

    def wait_quiet(self) -> None:
        for executor in self.executors:
            executor.wait_quiet()

    def release_some(self, workers: Sequence[int]) -> None:
        """The next `sync_weights` and `allocate` bring all of it back."""
        for worker in workers:
            self.executors[worker].release(weights=True)

    def _take_from_another(self, executor: MeshExecutor) -> None:
        version = executor.policy_version
        sources = [e for e in self.executors if e is not executor and e.has_weights and e.policy_version == version]
        if not sources:
            raise RuntimeError(f"no other worker has the weights of version {version}")
        executor.drop_weights()
        executor.take_weights(sources[0].copied_weights(executor.layout), executor.layout, version)

    def first_done(self, tickets: Mapping[int, Ticket]) -> int:
        while True:
            for worker, ticket in tickets.items():
                if isinstance(ticket, MeshTicket) and ticket.is_done:
                    return worker
            time.sleep(_POLL_S)

    def share(self, kind: type) -> None:
        """Objects of a class that plans name again and again; here plans have the objects themselves."""

    # -- compilation -------------------------------------------------------------------------------------------------

    def warm_up(
        self, progress: Callable[[str], None] = lambda state: None, first: Sequence[CompiledPrograms] = ()
    ) -> int:
        """As `MeshExecutor.warm_up`, for all workers."""
        now = [programs for executor in self.executors for programs in executor.programs_of([executor.tp])]
        with closing(CompileAhead([*first, *now])) as ahead:
            count = ahead.wait(progress)
        if self.executors[0].is_spread:
            self._meet("rollout")
        return count

    def compile_ahead(self, degrees: Iterable[int], first: Sequence[CompiledPrograms] = ()) -> CompileAhead | None:
        """Begins to compile in the background: the programs of `first`, then the programs of layouts that are not in
        use. The rollout (on a CPU) and the host's work need cores as well, so half of the cores compile."""
        others = [e.programs_of([tp]) for tp in degrees for e in self.executors if tp != e.tp]
        every = [*first, *(programs for one in others for programs in one)]
        return CompileAhead(every, max(compile_threads() // 2, 1)) if every else None
