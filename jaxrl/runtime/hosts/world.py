"""The world: the processes of a run as jax knows them, brought up and taken down.

`open_world` starts `jax.distributed` before anything else touches a device. Where process 0 is and which number this
process has come from the environment variables that a launcher sets (`JAXRL_COORDINATOR`, `JAXRL_PROCESS_ID`), from
`hosts.coordinator`, or from what jax detects (Slurm, Kubernetes, Open MPI). One process without a coordinator is a
world too, with a store in memory and nothing to wait for; with one, it is `jax.distributed` with a single process,
whose sums on a CPU have the order of those of several (its collectives are gloo's as well).

jax's own ways to end a process have no sentence: it aborts with stacks, after waiting for hosts that are not there
(300 s by default), and crashes where the coordinator's port is taken. So the address is tried out before jax has it,
and whatever can fail later is timed here as well, a little shorter.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from jaxrl.config import ConfigError
from jaxrl.config.hosts import HostsSection
from jaxrl.runtime.devices import devices_by_process, refuse_few, unequal_problem
from jaxrl.runtime.hosts.environment import COORDINATOR, COUNT_FLAG, FLAGS, PROCESS_ID
from jaxrl.runtime.hosts.key_value_store import (
    CoordinationStore,
    Disagreement,
    KeyValueStore,
    MemoryStore,
)
from jaxrl.runtime.hosts.liveness import GRACE_S, PhaseBarrier
from jaxrl.runtime.stop import Stop, end

_SHUTDOWN_S = 10  # jax's; all come to it at the same moment
_LATER_S = 30  # jax's time for the start, beyond ours
_TRY_S = 5  # for an address to work: a run before this one may be about to leave its port
_SAY_S = 15  # until a process says what it waits for
_NAMES = "names of hosts"


@dataclass(frozen=True)
class World:
    """The processes of a run and their devices.

    Attributes:
      store: what they write for each other. barrier: what keeps them together.
      host: the name of this machine.
      devices_by_process: what the run uses of each, as many of all.
    """

    store: KeyValueStore
    barrier: PhaseBarrier
    host: str
    devices_by_process: tuple[tuple[Any, ...], ...]

    @property
    def devices(self) -> list[Any]:
        """Of all processes, in their order."""
        return [device for own in self.devices_by_process for device in own]

    @property
    def local_devices(self) -> list[Any]:
        """Those of this process."""
        return list(self.devices_by_process[self.process])

    @property
    def process(self) -> int:
        return self.store.process

    @property
    def num_processes(self) -> int:
        return self.store.num_processes


@contextmanager
def open_world(hosts: HostsSection, stop: Stop | None = None) -> Iterator[World]:
    """Brings the world up, and takes it down when the block ends. An error inside ends all processes, and so does a
    signal that ends one of them.

    Args:
      stop: the signals of the program; without one they are the caller's.

    Raises:
      ConfigError: `hosts` does not fit what is there; on one process without others.
    """
    stop = stop or Stop()
    found = _coordinates(hosts)
    _prepare_devices(hosts)
    host = socket.gethostname()
    if found is None:
        barrier = PhaseBarrier(MemoryStore(), host, hosts.heartbeat_s, hosts.stall_timeout_s, stop)
        yield World(barrier.store, barrier, host, _devices(hosts))
        return
    _connect(hosts, *found)
    barrier = PhaseBarrier(CoordinationStore(), host, hosts.heartbeat_s, hosts.stall_timeout_s, stop)
    with barrier.failing(), stop.ending_by(barrier.fail):
        if jax.process_count() != hosts.num:
            raise Disagreement(
                f"hosts.num ({hosts.num}) must be the number of processes that were started ({jax.process_count()})"
            )
        barrier.at("looking for devices")
        processes = _devices(hosts)
        _refuse_unequal(barrier, [len(own) for own in processes])
        yield World(barrier.store, barrier, host, processes)
        barrier.close()
    _disconnect()


def _coordinates(hosts: HostsSection) -> tuple[str | None, int | None] | None:
    """Where process 0 is, and which process this is; None of them: as jax detects it. None: one process alone.

    Raises:
      ConfigError: a number that no process can have.
    """
    address = os.environ.get(COORDINATOR) or hosts.coordinator or None
    if hosts.num == 1 and address is None:
        return None
    name, _, port = (address or "").rpartition(":")
    if address is not None and not (name and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"{_origin()} must be host:port of process 0, found {address!r}: a port is a number from 1 to 65535"
        )
    text = os.environ.get(PROCESS_ID)
    if text is None:
        return address, 0 if hosts.num == 1 else None
    if not text.isdecimal() or int(text) >= hosts.num:
        raise ConfigError(f"{PROCESS_ID} must be a whole number below hosts.num ({hosts.num}), found {text!r}")
    return address, int(text)


def _prepare_devices(hosts: HostsSection) -> None:
    """What must be set before jax looks for devices."""
    if COUNT_FLAG not in os.environ.get(FLAGS, "") and hosts.devices_per_host:
        jax.config.update("jax_num_cpu_devices", hosts.devices_per_host)
    if hosts.devices_per_host and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
        visible = ",".join(map(str, range(hosts.devices_per_host)))
        jax.config.update("jax_cuda_visible_devices", visible)
        jax.config.update("jax_rocm_visible_devices", visible)


def _connect(hosts: HostsSection, address: str | None, process: int | None) -> None:
    """Starts `jax.distributed`. Ends the process where the others do not come: jax would abort it without a sentence.

    Raises:
      ConfigError: jax detects no cluster.
    """
    if address is not None:
        _try_out(address, process)
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which is a wish to stop here
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    options: dict[str, Any] = {}
    if address is not None and process is not None:
        options |= {"coordinator_address": address, "process_id": process, "num_processes": hosts.num}
        options |= {"cluster_detection_method": "deactivate"}
    elif address is not None:
        options |= {"coordinator_address": address}
    if address is not None and _is_loopback(address):
        options |= {"coordinator_bind_address": address}  # jax's default is every address of the machine
    visible = jax.config.read("jax_cuda_visible_devices"), jax.config.read("jax_rocm_visible_devices")
    connected = threading.Event()
    threading.Thread(target=_end_late, args=(connected, hosts, address), daemon=True).start()
    try:
        jax.distributed.initialize(
            **options,
            initialization_timeout=math.ceil(hosts.stall_timeout_s) + _LATER_S,
            heartbeat_timeout_seconds=math.ceil(hosts.heartbeat_s + GRACE_S),
            shutdown_timeout_seconds=_SHUTDOWN_S,
        )
    except ValueError as error:  # of what it could not detect
        raise ConfigError(
            f"hosts.num is {hosts.num} and nothing says which process this is: set hosts.coordinator and the "
            f"environment variable {PROCESS_ID}, start the processes with Slurm, Kubernetes or Open MPI, or set "
            f"hosts.launcher (jax: {error})"
        ) from None
    finally:
        connected.set()
    if "JAX_LOCAL_DEVICE_IDS" not in os.environ:  # under Slurm jax would see one device for each process
        jax.config.update("jax_cuda_visible_devices", visible[0])
        jax.config.update("jax_rocm_visible_devices", visible[1])


def _origin() -> str:
    """What says where process 0 is."""
    return COORDINATOR if os.environ.get(COORDINATOR) else "hosts.coordinator"


def _name_and_port(address: str) -> tuple[str, int]:
    name, _, port = address.rpartition(":")
    return name.strip("[]"), int(port)


def _try_out(address: str, process: int | None) -> None:
    """Raises ConfigError for an address that cannot be that of process 0, after `_TRY_S`."""
    until_s = time.monotonic() + _TRY_S
    while problem := _problem(address, process):
        if time.monotonic() > until_s:
            raise ConfigError(f"{_origin()} ({address}): {problem}")
        time.sleep(0.2)


def _problem(address: str, process: int | None) -> str:
    """Why nobody can meet at an address: its name is unknown; process 0 cannot listen there, where jax will, or does
    not reach itself by it. Empty: nothing is wrong so far."""
    name, port = _name_and_port(address)
    try:
        socket.getaddrinfo(name, port)
    except (OSError, UnicodeError) as error:
        return f"{socket.gethostname()} does not know the name {name} ({error})"
    if process != 0:
        return ""
    try:
        if _is_loopback(address):
            listens = socket.create_server((name, port))
        elif socket.has_dualstack_ipv6():
            listens = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listens = socket.create_server(("", port))
    except OSError as error:
        return f"process 0 cannot listen on port {port} of {socket.gethostname()} ({error})"
    with listens:
        listens.settimeout(_TRY_S)
        try:
            with socket.create_connection((name, port), timeout=_TRY_S) as client, listens.accept()[0]:
                client.close()  # before the other end, which would keep the port for a while
        except OSError as error:
            return f"it does not lead to process 0, which runs on {socket.gethostname()} ({error})"
    return ""


def _end_late(connected: threading.Event, hosts: HostsSection, address: str | None) -> None:
    first_s = min(_SAY_S, hosts.stall_timeout_s)
    if address is not None and not connected.wait(first_s):
        seen = "something answers there; other processes are missing, or it is not process 0"
        try:
            socket.create_connection(_name_and_port(address), timeout=_TRY_S).close()
        except OSError as error:
            seen = f"process 0 does not answer ({error})"
        print(f"jaxrl: still waiting at {address} ({_origin()}): {seen}", file=sys.stderr, flush=True)
    if not connected.wait(hosts.stall_timeout_s - first_s * (address is not None)):
        where = "" if address is None else f" at {address}"
        end(
            f"waited {hosts.stall_timeout_s:g} s (hosts.stall_timeout_s) for {hosts.num} processes (hosts.num) to meet"
            f"{where}: process 0 or another one was not started, or does not reach that address",
            1,
        )


def _is_loopback(address: str) -> bool:
    name = address.rpartition(":")[0]
    return name == "localhost" or name.startswith("127.")


def _devices(hosts: HostsSection) -> tuple[tuple[Any, ...], ...]:
    """The devices of each process that the run uses. Raises ConfigError where this one has too few."""
    found = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    processes = devices_by_process(found, jax.process_count(), hosts.devices_per_host)
    own = len(processes[jax.process_index()])
    refuse_few("hosts.devices_per_host", hosts.devices_per_host, own, socket.gethostname())
    return processes


def _refuse_unequal(barrier: PhaseBarrier, counts: list[int]) -> None:
    """Raises Disagreement, on all, where processes have different numbers of devices."""
    if len(set(counts)) == 1:  # all processes see the devices of all
        return
    store, timeout_s = barrier.store, barrier.stall_timeout_s
    store.put(f"{_NAMES}/{store.process:05}", barrier.host.encode())
    with barrier.waiting("the devices of all hosts"):
        store.barrier(_NAMES, timeout_s)
    raise Disagreement(unequal_problem(counts, [name.decode() for _, name in store.folder(_NAMES)]))


def _disconnect() -> None:
    """Ends `jax.distributed`. All processes have come to the end already; one that died since cannot hold this one."""
    timer = threading.Timer(_SHUTDOWN_S - 2, end, ("a host did not leave the world in time", 1))
    timer.daemon = True
    timer.start()
    jax.distributed.shutdown()
    timer.cancel()
