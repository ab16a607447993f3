"""Attention in plain jnp: the oracle for every kernel, and the path that runs on CPU.

Source: scaled dot-product attention with grouped key/value heads (Ainslie et al. 2023, GQA). Departures: queries are
grouped by key/value head instead of repeating keys and values, which keeps K and V at their stored size.

Dims: R rows, T tokens of a row (S as keys), H query heads, K key/value heads, G = H / K, D head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Rule(NamedTuple):
    """A layer's attention beyond a causal mask. Hashable."""

    window: int = 0  # positions that a query sees, its own included; 0: all
    softcap: float = 0.0  # scores s become softcap * tanh(s / softcap); 0: unchanged


PLAIN = Rule()


class Keys(NamedTuple):
    """Segments and positions, int32 [R, S], of keys that are not the queries' own; in any order."""

    segment_ids: jax.Array
    positions: jax.Array


class MaskInputs(NamedTuple):
    """The integers that the mask of packed rows follows from; int32 [R, T] each."""

    segment_ids: jax.Array
    positions: jax.Array
    prefix_ids: jax.Array  # the segment that each token's segment continues; 0 or its own for none
    first: jax.Array | None = None  # the lowest position that each token sees; None: there is no window
    keys: Keys | None = None  # of k and v, where they differ from the queries'

    @property
    def all_keys(self) -> Keys:
        """The keys' segments and positions; by default the queries'."""
        return self.keys or Keys(self.segment_ids, self.positions)


ATTENTION = "attention"
"""Name of the arrays that the tiled kernels keep for their backward pass, so that a remat policy can keep them too."""


class Codes(NamedTuple):
    """Cached keys or values in a byte a number (`rollout.kv_cache_dtype`), or the specs or shapes of both arrays: codes
    [..., D], int8 or float8, and float32 scales [..., 1] that multiply a head's codes of a position."""

    codes: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def dtype(self) -> Any:
        return self.codes.dtype


Cached = jax.Array | Codes


def numbers(cached: Cached, dtype: Any) -> jax.Array:
    """The numbers of codes, rounded to a type; other arrays unchanged."""
    if not isinstance(cached, Codes):
        return cached
    wide = jnp.promote_types(dtype, jnp.float32)
    return (cached.codes.astype(wide) * cached.scales.astype(wide)).astype(dtype)


def operands(widen: bool, tree: Any) -> Any:
    """Operands of a product: with `widen`, for backends that multiply narrow numbers slowly, arrays narrower than
    float32 become float32, which is exact."""
    if not widen:
        return tree
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def capped(scores: jax.Array, softcap: float) -> jax.Array:
    """Scores after `Rule.softcap`."""
    return softcap * jnp.tanh(scores / softcap) if softcap else scores


def softmax_with(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """The softmax of scores [..., S], with a further score that broadcasts to [..., 1], if there is one."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    column = jnp.broadcast_to(sinks.astype(scores.dtype), (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]


# ---------------------------------------------------------------- packed rows (training)


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: MaskInputs,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention within each segment of packed rows, and its shared prefix: [R, T, H, D] in q's dtype. Scores and
    softmax are float32 (float64 for float64 input).

    A token sees the tokens of its segment, and of its prefix segment, at positions up to its own. Padding (segment 0,
    position 0) sees padding only, so that every row of the softmax stays finite.

    Args:
      q: [R, T, H, D]. k, v: [R, S, K, D] with K dividing H; query heads h*G .. h*G+G-1 use key/value head h.
      softcap: as in `Rule`.
      sinks: [H], a score of each head's that takes its share of the softmax and has no value; None: there are none.
    """
    rows, tokens, heads, dim = q.shape
    kv_heads = k.shape[-2]
    assert heads % kv_heads == 0, f"{kv_heads} key/value heads must divide {heads} query heads"
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q_RTKGD = q.reshape(rows, tokens, kv_heads, heads // kv_heads, dim)
    scores_RKGTS = jnp.einsum("rtkgd,rskd->rkgts", q_RTKGD, k, preferred_element_type=wide) * dim**-0.5
    scores_RKGTS = capped(scores_RKGTS, softcap)
    keys = mask.all_keys
    prefix_ids = jnp.where(mask.prefix_ids == 0, mask.segment_ids, mask.prefix_ids)
    own, prefix = (ids[:, :, None] == keys.segment_ids[:, None, :] for ids in (mask.segment_ids, prefix_ids))
    visible = (own | prefix) & (mask.positions[:, :, None] >= keys.positions[:, None, :])
    if mask.first is not None:
        visible &= keys.positions[:, None, :] >= mask.first[:, :, None]
    scores_RKGTS = jnp.where(visible[:, None, None], scores_RKGTS, jnp.finfo(wide).min)
    if sinks is not None:
        sinks = sinks.reshape(kv_heads, -1, 1, 1)
    weights_RKGTS = softmax_with(scores_RKGTS, sinks).astype(v.dtype)
    out = jnp.einsum("rkgts,rskd->rtkgd", weights_RKGTS, v, preferred_element_type=wide)
    return out.reshape(rows, tokens, heads, dim).astype(q.dtype)


# ---------------------------------------------------------------- paged cache (rollout); dims as in kernels.attention


def _heads(pool_KNPD: Cached, by_head: bool) -> Any:
    """Indexes a pool's heads beside its blocks. Explicit numbers keep XLA:TPU from another layout of the pool, with the
    heads of a position side by side, and so from copying it; other backends are faster with a slice."""
    return jnp.arange(pool_KNPD.shape[0])[:, None, None] if by_head else slice(None)


def write_kv(
    pool_KNPD: Cached,
    new_RCKD: Cached,
    tables_RW: jax.Array,
    positions_RC: jax.Array,
    valid_RC: jax.Array,
    by_head: bool = False,
) -> Any:
    """Scatters [R, C] positions into their blocks; invalid ones go to block 0, which belongs to no row.

    `by_head`: as it suits TPUs; the result is the same.
    """
    if isinstance(pool_KNPD, Codes):
        rows = tables_RW, positions_RC, valid_RC, by_head
        return jax.tree.map(lambda pool, new: write_kv(pool, new, *rows), pool_KNPD, new_RCKD)
    assert not isinstance(new_RCKD, Codes), "codes go into a pool of codes"
    size = pool_KNPD.shape[2]
    entry = jnp.minimum(positions_RC // size, tables_RW.shape[1] - 1)
    blocks_RC = jnp.where(valid_RC, jnp.take_along_axis(tables_RW, entry, axis=1), 0)
    new_KRCD = jnp.moveaxis(new_RCKD, 2, 0).astype(pool_KNPD.dtype)
    return pool_KNPD.at[_heads(pool_KNPD, by_head), blocks_RC, positions_RC % size].set(new_KRCD)


def paged_attention(
    q_RCHD: jax.Array,
    k_KNPD: Cached,
    v_KNPD: Cached,
    tables_RW: jax.Array,
    positions_RC: jax.Array,
    rule: Rule = PLAIN,
    sinks_H: jax.Array | None = None,
    by_head: bool = False,
) -> jax.Array:
    """Gathers each row's blocks and attends to positions up to the query's own; softmax in float32 or better.

    `by_head`: as in `write_kv`.
    """
    rows, queries, heads, dim = q_RCHD.shape
    kv_heads, _, size, _ = k_KNPD.shape
    span, group = tables_RW.shape[1] * size, heads // kv_heads
    accumulate = jnp.promote_types(q_RCHD.dtype, jnp.float32)
    own = _heads(k_KNPD, by_head), tables_RW
    k_KRSD, v_KRSD = (
        numbers(jax.tree.map(lambda x: x[own].reshape(kv_heads, rows, span, -1), cached), q_RCHD.dtype)
        for cached in (k_KNPD, v_KNPD)
    )
    # Queries of one row and key/value head side by side (M = C * G): the products are then plain batched matrices.
    q_KRMD = jnp.moveaxis(q_RCHD.reshape(rows, queries, kv_heads, group, dim), 2, 0).reshape(kv_heads, rows, -1, dim)
    # Keys on the left: with few queries, XLA:CPU multiplies [S, D] x [D, M] twice as fast as [M, D] x [D, S].
    scores_KRSM = jnp.einsum("krsd,krmd->krsm", k_KRSD, q_KRMD, preferred_element_type=accumulate) * dim**-0.5
    scores_KRSM = capped(scores_KRSM, rule.softcap)
    visible_RCS = jnp.arange(span) <= positions_RC[..., None]
    if rule.window:
        visible_RCS &= jnp.arange(span) > positions_RC[..., None] - rule.window
    visible_RMS = jnp.repeat(visible_RCS, group, axis=1)
    scores_KRMS = jnp.where(visible_RMS, jnp.swapaxes(scores_KRSM, -1, -2), -jnp.inf)
    if sinks_H is not None:  # a query's heads lie side by side
        sinks_H = jnp.tile(sinks_H.reshape(kv_heads, 1, group), queries)[..., None]
    weights_KRMS = softmax_with(scores_KRMS, sinks_H).astype(v_KRSD.dtype)
    out_KRMD = jnp.einsum("krms,krsd->krmd", weights_KRMS, v_KRSD, preferred_element_type=accumulate)
    out_RCKGD = jnp.moveaxis(out_KRMD.reshape(kv_heads, rows, queries, group, dim), 0, 2)
    return out_RCKGD.reshape(rows, queries, heads, dim).astype(q_RCHD.dtype)
