"""Attention over packed rows without `[tokens, tokens]` scores, forward and backward: for training.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691, §3.1): tiles, an online softmax, and a backward pass that
recomputes each tile's scores from the saved logsumexp. Departures: it is plain jnp. Segments and shared prefixes decide
which tiles hold anything visible. So the pairs of tiles to visit are listed once per microbatch (`visible_pairs`), and
a loop of that length runs over them instead of over a triangle. The backward pass keeps q, k, v, the output and the
logsumexp.

`jaxrl.kernels.reference.packed_attention` is the oracle, and the path for the shortest rows. Tokens may lie in any
order; the fewest pairs are visited where a segment is in one piece, beside its prefix, as `jaxrl.training.packing` lays
them out. Keys may be of other tokens than queries.

Dims: R rows, T tokens of a row, H query heads, K key/value heads, G = H / K, D head dim; B tokens of a tile, S rows
that a tile spans, N tiles; M = B * G.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxrl.kernels import reference
from jaxrl.kernels.reference import MaskInputs


class Tiling(NamedTuple):
    """How the loop over tiles is cut. Hashable.

    `together`: one step of the loop handles all rows (few large steps, for accelerators), or one row (small steps, each
    skipping what its own row does not need, for CPUs).
    """

    longest_plain: int = 64  # rows up to this many tokens are left to the plain path
    block: int = 64  # B, tokens of a tile's side
    together: bool = False
    widen: bool = False  # multiply narrow operands as float32 (exactly), for backends with slow narrow products

    def keys(self, tokens: int) -> int:
        """About how many keys each query of a row of `tokens` is multiplied with."""
        if tokens <= self.longest_plain:
            return tokens
        return tokens // 2 if self.together else min(tokens, 2 * self.block)  # row by row: other groups are skipped


def tiling(platform: str) -> Tiling:
    """A tiling that suits a platform (`cpu`, `gpu`, `tpu`). Measured on CPU only: with 2 cores tiles of 64 were 1.2
    times as fast as the plain path in rows of 64 tokens, and 12 times in rows of 1024."""
    if platform == "cpu":
        return Tiling(widen=True)
    return Tiling(longest_plain=512, block=512, together=True)


class TilePairs(NamedTuple):
    """Which tiles see which, for one microbatch: int32 [P, 2] of (query tile, key tile), ordered by query tile, of
    which the first `num_pairs`, int32 [1], count."""

    pairs: jax.Array
    num_pairs: jax.Array


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: MaskInputs,
    tiles: TilePairs | None,
    how: Tiling,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """`reference.packed_attention`, in tiles where rows are long. Padding (segment 0) gets arbitrary finite values.

    On a mesh, call it inside `shard_map`: the length of its loop depends on the device's rows. `tiles`: from
    `visible_pairs` for the same `mask` and `how`.
    """
    if tiles is None:
        wide_q, wide_k, wide_v = reference.operands(how.widen, (q, k, v))
        out = reference.packed_attention(wide_q, wide_k, wide_v, mask, softcap, sinks)
        return out.astype(q.dtype)
    return _blockwise(how, softcap, q, k, v, sinks, tiles, _mask_tiles(mask, how))


def _mask_tiles(mask: MaskInputs, how: Tiling) -> MaskInputs:
    """The same integers in tiles [N, S, B], those of keys included."""
    return jax.tree.map(lambda x: _tiled(x, how), mask._replace(keys=mask.all_keys))


def visible_pairs(mask: MaskInputs, how: Tiling) -> TilePairs | None:
    """The pairs of tiles of a microbatch in which something is visible; None where rows are short."""
    rows, tokens = mask.all_keys.segment_ids.shape
    if tokens <= how.longest_plain:
        return None
    mask = _mask_tiles(mask, how)
    spanned, block = mask.segment_ids.shape[1:]
    # [row, query tile, key tile]; a tile that spans all rows is visited if any of them needs it
    by_row = jax.tree.map(lambda x: x.reshape(rows // spanned, -1, spanned, block), mask)
    each = jax.tree.map(lambda x: x[:, :, None], by_row)._replace(keys=jax.tree.map(lambda x: x[:, None], by_row.keys))
    needed = jnp.any(_visible(each), axis=(-3, -2, -1))
    row, query, key = jnp.nonzero(needed, size=needed.size, fill_value=0)
    pairs = jnp.stack([row * needed.shape[1] + query, row * needed.shape[2] + key], axis=-1)
    return TilePairs(pairs.astype(jnp.int32), jnp.sum(needed, dtype=jnp.int32)[None])


def _visible(mask: MaskInputs) -> jax.Array:
    """[..., B] of queries, [..., B] of keys -> [..., B, B]: the key's segment is the query's, or its prefix, the key's
    position is not beyond the query's, and in its window."""
    ids, positions = (x[..., None, :] for x in mask.all_keys)
    seen = ((mask.segment_ids[..., None] == ids) | (mask.prefix_ids[..., None] == ids)) & (ids > 0)
    seen &= mask.positions[..., None] >= positions
    return seen if mask.first is None else seen & (positions >= mask.first[..., None])


def _tiled(x: jax.Array, how: Tiling) -> jax.Array:
    """[R, T, ...] -> [N, S, B, ...], padded with zeros to whole tiles."""
    rows, tokens = x.shape[:2]
    count = -(-tokens // how.block)
    x = jnp.pad(x, [(0, 0), (0, count * how.block - tokens), *[(0, 0)] * (x.ndim - 2)])
    x = x.reshape(rows, count, how.block, *x.shape[2:])
    return jnp.moveaxis(x, 0, 1) if how.together else x.reshape(rows * count, 1, how.block, *x.shape[3:])


def _untiled(x: jax.Array, rows: int, tokens: int, how: Tiling) -> jax.Array:
    """The inverse of `_tiled`."""
    x = jnp.moveaxis(x, 0, 1) if how.together else x
    return x.reshape(rows, -1, *x.shape[3:])[:, :tokens]


def _query_tiles(x_RTHD: jax.Array, kv_heads: int, how: Tiling) -> jax.Array:
    """[R, T, H, D] -> [N, S, K, M, D]: the queries of a key/value head side by side."""
    x = _tiled(x_RTHD.reshape(*x_RTHD.shape[:2], kv_heads, -1, x_RTHD.shape[-1]), how)  # N S B K G D
    return jnp.moveaxis(x, 2, 3).reshape(*x.shape[:2], kv_heads, -1, x.shape[-1])


def _from_query_tiles(x: jax.Array, shape: tuple[int, ...], how: Tiling) -> jax.Array:
    """[N, S, K, M, D] -> [R, T, H, D]."""
    x = jnp.moveaxis(x.reshape(*x.shape[:3], how.block, -1, x.shape[-1]), 3, 2)
    return _untiled(x, shape[0], shape[1], how).reshape(shape)


def _key_tiles(x_RTKD: jax.Array, how: Tiling) -> jax.Array:
    """[R, T, K, D] -> [N, S, K, B, D]."""
    return jnp.moveaxis(_tiled(x_RTKD, how), 2, 3)


def _from_key_tiles(x: jax.Array, shape: tuple[int, ...], how: Tiling) -> jax.Array:
    return _untiled(jnp.moveaxis(x, 3, 2), shape[0], shape[1], how)


class _Step(NamedTuple):
    """One pair of tiles: indices, and scores [S, K, M, B] with what is visible of them [S, 1, M, B]."""

    query: jax.Array
    key: jax.Array
    scores: jax.Array
    visible: jax.Array


def _step(pair: jax.Array, q_NSKMD: jax.Array, k_NSKBD: jax.Array, mask: MaskInputs, softcap: float) -> _Step:
    query, key = pair
    wide, block = jnp.promote_types(q_NSKMD.dtype, jnp.float32), mask.segment_ids.shape[-1]
    scores = _product("skmd,skbd->skmb", q_NSKMD[query], k_NSKBD[key], wide) * q_NSKMD.shape[-1] ** -0.5
    scores = reference.capped(scores, softcap)
    of_keys = jax.tree.map(lambda x: x[key], mask.keys)
    seen = _visible(jax.tree.map(lambda x: x[query], mask)._replace(keys=of_keys))
    return _Step(query, key, scores, jnp.repeat(seen, scores.shape[2] // block, axis=1)[:, None])


def _product(spec: str, a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)


def _forward(
    how: Tiling,
    softcap: float,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    tiles: TilePairs,
    mask: MaskInputs,
) -> tuple[jax.Array, Any]:
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q_NSKMD = _query_tiles(reference.operands(how.widen, q), k.shape[2], how)
    k_NSKBD, v_NSKBD = (_key_tiles(x, how) for x in reference.operands(how.widen, (k, v)))
    count, lowest = tiles.num_pairs[0], jnp.finfo(wide).min

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, highest, total = carry
        # backwards, so that a query tile starts at its diagonal, where every token sees at least itself
        step = _step(tiles.pairs[count - 1 - i], q_NSKMD, k_NSKBD, mask, softcap)
        scores = jnp.where(step.visible, step.scores, lowest)
        before = highest[step.query]
        after = jnp.maximum(before, jnp.max(scores, axis=-1))
        weights = jnp.where(step.visible, jnp.exp(scores - after[..., None]), 0)
        shrink = jnp.exp(before - after)
        part = _product("skmb,skbd->skmd", weights.astype(v_NSKBD.dtype), v_NSKBD[step.key], wide)
        return (
            out.at[step.query].set(out[step.query] * shrink[..., None] + part),
            highest.at[step.query].set(after),
            total.at[step.query].set(total[step.query] * shrink + jnp.sum(weights, axis=-1)),
        )

    per_query = q_NSKMD.shape[:-1]
    start = (jnp.zeros(q_NSKMD.shape, wide), jnp.full(per_query, lowest), jnp.zeros(per_query, wide))
    if sinks is not None:  # seen before anything else
        start = (start[0], jnp.broadcast_to(_of_queries(sinks, k.shape[2], how, wide), per_query), start[2] + 1)
    out, highest, total = lax.fori_loop(0, count, body, start)
    total = jnp.where(total > 0, total, 1)  # padding has seen nothing
    out = _from_query_tiles(out / total[..., None], q.shape, how).astype(q.dtype)
    # named, so that a remat policy can keep them: recomputing them would run the loop again
    out, logsumexp = (checkpoint_name(x, reference.ATTENTION) for x in (out, highest + jnp.log(total)))
    return out, (q, k, v, sinks, out, logsumexp, tiles, mask)


def _of_queries(sinks_H: jax.Array, kv_heads: int, how: Tiling, dtype: Any) -> jax.Array:
    """[K, M]: a head's number for each query of a tile."""
    return jnp.tile(sinks_H.astype(dtype).reshape(kv_heads, -1), how.block)


def _backward(how: Tiling, softcap: float, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    q, k, v, sinks, out, logsumexp, tiles, mask = saved
    wide, kv_heads, scale = logsumexp.dtype, k.shape[2], q.shape[-1] ** -0.5
    inner = jnp.sum(out.astype(wide) * d_out.astype(wide), axis=-1, keepdims=True)
    inner = _query_tiles(inner, kv_heads, how)
    q_NSKMD, d_out_NSKMD = (_query_tiles(x, kv_heads, how) for x in reference.operands(how.widen, (q, d_out)))
    k_NSKBD, v_NSKBD = (_key_tiles(x, how) for x in reference.operands(how.widen, (k, v)))
    narrow = q_NSKMD.dtype

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        d_q, d_k, d_v = carry
        step = _step(tiles.pairs[i], q_NSKMD, k_NSKBD, mask, softcap)
        d_part, (query, key) = d_out_NSKMD[step.query], (step.query, step.key)
        weights = jnp.where(step.visible, jnp.exp(step.scores - logsumexp[query][..., None]), 0)
        d_weights = _product("skmd,skbd->skmb", d_part, v_NSKBD[key], wide)
        d_scores = weights * (d_weights - inner[query]) * scale
        if softcap:
            d_scores *= 1 - jnp.square(step.scores / softcap)
        d_scores = d_scores.astype(narrow)
        return (
            d_q.at[query].add(_product("skmb,skbd->skmd", d_scores, k_NSKBD[key], wide)),
            d_k.at[key].add(_product("skmb,skmd->skbd", d_scores, q_NSKMD[query], wide)),
            d_v.at[key].add(_product("skmb,skmd->skbd", weights.astype(narrow), d_part, wide)),
        )

    start = tuple(jnp.zeros(x.shape, wide) for x in (q_NSKMD, k_NSKBD, v_NSKBD))
    d_q, d_k, d_v = lax.fori_loop(0, tiles.num_pairs[0], body, start)
    d_sinks = None
    if sinks is not None:
        share = jnp.exp(_of_queries(sinks, kv_heads, how, wide) - logsumexp)
        each = jnp.sum(share * inner[..., 0], axis=(0, 1)).reshape(kv_heads, how.block, -1)
        d_sinks = -jnp.sum(each, axis=1).reshape(-1).astype(sinks.dtype)
    return (
        _from_query_tiles(d_q, q.shape, how).astype(q.dtype),
        _from_key_tiles(d_k, k.shape, how).astype(k.dtype),
        _from_key_tiles(d_v, v.shape, how).astype(v.dtype),
        d_sinks,
        *(None, None),
    )


# the forward pass without what it saves
_blockwise = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], nondiff_argnums=(0, 1))
_blockwise.defvjp(_forward, _backward)


class Runs(NamedTuple):
    """Where each token of packed rows finds its context; int32 [R, T]."""

    first: jax.Array  # the lowest position that it sees
    last: jax.Array  # the highest; nothing where it is lower than the first
    begin: jax.Array  # the position at which its segment begins
    own: jax.Array  # the column at which its segment begins
    prefix: jax.Array  # the column of position 0
    following: jax.Array  # the column behind its segment
    number: jax.Array  # of its segment, counted from the row's beginning


def runs(mask: MaskInputs) -> Runs:
    """The `Runs` of rows in which tokens lie in order: a segment's positions lie side by side, and continue those of
    its prefix. Padding sees nothing."""
    segment_ids, positions, prefix_ids, first, _ = mask
    rows, tokens = positions.shape
    column = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), positions.shape)
    starts = jnp.diff(segment_ids, axis=1, prepend=-1) != 0
    own = lax.cummax(jnp.where(starts, column, 0), axis=1)
    ahead = lax.cummin(jnp.where(starts, column, tokens), axis=1, reverse=True)
    following = jnp.pad(ahead[:, 1:], ((0, 0), (0, 1)), constant_values=tokens)
    begin = jnp.take_along_axis(positions, own, axis=1)
    begins = jnp.full((rows, tokens + 1), tokens, jnp.int32).at[jnp.arange(rows)[:, None], segment_ids].min(column)
    continues = (prefix_ids > 0) & (prefix_ids != segment_ids)
    prefix = jnp.where(continues, jnp.take_along_axis(begins, prefix_ids, axis=1), 0)
    lowest = jnp.where(continues, 0, begin)
    lowest = lowest if first is None else jnp.maximum(lowest, first)
    last = jnp.where(segment_ids > 0, positions, -1)
    number = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
    return Runs(*(x.astype(jnp.int32) for x in (lowest, last, begin, own, prefix, following, number)))
