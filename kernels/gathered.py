"""Decode attention over a window: the blocks of each row, gathered once for many decode steps.

A paged gather in every step moves each key and value three times (read, write, read again). So where no kernel reads a
block table in place (XLA on CPU), a decode program copies its rows' blocks into a *window* before its first step. It
keeps its steps' tokens in a small *fresh* buffer, and writes that back to the pool after its last. All rows advance in
lockstep, so a step's keys and values go to one index of the fresh buffer: a slice update in place, where the pool needs
a scatter. With drafts, each row fills its part of the buffer at its own pace (`put_several`).

The window is a list of *tiles*, each a few blocks of one row, so a program's cost follows the cached tokens, not the
number of rows times the longest. Each tile's scores have their own maximum and sum, and a row's tiles are joined as in
flash decoding (Dao et al. 2023), by a product with a matrix of zeros and ones that assigns tiles to rows.

Keys of the window are stored transposed, [D, S], and tiles and heads share one dim: XLA:CPU runs the products fastest
in this form (docs/performance.md). The loop never writes to the window: XLA would copy it in every step.

Dims: R rows, H query heads, K key/value heads, G = H / K, D head dim; U tiles, S positions of a tile, T steps of the
program, or the most tokens that a row may gain in it; C queries of a row, M = C * G; B = K * U or K * R; N blocks, P
positions per block, W blocks per table or tile. All of it is local to one device: callers run it in `shard_map`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.kernels import reference
from jaxrl.kernels.reference import Cached

_HIDDEN = -1e30
"""Added to scores that must not count: lower than any score, but finite."""


class WindowTiles(NamedTuple):
    """The blocks of the window, int32, listed by the host; or the specs or shapes of these three arrays: a tile's
    blocks, its row, and the position of its first token. Padding tiles have row 0 and a position beyond any sequence.
    """

    blocks_UW: Any
    owner_U: Any
    first_U: Any


class Window(NamedTuple):
    """The rows' cache when the program began: keys [K * U, D, S], values [K * U, S, D]; or the specs of both."""

    keys_BDS: Any
    values_BSD: Any


class Fresh(NamedTuple):
    """Keys and values of the program's own steps: [B, T, D] each, codes where the pool has them; or the specs of
    both."""

    keys_BTD: Any
    values_BTD: Any


def num_tiles(tables: Sequence[Sequence[int]], width: int) -> int:
    """Tiles of `width` blocks that rows with these block tables have."""
    return sum(-(-(len(table) - _num_freed(table)) // width) for table in tables)


def _num_freed(table: Sequence[int]) -> int:
    """Leading blocks 0: they were behind the layer's window, and have been freed."""
    return next((i for i, block in enumerate(table) if block), len(table))


def window_tiles(tables: Sequence[Sequence[int]], width: int, count: int, block_size: int) -> WindowTiles:
    """The tiles of one dp group's rows, as numpy arrays.

    Args:
      tables: the rows' block tables; leading blocks 0 belong to no tile.
      width: blocks per tile; a row's last tile is padded with block 0.
      count: tiles in all, at least `num_tiles(tables, width)`.
    """
    blocks_UW, owner_U = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
    first_U = np.full(count, np.iinfo(np.int32).max // 2, np.int32)
    tile = 0
    for row, table in enumerate(tables):
        for begin in range(_num_freed(table), len(table), width):
            own = table[begin : begin + width]
            blocks_UW[tile, : len(own)] = own
            owner_U[tile], first_U[tile] = row, begin * block_size
            tile += 1
    return WindowTiles(blocks_UW, owner_U, first_U)


def gather(pool_k_KNPD: Cached, pool_v_KNPD: Cached, blocks_UW: jax.Array, dtype: Any = None) -> Window:
    """The window of these blocks, in `dtype` where the pool holds codes."""
    heads, _, size, _ = pool_k_KNPD.shape
    count, width = blocks_UW.shape

    def one(pool_KNPD: Cached) -> jax.Array:
        own = jax.tree.map(lambda x: x[:, blocks_UW].reshape(heads * count, width * size, -1), pool_KNPD)
        return reference.numbers(own, dtype)

    return Window(jnp.swapaxes(one(pool_k_KNPD), -1, -2), one(pool_v_KNPD))


def blank(pool_v_KNPD: Cached, num_rows: int, num_steps: int) -> Fresh:
    """An empty fresh buffer for `num_steps` steps of `num_rows` rows of this pool; of codes where the pool is."""
    rows = pool_v_KNPD.shape[0] * num_rows
    empty: Any = jax.tree.map(lambda x: jnp.zeros((rows, num_steps, x.shape[-1]), x.dtype), pool_v_KNPD)
    return Fresh(empty, empty)


def put(fresh: Fresh, k_RKD: Cached, v_RKD: Cached, step: jax.Array) -> Fresh:
    """Stores one step's keys and values of every row."""

    def one(buffer: jax.Array, new_RKD: jax.Array) -> jax.Array:
        new_B1D = jnp.swapaxes(new_RKD, 0, 1).reshape(-1, 1, new_RKD.shape[-1]).astype(buffer.dtype)
        return jax.lax.dynamic_update_slice_in_dim(buffer, new_B1D, step, axis=1)

    return jax.tree.map(one, fresh, Fresh(k_RKD, v_RKD))


def put_several(fresh: Fresh, k_RCKD: Cached, v_RCKD: Cached, at_RC: jax.Array) -> Fresh:
    """Stores keys and values of several positions of every row, each at its own index; those beyond the buffer's end
    are dropped."""
    rows, _, heads, _ = k_RCKD.shape

    def one(buffer_BTD: jax.Array, new_RCKD: jax.Array) -> jax.Array:
        buffer_KRTD = buffer_BTD.reshape(heads, rows, *buffer_BTD.shape[1:])
        new_KRCD = jnp.moveaxis(new_RCKD, 2, 0).astype(buffer_BTD.dtype)
        written = buffer_KRTD.at[:, jnp.arange(rows)[:, None], at_RC].set(new_KRCD, mode="drop")
        return written.reshape(buffer_BTD.shape)

    return jax.tree.map(one, fresh, Fresh(k_RCKD, v_RCKD))


class _Part(NamedTuple):
    """A softmax over some of a row's positions: the largest score and the sum of exp(score - top), both [K, ., M], and
    the sum of values with the same weights, [K, ., M, D]."""

    top: jax.Array
    total: jax.Array
    out: jax.Array


def _part(scores_BMS: jax.Array, values_BSD: jax.Array, kv_heads: int) -> _Part:
    top_BM1 = jnp.max(scores_BMS, -1, keepdims=True)
    weights_BMS = jnp.exp(scores_BMS - top_BM1)
    out_BMD = jnp.einsum(
        "bgs,bsd->bgd", weights_BMS.astype(values_BSD.dtype), values_BSD, preferred_element_type=scores_BMS.dtype
    )
    parts = top_BM1[..., 0], jnp.sum(weights_BMS, -1), out_BMD
    return _Part(*(x.reshape(kv_heads, -1, *x.shape[1:]) for x in parts))


def attend(
    q_RCHD: jax.Array,
    window: Window,
    tiles: WindowTiles,
    fresh: Fresh,
    start_R: jax.Array,
    at: jax.Array,
    rule: reference.Rule = reference.PLAIN,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """[R, C, H, D]: each query sees its row's window before position `start`, and the fresh indexes 0 .. `at`, a scalar
    or [R, C], within the rule's window. One softmax over both, in float32 or better. A row's queries are one matrix, so
    each of its tiles is read once."""
    rows, queries, heads, dim = q_RCHD.shape
    kv_heads = fresh.keys_BTD.shape[0] // rows
    q_RCKGD = (q_RCHD * dim**-0.5).reshape(rows, queries, kv_heads, -1, dim)
    q_KRMD = jnp.moveaxis(q_RCKGD, 2, 0).reshape(kv_heads, rows, -1, dim)
    last = at  # or for each of a row's heads [K * R, M, 1]
    if at.ndim:
        last = jnp.tile(jnp.repeat(at, heads // kv_heads, axis=1), (kv_heads, 1))[..., None]
    sinks_KM = None if sinks_H is None else jnp.tile(sinks_H.reshape(kv_heads, -1), queries)
    fresh = Fresh(*(reference.numbers(own, q_KRMD.dtype) for own in fresh))
    wide = jnp.promote_types(q_KRMD.dtype, jnp.float32)
    q_BMD = q_KRMD[:, tiles.owner_U].reshape(-1, *q_KRMD.shape[2:])
    old_BMS = jnp.einsum("bgd,bds->bgs", q_BMD, window.keys_BDS, preferred_element_type=wide)
    q_BMD = q_KRMD.reshape(-1, *q_KRMD.shape[2:])
    new_BMT = jnp.einsum("bgd,btd->bgt", q_BMD, fresh.keys_BTD, preferred_element_type=wide)
    old_BMS, new_BMT = (reference.capped(x, rule.softcap) for x in (old_BMS, new_BMT))
    # sums instead of selects: a pass less
    cached_US = tiles.first_U[:, None] + jnp.arange(old_BMS.shape[-1]) < start_R[tiles.owner_U][:, None]
    old_BMS += jnp.tile(jnp.where(cached_US, 0, _HIDDEN).astype(wide), (kv_heads, 1))[:, None]
    new_BMT += jnp.where(jnp.arange(new_BMT.shape[-1]) <= last, 0, _HIDDEN).astype(wide)
    if rule.window:
        positions_US = tiles.first_U[:, None] + jnp.arange(old_BMS.shape[-1])
        last_BM = jnp.broadcast_to(last, (kv_heads * rows, *(jnp.shape(last)[1:] or (1, 1))))[..., 0]
        at_RM = start_R[:, None] + last_BM[:rows]  # the same for all heads
        behind_UMS = positions_US[:, None] <= at_RM[tiles.owner_U][..., None] - rule.window
        old_BMS += jnp.tile(jnp.where(behind_UMS, _HIDDEN, 0).astype(wide), (kv_heads, 1, 1))
        new_BMT += jnp.where(jnp.arange(new_BMT.shape[-1]) <= last - rule.window, _HIDDEN, 0).astype(wide)
    old, new = _part(old_BMS, window.values_BSD, kv_heads), _part(new_BMT, fresh.values_BTD, kv_heads)
    # every row has a fresh token, its own: the largest score is that of a token, and hidden tiles weigh nothing
    is_own_RU = tiles.owner_U == jnp.arange(rows)[:, None]
    best_KRUM = jnp.where(is_own_RU[:, :, None], old.top[:, None], _HIDDEN)
    top_KRM = jnp.maximum(new.top, jnp.max(best_KRUM, 2))
    if sinks_KM is not None:
        top_KRM = jnp.maximum(top_KRM, sinks_KM[:, None].astype(wide))
    of_tile_KUM = jnp.exp(old.top - top_KRM[:, tiles.owner_U])
    of_fresh_KRM = jnp.exp(new.top - top_KRM)
    own_RU = is_own_RU.astype(wide)
    total_KRM = of_fresh_KRM * new.total + jnp.einsum("ru,kug->krg", own_RU, of_tile_KUM * old.total)
    if sinks_KM is not None:
        total_KRM += jnp.exp(sinks_KM[:, None].astype(wide) - top_KRM)
    out_KRMD = of_fresh_KRM[..., None] * new.out
    out_KRMD += jnp.einsum("ru,kugd->krgd", own_RU, of_tile_KUM[..., None] * old.out)
    out_RCKGD = jnp.moveaxis((out_KRMD / total_KRM[..., None]).reshape(kv_heads, rows, queries, -1, dim), 0, 2)
    return out_RCKGD.reshape(q_RCHD.shape).astype(q_RCHD.dtype)


def scatter(
    pool_k_KNPD: Cached,
    pool_v_KNPD: Cached,
    fresh: Fresh,
    tables_RW: jax.Array,
    start_R: jax.Array,
    counts_R: jax.Array,
) -> tuple[Cached, Cached]:
    """The pool with each row's first `counts` fresh steps written from position `start` on."""
    heads, rows = pool_k_KNPD.shape[0], tables_RW.shape[0]
    offsets = jnp.arange(fresh.keys_BTD.shape[1])
    positions_RT = start_R[:, None] + offsets
    valid_RT = offsets < counts_R[:, None]

    def write(pool_KNPD: jax.Array, new_BTD: jax.Array) -> jax.Array:
        new_KRTD = new_BTD.reshape(heads, rows, *new_BTD.shape[1:])
        return reference.write_kv(pool_KNPD, jnp.moveaxis(new_KRTD, 0, 2), tables_RW, positions_RT, valid_RT)

    return jax.tree.map(write, (pool_k_KNPD, pool_v_KNPD), tuple(fresh))
