"""Lanes of packed KV blocks: taken from a pool, exchanged between the devices of two layouts, put into a pool.

Purpose: what runs inside `shard_map` when KV migrates (`jaxrl.sharding.kv_migration`), each function local to a device.

Source: docs/architecture.md: KV merges in `shard_map`, with one all-to-all per array.

A lane is one dp group of the layout that has more of them. A device's lanes stand in the order in which collectives
over several axes stack them (`lane_order`); only the block numbers depend on that order.

A home is one dp group of the layout that has fewer of them. Blocks that change their home (guests) take the last
places of a lane, as many for each home in turn. They cross by an all-to-all of their own, over the axes of dp that both
layouts have, to the lane of the same place in the other home, and are then exchanged with the others.

Dims: l lanes of a device, K key/value heads (K' of a device), N blocks of a pool, P positions per block, D head dim,
M places of a lane.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import axes_size


def _moved_axes(before: Layout, after: Layout, heads: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes that change between dp and tp: those that split heads in the layout with larger tp, and the others."""
    large, small = (before, after) if before.tp > after.tp else (after, before)
    moved = [axis for axis in large.tp_axes if axis not in small.tp_axes]
    split = large.kv_axes(heads)
    return tuple(axis for axis in moved if axis in split), tuple(axis for axis in moved if axis not in split)


def lane_order(before: Layout, after: Layout, heads: int) -> np.ndarray:
    """The lane at each place of a device's stack, within one dp group of the layout that has fewer dp groups.

    Lanes are numbered as dp groups are, by the mesh's order of axes. Collectives stack by the order in which axes are
    named to them: those that replicate first, then those that split heads, the major part of the heads first.
    """
    split, rest = _moved_axes(before, after, heads)
    mesh = before.mesh
    natural = [axis for axis in mesh.axis_names if axis in (*split, *rest)]
    numbers = np.arange(axes_size(mesh, natural)).reshape([mesh.shape[axis] for axis in natural])
    return numbers.transpose([natural.index(axis) for axis in (*rest, *split)]).ravel()


def home_axes(before: Layout, after: Layout) -> tuple[str, ...]:
    """The axes of dp that both layouts have, which tell homes apart."""
    return min(before.dp_axes, after.dp_axes, key=len)


def exchange(lanes: jax.Array, before: Layout, after: Layout, heads: int, guests: int = 0) -> jax.Array:
    """Packed lanes [l, K', M, P, D] of a device in one layout to those in the other; inside `shard_map`.

    `guests`: places for each home, at the end of a lane.
    """
    if guests:
        homes = home_axes(before, after)
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


def take(pool_KNPD: jax.Array, sources_LM: jax.Array) -> jax.Array:
    """The lanes' blocks, [l, K', M, P, D]; numbers are checked on the host."""
    return jax.vmap(lambda blocks: jnp.take(pool_KNPD, blocks, axis=1, mode="clip"))(sources_LM)


def put(pool_KNPD: jax.Array, lanes_LKMPD: jax.Array, targets_LM: jax.Array) -> jax.Array:
    """A pool with the lanes' blocks in it; numbers beyond the last block are dropped."""
    K, _, P, D = pool_KNPD.shape
    blocks_KBPD = jnp.moveaxis(lanes_LKMPD, 0, 1).reshape(K, -1, P, D)
    return pool_KNPD.at[:, targets_LM.ravel()].set(blocks_KBPD, mode="drop")
