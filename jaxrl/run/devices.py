"""Which devices a run uses, of this process and of all, the meshes over both, and their memory.

On one host the two meshes are one. Among several, training spans all devices, in the order of processes, and its minor
axes lie inside hosts; a rollout stays inside its host, or its group of hosts (`rollout.hosts_per_worker`). A device's
id is no index: ids of a second process may begin anywhere, and a device may be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError
from jaxrl.config.checks import LEARNING, host_problem
from jaxrl.mechanisms.judge import Judge
from jaxrl.sharding.memory import DeviceMemory, memory_of
from jaxrl.sharding.mesh import make_mesh, submeshes


@dataclass(frozen=True, slots=True)
class ProcessDevices:
    """A process among the run's, one per host.

    Attributes:
      local_devices: that the run uses of this process. devices: of all processes, equally many of each.
      memory: of this host's devices, or the least of all hosts once they have exchanged it (`with_least`).
    """

    process: int
    num_processes: int
    local_devices: tuple[Any, ...]
    devices: tuple[Any, ...]
    memory: DeviceMemory

    @property
    def mesh(self) -> Mesh:
        return make_mesh(self.devices, self.num_processes)

    def rollout_mesh(self, num_hosts: int = 1) -> Mesh:
        """The mesh of this host, or of its group of hosts: a part of `mesh`, with its minor axes."""
        groups = submeshes(self.mesh, self.num_processes // num_hosts, num_hosts)
        return groups[self.process // num_hosts]

    def with_least(self, reported: int | None) -> ProcessDevices:
        """The same with the memory that a device has on every host, as the hosts have agreed: plans and programs must
        be the same on all. None: not every platform reports it."""
        share = self.memory.share if reported is None else reported
        return replace(self, memory=replace(self.memory, reported=reported, share=share))


def devices_by_process(devices: Sequence[Any], num_processes: int, per_process: int = 0) -> tuple[tuple[Any, ...], ...]:
    """The devices of each process that a run uses, in order: at most `per_process`; 0: all."""
    found: list[list[Any]] = [[] for _ in range(num_processes)]
    for device in devices:
        found[device.process_index].append(device)
    return tuple(tuple(own[: per_process or len(own)]) for own in found)


def refuse_few(option: str, wanted: int, found: int, host: str = "") -> None:
    """Raises ConfigError where an option asks for more devices than there are, on a named host or here."""
    if wanted > found:
        where = f"that there are on {host}" if host else "there are"
        raise ConfigError(f"{option} ({wanted}) must be at most the devices {where} ({found})")


def prepare_jax(config: Config) -> list[Any]:
    """Sets what must be set before the first computation; returns the devices that a run uses of this process. Writes
    nothing."""
    _set_types(config)
    devices = jax.local_devices()
    option, wanted = "trainer.num_devices", config.trainer.num_devices
    if not wanted:
        option, wanted = "hosts.devices_per_host", config.hosts.devices_per_host or len(devices)
    refuse_few(option, wanted, len(devices))
    if problem := host_problem(config, wanted):
        raise ConfigError(problem)
    return devices[:wanted]


def prepare_hosts(config: Config, on_machine: int = 1) -> ProcessDevices:
    """`prepare_jax` for a run that may have several hosts, each with a process. Returns this host's place among them,
    with the memory of its devices. `on_machine`: how many of the hosts share one machine.

    Raises ConfigError where the devices do not fit the run.
    """
    count = config.hosts.num
    assert count == jax.process_count(), f"hosts.num is {count}, and jax has {jax.process_count()} processes"
    if count == 1:
        devices = tuple(prepare_jax(config))
        return ProcessDevices(0, 1, devices, devices, memory_of(devices))
    _set_types(config)
    processes = devices_by_process(jax.devices(), count, config.hosts.devices_per_host)
    own = processes[jax.process_index()]
    assert all(len(each) == len(own) for each in processes), "the world was opened with unequal processes"
    if problem := host_problem(config, len(own)):
        raise ConfigError(problem)
    everyone = tuple(device for devices in processes for device in devices)
    return ProcessDevices(jax.process_index(), count, own, everyone, memory_of(own, len(own) * on_machine))


def _set_types(config: Config) -> None:
    types = [config.rollout.dtype, config.actor.dtype, config.actor.param_dtype]
    if Judge.is_on(config):
        types.append(config.reward.judge.dtype)
    if "float64" in types:
        jax.config.update("jax_enable_x64", True)


def with_types(
    config: Config,
    platform: str,
    say: Callable[[str], None] = print,
    earlier: Config | None = None,
    command: str = "train",
) -> Config:
    """`config` with a type in place of each dtype that is auto, and said. `earlier`: the configuration of the run's
    start before, whose types it keeps; `command`: that reads it (empty: one that only rolls out), as types that it does
    not use go unsaid."""
    typed = config.with_types(platform, earlier)
    why = f" on {platform}" if earlier is None else ", as this run began"
    teacher = config.algorithm.teacher
    for name, before, after, is_read in (
        ("actor", config.actor, typed.actor, command in LEARNING),
        ("rollout", config.rollout, typed.rollout, command not in ("sft", "dpo")),
        ("algorithm.teacher", teacher, typed.algorithm.teacher, command == "train" and bool(teacher.path)),
    ):
        if before.dtype == "auto" and is_read:
            say(f"{name}.dtype: auto is {after.dtype}{why}")
    return typed
