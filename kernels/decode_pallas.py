"""A decode step's attention as one Pallas kernel for NVIDIA GPUs: from a layer's merged product to attention's output.

Between the product that makes a token's queries, key and value and the product that takes attention's output, XLA runs
a kernel for each of: bias and rotary embedding of the queries, the scatter of the new key, that of the new value,
attention. Here one program takes one row, one key/value head and one part of the row's context. It adds up the
product's partial sums for its G queries, key and value, adds the bias, applies the norms of queries and keys (Qwen3)
and the rotary embedding, writes the new key and value into the pool, and attends. It rounds wherever the separate
operations round. The new position enters the running softmax as its first column, from registers, so nothing is read
that was just written; the walk over the pool covers earlier positions alone.

Sources: as in `paged_pallas`, of which this uses the walk, the running softmax and the merging of parts. Rotary
embedding pairs the first half of a head with the second. Triton cannot concatenate, so every number is computed
together with its partner, from a second load of the same few rows.

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
    PagedTileSizes,
    choose_tiles,
    merge,
    refusal,
    score_scale,
    store_rows,
    store_softmax,
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
    flat = tiles.parts * heads
    pool = jax.ShapeDtypeStruct((kv_heads, blocks * size, dim), dtype), _of_head(blocks * size, dim)
    inputs = {
        "k": (k_KNPD.reshape(pool[0].shape), pool[1]),
        "v": (v_KNPD.reshape(pool[0].shape), pool[1]),
        "table": (tables_RW.astype(jnp.int32), _of_row(width)),
        "position": (positions_R.astype(jnp.int32)[:, None], _of_row(1)),
        **_slab_inputs(qkv_SRKXD, bias_KXD, norms, cos_RC, sin_RC),
    }
    outputs = {"new_k": pool, "new_v": pool}
    if tiles.parts == 1:
        outputs["out"] = jax.ShapeDtypeStruct((rows, heads, dim), dtype), _of_row(heads, dim)
    else:
        outputs["out"] = jax.ShapeDtypeStruct((rows, flat, dim), jnp.float32), _of_row(flat, dim)
        outputs["lse"] = jax.ShapeDtypeStruct((rows, flat), jnp.float32), _of_row(flat)
    new_k, new_v, out, *lse = _call(inputs, outputs, tiles, size, eps, window, interpret)
    if tiles.parts > 1:
        out = merge(out, lse[0], tiles.parts, dtype, interpret)
    return out, new_k.reshape(k_KNPD.shape), new_v.reshape(v_KNPD.shape)


def _call(
    inputs: dict[str, tuple[jax.Array, pl.BlockSpec]],
    outputs: dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    tiles: PagedTileSizes,
    size: int,
    eps: float,
    window: int,
    interpret: bool,
) -> list[jax.Array]:
    """The outputs, in their order; the first two take the place of the first two inputs, which are the pool."""
    rows, kv_heads = inputs["table"][0].shape[0], inputs["k"][0].shape[0]
    return pl.pallas_call(
        partial(_decode_kernel, names=(*inputs, *outputs), tiles=tiles, size=size, eps=eps, window=window),
        grid=(kv_heads, rows, tiles.parts),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for _, spec in outputs.values()],
        out_shape=[shape for shape, _ in outputs.values()],
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
    )(*(array for array, _ in inputs.values()))


def _of_row(*dims: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, *dims), lambda i, r, s: (r, *(0,) * len(dims)))


def _of_head(*dims: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, *dims), lambda i, r, s: (i, *(0,) * len(dims)))


def _slab_inputs(
    qkv_SRKXD: jax.Array,
    bias_KXD: jax.Array | None,
    norms: HeadNorms | None,
    cos_RC: jax.Array,
    sin_RC: jax.Array,
) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
    """What the new queries, keys and values come from, by the names that `_decode_kernel` has for it."""
    parts, _, _, slab, dim = qkv_SRKXD.shape
    inputs = {
        "qkv": (qkv_SRKXD, pl.BlockSpec((parts, None, None, slab, dim), lambda i, r, s: (0, r, i, 0, 0))),
        "cos": (cos_RC, _of_row(dim // 2)),
        "sin": (sin_RC, _of_row(dim // 2)),
    }
    if bias_KXD is not None:
        inputs["bias"] = bias_KXD, _of_head(slab, dim)
    if norms is not None:
        whole = pl.BlockSpec((dim,), lambda i, r, s: (0,))
        inputs |= {"q_norm": (norms.q, whole), "k_norm": (norms.k, whole)}
    return inputs


def _decode_kernel(
    *refs: Any, names: tuple[str, ...], tiles: PagedTileSizes, size: int, eps: float, window: int
) -> None:
    """Refs by name: of one row and key/value head qkv [S, X, D]; of one row table [W], position [1], cos, sin [D / 2],
    out [H, D] (of all parts: [parts * H, D]), lse [parts * H]; of one head k, v, new_k, new_v [N * P, D], bias [X, D];
    q_norm, k_norm [D]."""
    ref = dict(zip(names, refs, strict=True))
    kv_head, part = pl.program_id(0), pl.program_id(2)
    group, dim = ref["qkv"].shape[1] - 2, ref["qkv"].shape[2]
    position = ref["position"][0]
    starts = (part == 0) & (position >= 0)
    query_M = jnp.arange(tiles.queries, dtype=jnp.int32)
    live_M = query_M < group
    q_MD = _turned(ref, query_M, live_M, "q_norm", eps)
    one = jnp.zeros((1,), jnp.int32)
    key_1D = _turned(ref, one + group, one == 0, "k_norm", eps)
    value_1D = _biased(ref, one + (group + 1), one == 0, _columns(1, dim))

    entry = jnp.minimum(lax.div(jnp.maximum(position, 0), size), ref["table"].shape[0] - 1)
    mask = (one == 0) & starts
    slot = plgpu.load(ref["table"].at[one + entry], mask=mask, other=0) * size + lax.rem(position, size)
    store_rows(ref["new_k"], slot, key_1D, mask)
    store_rows(ref["new_v"], slot, value_1D, mask)

    # The first part begins with the new position, of weight 1: only there, where it exists, is anything seen yet.
    score_M = jnp.sum(q_MD.astype(jnp.float32) * key_1D.astype(jnp.float32), axis=1) * score_scale(dim)
    seen_M = jnp.broadcast_to(starts, score_M.shape)
    value_MD = jnp.broadcast_to(value_1D.astype(jnp.float32), q_MD.shape)
    carry = (
        jnp.where(seen_M[:, None], value_MD, 0),
        jnp.where(seen_M, score_M, NEVER),
        jnp.where(seen_M, 1.0, 0.0),
    )
    before_M = jnp.broadcast_to(position - 1, score_M.shape)
    end, first_M = jnp.maximum(position, 0), None
    if window:
        first_M = jnp.broadcast_to(jnp.maximum(position - (window - 1), 0), score_M.shape)
    carry = walk(q_MD, before_M, ref["k"], ref["v"], ref["table"], size, end, part, tiles, carry, first_M)
    heads = pl.num_programs(0) * group
    store_softmax(ref["out"], ref.get("lse"), part * heads + kv_head * group + query_M, carry, live_M)


def _columns(rows: int, dim: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (rows, dim), 1)


def _turned(ref: dict[str, Any], rows: jax.Array, mask: jax.Array, norm: str, eps: float) -> jax.Array:
    """Rows of the slab, [len(rows), D] in the pool's dtype, normed and with rotary embedding."""
    dim, dtype = ref["qkv"].shape[2], ref["k"].dtype
    at = _columns(len(rows), dim)
    partner_at = jnp.where(at < dim // 2, at + dim // 2, at - dim // 2)
    x, partner = _biased(ref, rows, mask, at), _biased(ref, rows, mask, partner_at)
    if norm in ref:
        wide = x.astype(jnp.float32)
        factor = lax.rsqrt(jnp.sum(wide * wide, axis=1) / dim + eps)[:, None]
        scale, partner_scale = (plgpu.load(ref[norm].at[i]).astype(jnp.float32) for i in (at, partner_at))
        x = (wide * factor * scale).astype(dtype)
        partner = (partner.astype(jnp.float32) * factor * partner_scale).astype(dtype)
    pair = jnp.where(at < dim // 2, at, at - dim // 2)
    cos, sin = plgpu.load(ref["cos"].at[pair]), plgpu.load(ref["sin"].at[pair])
    sin = jnp.where(at < dim // 2, -sin, sin)
    return (x.astype(jnp.float32) * cos + partner.astype(jnp.float32) * sin).astype(dtype)


def _biased(ref: dict[str, Any], rows: jax.Array, mask: jax.Array, columns: jax.Array) -> jax.Array:
    """Elements of the slab at rows and columns [len(rows), D]: the product, and the bias added to it."""
    rows, mask = (jnp.broadcast_to(x[:, None], columns.shape) for x in (rows, mask))
    dtype, parts = ref["k"].dtype, ref["qkv"].shape[0]
    total = jnp.zeros(columns.shape, jnp.float32)
    for i in range(parts):
        at = ref["qkv"].at[jnp.full(columns.shape, i, jnp.int32), rows, columns]
        total += plgpu.load(at, mask=mask, other=0)
    x = total.astype(dtype)
    if "bias" in ref:
        bias = plgpu.load(ref["bias"].at[rows, columns], mask=mask, other=0)
        x = (x.astype(jnp.float32) + bias.astype(jnp.float32)).astype(dtype)
    return x
