"""Where this process stands among the run's hosts: its devices and everyone's, the meshes over both, their memory.

Purpose: `ProcessDevices` is what the parts of a run are built from, and `prepare_hosts` finds it. With one process the
two meshes are one.

Source: docs/architecture.md (several processes). Training spans all devices, in the order of processes, and its minor
axes lie inside hosts; a rollout stays inside its host. A device's id is no index: ids of a second process may begin
anywhere, and a device may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from jaxrl.config import ConfigError
from jaxrl.sharding.mesh import make_mesh


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What is known of the devices' memory, in bytes of one device.

    Attributes:
      platform: `jaxrl.sharding.mesh.platform_of`.
      reported: None where the backend reports none (a CPU's memory is the host's).
      share: the same, or a CPU's share of the host's.
    """

    platform: str
    reported: int | None
    share: int


@dataclass(frozen=True, slots=True)
class ProcessDevices:
    """A process among the run's, one per host.

    Attributes:
      process: its number. num_processes: of the run.
      local_devices: that the run uses of this process.
      devices: of all processes, in their order; equally many of each.
      memory: of this host's devices, or the least of all hosts once they have told each other (`with_least`).
    """

    process: int
    num_processes: int
    local_devices: tuple[Any, ...]
    devices: tuple[Any, ...]
    memory: DeviceMemory

    @property
    def mesh(self) -> Mesh:
        """The mesh of training, over all hosts."""
        return make_mesh(self.devices, self.num_processes)

    @property
    def local_mesh(self) -> Mesh:
        """The mesh of this host: a part of `mesh`, with its minor axes."""
        return make_mesh(self.local_devices)

    def with_least(self, reported: int | None) -> ProcessDevices:
        """The same with the memory that a device has on every host, as the hosts have agreed: plans and programs must
        be the same on all. None: not every platform reports it."""
        share = self.memory.share if reported is None else reported
        return replace(self, memory=replace(self.memory, reported=reported, share=share))


def devices_of_hosts(devices: Sequence[Any], num_processes: int, per_host: int = 0) -> tuple[tuple[Any, ...], ...]:
    """The devices that the run uses of each process, in order.

    Args:
      devices: all that there are, of all processes.
      per_host: how many of each; 0: all.

    Raises:
      ConfigError: a process has too few, another number than the first, or none.
    """
    by_process: dict[int, list[Any]] = {process: [] for process in range(num_processes)}
    for device in devices:
        assert device.process_index in by_process, f"a device of process {device.process_index} of {num_processes}"
        by_process[device.process_index].append(device)
    counts = {process: len(own) for process, own in by_process.items()}
    if per_host and min(counts.values()) < per_host:
        raise ConfigError(
            f"hosts.devices_per_host ({per_host}) must be at most the devices of each process, found {_listed(counts)}"
        )
    if not per_host and len({*counts.values()}) > 1:
        raise ConfigError(
            f"all hosts must have as many devices, found {_listed(counts)}: set hosts.devices_per_host to "
            f"{min(counts.values())}"
        )
    return tuple(tuple(own[: per_host or len(own)]) for own in by_process.values())


def _listed(counts: Mapping[int, int]) -> str:
    return ", ".join(f"{count} of process {process}" for process, count in counts.items())
