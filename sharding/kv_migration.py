"""Moving live KV blocks between layouts of one mesh (`migrate`), and between workers on disjoint devices
(`migrate_across`). A plan (`jaxrl.scheduling.layouts.kv_plan`) says where the live blocks go.

One program moves an array (keys or values of one layer): take the live blocks of each lane, exchange, scatter into the
new pool, all in `shard_map`. If the partitioner gets a gather or scatter together with a layout change, it aborts the
process on jax 0.11.2 (docs/architecture.md). The exchange is one all-to-all over the axes that split heads, and one
all-gather over the others; a jitted identity with `out_shardings` in its place takes longer (docs/layouts.md). The old
array is deleted right after its dispatch. A pool of codes (`rollout.kv_cache_dtype`) has codes and scales, whose last
dim is 1: they move as two pools.

A *lane* is one dp group of the layout that has more of them. A device's lanes are in the order in which collectives
over several axes stack them (`_lane_order`); only the block numbers depend on it. A *home* is one dp group of the
layout that has fewer of them. Blocks that change their home (guests) take the last places of a lane, equally many for
each home. One more all-to-all, over the axes of dp that both layouts have, moves them to the lane of the same place in
the other home. Then they are exchanged with the others.

Dims: dp groups, l lanes of a device, K key/value heads (K' of a device); N blocks of a pool, P positions per block, D
head dim, M places of a lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import axes_size
from jaxrl.sharding.reshard import DEFAULT_MAX_EXTRA_BYTES

MIN_LANE_BLOCKS = 8
Pool = list[tuple[Any, Any]]
"""Each layer's keys and values: arrays, or trees of arrays, all with the dims of a pool."""
Lanes = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""The result of `KvPlan.lanes`. Blocks in the old and the new pool, int32 [lanes, M], -1 for none; and those that
change their home, [lanes, homes, G], by the home that they go to and by the one that they come from."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes that a migration's programs depend on beside the layouts: one pool array before and after."""

    num_kv_heads: int
    num_blocks: int
    new_num_blocks: int
    block_size: int
    head_dim: int
    dtype: Any
    lane_blocks: int
    guest_blocks: int  # of those places, for each home

    @property
    def block_bytes(self) -> int:
        return self.num_kv_heads * self.block_size * self.head_dim * np.dtype(self.dtype).itemsize


def migrate(
    pool: Pool,
    before: Layout,
    after: Layout,
    lanes: Lanes,
    num_blocks: int,
    *,
    max_extra_bytes: int = DEFAULT_MAX_EXTRA_BYTES,
) -> Pool:
    """Moves a pool's live blocks (`rollout.kv_cache`) into a new pool of `num_blocks`, the reserved one included, in a
    layout of the same mesh, and deletes the old pool. Blocks that are no lane's target are zero. `max_extra_bytes`: the
    most that a device may hold beyond the larger of the two pools; an array that needs more goes alone.
    """
    assert before.mesh == after.mesh, "between meshes: migrate_across"
    parts, structure = _parts(pool)
    shapes = [_sizes(part, before, after, num_blocks, *_most(lanes)) for part in parts]
    moves = [_moves(shape, before, after, len(pool), max_extra_bytes) for shape in shapes]
    moved: list[Pool] = []
    for part, shape, programs in zip(parts, shapes, moves, strict=True):
        index = _indices(lanes, before, after, shape)
        old, new = [array for layer in part for array in layer], []
        previous: Any = ()
        for count, program in programs:
            jax.block_until_ready(previous)  # or the chunks in flight would add up
            own = [old.pop(0) for _ in range(count)]
            previous = program(*own, *index)
            for array in own:
                array.delete()
            new += previous
        moved.append(_layers(new))
    return _joined(moved, structure)


def precompile(before: Layout, after: Layout, pool: Pool, num_blocks: int, sizes: tuple[int, int]) -> None:
    """Compiles what `migrate` between these layouts needs, and moves nothing. The pool may hold
    `jax.ShapeDtypeStruct`s. `sizes`: (M, G) of the lanes."""
    for part in _parts(pool)[0]:
        _moves(_sizes(part, before, after, num_blocks, *sizes), before, after, len(pool), DEFAULT_MAX_EXTRA_BYTES)


def migrate_across(
    pool: Pool,
    before: Layout,
    after: Layout,
    lanes: Lanes,
    into: Pool,
    *,
    max_extra_bytes: int = DEFAULT_MAX_EXTRA_BYTES,
) -> Pool:
    """Moves live blocks to other devices: packs, copies by `jax.device_put` with the same spec, exchanges them there.
    The source pool stays as it is, because its other requests may continue. `into`: the target worker's pool, deleted
    afterwards. The meshes are of one shape, and share no device."""
    assert before.mesh.shape == after.mesh.shape, "the same spec must exist on both sides"
    parts, structure = _parts(pool)
    landing = Layout(after.mesh, before.tp)
    both = [*zip(parts, _parts(into)[0], strict=True)]
    shapes = [_sizes(part, before, after, into[0][0].shape[2], *_most(lanes)) for part in parts]
    moved: list[Pool] = []
    for (part, target), shape in zip(both, shapes, strict=True):
        source_index, target_index = _indices(lanes, before, after, shape)
        chunks = _chunks(shape, landing, after, 2 * len(part), max_extra_bytes, makes_pool=False)
        packs = [_pack(shape, before, after, count) for count in chunks]
        unpacks = [_unpack(shape, landing, after, count) for count in chunks]
        old, new = [array for layer in part for array in layer], []
        held = [array for layer in target for array in layer]
        packed_sharding = NamedSharding(landing.mesh, _pool_spec(landing, shape))
        previous: Any = ()
        for count, pack, unpack in zip(chunks, packs, unpacks, strict=True):
            jax.block_until_ready(previous)
            packed = pack(*[old.pop(0) for _ in range(count)], source_index)
            landed = jax.device_put(list(packed), packed_sharding)
            for array in packed:
                array.delete()
            previous = unpack(*landed, *[held.pop(0) for _ in range(count)], target_index)
            for array in landed:
                array.delete()
            new += previous
        moved.append(_layers(new))
    return _joined(moved, structure)


def _parts(pool: Any) -> tuple[list[Pool], Any]:
    """(a pool for each kind of array, the structure of the whole pool)."""
    layers = [tuple(jax.tree.leaves(cached) for cached in layer) for layer in pool]
    kinds = range(len(layers[0][0]))
    return [[(keys[i], values[i]) for keys, values in layers] for i in kinds], jax.tree.structure(pool)


def _joined(pools: Sequence[Pool], structure: Any) -> Pool:
    """The inverse of `_parts`."""
    arrays = [pool[layer][side] for layer in range(len(pools[0])) for side in range(2) for pool in pools]
    return jax.tree.unflatten(structure, arrays)


# ---------------------------------------------------------------- sizes


def lane_capacity(num_blocks: int, most: int) -> int:
    """Places of a lane: a power of two from 8 on, at most `most`, so that few sizes are compiled."""
    return min(max(MIN_LANE_BLOCKS, 1 << max(num_blocks - 1, 0).bit_length()), max(most, 1))


def _most(lanes: Lanes) -> tuple[int, int]:
    """(M, G)"""
    return lanes[0].shape[-1], lanes[2].shape[-1]


def _sizes(pool: Pool, before: Layout, after: Layout, num_blocks: int, own: int, guests: int) -> _Sizes:
    """`own`, `guests`: blocks of the fullest lane, and of the fullest home's guests in it."""
    heads, old_blocks, block_size, head_dim = pool[0][0].shape[1:]
    most = min(old_blocks, num_blocks) - 1  # what fits into the smaller of a lane's pools
    each = lane_capacity(guests, most) if guests else 0
    places = lane_capacity(own, most) + min(before.dp, after.dp) * each
    return _Sizes(heads, old_blocks, num_blocks, block_size, head_dim, pool[0][0].dtype, places, each)


def _pool_spec(layout: Layout, shape: _Sizes) -> PartitionSpec:
    return PartitionSpec(layout.dp_axes or None, layout.kv_axes(shape.num_kv_heads) or None)


def _indices(lanes: Lanes, before: Layout, after: Layout, shape: _Sizes) -> tuple[np.ndarray, np.ndarray]:
    """The source and target blocks in the order in which devices stack their lanes, [lanes, places] both."""
    source_index, target_index = (_padded(lanes[i], lanes[i + 2], shape) for i in range(2))
    order = _lane_order(before, after, shape.num_kv_heads)
    own = (order + len(order) * np.arange(len(source_index) // len(order))[:, None]).ravel()
    # The side with several lanes per dp group stacks them; on the other side each lane is a group.
    if before.dp < after.dp:
        source_index = source_index[own]
    else:
        target_index = target_index[own]
    targets = np.where(target_index < 0, shape.new_num_blocks, target_index).astype(np.int32)
    return np.maximum(source_index, 0), targets


def _padded(own: np.ndarray, guests: np.ndarray, shape: _Sizes) -> np.ndarray:
    """Block numbers [lanes, places], -1 for none: a lane's own blocks, then the guests' by home."""
    num_lanes, num_homes, most = guests.shape
    by_home = np.full((num_lanes, num_homes, shape.guest_blocks), -1, np.int32)
    by_home[:, :, :most] = guests
    index = np.full((num_lanes, shape.lane_blocks), -1, np.int32)
    index[:, : own.shape[1]] = own
    index[:, shape.lane_blocks - num_homes * shape.guest_blocks :] = by_home.reshape(num_lanes, -1)
    return index


def _layers(arrays: Sequence[jax.Array]) -> Pool:
    return list(zip(arrays[::2], arrays[1::2], strict=True))


# ---------------------------------------------------------------- programs


def _moves(
    shape: _Sizes, before: Layout, after: Layout, num_layers: int, max_extra_bytes: int
) -> list[tuple[int, Any]]:
    """How many arrays each program moves, and the program."""
    chunks = _chunks(shape, before, after, 2 * num_layers, max_extra_bytes)
    return [(count, _move(shape, before, after, count)) for count in chunks]


@lru_cache(maxsize=128)
def _move(shape: _Sizes, before: Layout, after: Layout, count: int) -> Any:
    """Compiled: (`count` pool arrays, sources, targets) -> as many new ones."""

    def local(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        *arrays, sources, targets = arguments
        lanes = [_take(array[0], sources) for array in arrays]
        lanes = [_exchange(each, before, after, shape.num_kv_heads, shape.guest_blocks) for each in lanes]
        zeros = jnp.zeros((lanes[0].shape[1], shape.new_num_blocks, *lanes[0].shape[3:]), shape.dtype)
        return tuple(_put(zeros, each, targets)[None] for each in lanes)

    old, new = _pool_spec(before, shape), _pool_spec(after, shape)
    rows = (PartitionSpec(before.dp_axes or None), PartitionSpec(after.dp_axes or None))
    arrays = [_abstract(before, shape, shape.num_blocks)] * count
    lanes = max(before.dp, after.dp)
    index = [_index(layout, spec, lanes, shape) for layout, spec in zip((before, after), rows, strict=True)]
    return _compile(local, before, ((old,) * count + rows), (new,) * count, (*arrays, *index))


@lru_cache(maxsize=128)
def _pack(shape: _Sizes, before: Layout, after: Layout, count: int) -> Any:
    """Compiled: (`count` pool arrays, sources) -> packed lanes, in the same layout."""

    def local(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        *arrays, sources = arguments
        return tuple(_take(array[0], sources) for array in arrays)

    spec, rows = _pool_spec(before, shape), PartitionSpec(before.dp_axes or None)
    index = _index(before, rows, max(before.dp, after.dp), shape)
    arrays = [_abstract(before, shape, shape.num_blocks)] * count
    return _compile(local, before, ((spec,) * count + (rows,)), (spec,) * count, (*arrays, index))


@lru_cache(maxsize=128)
def _unpack(shape: _Sizes, landing: Layout, after: Layout, count: int) -> Any:
    """Compiled: (`count` packed lanes, as many pool arrays, targets) -> pool arrays."""

    def local(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        *arrays, targets = arguments
        lanes = [_exchange(array, landing, after, shape.num_kv_heads, shape.guest_blocks) for array in arrays[:count]]
        return tuple(_put(pool[0], each, targets)[None] for pool, each in zip(arrays[count:], lanes, strict=True))

    rows = PartitionSpec(after.dp_axes or None)
    num_lanes = max(landing.dp, after.dp)
    packed = jax.ShapeDtypeStruct(
        (num_lanes, shape.num_kv_heads, shape.lane_blocks, shape.block_size, shape.head_dim),
        shape.dtype,
        sharding=NamedSharding(landing.mesh, _pool_spec(landing, shape)),
    )
    pools, new = [_abstract(after, shape, shape.new_num_blocks)] * count, (_pool_spec(after, shape),) * count
    in_specs = (*[_pool_spec(landing, shape)] * count, *new, rows)
    arguments = (*[packed] * count, *pools, _index(after, rows, num_lanes, shape))
    return _compile(local, after, in_specs, new, arguments, donated=tuple(range(count, 2 * count)))


def _abstract(layout: Layout, shape: _Sizes, num_blocks: int) -> jax.ShapeDtypeStruct:
    dims = (layout.dp, shape.num_kv_heads, num_blocks, shape.block_size, shape.head_dim)
    return jax.ShapeDtypeStruct(dims, shape.dtype, sharding=NamedSharding(layout.mesh, _pool_spec(layout, shape)))


def _index(layout: Layout, spec: PartitionSpec, lanes: int, shape: _Sizes) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(layout.mesh, spec)
    return jax.ShapeDtypeStruct((lanes, shape.lane_blocks), jnp.int32, sharding=sharding)


def _compile(
    local: Callable[..., Any],
    layout: Layout,
    in_specs: tuple[PartitionSpec, ...],
    out_specs: tuple[PartitionSpec, ...],
    arguments: tuple[jax.ShapeDtypeStruct, ...],
    donated: tuple[int, ...] = (),
) -> Any:
    # check_vma off: key/value heads may be replicated over a part of tp
    mapped = jax.shard_map(local, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donated).lower(*arguments).compile()


# ---------------------------------------------------------------- lanes, inside shard_map; local to a device


def _moved_axes(before: Layout, after: Layout, heads: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes that change between dp and tp: those that split heads at the larger tp, and the others."""
    large, small = (before, after) if before.tp > after.tp else (after, before)
    moved = [axis for axis in large.tp_axes if axis not in small.tp_axes]
    split = large.kv_axes(heads)
    return tuple(axis for axis in moved if axis in split), tuple(axis for axis in moved if axis not in split)


def _lane_order(before: Layout, after: Layout, heads: int) -> np.ndarray:
    """The lane at each place of a device's stack, within one dp group of the layout that has fewer dp groups.

    Lanes are numbered as dp groups are, by the mesh's order of axes. Collectives stack by the order in which axes are
    named to them: those that replicate first, then those that split heads, the major part of the heads first.
    """
    split, rest = _moved_axes(before, after, heads)
    mesh = before.mesh
    natural = [axis for axis in mesh.axis_names if axis in (*split, *rest)]
    numbers = np.arange(axes_size(mesh, natural)).reshape([mesh.shape[axis] for axis in natural])
    return numbers.transpose([natural.index(axis) for axis in (*rest, *split)]).ravel()


def _exchange(lanes: jax.Array, before: Layout, after: Layout, heads: int, guests: int) -> jax.Array:
    """Packed lanes [l, K', M, P, D] of a device in one layout to those in the other. `guests`: places for each home, at
    the end of a lane."""
    if guests:
        homes = min(before.dp_axes, after.dp_axes, key=len)  # the axes of dp that both have tell homes apart
        first = lanes.shape[2] - guests * axes_size(before.mesh, homes)
        crossed = lax.all_to_all(lanes[:, :, first:], homes, split_axis=2, concat_axis=2, tiled=True)
        lanes = lax.concatenate([lanes[:, :, :first], crossed], 2)
    split, rest = _moved_axes(before, after, heads)
    if after.tp >= before.tp:
        if split:
            lanes = lax.all_to_all(lanes, split, split_axis=1, concat_axis=0, tiled=True)
        return lax.all_gather(lanes, rest, axis=0, tiled=True) if rest else lanes
    if rest:
        # Each device along these axes has the same heads of all the group's lanes, and keeps its own lane.
        count = lanes.shape[0] // axes_size(before.mesh, rest)
        lanes = lax.dynamic_slice_in_dim(lanes, lax.axis_index(rest) * count, count, axis=0)
    return lax.all_to_all(lanes, split, split_axis=0, concat_axis=1, tiled=True) if split else lanes


def _take(pool_KNPD: jax.Array, sources_LM: jax.Array) -> jax.Array:
    """The lanes' blocks, [l, K', M, P, D]. Numbers are checked on the host."""
    return jax.vmap(lambda blocks: jnp.take(pool_KNPD, blocks, axis=1, mode="clip"))(sources_LM)


def _put(pool_KNPD: jax.Array, lanes_LKMPD: jax.Array, targets_LM: jax.Array) -> jax.Array:
    """The pool with the lanes' blocks in it; numbers beyond the last block are dropped."""
    K, _, P, D = pool_KNPD.shape
    blocks_KBPD = jnp.moveaxis(lanes_LKMPD, 0, 1).reshape(K, -1, P, D)
    return pool_KNPD.at[:, targets_LM.ravel()].set(blocks_KBPD, mode="drop")


# ---------------------------------------------------------------- chunks


def _shard_bytes(layout: Layout, shape: _Sizes, num_blocks: int, groups: int = 1) -> int:
    """The bytes that one array's blocks of `groups` dp groups take on a device."""
    return groups * num_blocks * shape.block_bytes * layout.kv_heads_each(shape.num_kv_heads) // shape.num_kv_heads


def _working_bytes(shape: _Sizes, before: Layout, after: Layout) -> int:
    """The bytes on a device while one array moves, beside its old and new form: lanes, sent and received, twice; and
    those of guests."""
    lanes, guests = max(before.dp, after.dp), shape.guest_blocks * min(before.dp, after.dp)
    sent = _shard_bytes(before, shape, shape.lane_blocks + guests, lanes // before.dp)
    received = _shard_bytes(after, shape, shape.lane_blocks, lanes // after.dp)
    return 2 * (sent + received)


def _chunks(
    shape: _Sizes, before: Layout, after: Layout, num_arrays: int, max_extra_bytes: int, *, makes_pool: bool = True
) -> tuple[int, ...]:
    """How many arrays move at once; `makes_pool`: whether the new pool's come into being beside the old ones."""
    pools = [_shard_bytes(before, shape, shape.num_blocks), _shard_bytes(after, shape, shape.new_num_blocks)]
    cost = _working_bytes(shape, before, after) + (min(pools) if makes_pool else 0)
    count = math.ceil(num_arrays / max(max_extra_bytes // cost, 1))
    size, larger = divmod(num_arrays, count)
    return tuple(size + (i < larger) for i in range(count))
