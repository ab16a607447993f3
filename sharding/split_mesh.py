"""Arrays between a mesh and a part of it.

`Half` lends what all devices share to one half of them, and takes it back: weights go to the devices that the stream
trainer has freed, and gradients come back (`jaxrl.mechanisms.stream_trainer.gradients`), while the other half decodes:
a program on the whole mesh would stop it. `submesh_arrays` gives a part of the devices the shards that they have
already.

A half is cut along the mesh's major axis, the last one that splits a dim. So each device of a half has one part of its
new shard already, and its partner in the other half has the part beside it. To lend, the partner's parts cross by
`jax.device_put`, and a program on the half alone joins both parts; to give back, a program on the half cuts each shard
in two, one of which crosses. Arrays move leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.sharding.mesh import entry_axes, submeshes

Tree = Any


@dataclass(frozen=True, slots=True)
class Half:
    """One half of a factored mesh: its first devices (`index` 0) or its last ones (1). Raises ValueError where the
    mesh's major axis has another size than 2."""

    whole: Mesh
    index: int

    def __post_init__(self) -> None:
        count = self.whole.devices.size
        if self.whole.devices.shape[0] != 2:
            raise ValueError(f"a mesh of {count} devices has no halves that are meshes like it: 2^k devices have")
        assert self.index in (0, 1)

    @property
    def mesh(self) -> Mesh:
        """The half as a factored mesh with the whole's minor axes."""
        return submeshes(self.whole, 2)[self.index]

    @property
    def other(self) -> Mesh:
        return submeshes(self.whole, 2)[1 - self.index]

    def lend(self, tree: Tree, shardings: Tree) -> Tree:
        """Copies of arrays of the whole mesh, on the half.

        `shardings` are on `mesh`; each splits the dim that its array is split in, by the minor axes of the array's own
        spec, or splits it no more than the array is. Raises ValueError for any other.
        """
        previous: Any = ()

        def one(array: jax.Array, target: NamedSharding) -> jax.Array:
            nonlocal previous
            jax.block_until_ready(previous)  # what crosses of one leaf at a time
            dim = _dim_of(array.sharding, target)
            parts = [self._shards(array, index, target.spec, dim) for index in (0, 1)]
            if dim is None:
                previous = _copied(target)(parts[self.index])
            else:
                crossed = jax.device_put(parts[1 - self.index], target)
                own = parts[self.index]
                first, second = (own, crossed) if self.index == 0 else (crossed, own)
                previous = _joined(target, array.ndim, dim)(first, second)
                crossed.delete()
            return previous

        return jax.tree.map(one, tree, shardings)

    def give_back(self, tree: Tree, shardings: Tree) -> Tree:
        """Arrays of the half as arrays of the whole mesh, with shardings that `lend` could have started from; the
        inverse of `lend`. Deletes the given arrays. Raises ValueError as `lend`."""
        previous: Any = ()

        def one(array: jax.Array, target: NamedSharding) -> jax.Array:
            nonlocal previous
            jax.block_until_ready(previous)
            here = array.sharding
            assert isinstance(here, NamedSharding)
            dim = _dim_of(target, here)
            parts = (array, array) if dim is None else _cut(here, array.ndim, dim)(array)
            there = NamedSharding(self.other, here.spec)
            crossed = jax.device_put(parts[1 - self.index], there)
            own = _copied(here)(array) if dim is None else parts[self.index]
            shards = {shard.device: shard.data for half in (own, crossed) for shard in half.addressable_shards}
            ordered = [shards[device] for device in target.addressable_devices]
            previous = jax.make_array_from_single_device_arrays(array.shape, target, ordered)
            array.delete()
            return previous

        return jax.tree.map(one, tree, shardings)

    def _shards(self, array: jax.Array, index: int, spec: PartitionSpec, dim: int | None) -> jax.Array:
        """The shards on the half of this index, as an array of that half, without a copy: half as long in `dim`, if
        any."""
        mesh = submeshes(self.whole, 2)[index]
        devices = set(mesh.devices.flat)
        shape = tuple(size // 2 if i == dim else size for i, size in enumerate(array.shape))
        shards = [shard.data for shard in array.addressable_shards if shard.device in devices]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), shards)


def _dim_of(whole: Any, half: NamedSharding) -> int | None:
    """The dim that the whole's major axis splits, as the last of its axes; None if it splits none. Checks that the rest
    is what the half's sharding says."""
    assert isinstance(whole, NamedSharding)
    major = whole.mesh.axis_names[0]
    found, left = None, []
    for dim, entry in enumerate(whole.spec):
        axes = entry_axes(entry)
        if major in axes:
            found = dim if axes[-1] == major else -1
        left.append(tuple(axis for axis in axes if axis != major))
    wanted = [tuple(axis for axis in entry_axes(entry) if half.mesh.shape[axis] > 1) for entry in half.spec]
    if found == -1 or _trimmed(left) != _trimmed(wanted):
        raise ValueError(
            f"an array split as {whole.spec} over a mesh cannot be split as {half.spec} over its half: its major axis "
            f"({major}) must be the last that splits a dim, and all else the same"
        )
    return found


def _trimmed(entries: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Without the unsplit dims at the end, which a spec may leave out."""
    while entries and not entries[-1]:
        entries = entries[:-1]
    return entries


@lru_cache(maxsize=64)
def _copied(target: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: jnp.array(x, copy=True), out_shardings=target)


@lru_cache(maxsize=64)
def _joined(target: NamedSharding, ndim: int, dim: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Joins both parts of each shard, on each device by itself."""
    spec = PartitionSpec(*target.spec, *[None] * (ndim - len(target.spec)))

    def local(first: jax.Array, second: jax.Array) -> jax.Array:
        return jnp.concatenate([first, second], axis=dim)

    joined = jax.shard_map(local, mesh=target.mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    return jax.jit(joined, out_shardings=target)


@lru_cache(maxsize=64)
def _cut(source: NamedSharding, ndim: int, dim: int) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    spec = PartitionSpec(*source.spec, *[None] * (ndim - len(source.spec)))

    def local(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, second = jnp.split(x, 2, axis=dim)
        return first, second

    cut = jax.shard_map(local, mesh=source.mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False)
    return jax.jit(cut, out_shardings=(source, source))


def submesh_arrays(tree: Any, target: Any) -> Any:
    """The arrays of a tree under other shardings of devices that they are on, without a copy: deleting one of both
    arrays kills the other. An array that occurs several times in the tree (tied weights) is made once. Raises
    ValueError if an array is not on one of the target's devices, or has another part of it there."""
    known: dict[tuple[int, NamedSharding], jax.Array] = {}

    def one(path: Any, array: jax.Array, sharding: NamedSharding) -> jax.Array:
        key = (id(array), sharding)
        if key not in known:
            known[key] = _on_submesh(jax.tree_util.keystr(path) or "the array", array, sharding)
        return known[key]

    return jax.tree_util.tree_map_with_path(one, tree, target)


def _on_submesh(name: str, array: jax.Array, sharding: NamedSharding) -> jax.Array:
    if array.sharding == sharding:
        return array
    there = array.sharding.devices_indices_map(array.shape)
    wanted = sharding.devices_indices_map(array.shape)
    moving = [device.id for device, part in wanted.items() if there.get(device) != part]
    if moving:
        raise ValueError(
            f"submesh_arrays: {name} would have to move: device {moving[0]} does not hold the part of it that "
            f"{sharding.spec} says: use reshard"
        )
    parts = [shard.data for shard in array.addressable_shards if shard.device in wanted]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)
