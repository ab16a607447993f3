"""A decode step's Pallas kernels for NVIDIA GPUs: `decode_attention`, and the residual add with a norm (`add_norm`).

**Attention.** Between the product of a token's queries, key and value and the product of attention's output, XLA runs
four kernels: the queries' bias and rotary embedding, the scatter of the new key, the scatter of the new value, and
attention. Here a program takes one key/value head and its share of the pieces of all rows' contexts. For each it adds
up the product's partial sums for the row's G queries, key and value. It adds the bias, applies the norms of queries and
keys (Qwen3) and the rotary embedding, and attends. With a row's first piece it writes the new key and value into the
pool. It rounds wherever the separate operations round. The new position enters the running softmax as its first column,
from registers; the walk over the pool reads earlier positions only.

Sources: as in `paged_pallas`, of which this uses the list of pieces, the walk and the merge. Rotary embedding pairs the
first half of a head with the second. Triton cannot concatenate, so every number is computed together with its partner,
from a second load of the same few rows. A row that does not decode has position -1: it reads nothing, writes nothing
into the pool, and gets zeros.

Backend: Pallas on Triton (docs/kernels.md).

Dims: R rows, E features, K key/value heads, G queries a key/value head, X = G + 2 (its queries, then its key, its
value), D head dim; N blocks, P positions per block, W blocks per table, S partial sums of a product, M queries of a
tile.
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
    PagedTileSizes,
    Piece,
    call,
    choose_tiles,
    each_piece,
    list_work,
    merge,
    of_head,
    of_table,
    piece_outputs,
    pool_inputs,
    refusal,
    score_scale,
    store_piece,
    store_rows,
    tile_of,
    walk,
)
from jaxrl.kernels.reference import Cached


class HeadNorms(NamedTuple):
    """Scales [D] of the norms over each query's and each key's head."""

    q: jax.Array
    k: jax.Array


def decode_refusal(heads: int, kv_heads: int, dim: int, dtype: Any) -> str | None:
    """Why this kernel does not take a device's heads; None if it does."""
    one = jax.ShapeDtypeStruct((1, 1, heads, dim), dtype)
    if reason := refusal(one, one, one, kv_heads):  # pyright: ignore[reportArgumentType]
        return reason
    most = MAX_QUERIES[jnp.dtype(dtype).itemsize]
    if heads // kv_heads > most:
        return f"queries per key/value head ({heads // kv_heads}) must be at most {most}"
    return None


@partial(
    jax.jit, static_argnames=("dtype", "eps", "window", "tiles", "interpret")
)  # layers of one shape share one trace of the kernels
def decode_attention(
    qkv_SRKXD: jax.Array,
    bias_KXD: jax.Array | None,
    norms: HeadNorms | None,
    cos_RC: jax.Array,
    sin_RC: jax.Array,
    k_KNPD: Cached,
    v_KNPD: Cached,
    tables_RW: jax.Array,
    positions_R: jax.Array,
    *,
    eps: float,
    dtype: Any = None,
    window: int = 0,
    tiles: PagedTileSizes | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, Cached, Cached]:
    """One new position for every row: attention's output [R, K * G, D] in `dtype`, and the pool with the new keys and
    values.

    Args:
      qkv_SRKXD: partial sums of the product, float32, not rounded yet. bias_KXD: added to their sum; in `dtype`.
      cos_RC, sin_RC: float32 [R, D / 2], rotary embedding at the rows' positions.
      k_KNPD, v_KNPD: the layer's pool, donated: the results take its place.
      positions_R: the new position, -1 for rows that do not decode.
      dtype: of activations; None: the pool's, which holds no codes.
    """
    shares, rows, kv_heads, slab, dim = qkv_SRKXD.shape
    size, width, dtype = k_KNPD.shape[2], tables_RW.shape[1], jnp.dtype(dtype or k_KNPD.dtype)
    heads = kv_heads * (slab - 2)
    if reason := decode_refusal(heads, kv_heads, dim, dtype):
        raise ValueError(f"decode's Pallas kernel: {reason}; use implementation='reference'")
    tiles = tiles or choose_tiles(rows, 1, heads, kv_heads, width * size, dim, dtype)
    tiles = replace(tiles, queries=max(tiles.queries, pl.next_power_of_2(slab - 2)))
    pool = pool_inputs(k_KNPD, v_KNPD)
    work, programs = list_work(positions_R, positions_R - 1, window, width * size, tiles.piece, kv_heads)
    inputs = {
        **pool,
        "table": (tables_RW.astype(jnp.int32), WHOLE),
        "position": (positions_R.astype(jnp.int32), WHOLE),
        "qkv": (qkv_SRKXD, pl.BlockSpec((shares, rows, None, slab, dim), lambda i, p: (0, 0, i, 0, 0))),
        "cos": (cos_RC, WHOLE),
        "sin": (sin_RC, WHOLE),
    }
    if bias_KXD is not None:
        inputs["bias"] = bias_KXD, of_head(slab, dim)
    if norms is not None:
        inputs |= {"q_norm": (norms.q, WHOLE), "k_norm": (norms.k, WHOLE)}
    inputs |= work
    outputs = {f"new_{name}": (jax.ShapeDtypeStruct(x.shape, x.dtype), spec) for name, (x, spec) in pool.items()}
    outputs |= piece_outputs(rows, heads, dim, dtype, pl.cdiv(width * size, tiles.piece))
    how = tiles.num_warps, tiles.num_stages
    kernel = partial(_decode_kernel, tiles=tiles, size=size, eps=eps, window=window, dtype=dtype)
    made = call(kernel, (kv_heads, programs), inputs, outputs, how, interpret, {i: i for i in range(len(pool))})
    arrays, structure = jax.tree.flatten((k_KNPD, v_KNPD))
    new = [made.pop(f"new_{name}").reshape(x.shape) for name, x in zip(pool, arrays, strict=True)]
    new_k, new_v = jax.tree.unflatten(structure, new)
    return merge(made, work, None, heads, interpret).reshape(rows, heads, dim), new_k, new_v


def _decode_kernel(
    *refs: Any, names: tuple[str, ...], tiles: PagedTileSizes, size: int, eps: float, window: int, dtype: Any
) -> None:
    """Refs by name: of one key/value head qkv [S, R, X, D], k, v, new_k, new_v [N * P, D], bias [X, D]; where the pool
    holds codes, k_scale, v_scale, new_k_scale, new_v_scale [N * P]; table [R, W], position [R], cos, sin [R, D / 2],
    q_norm, k_norm [D], those of `list_work` and `piece_outputs`."""
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
        q_MD = _turned(ref, at.row, query_M, tile.live_M, "q_norm", eps, dtype)
        key_1D = _turned(ref, at.row, one + group, one == 0, "k_norm", eps, dtype)
        value_1D = _biased(ref, at.row, one + (group + 1), one == 0, _columns(1, dim), dtype)

        entry = jnp.minimum(lax.div(jnp.maximum(position, 0), size), ref["table"].shape[1] - 1)
        mask = (one == 0) & starts
        slot = plgpu.load(ref["table"].at[one + at.row, one + entry], mask=mask, other=0) * size
        slot += lax.rem(position, size)
        key_1D, value_1D = (_stored(ref, name, slot, x, mask) for name, x in (("k", key_1D), ("v", value_1D)))

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
        load = of_table(ref, at.row, size, dtype)
        store_piece(ref, at, tile, walk(q_MD, first_M, last_M, load, tiles, at.number, carry))

    each_piece(ref, pl.program_id(1), pl.num_programs(1), visit)


def _stored(ref: dict[str, Any], name: str, slot: jax.Array, x_1D: jax.Array, mask: jax.Array) -> jax.Array:
    """Writes a new key or value to its slot of the pool, and returns the stored numbers: decoded from codes, if the
    pool has them (`jaxrl.sharding.narrow_weights`)."""
    scale_ref = ref.get(f"new_{name}_scale")
    if scale_ref is None:
        store_rows(ref[f"new_{name}"], slot, x_1D, mask)
        return x_1D
    wide_1D, is_whole = x_1D.astype(jnp.float32), ref[name].dtype == jnp.int8
    most = 127.0 if is_whole else 448.0
    top_1 = jnp.max(jnp.abs(wide_1D), axis=1)
    codes_1D = wide_1D * (most / jnp.where(top_1 == 0, 1, top_1))[:, None]
    if is_whole:
        codes_1D = _rounded(codes_1D)
    codes_1D, scale_1 = codes_1D.astype(ref[name].dtype), top_1 / most
    store_rows(ref[f"new_{name}"], slot, codes_1D, mask)
    plgpu.store(scale_ref.at[slot], scale_1, mask=mask)
    return (codes_1D.astype(jnp.float32) * scale_1[:, None]).astype(x_1D.dtype)


def _rounded(x: jax.Array) -> jax.Array:
    """To the nearest whole number, halves to even: Triton has no such function."""
    whole = jnp.floor(x)
    rest, is_odd = x - whole, whole - 2 * jnp.floor(whole / 2) == 1
    return jnp.where((rest > 0.5) | ((rest == 0.5) & is_odd), whole + 1, whole)


def _columns(rows: int, dim: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (rows, dim), 1)


def _turned(
    ref: dict[str, Any], row: Any, rows: jax.Array, mask: jax.Array, norm: str, eps: float, dtype: Any
) -> jax.Array:
    """Rows of a row's slab, [len(rows), D], normed and with rotary embedding."""
    dim = ref["qkv"].shape[3]
    at = _columns(len(rows), dim)
    partner_at = jnp.where(at < dim // 2, at + dim // 2, at - dim // 2)
    x, partner = (_biased(ref, row, rows, mask, columns, dtype) for columns in (at, partner_at))
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


def _biased(
    ref: dict[str, Any], row: Any, rows: jax.Array, mask: jax.Array, columns: jax.Array, dtype: Any
) -> jax.Array:
    """Elements of the slab at rows and columns [len(rows), D]: the product, and the bias added to it."""
    rows, mask = (jnp.broadcast_to(x[:, None], columns.shape) for x in (rows, mask))
    shares = ref["qkv"].shape[0]
    total = jnp.zeros(columns.shape, jnp.float32)
    for i in range(shares):
        at = (jnp.full(columns.shape, each, jnp.int32) for each in (i, row))
        total += plgpu.load(ref["qkv"].at[(*at, rows, columns)], mask=mask, other=0)
    x = total.astype(dtype)
    if "bias" in ref:
        bias = plgpu.load(ref["bias"].at[rows, columns], mask=mask, other=0)
        x = (x.astype(jnp.float32) + bias.astype(jnp.float32)).astype(dtype)
    return x


# ---------------------------------------------------------------- add and norm


@partial(jax.jit, static_argnames=("eps", "interpret"))
def add_norm(
    x_RE: jax.Array, parts_SRE: jax.Array, scale_E: jax.Array, *, eps: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(x + the sum of the parts, its RMS norm), both [R, E] in x's dtype, rounded where separate operations round.

    XLA makes two kernels of the sum of a product's parts, the add and the norm. One does not keep the residual stream,
    and the second adds up the same parts again to keep it. Here one program per row makes both results from one
    reading. `parts_SRE`: a product's partial sums, float32, not rounded yet.
    """
    (rows, features), parts = x_RE.shape, parts_SRE.shape[0]
    width = pl.next_power_of_2(features)
    of_row = pl.BlockSpec((None, features), lambda r: (r, 0))
    shape = jax.ShapeDtypeStruct(x_RE.shape, x_RE.dtype)
    x_RE, normed_RE = pl.pallas_call(
        partial(_add_norm_kernel, width=width, eps=eps),
        grid=(rows,),
        in_specs=[
            of_row,
            pl.BlockSpec((parts, None, features), lambda r: (0, r, 0)),
            pl.BlockSpec((features,), lambda r: (0,)),
        ],
        out_specs=[of_row, of_row],
        out_shape=[shape, shape],
        compiler_params=plgpu.CompilerParams(num_warps=8 if width >= 2048 else 4, num_stages=1),
        interpret=interpret,
    )(x_RE, parts_SRE, scale_E)
    return x_RE, normed_RE


def _add_norm_kernel(
    x_ref: Any, parts_ref: Any, scale_ref: Any, sum_ref: Any, out_ref: Any, *, width: int, eps: float
) -> None:
    """Refs of one row: x, sum, out [E], parts [S, E]; scale [E]. `width` is E up to the next power of two."""
    parts, features = parts_ref.shape
    dtype = x_ref.dtype
    at = jnp.arange(width, dtype=jnp.int32)
    mask = at < features
    total = jnp.zeros((width,), jnp.float32)
    for i in range(parts):
        total += plgpu.load(parts_ref.at[jnp.full((width,), i, jnp.int32), at], mask=mask, other=0)
    x = plgpu.load(x_ref.at[at], mask=mask, other=0)
    added = (x.astype(jnp.float32) + total.astype(dtype).astype(jnp.float32)).astype(dtype)
    plgpu.store(sum_ref.at[at], added, mask=mask)
    wide = added.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.sum(wide * wide) / features + eps)
    scale = plgpu.load(scale_ref.at[at], mask=mask, other=0).astype(jnp.float32)
    plgpu.store(out_ref.at[at], (normed * scale).astype(dtype), mask=mask)
