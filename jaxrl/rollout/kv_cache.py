"""The paged KV cache of a layout: one pool per dp group, with a pair of arrays per layer of a stack.

Where no layer has a window all layers are one stack. Else several stacks share the arrays (`jaxrl.models.kv_layers`),
each with its own tables.

A pool array is [dp, K, N, P, D] (dp groups, key/value heads, blocks, positions per block, head dim). dp is split over
the layout's dp axes, and K over `Layout.kv_axes`. A pool of codes (`rollout.kv_cache_dtype`) is a pair: the codes, and
a scale for each position and head, [dp, K, N, P, 1]. Both follow from that position's key or value alone. Heads come
before blocks because a gather of blocks then yields [K, R, S, D], the order in which XLA:CPU decodes fastest. Block
numbers are local to a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.kernels import attention, gathered, reference
from jaxrl.kernels.reference import Cached, Codes
from jaxrl.models.kv_layers import KvLayers
from jaxrl.schema.limits import Narrow
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.narrow_weights import dtype_of, narrowed

Pool = list[tuple[Cached, Cached]]
Tables = tuple[jax.Array, ...]
"""For each stack, the rows' blocks, int32 [dp, R, W]."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """`num_layers` counts pairs of arrays, `num_kv_heads` padded heads, `num_blocks` blocks per dp group with the
    reserved one."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    dtype: jnp.dtype
    codes: Narrow = "none"

    def dims(self, layout: Layout) -> tuple[int, ...]:
        return layout.dp, self.num_kv_heads, self.num_blocks, self.block_size, self.head_dim

    def made(self, layout: Layout, make: Callable[[tuple[int, ...], Any], Any]) -> Pool:
        """A pool of what `make` returns for the dims and the dtype of an array."""
        dims = self.dims(layout)
        if self.codes == "none":
            return [(make(dims, self.dtype), make(dims, self.dtype)) for _ in range(self.num_layers)]

        def one() -> Codes:
            return Codes(make(dims, dtype_of(self.codes)), make((*dims[:-1], 1), jnp.float32))

        return [(one(), one()) for _ in range(self.num_layers)]


def pool_spec(layout: Layout, num_kv_heads: int) -> PartitionSpec:
    return PartitionSpec(layout.dp_axes or None, layout.kv_axes(num_kv_heads) or None)


def pool_sharding(layout: Layout, shape: CacheShape) -> NamedSharding:
    return NamedSharding(layout.mesh, pool_spec(layout, shape.num_kv_heads))


def allocate(layout: Layout, shape: CacheShape) -> Pool:
    """A zeroed pool, each device allocating its own shard."""
    return cast(Pool, _zeros(layout, shape)())


@lru_cache(maxsize=16)
def _zeros(layout: Layout, shape: CacheShape) -> Callable[[], Any]:
    """Compiled once: the pool is released and allocated again in every step."""
    return jax.jit(lambda: shape.made(layout, jnp.zeros), out_shardings=pool_sharding(layout, shape))


def coded(new: jax.Array, pool: Cached) -> Cached:
    if not isinstance(pool, Codes):
        return new
    codes, scales = narrowed("int8" if pool.dtype == jnp.int8 else "fp8", new, -1)
    return Codes(codes, scales[..., None])


def attend(
    layout: Layout,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: tuple[Cached, Cached],
    tables: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    how: attention.PagedAttention,
    rule: reference.Rule = reference.PLAIN,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, tuple[Cached, Cached]]:
    """Writes k and v, then attends; in `shard_map` over dp and tp, so that block numbers stay local to their pool.

    The attention's output, as q, and the layer's new arrays. q: [dp, R, C, H, D]; k, v: [dp, R, C, K, D]; `tables` of
    the layer's stack, int32 [dp, R, W]; positions, valid: [dp, R, C].
    """
    kv_heads = pool[0].shape[1]
    dp, tp, kv = layout.dp_axes or None, layout.tp_axes or None, layout.kv_axes(kv_heads) or None
    queries, keys = PartitionSpec(dp, None, None, tp), PartitionSpec(dp, None, None, kv)
    paged, rows = PartitionSpec(dp, kv), PartitionSpec(dp)

    def local(q, k, v, pool_k, pool_v, tables, positions, valid, sinks):
        pool_k, pool_v = _own((pool_k, pool_v))
        pool_k = how.write(pool_k, coded(k[0], pool_k), tables[0], positions[0], valid[0])
        pool_v = how.write(pool_v, coded(v[0], pool_v), tables[0], positions[0], valid[0])
        out = how.attend(q[0], pool_k, pool_v, tables[0], positions[0], rule, sinks)
        return _lead((out, pool_k, pool_v))

    out, pool_k, pool_v = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(queries, keys, keys, paged, paged, rows, rows, rows, PartitionSpec(tp)),
        out_specs=(queries, paged, paged),
        check_vma=False,  # key/value heads may be replicated over a part of tp
    )(q, k, v, *pool, tables, positions, valid, sinks)
    return out, (pool_k, pool_v)


class GatheredCache:
    """Decode over windows (`jaxrl.kernels.gathered`), in `shard_map` over dp and tp: `open` gathers, `attend` is one
    layer of one step, and `close` writes the steps back to the pool. Windows and fresh buffers have a leading dim dp
    here, and their next is split over the axes of key/value heads."""

    def __init__(self, layout: Layout, num_kv_heads: int, layers: KvLayers) -> None:
        self._mesh, self._layers = layout.mesh, layers
        self._dp, self._tp = layout.dp_axes or None, layout.tp_axes or None
        self._kv = layout.kv_axes(num_kv_heads) or None
        self._rows, self._paged = PartitionSpec(self._dp), PartitionSpec(self._dp, self._kv)
        self._tiles = gathered.WindowTiles(*[self._rows] * 3)
        self._window, self._fresh = gathered.Window(*[self._paged] * 2), gathered.Fresh(*[self._paged] * 2)

    def open(
        self, pool: Pool, tiles: Sequence[gathered.WindowTiles], num_rows: int, num_steps: int, dtype: Any
    ) -> tuple[list[gathered.Window], list[gathered.Fresh]]:
        """Each layer's window of its stack's tiles, [dp, U, ...], and its empty buffer for `num_steps` positions of the
        rows; `dtype`: of the window, where the pool holds codes."""

        def local(keys, values, blocks):
            keys, values = _own((keys, values))
            window = gathered.gather(keys, values, blocks[0], dtype)
            return _lead((window, gathered.blank(values, num_rows, num_steps)))

        gather = self._map(local, (self._paged, self._paged, self._rows), (self._window, self._fresh))
        both = [gather(*pool[place], tiles[stack].blocks_UW) for stack, place in self._layers.places]
        return [window for window, _ in both], [fresh for _, fresh in both]

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        window: gathered.Window,
        tiles: gathered.WindowTiles,
        fresh: gathered.Fresh,
        start: jax.Array,
        at: jax.Array,
        rule: reference.Rule = reference.PLAIN,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, gathered.Fresh]:
        """One layer of one step, in which rows take one position, or C positions: the attention's output, as q, and the
        layer's new buffer.

        Args:
          q: [dp, R, H, D] or [dp, R, C, H, D]; k, v: the same with K heads.
          start: int32 [dp, R], the position of step 0 in each row.
          at: int32 scalar, the step; or [dp, R, C], each position's index in the fresh buffer; beyond its end: not
            stored.
        """
        several = at.ndim > 0
        put = gathered.put_several if several else gathered.put

        def local(q, k, v, window, tiles, fresh, start, at, sinks):
            own, at = _own(fresh), at[0] if several else at
            own = put(own, coded(k[0], own.keys_BTD), coded(v[0], own.values_BTD), at)
            queries = q[0] if several else q[0][:, None]
            out = gathered.attend(queries, _own(window), _own(tiles), own, start[0], at, rule, sinks)
            return out.reshape(q.shape), _lead(own)

        positions = (None, None) if several else (None,)
        queries = PartitionSpec(self._dp, *positions, self._tp)
        keys = PartitionSpec(self._dp, *positions, self._kv)
        places = self._rows if several else PartitionSpec()
        rest = (self._window, self._tiles, self._fresh, self._rows, places, PartitionSpec(self._tp))
        arrays = (q, k, v, window, tiles, fresh, start, at, sinks)
        return self._map(local, (queries, keys, keys, *rest), (queries, self._fresh))(*arrays)

    def close(
        self, pool: Pool, fresh: list[gathered.Fresh], tables: Tables, start: jax.Array, counts: jax.Array
    ) -> Pool:
        """The pool with each row's first `counts` [dp, R] steps in it."""

        def local(keys, values, fresh, tables, start, counts):
            keys, values, own = _own((keys, values, fresh))
            return _lead(gathered.scatter(keys, values, own, tables[0], start[0], counts[0]))

        in_specs = (self._paged, self._paged, self._fresh, self._rows, self._rows, self._rows)
        scatter = self._map(local, in_specs, (self._paged, self._paged))
        arrays = list(pool)
        for own, (stack, place) in zip(fresh, self._layers.places, strict=True):
            arrays[place] = scatter(*arrays[place], own, tables[stack], start, counts)
        return arrays

    def _map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        # check_vma off: key/value heads may be replicated over a part of tp
        return jax.shard_map(function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _own(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _lead(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)
