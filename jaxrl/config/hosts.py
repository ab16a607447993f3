"""The options of a run on several hosts (`hosts`). What they exclude stands in `checks`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from jaxrl.schema.declared import Cap
from jaxrl.schema.devices import MAX_DEVICES
from jaxrl.schema.limits import MAX_WAIT

Launcher = Literal["none", "local", "ray"]
MAX_HOSTS = Cap(4096, "every process hears of every sample")


@dataclass(frozen=True)
class HostsSection:
    """Several hosts: one process on each, a mesh over all of them for training, and a rollout engine per host."""

    num: Annotated[int, Ge(1), MAX_HOSTS, "Processes of the run, one per host; each has as many devices."] = 1
    launcher: Annotated[
        Launcher,
        "What starts the processes; ray: this command, which controls an actor on each host of a Ray cluster, local: "
        "this command, all on this machine, none: something else has (Slurm, Kubernetes, mpirun), the same command on "
        "each host.",
    ] = "none"
    address: Annotated[
        str,
        "With hosts.launcher=ray, the cluster's address; auto: one that `ray start` has started on this machine; "
        "empty: the one that the environment variable RAY_ADDRESS names, or else a cluster of the run's own.",
    ] = ""
    coordinator: Annotated[
        str, "With hosts.launcher=none, host:port of process 0; empty: what jax detects from the environment."
    ] = ""
    devices_per_host: Annotated[int, Ge(0), MAX_DEVICES, "Devices that each process uses; 0: all that it has."] = 0
    heartbeat_s: Annotated[
        float, Ge(1), MAX_WAIT, "A process that has been silent for so many seconds is dead, and the world ends."
    ] = 30.0
    stall_timeout_s: Annotated[
        float,
        Gt(0),
        MAX_WAIT,
        "Seconds for which a host may keep the others waiting in one place before the run ends and names it.",
    ] = 900.0
    max_restarts: Annotated[
        int,
        Ge(0),
        "How often a launcher starts the processes again, without a checkpoint in between, before it gives up.",
    ] = 3


def with_workers_of_hosts(num_workers: int, num_groups: int) -> int:
    """The workers of a run: as many as asked for, and at least one per host, or group of hosts that a worker spans."""
    return num_groups if num_workers == 1 else num_workers
