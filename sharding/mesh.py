"""The one factored mesh that rollout and training share.

2^k devices become k axes of size 2, other counts factor into primes; the minor axis is `x0`. A tensor-parallel degree
is then a prefix of (x0, x1, ...), so each step up splits the shard that is already there (`jaxrl.sharding.layout`).
Devices that differ in x0 only are neighbours in the given order.
Over several hosts the minor axes lie inside hosts and the major ones go from host to host.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrl.schema.devices import mesh_factors


def make_mesh(devices: Sequence[Any] | None = None, num_hosts: int = 1) -> Mesh:
    """The factored mesh over `devices` (default: all), axes (`x{k-1}`, ..., `x1`, `x0`) with the smallest factor
    last; one device gives one axis `x0` of size 1. Each of `num_hosts` hosts has equally many devices, one host's
    after another's."""
    devices = jax.devices() if devices is None else devices
    assert len(devices) % num_hosts == 0, f"{len(devices)} devices are not equally many on {num_hosts} hosts"
    factors = mesh_factors(len(devices), num_hosts) or (1,)
    names = tuple(f"x{i}" for i in reversed(range(len(factors))))
    grid = np.asarray(devices, dtype=object).reshape(factors[::-1])
    # jax's own helpers differ in their default, and resharding differs by type
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def platform_of(device: Any) -> str:
    """`cpu`, `tpu`, `gpu` for NVIDIA's, or `rocm` for AMD's, which jax calls `gpu` as well."""
    if device.platform == "gpu" and "rocm" in device.client.platform_version.lower():
        return "rocm"
    return device.platform


def submeshes(mesh: Mesh, count: int, num_hosts: int = 1) -> tuple[Mesh, ...]:
    """A factored mesh cut into `count` equal ones along its major axes, in the order of its devices; the devices of a
    part are on `num_hosts` hosts. A part is the mesh that `make_mesh` makes of its devices. Raises ValueError if
    `count` is no product of the first axes."""
    sizes = [mesh.shape[axis] for axis in mesh.axis_names]
    possible = tuple(dict.fromkeys(accumulate((1, *sizes), operator.mul)))
    if count not in possible:
        raise ValueError(
            f"rollout.num_workers ({count}) must cut a mesh of {mesh.size} devices along its major axes, into one of "
            f"{', '.join(map(str, possible))} workers"
        )
    if count == 1:
        return (mesh,)
    devices = mesh.devices.reshape(count, -1)
    return tuple(make_mesh(part.tolist(), num_hosts) for part in devices)


def nested_axes(mesh: Mesh) -> tuple[str, ...]:
    """(x0, x1, ...): the order in which tensor dims are split, major first."""
    return tuple(reversed(mesh.axis_names))


def entry_axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axes_size(mesh: Mesh, axes: Sequence[str]) -> int:
    """The number of shards that a split over `axes` makes."""
    return int(np.prod([mesh.shape[axis] for axis in axes], dtype=np.int64))


def dividing_prefix(mesh: Mesh, axes: Sequence[str], size: int) -> tuple[str, ...]:
    """The longest prefix of `axes` whose product divides `size`."""
    return tuple(axes[: len(dividing_factors([mesh.shape[axis] for axis in axes], size))])


def dividing_factors(factors: Sequence[int], size: int) -> Sequence[int]:
    """The longest prefix of `factors` whose product divides `size`."""
    product = 1
    for i, factor in enumerate(factors):
        product *= factor
        if size % product:
            return factors[:i]
    return factors
