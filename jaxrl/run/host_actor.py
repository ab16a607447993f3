"""A host's process in a run on several hosts: the actor that Ray starts there, and how it joins the others.

`HostActor` holds the host's `jaxrl.run.host.Host` and carries out the controller's calls, one after another, in the
order in which they were sent. Calls that must answer while another runs have a separate thread (`HEALTH`), and so have
training calls (`LEARNING`): if the rollout has its own devices, an update runs beside a round.

Source: Ray's actors and concurrency groups.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import jax

from jaxrl.config import Config
from jaxrl.config.options import HostsSection
from jaxrl.rollout.remote import ExecutorFacts, LayoutFacts
from jaxrl.run.build import read_tokenizer_and_model
from jaxrl.run.devices import ProcessDevices, devices_by_process, refuse_few
from jaxrl.run.host import Host, LoadRequest, NoGroup
from jaxrl.run.host_agreement import facts, folder_problem
from jaxrl.run.memory import layout_degrees
from jaxrl.scheduling.tokens.plan import Plan, PlanResult, Ticket
from jaxrl.training.steps import Choice
from jaxrl.types import TrainBatch

_COUNT_FLAG = "--xla_force_host_platform_device_count"  # in XLA_FLAGS: overrides how many devices a CPU has
HEALTH, LEARNING = "health", "learning"
GROUPS = {"progress": HEALTH, "is_buffered": HEALTH, "learn": LEARNING, "annotate": LEARNING}
"""Methods with their concurrency groups, each of which is a thread."""


_PATIENCE_MS = 7 * 24 * 3600 * 1000
"""The controller sees whether hosts make progress, and ends the run where none does."""


class HostGroup(NoGroup):
    """The other hosts, by the key-value store that `jax.distributed` keeps in the first one. Its client is a private
    part of jax (the calls are those of jax 0.10 and 0.11). A failure here ends the run: the controller receives it as
    of any error on a host."""

    def __init__(self, on_machine: int = 1) -> None:
        from jax._src import distributed

        state = distributed.global_state
        assert state.client is not None, "jax.distributed is not initialized"
        self._client: Any = state.client
        self._process, self._num_processes = state.process_id, state.num_processes
        self.on_machine = on_machine

    def with_least(self, devices: ProcessDevices) -> ProcessDevices:
        self._put(f"memory/{self._process}", str(devices.memory.reported or ""))
        found = [self._get(f"memory/{i}") for i in range(self._num_processes)]
        return devices.with_least(min(map(int, found)) if all(found) else None)

    def meet(self, name: str) -> None:
        self._client.wait_at_barrier(f"jaxrl/meet/{name}", _PATIENCE_MS)

    def first(self, name: str, make: Callable[[], str]) -> str:
        if self._process == 0:
            self._put(f"first/{name}", make())
        return self._get(f"first/{name}")

    def _put(self, key: str, value: str) -> None:
        self._client.key_value_set(f"jaxrl/{key}", value)

    def _get(self, key: str) -> str:
        return self._client.blocking_key_value_get(f"jaxrl/{key}", _PATIENCE_MS)


class HostActor:
    """One host of a run; `process`: its number among `hosts.num`."""

    def __init__(self, process: int, hosts: HostsSection) -> None:
        self._process, self._hosts = process, hosts
        self._beats, self._doing, self._committed = 0, "starting", -1
        self._tickets: dict[int, deque[Ticket]] = {}

    @cached_property
    def host(self) -> Host:
        return Host(HostGroup(self._on_machine), self._beat)

    def _beat(self, doing: str) -> None:
        self._beats += 1
        self._doing = doing or self._doing

    def progress(self) -> tuple[int, str, int]:
        """How often there was progress, what is being done, and the newest complete checkpoint (-1: none)."""
        return self._beats, self._doing, self._committed

    # -- joining the others ------------------------------------------------------------------------------------------

    def address(self) -> tuple[str, str, int]:
        """host:port at which the others may find this actor, its machine's name, and its process id."""
        import ray  # pyright: ignore[reportMissingImports]  (an optional extra)

        node = ray.util.get_node_ip_address()
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        return f"{node}:{port}", socket.gethostname(), os.getpid()

    def join(self, coordinator: str, on_machine: int) -> int:
        """Joins the `jax.distributed` world of all hosts; returns how many devices this host has. `coordinator`:
        host:port of the first host; `on_machine`: hosts of the run on this machine. Raises ConfigError where there are
        fewer than `hosts.devices_per_host`."""
        hosts, wanted = self._hosts, self._hosts.devices_per_host
        self._on_machine = on_machine
        self._beat("meeting the other hosts")
        if wanted:
            flags = os.environ.get("XLA_FLAGS", "").split()
            os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if _COUNT_FLAG not in flag)
            jax.config.update("jax_num_cpu_devices", wanted)
        jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator,
            hosts.num,
            self._process,
            initialization_timeout=round(hosts.stall_timeout_s),
            cluster_detection_method="deactivate",
        )
        found = devices_by_process(jax.devices(), hosts.num, wanted)[self._process]
        refuse_few("hosts.devices_per_host", wanted, len(found), socket.gethostname())
        return len(found)

    def facts(self, config: Config, mark: str) -> tuple[dict[str, str], str]:
        """The facts that must be equal on all hosts, and the problem with the run directory here, where the controller
        has written the file `mark`; empty: nothing."""
        hosts = self._hosts
        own = devices_by_process(jax.devices(), hosts.num, hosts.devices_per_host)[self._process]
        return facts(config, own), folder_problem(config.trainer.run_dir, mark)

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, path: str, *arguments: Any, **named: Any) -> Any:
        """Calls a method of the host, or of one of its attributes (`trainer.apply`)."""
        self._beat(path.replace(".", " ").replace("_", " "))
        return self.get(path)(*arguments, **named)

    def learn(self, path: str, *arguments: Any) -> Any:
        """`call`, of a model in training."""
        return self.call(path, *arguments)

    def get(self, path: str) -> Any:
        """The value of an attribute."""
        return reduce(getattr, path.split("."), self.host)

    def open_store(self, folder: Path) -> tuple[Choice | None, int | None]:
        store = self.host.open_store(folder, self._note_commit)
        return store.chosen, store.latest_step()

    def _note_commit(self, step: int) -> None:
        self._committed = step

    def load(self, asked: LoadRequest) -> str | None:
        tokenizer = None if asked.teacher is None else read_tokenizer_and_model(self.host.config)[0]
        return self.host.load(asked, tokenizer)

    def build_workers(self) -> list[ExecutorFacts]:
        """Builds the executors of this host's workers, and describes them."""
        workers, config = self.host.build_workers(), self.host.config
        degrees = layout_degrees(config, self.host.rollout_mesh.size)
        return [
            ExecutorFacts(
                each.config,
                each.tp,
                {tp: LayoutFacts(each.capacity(tp), each.row_sizes(tp), each.verify_widths(tp)) for tp in degrees},
            )
            for each in workers.executors
        ]

    def sync_weights(self, policy_version: int) -> None:
        self._beat("sync of weights")
        self.host.workers.sync_weights(self.host.params, policy_version)

    def buffer_weights(self, policy_version: int) -> None:
        self.host.workers.buffer_weights(self.host.params, policy_version)

    def is_buffered(self) -> bool:
        return self.host.workers.is_buffered

    def take_buffered(self, worker: int) -> None:
        self.host.workers.take_buffered(worker)

    def warm_up(self) -> int:
        """Compiles the rollout's programs, and together with them the update's, except on CPUs. Returns their
        number."""
        on_cpu = self.host.place.devices[0].platform == "cpu"
        update = [] if on_cpu else [each.programs for each in self.host.models]
        return self.host.workers.warm_up(lambda state: self._beat(f"compiling: {state}"), update)

    def compile_ahead(self, degrees: tuple[int, ...]) -> None:
        """Begins to compile in the background what is not compiled yet."""
        self._ahead = self.host.workers.compile_ahead(degrees, [each.programs for each in self.host.models])

    def submit(self, worker: int, plan: Plan) -> None:
        ticket = self.host.workers.executors[worker].submit(plan)
        self._tickets.setdefault(worker, deque()).append(ticket)

    def collect(self, worker: int) -> PlanResult:
        """The result of a worker's oldest plan."""
        self._beats += 1
        return self.host.workers.executors[worker].collect(self._tickets[worker].popleft())

    def release(self, weights: bool) -> None:
        self.host.workers.release(weights=weights)

    def annotate(self, batch: TrainBatch) -> tuple[Any, Any, Any]:
        """The teacher's log-probabilities of a batch's tokens, as `MeshTeacher.annotate` writes them into the batch."""
        batch = replace(batch)
        assert self.host.teacher is not None, "there is a teacher"
        self.host.teacher.annotate(batch)
        return batch.teacher_logprobs, batch.teacher_top_logprobs, batch.teacher_ids

    def executor(self, worker: int, method: str, *arguments: Any) -> Any:
        """Calls a method of an executor."""
        return getattr(self.host.workers.executors[worker], method)(*arguments)
