"""The plan of a move between shardings, worked out before anything moves: paths, chunks, programs, and memory.

Purpose: the planning half of `jaxrl.sharding.reshard`, which states the facts behind it.

Chunks: leaves of equal shape, dtype and shardings form a class; a chunk holds whole classes if they fit into the bound,
and larger classes are cut evenly. So programs are few, even for many layers. Leaves that shrink go first: a device
never holds more than the larger of the two trees and one chunk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxrl.sharding.mesh import entry_axes

_SCALARS = 16  # bytes per leaf for the offsets that a program works out

Shape = tuple[int, ...]
Place = tuple[int, str]  # a device's id and a kind of memory


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """The size of a move. It follows from shapes and shardings, so it has no times.

    Attributes:
      num_leaves: arrays of the tree, each counted once however often the tree names it.
      num_aliased: those that were in place already.
      num_chunks, num_programs: dispatches, and the different programs among them (`device_put` counts as one each).
      moved_bytes: bytes that had to cross from one device to another, over all devices.
      peak_extra_bytes: the most that any device holds beyond the larger of the tree before and the tree after (with
        `keep`: beyond both together), the compiler's temporary buffers included.
      max_extra_bytes: the bound.
      oversized: leaves that alone need more than the bound; each went in a chunk of its own.
    """

    num_leaves: int
    num_aliased: int
    num_chunks: int
    num_programs: int
    moved_bytes: int
    peak_extra_bytes: int
    max_extra_bytes: int
    oversized: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array's path through shardings: the first is where it is, the last where it goes."""

    name: str
    shape: Shape
    dtype: Any
    path: tuple[Sharding, ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        return self.shape, self.dtype, self.path

    def bytes_on(self, hop: int) -> int:
        """Bytes of one shard after so many hops."""
        return math.prod(self.path[hop].shard_shape(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Chunks of leaf numbers, and the report."""

    chunks: tuple[tuple[int, ...], ...]
    report: ReshardReport


# ---------------------------------------------------------------- the way of one array


def _kind(sharding: Sharding) -> str:
    return sharding.memory_kind or _default_kind(sharding)


def _default_kind(sharding: Sharding) -> str:
    return min(sharding.device_set, key=lambda device: device.id).default_memory().kind


def way_of(name: str, array: Any, target: NamedSharding) -> tuple[Sharding, ...]:
    """The shardings that an array passes through; only its own if it is in place already."""
    source, ndim = array.sharding, array.ndim
    if source.is_equivalent_to(target, ndim):
        return (source,)
    if not isinstance(source, NamedSharding):
        raise ValueError(
            f"reshard: {name} has a {type(source).__name__}, and only named shardings can be moved between: make it "
            "with out_shardings, or put it there with jax.device_put"
        )
    path = [source]

    def go(sharding: NamedSharding) -> None:
        if not path[-1].is_equivalent_to(sharding, ndim) or _kind(path[-1]) != _kind(sharding):
            path.append(sharding)

    default = _default_kind(source)
    on_device = target.with_memory_kind(_default_kind(target))
    if _kind(source) != default:
        go(source.with_memory_kind(default))
    if source.device_set == target.device_set:
        if _order(source) != _order(target):
            raise ValueError(
                f"reshard: {name} is on a mesh of the target's devices in another order: use one mesh for both"
            )
    elif source.device_set & target.device_set:
        raise ValueError(
            f"reshard: {name} is on {len(source.device_set)} devices and its target on {len(target.device_set)}, of "
            f"which {len(source.device_set & target.device_set)} are the same: no program runs on two different sets "
            "of devices, and a copy between them would go through the host. Move within one set, or between sets "
            "that have no device in common"
        )
    else:
        for sharding in _across(name, path[-1], on_device):
            go(sharding)
    go(on_device)
    go(target)
    return tuple(path)


def _order(sharding: NamedSharding) -> list[Any]:
    return np.ravel(cast(Any, sharding.mesh.devices)).tolist()


def _across(name: str, here: NamedSharding, target: NamedSharding) -> tuple[NamedSharding, ...]:
    """Shardings on the way to other devices, around the one hop from mesh to mesh, which keeps every shard whole."""
    here, wanted = _without_ones(here), _without_ones(target)
    if _has_axes(target, here):
        return (NamedSharding(target.mesh, here.spec),)
    if _has_axes(here, wanted):
        return (NamedSharding(here.mesh, wanted.spec), target)
    raise ValueError(
        f"reshard: {name} goes from a mesh {dict(here.mesh.shape)} to one of other devices, {dict(target.mesh.shape)}: "
        f"neither has all axes, of the same size, of the spec on the other side ({here.spec}; {target.spec})"
    )


def _has_axes(there: NamedSharding, named: NamedSharding) -> bool:
    """Whether the mesh `there` has all axes that split something in the spec of `named`, with the same sizes."""
    axes = [axis for entry in named.spec for axis in entry_axes(entry)]
    sizes = cast(dict[str, int], there.mesh.shape)
    return all(sizes.get(axis) == named.mesh.shape[axis] for axis in axes)


def _without_ones(sharding: NamedSharding) -> NamedSharding:
    """The same sharding, its spec without the axes of size 1: they split nothing, and another mesh may lack them."""

    def kept(entry: Any) -> Any:
        return tuple(axis for axis in entry_axes(entry) if sharding.mesh.shape[axis] > 1) or None

    spec = PartitionSpec(*(kept(entry) for entry in sharding.spec))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


# ---------------------------------------------------------------- chunks


def steps_of(leaves: Sequence[Leaf], chunk: Sequence[int]) -> list[tuple[Any, ...]]:
    """The arguments of `program_of` for each hop of a chunk; all its leaves have the same number and kinds of hops."""
    own = [leaves[i] for i in chunk]
    types = tuple((leaf.shape, leaf.dtype) for leaf in own)
    return [
        (types, tuple(leaf.path[hop] for leaf in own), tuple(leaf.path[hop + 1] for leaf in own))
        for hop in range(len(own[0].path) - 1)
    ]


@lru_cache(maxsize=512)
def program_of(types: tuple[Any, ...], sources: tuple[Sharding, ...], targets: tuple[Sharding, ...]) -> Any:
    """A function of a chunk's arrays that gives them in other shardings; compiled where it is a program."""
    if is_put(sources[0], targets[0]):
        return lambda *arrays: jax.device_put(list(arrays), list(targets))
    abstract = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for (shape, dtype), sharding in zip(types, sources, strict=True)
    ]
    return jax.jit(lambda *arrays: arrays, out_shardings=targets).lower(*abstract).compile()


def is_put(source: Sharding, target: Sharding) -> bool:
    """Whether a hop is a `device_put`: to other devices or another kind of memory."""
    return source.device_set != target.device_set or _kind(source) != _kind(target)


def crossing_bytes(shape: Shape, itemsize: int, source: Sharding, target: Sharding) -> int:
    """Bytes of an array that devices need in `target` and do not hold themselves in `source`, over all devices."""
    held = source.devices_indices_map(shape)
    needed = 0
    for device, index in target.devices_indices_map(shape).items():
        wanted = _ranges(index, shape)
        own = _ranges(held[device], shape) if device in held else None
        both = (
            0
            if own is None
            else math.prod(max(min(a[1], b[1]) - max(a[0], b[0]), 0) for a, b in zip(wanted, own, strict=True))
        )
        needed += math.prod(stop - start for start, stop in wanted) - both
    return needed * itemsize


def _ranges(index: tuple[slice, ...] | None, shape: Shape) -> list[tuple[int, int]]:
    assert index is not None
    return [each.indices(size)[:2] for each, size in zip(index, shape, strict=True)]


def _cost(leaf: Leaf) -> int:
    """The most extra bytes per device while a leaf moves: the smaller of its two forms, and a copy if it gathers."""
    most = 0
    for hop in range(len(leaf.path) - 1):
        source, target = leaf.path[hop], leaf.path[hop + 1]
        if is_put(source, target):
            continue
        gathers = crossing_bytes(leaf.shape, leaf.dtype.itemsize, source, target) > 0
        before, after = leaf.bytes_on(hop), leaf.bytes_on(hop + 1)
        most = max(most, min(before, after) + gathers * after + _SCALARS)
    return most


@lru_cache(maxsize=128)
def make_plan(leaves: tuple[Leaf, ...], max_extra_bytes: int, keep: bool) -> ReshardPlan:
    classes: dict[tuple[Any, ...], list[int]] = {}
    for i, leaf in enumerate(leaves):
        if len(leaf.path) > 1:
            classes.setdefault(leaf.kind, []).append(i)
    costs = {kind: _cost(leaves[members[0]]) for kind, members in classes.items()}

    def order(kind: tuple[Any, ...]) -> tuple[Any, ...]:
        leaf = leaves[classes[kind][0]]
        # leaves that share a program agree in devices and memory at every hop
        way = tuple((sorted(device.id for device in s.device_set), _kind(s)) for s in leaf.path)
        return leaf.bytes_on(len(leaf.path) - 1) > leaf.bytes_on(0), way

    chunks: list[list[int]] = []
    room, current = 0, None
    for kind in sorted(classes, key=order):
        members, cost = classes[kind], costs[kind]
        if order(kind) == current and len(members) * cost <= room:
            chunks[-1].extend(members)
            room -= len(members) * cost
            continue
        count = math.ceil(len(members) / max(max_extra_bytes // max(cost, 1), 1))
        size, larger = divmod(len(members), count)
        ends = [size * i + min(i, larger) for i in range(count + 1)]
        chunks += [members[start:end] for start, end in pairwise(ends)]
        room, current = max_extra_bytes - len(chunks[-1]) * cost, order(kind)
    oversized = tuple(
        leaves[i].name for kind, members in classes.items() if costs[kind] > max_extra_bytes for i in members
    )
    steps = [step for chunk in chunks for step in steps_of(leaves, chunk)]
    report = ReshardReport(
        num_leaves=len(leaves),
        num_aliased=sum(len(leaf.path) == 1 for leaf in leaves),
        num_chunks=len(chunks),
        num_programs=len(set(steps)),
        moved_bytes=sum(
            len(members) * crossing_bytes(leaf.shape, leaf.dtype.itemsize, leaf.path[0], leaf.path[-1])
            for members in classes.values()
            for leaf in [leaves[members[0]]]
        ),
        peak_extra_bytes=_peak_extra(leaves, chunks, keep),
        max_extra_bytes=max_extra_bytes,
        oversized=oversized,
    )
    return ReshardPlan(tuple(map(tuple, chunks)), report)


def _peak_extra(leaves: Sequence[Leaf], chunks: Sequence[Sequence[int]], keep: bool) -> int:
    """Replays the chunks with what each device holds; temporaries as the compiled programs have them."""

    def places(leaf: Leaf, hop: int) -> dict[Place, int]:
        sharding, size = leaf.path[hop], leaf.bytes_on(hop)
        return {(device.id, _kind(sharding)): size for device in sharding.device_set}

    before: Counter[Place] = Counter()
    after: Counter[Place] = Counter()
    for leaf in leaves:
        before.update(places(leaf, 0))
        after.update(places(leaf, len(leaf.path) - 1))
        if keep and len(leaf.path) > 1:
            after.update(places(leaf, 0))
    live, peak = before.copy(), 0
    for chunk in chunks:
        own = [leaves[i] for i in chunk]
        for hop, step in enumerate(steps_of(leaves, chunk)):
            for leaf in own:
                live.update(places(leaf, hop + 1))
            compiled = program_of(*step)
            by_copy = is_put(step[1][0], step[2][0])
            temporary = 0 if by_copy else compiled.memory_analysis().temp_size_in_bytes
            devices = {device.id for device in step[2][0].device_set}
            for place, size in live.items():
                working = temporary if place[0] in devices else 0
                peak = max(peak, size + working - max(before[place], after[place]))
            if hop or not keep:
                for leaf in own:
                    live.subtract(places(leaf, hop))
    return peak
