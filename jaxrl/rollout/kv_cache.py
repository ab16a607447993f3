"""The paged KV cache of a layout: one pool per dp group, per layer a pair of arrays.

A pool array is [dp, K, N, P, D] (dp groups, key/value heads, blocks, positions per block, head dim), dp split over the
layout's dp axes and K over the axes that `Layout.kv_axes` gives. Heads come before blocks because a gather of blocks
then yields [K, R, S, D], the order in which XLA:CPU decodes fastest (design §6). Block numbers are local to a pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.kernels import attention
from jaxrl.sharding.layout import Layout

Pool = list[tuple[jax.Array, jax.Array]]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of a cache; `num_kv_heads` counts padded heads, `num_blocks` blocks per dp group with the reserved one."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    dtype: jnp.dtype

    @property
    def bytes_per_block(self) -> int:
        """Of all layers, keys and values together, before any split over tp."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize


def pool_spec(layout: Layout, num_kv_heads: int) -> PartitionSpec:
    return PartitionSpec(layout.dp_axes or None, layout.kv_axes(num_kv_heads) or None)


def pool_sharding(layout: Layout, shape: CacheShape) -> NamedSharding:
    return NamedSharding(layout.mesh, pool_spec(layout, shape.num_kv_heads))


def allocate(layout: Layout, shape: CacheShape) -> Pool:
    """A zeroed pool, each device allocating its own shard."""
    return cast(Pool, _zeros(layout, shape)())


@lru_cache(maxsize=16)
def _zeros(layout: Layout, shape: CacheShape) -> Callable[[], Any]:
    """Compiled once per layout and shape: the pool is released and allocated again in every step."""
    dims = (layout.dp, shape.num_kv_heads, shape.num_blocks, shape.block_size, shape.head_dim)
    sharding = pool_sharding(layout, shape)
    return jax.jit(
        lambda: [(jnp.zeros(dims, shape.dtype), jnp.zeros(dims, shape.dtype)) for _ in range(shape.num_layers)],
        out_shardings=[(sharding, sharding)] * shape.num_layers,
    )


def attend(
    layout: Layout,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: tuple[jax.Array, jax.Array],
    tables: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Writes k and v, then attends; in `shard_map` over dp and tp, so that block numbers stay local to their pool.

    Args:
      q: [dp, R, C, H, D]; k, v: [dp, R, C, K, D].
      pool: this layer's arrays.
      tables: int32 [dp, R, W]; positions, valid: [dp, R, C].

    Returns:
      The attention's output [dp, R, C, H, D] and the layer's new arrays.
    """
    kv_heads = pool[0].shape[1]
    dp, tp, kv = layout.dp_axes or None, layout.tp_axes or None, layout.kv_axes(kv_heads) or None
    queries, keys = PartitionSpec(dp, None, None, tp), PartitionSpec(dp, None, None, kv)
    paged, rows = PartitionSpec(dp, kv), PartitionSpec(dp)

    def local(q, k, v, pool_k, pool_v, tables, positions, valid):
        pool_k = attention.write_kv(pool_k[0], k[0], tables[0], positions[0], valid[0])
        pool_v = attention.write_kv(pool_v[0], v[0], tables[0], positions[0], valid[0])
        out = attention.paged_attention(q[0], pool_k, pool_v, tables[0], positions[0])
        return out[None], pool_k[None], pool_v[None]

    out, pool_k, pool_v = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(queries, keys, keys, paged, paged, rows, rows, rows),
        out_specs=(queries, paged, paged),
        check_vma=False,  # key/value heads may be replicated over a part of tp
    )(q, k, v, *pool, tables, positions, valid)
    return out, (pool_k, pool_v)
