"""Which devices each of several processes on one machine gets, by environment variables; jax is not asked.

On a CPU the devices are made up by XLA, as many as are wanted. GPUs are dealt out in order by CUDA_VISIBLE_DEVICES. A
machine's TPU belongs to one process.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxrl.config import ConfigError
from jaxrl.config.hosts import HostsSection
from jaxrl.runtime.hosts.environment import COUNT_FLAG, FLAGS, PLATFORMS, VISIBLE

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_LIST_S = 30.0
_GOOGLE = "0x1ae0"  # network cards and disks of its clouds as well
# of jax 0.11.2 (jax/_src/hardware_utils.py): v3, plc, v4, v5p, v5e, v6e, 7x, 8i, 8t
_TPUS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x0083", "0x007c")


def platform_of(environment: Mapping[str, str], num_gpus: int, *, has_plugin: bool, has_tpu: bool) -> str:
    """`cpu`, `gpu` or `tpu`: what jax will use first in a process with this environment."""
    wanted = environment.get(PLATFORMS, "").split(",")[0].strip().lower()
    if wanted:
        return "gpu" if wanted in ("cuda", "gpu", "rocm") else "tpu" if wanted == "tpu" else "cpu"
    if has_plugin and num_gpus:
        return "gpu"
    return "tpu" if has_tpu else "cpu"


def environments(hosts: HostsSection, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """What each process on this machine gets besides `environment`.

    Raises:
      ConfigError: the machine has too few devices.
    """
    gpus = visible_gpus(environment)
    has_plugin = any(importlib.util.find_spec(name) is not None for name in _PLUGINS)
    platform = platform_of(environment, len(gpus), has_plugin=has_plugin, has_tpu=has_tpu())
    return dealt(hosts, platform, gpus, environment.get(FLAGS, ""))


def dealt(hosts: HostsSection, platform: str, gpus: Sequence[str], flags: str) -> list[dict[str, str]]:
    """The variables of each process. `gpus`: names for CUDA_VISIBLE_DEVICES; `flags`: XLA_FLAGS as they are.

    Raises:
      ConfigError: there are too few devices.
    """
    num, each = hosts.num, hosts.devices_per_host
    if platform == "tpu" and num > 1:
        raise ConfigError(
            f"hosts.launcher=local: hosts.num ({num}) must be 1 on a TPU, whose chips belong to one process; take "
            "another launcher, with a machine for each process"
        )
    if platform == "gpu":
        wanted = num * max(each, 1)
        if wanted > len(gpus):
            factor = f" × hosts.devices_per_host ({each})" if each else ""
            raise ConfigError(
                f"hosts.launcher=local: hosts.num ({num}){factor} needs {wanted} GPUs on this machine, which shows "
                f"{len(gpus)} ({', '.join(gpus) or 'none'})"
            )
        each = each or len(gpus) // num
        return [{VISIBLE: ",".join(gpus[i * each : (i + 1) * each])} for i in range(num)]
    if platform == "cpu" and each:
        return [{FLAGS: with_device_count(flags, each)}] * num
    return [{}] * num


def with_device_count(flags: str, count: int) -> str:
    """XLA_FLAGS with so many devices on a CPU, in place of what they said of that."""
    kept = [flag for flag in flags.split() if flag.partition("=")[0] != COUNT_FLAG]
    return " ".join([*kept, f"{COUNT_FLAG}={count}"])


def has_tpu(devices: Path = Path("/dev"), pci: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether this machine has a TPU: `/dev/accel0`, or as jax tells it, by the numbers on the PCI bus.

    Chips after v5p are `/dev/vfio/*`; so is whatever else is handed on to a virtual machine.
    """
    if (devices / "accel0").exists():
        return True
    return any(_read(each / "vendor") == _GOOGLE and _read(each / "device") in _TPUS for each in pci.glob("*"))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Names of the NVIDIA GPUs that a process with this environment may use, for CUDA_VISIBLE_DEVICES."""
    if VISIBLE in environment:
        named = [name.strip() for name in environment[VISIBLE].split(",")]
        # as CUDA reads it: the first name that is none ends the list
        return named[: next((i for i, name in enumerate(named) if name in ("", "-1")), len(named))]
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_LIST_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU (\d+):", done.stdout, re.MULTILINE)
