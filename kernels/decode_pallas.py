"""A decode step's attention as one Pallas kernel for NVIDIA GPUs: from a layer's merged product to attention's output.

Between the product that makes a token's queries, key and value and the product that takes attention's output, XLA runs
a kernel for each of: bias and rotary embedding of the queries, the scatter of the new key, that of the new value,
attention. Here a program takes one key/value head and its share of the pieces of all rows' contexts. For each it adds
up the product's partial sums for the row's G queries, key and value, adds the bias, applies the norms of queries and
keys (Qwen3) and the rotary embedding, and attends; with a row's first piece it writes the new key and value into the
pool. It rounds wherever the separate operations round. The new position enters the running softmax as its first column,
from registers, so nothing is read that was just written; the walk over the pool covers earlier positions alone.

Sources: as in `paged_pallas`, of which this uses the list of pieces, the walk and the merge. Rotary embedding pairs the
first half of a head with the second. Triton cannot concatenate, so every number is computed together with its partner,
from a second load of the same few rows.

Backend: Pallas on Triton (docs/kernels.md). A row that does not decode has position -1: it reads nothing, writes
nothing into the pool, and gets zeros.

Dims: R rows, K key/value heads, G queries a key/value head, X = G + 2 (its queries, then its key, its value), D head
dim, N blocks, P positions per block, W blocks per table, S partial sums of the product, M queries of a tile.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxrl.kernels.paged_pallas import (
    MAX_QUERIES,
    NEVER,
    WHOLE,
    Inputs,
    PagedTileSizes,
    Piece,
    call,
    choose_tiles,
    each_piece,
    list_work,
    merge,
    of_table,
    piece_outputs,
    refusal,
    score_scale,
    store_piece,
    store_rows,
    tile_of,
    walk,
)


class HeadNorms(NamedTuple):
    """Scales [D] of the norms over each query's and each key's head."""

    q: jax.Array
    k: jax.Array


def decode_refusal(heads: int, kv_heads: int, dim: int, dtype: Any) -> str | None:
    """Why this kernel cannot serve so many (local) heads of dim D in this dtype; None if it can."""
    one = jax.ShapeDtypeStruct((1, 1, heads, dim), dtype)
    if reason := refusal(one, one, one, kv_heads):  # pyright: ignore[reportArgumentType]
        return reason
    most = MAX_QUERIES[jnp.dtype(dtype).itemsize]
    if heads // kv_heads > most:
        return f"queries per key/value head ({heads // kv_heads}) must be at most {most}"
    return None


@partial(
    jax.jit, static_argnames=("eps", "window", "tiles", "interpret")
)  # layers of one shape share one trace of the kernels
def decode_attention(
    qkv_SRKXD: jax.Array,
    bias_KXD: jax.Array | None,
    norms: HeadNorms | None,
    cos_RC: jax.Array,
    sin_RC: jax.Array,
    k_KNPD: jax.Array,
    v_KNPD: jax.Array,
    tables_RW: jax.Array,
    positions_R: jax.Array,
    *,
    eps: float,
    window: int = 0,
    tiles: PagedTileSizes | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One new position for every row.

    Args:
      qkv_SRKXD: partial sums of the product, float32, not rounded yet; their sum is what the product gives.
      bias_KXD: added to it; in the pool's dtype, like everything that follows.
      cos_RC, sin_RC: float32 [R, D / 2], rotary embedding at the rows' positions.
      k_KNPD, v_KNPD: the layer's pool. Given away: the results take its place.
      tables_RW: blocks of each row; positions_R: the new position, -1 for rows that do not decode.
      eps: of the norms.
      window: as in `reference.Rule`.
      tiles: how to cut the work; `choose_tiles` decides if None.
      interpret: run as plain JAX, on any device (slow; for tests).

    Returns:
      Attention's output [R, K * G, D] in the pool's dtype, and the pool with the new keys and values.

    Raises:
      ValueError: for what `decode_refusal` names.
    """
    _, rows, kv_heads, slab, dim = qkv_SRKXD.shape
    (_, blocks, size, _), dtype, width = k_KNPD.shape, k_KNPD.dtype, tables_RW.shape[1]
    heads = kv_heads * (slab - 2)
    if reason := decode_refusal(heads, kv_heads, dim, dtype):
        raise ValueError(f"decode's Pallas kernel: {reason}; use implementation='reference'")
    tiles = tiles or choose_tiles(rows, 1, heads, kv_heads, width * size, dim, dtype)
    tiles = replace(tiles, queries=max(tiles.queries, pl.next_power_of_2(slab - 2)))
    pool = jax.ShapeDtypeStruct((kv_heads, blocks * size, dim), dtype), _of_head(blocks * size, dim)
    work, programs = list_work(positions_R, positions_R - 1, window, width * size, tiles, kv_heads)
    inputs = {
        "k": (k_KNPD.reshape(pool[0].shape), pool[1]),
        "v": (v_KNPD.reshape(pool[0].shape), pool[1]),
        "table": (tables_RW.astype(jnp.int32), WHOLE),
        "position": (positions_R.astype(jnp.int32), WHOLE),
        **_slab_inputs(qkv_SRKXD, bias_KXD, norms, cos_RC, sin_RC),
        **work,
    }
    outputs = {"new_k": pool, "new_v": pool}
    outputs |= piece_outputs(rows, heads, dim, dtype, pl.cdiv(width * size, tiles.piece))
    how = tiles.num_warps, tiles.num_stages
    kernel = partial(_decode_kernel, tiles=tiles, size=size, eps=eps, window=window)
    made = call(kernel, (kv_heads, programs), inputs, outputs, how, interpret, {0: 0, 1: 1})
    new_k, new_v = (made.pop(name).reshape(k_KNPD.shape) for name in ("new_k", "new_v"))
    return merge(made, work, None, heads, interpret).reshape(rows, heads, dim), new_k, new_v


def _of_head(*dims: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, *dims), lambda i, p: (i, *(0,) * len(dims)))


def _slab_inputs(
    qkv_SRKXD: jax.Array,
    bias_KXD: jax.Array | None,
    norms: HeadNorms | None,
    cos_RC: jax.Array,
    sin_RC: jax.Array,
) -> Inputs:
    """What the new queries, keys and values come from, by the names that `_decode_kernel` has for it."""
    shares, rows, _, slab, dim = qkv_SRKXD.shape
    of_head = pl.BlockSpec((shares, rows, None, slab, dim), lambda i, p: (0, 0, i, 0, 0))
    inputs = {"qkv": (qkv_SRKXD, of_head), "cos": (cos_RC, WHOLE), "sin": (sin_RC, WHOLE)}
    if bias_KXD is not None:
        inputs["bias"] = bias_KXD, _of_head(slab, dim)
    if norms is not None:
        inputs |= {"q_norm": (norms.q, WHOLE), "k_norm": (norms.k, WHOLE)}
    return inputs


def _decode_kernel(
    *refs: Any, names: tuple[str, ...], tiles: PagedTileSizes, size: int, eps: float, window: int
) -> None:
    """Refs by name: of one key/value head qkv [S, R, X, D], k, v, new_k, new_v [N * P, D], bias [X, D]; table [R, W],
    position [R], cos, sin [R, D / 2], q_norm, k_norm [D], those of `list_work` and `piece_outputs`."""
    ref = dict(zip(names, refs, strict=True))
    kv_head, group, dim = pl.program_id(0), ref["qkv"].shape[2] - 2, ref["qkv"].shape[3]
    tile = tile_of(0, kv_head, 1, pl.num_programs(0) * group, group, tiles.queries)
    query_M, one = jnp.arange(tiles.queries, dtype=jnp.int32), jnp.zeros((1,), jnp.int32)

    def visit(at: Piece) -> None:
        position = ref["position"][at.row]
        # The row's first piece begins with the new position, of weight 1: only there is anything seen yet.
        starts = position >= 0
        if at.index is not None:
            starts &= at.index == ref["bounds"][at.row]
        q_MD = _turned(ref, at.row, query_M, tile.live_M, "q_norm", eps)
        key_1D = _turned(ref, at.row, one + group, one == 0, "k_norm", eps)
        value_1D = _biased(ref, at.row, one + (group + 1), one == 0, _columns(1, dim))

        entry = jnp.minimum(lax.div(jnp.maximum(position, 0), size), ref["table"].shape[1] - 1)
        mask = (one == 0) & starts
        slot = plgpu.load(ref["table"].at[one + at.row, one + entry], mask=mask, other=0) * size
        store_rows(ref["new_k"], slot + lax.rem(position, size), key_1D, mask)
        store_rows(ref["new_v"], slot + lax.rem(position, size), value_1D, mask)

        score_M = jnp.sum(q_MD.astype(jnp.float32) * key_1D.astype(jnp.float32), axis=1) * score_scale(dim)
        seen_M = jnp.broadcast_to(starts, score_M.shape)
        value_MD = jnp.broadcast_to(value_1D.astype(jnp.float32), q_MD.shape)
        carry = (
            jnp.where(seen_M[:, None], value_MD, 0),
            jnp.where(seen_M, score_M, NEVER),
            jnp.where(seen_M, 1.0, 0.0),
        )
        last_M = jnp.broadcast_to(position - 1, score_M.shape)
        first_M = last_M - (window - 2) if window else None
        store_piece(ref, at, tile, walk(q_MD, first_M, last_M, of_table(ref, at.row, size), tiles, at.number, carry))

    each_piece(ref, visit)


def _columns(rows: int, dim: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (rows, dim), 1)


def _turned(ref: dict[str, Any], row: Any, rows: jax.Array, mask: jax.Array, norm: str, eps: float) -> jax.Array:
    """Rows of a row's slab, [len(rows), D] in the pool's dtype, normed and with rotary embedding."""
    dim, dtype = ref["qkv"].shape[3], ref["k"].dtype
    at = _columns(len(rows), dim)
    partner_at = jnp.where(at < dim // 2, at + dim // 2, at - dim // 2)
    x, partner = _biased(ref, row, rows, mask, at), _biased(ref, row, rows, mask, partner_at)
    if norm in ref:
        wide = x.astype(jnp.float32)
        factor = lax.rsqrt(jnp.sum(wide * wide, axis=1) / dim + eps)[:, None]
        scale, partner_scale = (plgpu.load(ref[norm].at[i]).astype(jnp.float32) for i in (at, partner_at))
        x = (wide * factor * scale).astype(dtype)
        partner = (partner.astype(jnp.float32) * factor * partner_scale).astype(dtype)
    pair = jnp.full(at.shape, row), jnp.where(at < dim // 2, at, at - dim // 2)
    cos, sin = plgpu.load(ref["cos"].at[pair]), plgpu.load(ref["sin"].at[pair])
    sin = jnp.where(at < dim // 2, -sin, sin)
    return (x.astype(jnp.float32) * cos + partner.astype(jnp.float32) * sin).astype(dtype)


def _biased(ref: dict[str, Any], row: Any, rows: jax.Array, mask: jax.Array, columns: jax.Array) -> jax.Array:
    """Elements of the slab at rows and columns [len(rows), D]: the product, and the bias added to it."""
    rows, mask = (jnp.broadcast_to(x[:, None], columns.shape) for x in (rows, mask))
    dtype, shares = ref["k"].dtype, ref["qkv"].shape[0]
    total = jnp.zeros(columns.shape, jnp.float32)
    for i in range(shares):
        at = (jnp.full(columns.shape, each, jnp.int32) for each in (i, row))
        total += plgpu.load(ref["qkv"].at[(*at, rows, columns)], mask=mask, other=0)
    x = total.astype(dtype)
    if "bias" in ref:
        bias = plgpu.load(ref["bias"].at[rows, columns], mask=mask, other=0)
        x = (x.astype(jnp.float32) + bias.astype(jnp.float32)).astype(dtype)
    return x
