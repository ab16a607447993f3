"""Attention over packed rows as Pallas kernels for NVIDIA GPUs, forward and backward, for training.

Scores exist only in tiles. The ranges of a tile's segments and positions decide beforehand which tiles hold anything
visible, so a row of many short segments costs no more than its segments. They also decide in which tiles every query
sees every key, so that no mask is needed: masks in all tiles take twice the time (H200, 8k tokens).

Sources: FlashAttention-2 (Dao 2023, arXiv:2307.08691, sections 3.1 and 3.2) for the running softmax and the backward
pass from the saved log-sum-exp; the lists of tiles to visit follow FlexAttention's block masks (Dong et al. 2024,
arXiv:2412.05496, section 4.2). Departures: lists come from ranges, not from every pair of tokens, so a tile may be
visited in vain but is never missed. One program sums gradients of keys and values over a group's query heads, in a
fixed order and without atomics, so a result does not change from run to run.

The backend and the terms are those of `paged_pallas`. Dims: R rows, T tokens of a row, H query heads, K key/value
heads, G = H / K, D head dim; inside a kernel M queries and B keys of a tile; I query tiles, J key tiles. Keys may be
of other tokens than queries, S of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxrl.kernels.paged_pallas import (
    NEVER,
    dot,
    load_numbers,
    load_rows,
    refusal,
    score_scale,
    softmax_step,
    store_rows,
)
from jaxrl.kernels.reference import ATTENTION, MaskInputs

OUTSIDE = -1  # the segment of tokens past the end of a row
NO_PREFIX = -2  # a segment that no key has


@dataclass(frozen=True, slots=True)
class PackedTileSizes:
    """Queries and keys per tile (powers of two, at least 16), and the compiler's warps and stages.

    The forward pass and the gradient of queries keep a tile of queries and walk over keys; the gradients of keys and
    values keep a tile of keys and walk over queries.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def choose_tiles(dtype: Any) -> Tiles:
    """Tile sizes for the forward pass and the gradients of queries, and of keys and values.

    In 16 bits the fastest of 16, 18 and 26 on an H200 at head dim 128, over rows of 1k and of 8k tokens together
    (docs/benchmarks/h200-2026-11-26.md); in float32 a rule of thumb, unmeasured.
    """
    if jnp.dtype(dtype) == jnp.float32:  # three products instead of one: larger tiles would spill registers
        return PackedTileSizes(32, 32, 4, 2), PackedTileSizes(32, 32, 4, 2), PackedTileSizes(16, 32, 4, 2)
    return PackedTileSizes(128, 64, 4, 3), PackedTileSizes(64, 64, 4, 3), PackedTileSizes(128, 64, 8, 2)


Tiles = tuple[PackedTileSizes, PackedTileSizes, PackedTileSizes]
"""Tile sizes of the forward pass, of the gradients of queries, and of the gradients of keys and values."""


class TileList(NamedTuple):
    """Which tiles a kernel visits for each tile that it keeps; R rows, I kept tiles, J others."""

    numbers: jax.Array  # [R, I, J], first the fully visible tiles, then the partly visible ones, then others
    whole: jax.Array  # [R, I], how many are fully visible
    count: jax.Array  # [R, I], how many are visible at all


class TileLists(NamedTuple):
    """For each of the three kernels."""

    forward: TileList
    queries: TileList
    keys: TileList


@partial(jax.jit, static_argnames=("tiles", "interpret"))
def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: MaskInputs,
    *,
    tiles: Tiles | None = None,
    sinks: jax.Array | None = None,
    lists: TileLists | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`reference.packed_attention`, differentiable once; scores, softmax and sums are float32.

    `tiles`: how to cut the work; `choose_tiles` decides if None. `lists`: of `tile_lists` for the same mask and tiles;
    computed here if None. `interpret`: run as plain JAX, on any device (slow; for tests).
    """
    if reason := refusal(q, k, v, k.shape[2]):
        raise ValueError(f"packed attention's Pallas kernels: {reason}; set actor.attention to auto or reference")
    tiles = tiles or choose_tiles(q.dtype)
    lists = tile_lists(mask, tiles) if lists is None else lists
    window = () if mask.first is None else (mask.first,)
    ids = (mask.segment_ids, mask.prefix_ids, mask.positions, *mask.all_keys, *window)
    integers = tuple(x.astype(jnp.int32) for x in ids)
    return _packed(q, k, v, sinks, integers, lists, tiles, interpret)


Integers = tuple[jax.Array, ...]  # segment_ids, prefix_ids, positions; of keys two of them; and with a window first


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    ids: Integers,
    lists: TileLists,
    tiles: Tiles,
    interpret: bool,
) -> tuple[Any, Any]:
    lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    out, lse = _call(_forward_kernel, tiles[0], q, k, (q, k, v), ids, lists.forward, (q, lse), interpret)
    if sinks is not None:  # one more share of the softmax, without a value
        whole = jnp.logaddexp2(lse, _in_base_2(sinks))
        out, lse = (out * jnp.exp2(lse - whole)[..., None]).astype(q.dtype), whole
    out, lse = (checkpoint_name(x, ATTENTION) for x in (out, lse))
    return out, (q, k, v, sinks, ids, lists, out, lse)


def _in_base_2(sinks: jax.Array) -> jax.Array:
    return sinks.astype(jnp.float32) * math.log2(math.e)


def _backward(tiles: Tiles, interpret: bool, residuals: Any, d_out: jax.Array) -> tuple[Any, ...]:
    q, k, v, sinks, ids, lists, out, lse = residuals
    d_out = d_out.astype(q.dtype)
    # Shared by all gradients of a row's scores: the derivative of the softmax's normaliser.
    shift = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    inputs = (q, k, v, d_out, lse, shift)
    (d_q,) = _call(_query_gradient_kernel, tiles[1], q, k, inputs, ids, lists.queries, (q,), interpret)
    d_k, d_v = _call(_key_gradient_kernel, tiles[2], q, k, inputs, ids, lists.keys, (k, v), interpret, over_keys=True)
    d_sinks = None
    if sinks is not None:
        share = jnp.exp2(_in_base_2(sinks) - lse)
        d_sinks = -jnp.sum(share * shift, axis=(0, 1)).astype(sinks.dtype)
    return d_q, d_k, d_v, d_sinks, None, None


# the forward pass without what it saves
_packed = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], nondiff_argnums=(6, 7))
_packed.defvjp(_forward, _backward)


# ---------------------------------------------------------------- which tiles to visit


def tile_lists(mask: MaskInputs, tiles: Tiles) -> TileLists:
    """The lists of all three kernels, for all layers of a kind in a microbatch."""
    forward, queries, others = (visible_tiles(mask, own.queries, own.keys) for own in tiles)
    return TileLists(list_tiles(*forward), list_tiles(*queries), list_tiles(*(jnp.swapaxes(x, 1, 2) for x in others)))


def visible_tiles(mask: MaskInputs, queries: int, keys: int) -> tuple[jax.Array, jax.Array]:
    """Two arrays of bool [R, I, J], (may be visible, is fully visible): the first is False only where no query of tile
    i sees a key of tile j, the second True only where all see all. `queries`, `keys`: of a tile."""
    (segment_ids, positions, prefix_ids, first, _), of_keys = mask, mask.all_keys
    far = jnp.iinfo(jnp.int32).max
    first_I, last_I = (of(segment_ids, queries)[..., None] for of in (_lowest, _highest))
    # Tokens without a prefix leave an empty range: its first segment lies beyond its last.
    prefix_first_I = _lowest(jnp.where(prefix_ids == 0, far, prefix_ids), queries)[..., None]
    prefix_last_I = _highest(jnp.where(prefix_ids == 0, NO_PREFIX, prefix_ids), queries)[..., None]
    first_J, last_J = (of(of_keys.segment_ids, keys)[:, None, :] for of in (_lowest, _highest))
    soonest_J, latest_J = (of(of_keys.positions, keys)[:, None, :] for of in (_lowest, _highest))
    own = (first_J <= last_I) & (last_J >= first_I)
    prefix = (first_J <= prefix_last_I) & (last_J >= prefix_first_I)
    early = soonest_J <= _highest(positions, queries)[..., None]
    # One segment in all of both tiles; a tile of keys of one segment that all queries have for their prefix.
    same = (first_J == last_J) & (first_I == last_I) & (first_J == first_I)
    all_prefixed = _lowest(prefix_ids, queries)[..., None] == prefix_last_I
    shared = (first_J == last_J) & all_prefixed & (first_J == prefix_last_I)
    earlier = latest_J <= _lowest(positions, queries)[..., None]
    if first is not None:  # and in the window of some, or of all
        early &= latest_J >= _lowest(first, queries)[..., None]
        earlier &= soonest_J >= _highest(first, queries)[..., None]
    inside_I, inside_J = _inside(segment_ids.shape[1], queries), _inside(of_keys.segment_ids.shape[1], keys)
    return (own | prefix) & early, (same | shared) & earlier & inside_I[:, None] & inside_J


def _inside(tokens: int, size: int) -> jax.Array:
    """bool [tiles]: all of a tile is inside the row."""
    return (jnp.arange(-(-tokens // size)) + 1) * size <= tokens


def _lowest(x_RT: jax.Array, size: int) -> jax.Array:
    return _tiled(x_RT, size).min(axis=-1)


def _highest(x_RT: jax.Array, size: int) -> jax.Array:
    return _tiled(x_RT, size).max(axis=-1)


def _tiled(x_RT: jax.Array, size: int) -> jax.Array:
    """[R, tiles, size]; the last token is repeated where the last tile is not full."""
    rows, tokens = x_RT.shape
    return jnp.pad(x_RT, ((0, 0), (0, -tokens % size)), mode="edge").reshape(rows, -1, size)


def list_tiles(visible_RIJ: jax.Array, whole_RIJ: jax.Array) -> TileList:
    """The list for each tile i of `visible_tiles`."""
    order = jnp.where(whole_RIJ, 0, jnp.where(visible_RIJ, 1, 2))
    numbers = jnp.argsort(order, axis=-1, stable=True).astype(jnp.int32)
    return TileList(numbers, *(x.sum(axis=-1, dtype=jnp.int32) for x in (whole_RIJ, visible_RIJ)))


# ---------------------------------------------------------------- kernels


@dataclass(frozen=True, slots=True)
class _Ids:
    """Refs of a row's integers: [T] of queries, [S] of keys."""

    segments: Any
    prefixes: Any
    positions: Any
    key_segments: Any
    key_positions: Any
    first: Any = None

    @property
    def num_queries(self) -> int:
        return self.segments.shape[0]

    @property
    def num_keys(self) -> int:
        return self.key_segments.shape[0]

    def visible(self, query_M: jax.Array, key_B: jax.Array) -> jax.Array:
        """bool [M, B]."""
        in_M, in_B = query_M < self.num_queries, key_B < self.num_keys
        segment_M = plgpu.load(self.segments.at[query_M], mask=in_M, other=OUTSIDE)[:, None]
        prefix_M = plgpu.load(self.prefixes.at[query_M], mask=in_M, other=0)[:, None]
        position_M = plgpu.load(self.positions.at[query_M], mask=in_M, other=0)[:, None]
        segment_B = plgpu.load(self.key_segments.at[key_B], mask=in_B, other=OUTSIDE)[None, :]
        position_B = plgpu.load(self.key_positions.at[key_B], mask=in_B, other=0)[None, :]
        prefix_M = jnp.where(prefix_M == 0, NO_PREFIX, prefix_M)
        seen = ((segment_B == segment_M) | (segment_B == prefix_M)) & (position_B <= position_M)
        if self.first is None:
            return seen
        return seen & (position_B >= plgpu.load(self.first.at[query_M], mask=in_M, other=0)[:, None])


def _call(
    kernel: Callable[..., None],
    tiles: PackedTileSizes,
    q: jax.Array,
    k: jax.Array,
    inputs: tuple[jax.Array, ...],
    ids: Integers,
    listed: TileList,
    outputs: tuple[Any, ...],
    interpret: bool,
    *,
    over_keys: bool = False,
) -> list[jax.Array]:
    """Runs a kernel for every kept tile, head and row; arrays [R, T, heads, ...] go in and come out as [R, T * heads,
    ...], so that a token and head are one index.

    Programs start in the grid's order, so those with the most to visit come first: the last queries, the first keys.
    """
    (rows, _, heads), kv_heads = q.shape[:3], k.shape[2]
    num_tiles = listed.count.shape[1]

    def of_row(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda h, i, r: (r, *(0,) * (x.ndim - 1)))

    def of_tile(x: jax.Array) -> pl.BlockSpec:
        tile = (lambda i: i) if over_keys else (lambda i: num_tiles - 1 - i)
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda h, i, r: (r, tile(i), *(0,) * (x.ndim - 2)))

    def merged(x: Any) -> tuple[int, ...]:
        return (rows, x.shape[1] * x.shape[2], *x.shape[3:])

    @wraps(kernel)  # profiles and compiled programs know it by its name
    def of_refs(*refs: Any) -> None:
        own, others = _Ids(*refs[: len(ids)]), refs[len(ids) :]
        ins, lists, outs = others[: len(inputs)], others[len(inputs) :][: len(listed)], others[-len(outputs) :]
        kernel(own, ins, TileList(*lists), outs, tiles=tiles, heads=heads, group=heads // kv_heads)

    flat = [x.reshape(merged(x)) for x in inputs]
    shapes = [jax.ShapeDtypeStruct(merged(x), x.dtype) for x in outputs]
    outs = pl.pallas_call(
        of_refs,
        grid=(kv_heads if over_keys else heads, num_tiles, rows),
        in_specs=[*map(of_row, (*ids, *flat)), *map(of_tile, listed)],
        out_specs=[of_row(x) for x in shapes],
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
    )(*ids, *flat, *listed)
    return [out.reshape(x.shape) for out, x in zip(outs, outputs, strict=True)]


def _at(number: Any, size: int) -> jax.Array:
    return number * size + jnp.arange(size, dtype=jnp.int32)


def _last_first() -> jax.Array:
    """The tile of queries that this program keeps."""
    return pl.num_programs(1) - 1 - pl.program_id(1)


def _visit(listed: TileList, step: Callable[[Any, Any, bool, Any], Any], carry: Any, turns: int = 1) -> Any:
    """`carry` after `step(tile, turn, masked, carry)` for the listed tiles: in each turn the fully visible ones without
    a mask, then the others. Turns and tiles are one loop, so that loads of a step overlap the step before."""

    def some(first: Any, number: Any, masked: bool, carry: Any) -> Any:
        def one(i: Any, carry: Any) -> Any:
            at, turn = (i, 0) if turns == 1 else (lax.rem(i, number), lax.div(i, number))
            return step(listed.numbers[first + at], turn, masked, carry)

        return lax.fori_loop(0, number * turns, one, carry)

    whole, count = listed.whole[...], listed.count[...]
    carry = some(0, whole, False, carry)
    return some(whole, count - whole, True, carry)


Refs = tuple[Any, ...]


def _forward_kernel(
    ids: _Ids, inputs: Refs, listed: TileList, outputs: Refs, *, tiles: PackedTileSizes, heads: int, group: int
) -> None:
    (q_ref, k_ref, v_ref), (out_ref, lse_ref) = inputs, outputs
    head, kv_heads = pl.program_id(0), heads // group
    query_M = _at(_last_first(), tiles.queries)
    in_M, row_M = query_M < ids.num_queries, query_M * heads + head
    q_MD = load_rows(q_ref, row_M, in_M)

    def step(tile: Any, _: Any, masked: bool, carry: tuple) -> tuple:
        key_B = _at(tile, tiles.keys)
        row_B, in_B = key_B * kv_heads + lax.div(head, group), key_B < ids.num_keys if masked else None
        k_BD, v_BD = load_rows(k_ref, row_B, in_B), load_rows(v_ref, row_B, in_B)
        visible_MB = ids.visible(query_M, key_B) if masked else None
        return softmax_step(q_MD, k_BD, v_BD, visible_MB, *carry)

    per_query = (tiles.queries,)
    start = (jnp.zeros(q_MD.shape, jnp.float32), jnp.full(per_query, NEVER, jnp.float32), jnp.zeros(per_query))
    sum_MD, top_M, total_M = _visit(listed, step, start)
    total_M = jnp.where(total_M > 0, total_M, 1)  # of queries past the end of the row; all others see themselves
    store_rows(out_ref, row_M, sum_MD / total_M[:, None], in_M)
    plgpu.store(lse_ref.at[row_M], top_M + jnp.log2(total_M), mask=in_M)


def _query_gradient_kernel(
    ids: _Ids, inputs: Refs, listed: TileList, outputs: Refs, *, tiles: PackedTileSizes, heads: int, group: int
) -> None:
    (q_ref, k_ref, v_ref, d_out_ref, lse_ref, shift_ref), (d_q_ref,) = inputs, outputs
    head, kv_heads = pl.program_id(0), heads // group
    query_M = _at(_last_first(), tiles.queries)
    in_M, row_M = query_M < ids.num_queries, query_M * heads + head
    q_MD, d_out_MD = load_rows(q_ref, row_M, in_M), load_rows(d_out_ref, row_M, in_M)
    lse_M, shift_M = (load_numbers(ref, row_M, in_M) for ref in (lse_ref, shift_ref))

    def step(tile: Any, _: Any, masked: bool, d_q_MD: jax.Array) -> jax.Array:
        key_B = _at(tile, tiles.keys)
        row_B, in_B = key_B * kv_heads + lax.div(head, group), key_B < ids.num_keys if masked else None
        k_BD, v_BD = load_rows(k_ref, row_B, in_B), load_rows(v_ref, row_B, in_B)
        weights_MB = _weights(q_MD, k_BD, ids.visible(query_M, key_B) if masked else None, lse_M)
        d_scores_MB = weights_MB * (dot(d_out_MD, v_BD, 1, 1) - shift_M[:, None])
        return d_q_MD + dot(d_scores_MB.astype(k_BD.dtype), k_BD, 1, 0)

    d_q_MD = _visit(listed, step, jnp.zeros(q_MD.shape, jnp.float32))
    store_rows(d_q_ref, row_M, d_q_MD * q_MD.shape[1] ** -0.5, in_M)


def _key_gradient_kernel(
    ids: _Ids, inputs: Refs, listed: TileList, outputs: Refs, *, tiles: PackedTileSizes, heads: int, group: int
) -> None:
    (q_ref, k_ref, v_ref, d_out_ref, lse_ref, shift_ref), (d_k_ref, d_v_ref) = inputs, outputs
    kv_head, kv_heads = pl.program_id(0), heads // group
    key_B = _at(pl.program_id(1), tiles.keys)
    in_B, row_B = key_B < ids.num_keys, key_B * kv_heads + kv_head
    k_BD, v_BD = load_rows(k_ref, row_B, in_B), load_rows(v_ref, row_B, in_B)

    def step(tile: Any, head: Any, masked: bool, carry: tuple) -> tuple:
        query_M = _at(tile, tiles.queries)
        in_M, row_M = query_M < ids.num_queries if masked else None, query_M * heads + kv_head * group + head
        q_MD, d_out_MD = load_rows(q_ref, row_M, in_M), load_rows(d_out_ref, row_M, in_M)
        lse_M, shift_M = (load_numbers(ref, row_M, in_M) for ref in (lse_ref, shift_ref))
        weights_MB = _weights(q_MD, k_BD, ids.visible(query_M, key_B) if masked else None, lse_M)
        d_scores_MB = weights_MB * (dot(d_out_MD, v_BD, 1, 1) - shift_M[:, None])
        d_k_BD, d_v_BD = carry
        d_v_BD += dot(weights_MB.astype(d_out_MD.dtype), d_out_MD, 0, 0)
        return d_k_BD + dot(d_scores_MB.astype(q_MD.dtype), q_MD, 0, 0), d_v_BD

    start = (jnp.zeros(k_BD.shape, jnp.float32), jnp.zeros(v_BD.shape, jnp.float32))
    d_k_BD, d_v_BD = _visit(listed, step, start, turns=group)
    store_rows(d_k_ref, row_B, d_k_BD * k_BD.shape[1] ** -0.5, in_B)
    store_rows(d_v_ref, row_B, d_v_BD, in_B)


def _weights(q_MD: jax.Array, k_BD: jax.Array, visible_MB: jax.Array | None, lse_M: jax.Array) -> jax.Array:
    """The softmax's weights once more, from scores and the saved base-2 log-sum-exp."""
    weights_MB = jnp.exp2(dot(q_MD, k_BD, 1, 1) * score_scale(q_MD.shape[1]) - lse_M[:, None])
    return weights_MB if visible_MB is None else jnp.where(visible_MB, weights_MB, 0)
