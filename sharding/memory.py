"""The memory of devices and of this machine, as JAX and the system report it, and bytes as text."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.sharding.mesh import platform_of

GPU_PLATFORMS = ("gpu", "cuda", "rocm")
_SHARE_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # jax takes one of them
DEFAULT_SHARE = 0.75
"""The share of a GPU's memory for JAX unless the environment says otherwise."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device, in bytes."""

    platform: str
    reported: int | None  # None where the backend reports none (a CPU's memory is the host's)
    share: int  # the same, or a CPU's share of the host's


def device_bytes(devices: Sequence[Any]) -> int | None:
    """The memory of one device; None if the backend does not report it (a CPU's memory is the host's)."""
    stats = devices[0].memory_stats()
    return None if not stats else stats.get("bytes_limit")


def memory_share(platform: str) -> float | None:
    """The share of a GPU's memory that JAX allocates at its start; None on other platforms, which give all.

    JAX reports this share and not the card's memory, so it is read from the environment, or is jax's default
    (https://docs.jax.dev/en/latest/gpu_memory_allocation.html).
    """
    if platform not in GPU_PLATFORMS:
        return None
    return float(os.environ.get(share_variable()) or DEFAULT_SHARE)


def share_variable() -> str:
    """The environment variable that sets the share. Jax refuses to run with both set."""
    return next(filter(os.environ.get, _SHARE_VARIABLES), _SHARE_VARIABLES[-1])


def host_bytes() -> int:
    """The memory of this machine, or of the control group that this process may use."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # not there, or no limit: `max`
            found.append(int(Path(file).read_text()))
    return min(found)


def memory_of(devices: Sequence[Any], sharing: int = 0) -> DeviceMemory:
    """The memory of this process's devices, which are alike. `sharing`: how many CPU devices share this machine's
    memory; 0: these."""
    reported = device_bytes(devices)
    share = host_bytes() // (sharing or len(devices)) if reported is None else reported
    return DeviceMemory(platform_of(devices[0]), reported, share)


def in_bytes(value: float) -> str:
    """1536 -> "1.5 KiB"."""
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= (size := 1024**power):
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
