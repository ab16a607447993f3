"""Moving a tree of arrays (rollout weights, training state) between shardings: chunk by chunk, on the devices, with a
bound on the extra memory.

- Within one set of devices, a jitted identity with `out_shardings` moves arrays; `jax.device_put` would go through the
  host and block (docs/architecture.md).
- Across disjoint sets, `jax.device_put` moves arrays with the same spec on both sides, and they are resharded before it
  or on arrival. Sets that overlap without being equal are refused: there is no direct way.

One chunk is in flight at a time; the last one is not waited for. Everything is checked, planned and compiled before
anything moves, and cached. Leaves of equal shape, dtype and shardings form a class; a chunk holds whole classes if they
fit into the bound, and larger classes are cut evenly, so programs are few. Leaves that shrink go first: a device never
holds more than the larger of the two trees and one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxrl.sharding.mesh import entry_axes

DEFAULT_MAX_EXTRA_BYTES = 64 << 20
_SCALARS = 16  # bytes per leaf for the offsets that a program works out

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array's path through shardings, from where it is to where it goes."""

    shape: Shape
    dtype: Any
    path: tuple[Sharding, ...]

    def bytes_on(self, hop: int) -> int:
        return math.prod(self.path[hop].shard_shape(self.shape)) * self.dtype.itemsize


def reshard(tree: Any, target: Any, *, max_extra_bytes: int = DEFAULT_MAX_EXTRA_BYTES, keep: bool = False) -> Any:
    """Moves a tree of arrays; returns it in the target's shardings.

    The given arrays are deleted, except those that were in place already: these are in the result as they are. An array
    that occurs several times in the tree (tied weights) moves once. If an array shares its buffers with another one
    outside the tree (as after `device_put` to an equivalent sharding), deleting it deletes the other one too.

    Args:
      target: a tree of NamedSharding like `tree` or a prefix of it (one sharding for all).
      max_extra_bytes: the most that a device may hold beyond the larger of the tree before and the tree after (with
        `keep`: beyond both together). A leaf that needs more goes alone.
      keep: leave the given arrays alive.

    Raises ValueError, before anything moves, where there is no direct way.
    """
    arrays, slots, structure, leaves = _collect(tree, target)
    chunks = make_plan(leaves, max_extra_bytes)
    programs = [[program_of(*step) for step in steps_of(leaves, chunk)] for chunk in chunks]
    moved: list[Any] = list(arrays)
    previous: Any = ()
    for chunk, steps in zip(chunks, programs, strict=True):
        jax.block_until_ready(previous)  # or the chunks in flight would add up
        values: Sequence[jax.Array] = [arrays[i] for i in chunk]
        for hop, program in enumerate(steps):
            results = program(*values)
            if hop or not keep:
                for value in values:
                    value.delete()
            values = results
        for i, value in zip(chunk, values, strict=True):
            moved[i] = value
        previous = values
    return jax.tree.unflatten(structure, [moved[i] for i in slots])


def precompile(tree: Any, target: Any) -> None:
    """Compiles what `reshard` with the same arguments would run, and moves nothing. Safe in a background thread. `tree`
    may hold `jax.ShapeDtypeStruct` with shardings."""
    *_, leaves = _collect(tree, target)
    for chunk in make_plan(leaves, DEFAULT_MAX_EXTRA_BYTES):
        for step in steps_of(leaves, chunk):
            program_of(*step)


# ---------------------------------------------------------------- what is asked for


def _collect(tree: Any, target: Any) -> tuple[list[Any], list[int], Any, tuple[Leaf, ...]]:
    """(distinct arrays, the index of the array at each place of the tree, the tree's structure, the arrays' paths)."""
    shardings = jax.tree.leaves(jax.tree.broadcast(target, tree))
    with_path, structure = jax.tree_util.tree_flatten_with_path(tree)
    arrays: list[Any] = []
    leaves: list[Leaf] = []
    slots: list[int] = []
    known: dict[tuple[int, Sharding], int] = {}
    targets: dict[int, Sharding] = {}
    for (path, array), sharding in zip(with_path, shardings, strict=True):
        name = jax.tree_util.keystr(path) or "the array"
        key = (id(array), sharding)
        if key not in known:
            if targets.setdefault(id(array), sharding) != sharding:
                raise ValueError(
                    f"reshard: {name} stands twice in the tree, with the targets {targets[id(array)]} and {sharding}: "
                    "one array can go to one place only"
                )
            known[key] = len(arrays)
            arrays.append(array)
            leaves.append(Leaf(array.shape, array.dtype, way_of(name, array, sharding)))
        slots.append(known[key])
    return arrays, slots, structure, tuple(leaves)


# ---------------------------------------------------------------- the way of one array


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
    if source.device_set == target.device_set:
        if _order(source) != _order(target):
            raise ValueError(
                f"reshard: {name} is on a mesh of the target's devices in another order: use one mesh for both"
            )
        return source, target
    if both := source.device_set & target.device_set:
        raise ValueError(
            f"reshard: {name} is on {len(source.device_set)} devices and its target on {len(target.device_set)}, of "
            f"which {len(both)} are the same: no program runs on two different sets of devices, and a copy between "
            "them would go through the host. Move within one set, or between sets that have no device in common"
        )
    path = [source]
    for sharding in (*_across(name, source, target), target):
        if not path[-1].is_equivalent_to(sharding, ndim):
            path.append(sharding)
    return tuple(path)


def _order(sharding: NamedSharding) -> list[Any]:
    return np.ravel(cast(Any, sharding.mesh.devices)).tolist()


def _across(name: str, here: NamedSharding, target: NamedSharding) -> tuple[NamedSharding, ...]:
    """Shardings on the way to other devices, around the one hop from mesh to mesh, which keeps every shard whole."""
    here, wanted = _without_ones(here), _without_ones(target)
    if _has_axes(target, here):
        return (NamedSharding(target.mesh, here.spec),)
    if _has_axes(here, wanted):
        return (NamedSharding(here.mesh, wanted.spec),)
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
    """The same sharding without axes of size 1 in its spec: they split nothing, and another mesh may lack them."""

    def kept(entry: Any) -> Any:
        return tuple(axis for axis in entry_axes(entry) if sharding.mesh.shape[axis] > 1) or None

    return NamedSharding(sharding.mesh, PartitionSpec(*(kept(entry) for entry in sharding.spec)))


# ---------------------------------------------------------------- chunks


def steps_of(leaves: Sequence[Leaf], chunk: Sequence[int]) -> list[tuple[Any, ...]]:
    """The arguments of `program_of` for each hop of a chunk. All its leaves have the same kinds of hops."""
    own = [leaves[i] for i in chunk]
    types = tuple((leaf.shape, leaf.dtype) for leaf in own)
    return [
        (types, tuple(leaf.path[hop] for leaf in own), tuple(leaf.path[hop + 1] for leaf in own))
        for hop in range(len(own[0].path) - 1)
    ]


@lru_cache(maxsize=512)
def program_of(types: tuple[Any, ...], sources: tuple[Sharding, ...], targets: tuple[Sharding, ...]) -> Any:
    """A function that gives a chunk's arrays other shardings; compiled where it is a program."""
    if is_put(sources[0], targets[0]):
        return lambda *arrays: jax.device_put(list(arrays), list(targets))
    abstract = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for (shape, dtype), sharding in zip(types, sources, strict=True)
    ]
    return jax.jit(lambda *arrays: arrays, out_shardings=targets).lower(*abstract).compile()


def is_put(source: Sharding, target: Sharding) -> bool:
    """Whether a hop is a `device_put`, to other devices."""
    return source.device_set != target.device_set


def gathers(shape: Shape, source: Sharding, target: Sharding) -> bool:
    """Whether a device needs more in `target` than the part that it holds in `source`; of the same devices."""
    held = source.devices_indices_map(shape)
    for device, wanted in target.devices_indices_map(shape).items():
        for own, part, size in zip(held[device], wanted, shape, strict=True):
            (begin, end, _), (start, stop, _) = own.indices(size), part.indices(size)
            if start < begin or stop > end:
                return True
    return False


def _cost(leaf: Leaf) -> int:
    """The most extra bytes per device while a leaf moves: the smaller of its two forms, and a copy if it gathers."""
    most = 0
    for hop in range(len(leaf.path) - 1):
        source, target = leaf.path[hop], leaf.path[hop + 1]
        if is_put(source, target):
            continue
        before, after = leaf.bytes_on(hop), leaf.bytes_on(hop + 1)
        most = max(most, min(before, after) + gathers(leaf.shape, source, target) * after + _SCALARS)
    return most


@lru_cache(maxsize=128)
def make_plan(leaves: tuple[Leaf, ...], max_extra_bytes: int) -> list[list[int]]:
    """The chunks, as indices of leaves; of leaves that are in place already there are none."""
    classes: dict[Leaf, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if len(leaf.path) > 1:
            classes.setdefault(leaf, []).append(i)

    def order(leaf: Leaf) -> tuple[Any, ...]:
        # leaves that share a program agree in devices at every hop
        way = tuple(sorted(device.id for device in sharding.device_set) for sharding in leaf.path)
        return leaf.bytes_on(len(leaf.path) - 1) > leaf.bytes_on(0), way

    chunks: list[list[int]] = []
    room, current = 0, None
    for leaf in sorted(classes, key=order):
        members, cost = classes[leaf], _cost(leaf)
        if order(leaf) == current and len(members) * cost <= room:
            chunks[-1].extend(members)
            room -= len(members) * cost
            continue
        count = math.ceil(len(members) / max(max_extra_bytes // max(cost, 1), 1))
        size, larger = divmod(len(members), count)
        ends = [size * i + min(i, larger) for i in range(count + 1)]
        chunks += [members[start:end] for start, end in pairwise(ends)]
        room, current = max_extra_bytes - len(chunks[-1]) * cost, order(leaf)
    return chunks
