"""Windows, capped scores and sinks in every implementation of attention, against a softmax written out here: values,
and in training the gradient of everything, the sinks' own included.

Tolerances of the kernels are those of test_paged_pallas.py and test_packed_pallas.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels import attention, gathered, packed, packed_pallas, paged_pallas, reference
from jaxrl.kernels.packed import Tiling
from jaxrl.kernels.packed_pallas import PackedTileSizes
from jaxrl.kernels.paged_pallas import PagedTileSizes
from jaxrl.kernels.reference import MaskInputs, Rule

from .test_decode_pallas import case, separate
from .test_decode_pallas import run as decode
from .test_gathered import BLOCK, WIDTH
from .test_packed_attention import inputs, random_rows
from .test_paged_pallas import case as paged_case

ROWS = random_rows(5, 44, seed=3)


@partial(jax.jit, static_argnames="cap")
def dense(q, k, v, seen, cap=0.0, sinks=None):
    """[..., C, H, D] of queries, [..., S, K, D] of keys, and who sees whom [..., C, S]; sinks: [H]."""
    group = q.shape[-2] // k.shape[-2]
    scores = jnp.einsum("...chd,...shd->...hcs", q, jnp.repeat(k, group, -2)) / np.sqrt(q.shape[-1])
    scores = jnp.tanh(scores / cap) * cap if cap else scores
    scores = jnp.where(seen[..., None, :, :], scores, -1e30)
    highest = jnp.max(scores, -1, keepdims=True)
    highest = highest if sinks is None else jnp.maximum(highest, sinks[:, None, None])
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, -1, keepdims=True)
    weights /= total if sinks is None else total + jnp.exp(sinks[:, None, None] - highest)
    return jnp.einsum("...hcs,...shd->...chd", weights, jnp.repeat(v, group, -2))


def seen_in_rows(rows, window):
    segments, positions, prefixes = rows
    behind = positions[:, :, None] - positions[:, None]
    same = (segments[:, :, None] == segments[:, None]) | (prefixes[:, :, None] == segments[:, None])
    return same & (behind >= 0) & (behind < window)


def sinks_of(heads: int, has_sinks: bool, dtype: Any = "float64") -> Any:
    return np.random.default_rng(9).normal(size=heads).astype(dtype) * 2 if has_sinks else None


# ---------------------------------------------------------------- packed rows


@pytest.mark.parametrize(
    ("how", "window", "cap", "has_sinks"),
    [
        (None, 3, 0.0, True),
        (None, 10**6, 0.0, False),  # segments and shared prefixes alone
        (Tiling(0, 8), 5, 0.7, False),
        (Tiling(0, 16, together=True), 2, 0.0, True),
        ("kernels", 7, 0.0, True),
    ],
)
def test_packed_rows(how, window, cap, has_sinks):
    """Windows of one to three tiles; a window reaches over a segment's beginning into its prefix."""
    segments, positions, _prefixes = ROWS
    exact = how != "kernels"
    with jax.enable_x64(exact):
        dtype = "float64" if exact else "float32"
        q, k, v, d_out = inputs(5, 44, dtype, dim=16)
        first, real = positions - window + 1, (segments > 0)[..., None, None]
        mask, sinks = MaskInputs(*ROWS, first), sinks_of(q.shape[2], has_sinks, dtype)

        def attend(q, k, v, sinks):
            if how is None:
                plain = attention.choose_packed("reference", "cpu", attention.Heads(6, 2, 16, dtype, cap))
                assert plain.num_keys(44) == 44
                return plain.attend(q, k, v, mask, plain.tile_pairs(mask, dtype), sinks)
            if not isinstance(how, Tiling):
                tiles = (PackedTileSizes(16, 16, 4, 2),) * 3
                return packed_pallas.packed_attention(q, k, v, mask, tiles=tiles, interpret=True, sinks=sinks)
            return packed.attention(q, k, v, mask, packed.visible_pairs(mask, how), how, cap, sinks)

        def naive(q, k, v, sinks):
            return dense(q, k, v, seen_in_rows(ROWS, window), cap=cap, sinks=sinks)

        def differentiated(function):
            def total(*arrays):
                out = jnp.where(real, function(*arrays), 0)
                return jnp.sum(out * d_out), out

            places = (0, 1, 2, 3) if has_sinks else (0, 1, 2)
            return jax.tree.leaves(jax.jit(jax.grad(total, argnums=places, has_aux=True))(q, k, v, sinks))

        for got, want in zip(differentiated(attend), differentiated(naive), strict=True):
            assert np.abs(np.asarray(got) - want).max() <= (1e-12 if exact else 4e-6) * np.abs(want).max()


def test_tiles_behind_the_window_are_left_out():
    segments, positions, prefixes = np.ones((1, 64), np.int32), np.arange(64)[None], np.ones((1, 64), np.int32)
    for window, count in ((1, 8), (9, 15), (10, 21), (64, 36)):
        mask = MaskInputs(segments, positions, prefixes, positions - window + 1)
        tiles = packed.visible_pairs(mask, Tiling(0, 8))
        assert tiles is not None
        assert int(tiles.num_pairs[0]) == count, window
        visible, whole = packed_pallas.visible_tiles(mask, 8, 8)
        assert int(visible.sum()) == count
        pairs = seen_in_rows((segments, positions, prefixes), window)[0].reshape(8, 8, 8, 8)
        assert not (np.asarray(whole[0]) & ~pairs.all((1, 3))).any()


# ---------------------------------------------------------------- paged cache


def in_order(pool_KNPD, tables):
    """[R, S, K, D]: what the rows have, in the order of their positions."""
    rows = pool_KNPD[:, tables]
    return jnp.moveaxis(rows.reshape(rows.shape[0], tables.shape[0], -1, rows.shape[-1]), 0, 2)


def naive_paged(q, k, v, tables, positions, rule, sinks=None):
    behind = positions[..., None] - np.arange(tables.shape[1] * k.shape[2])
    seen = (behind >= 0) & (behind < (rule.window or 10**6))
    return np.asarray(dense(q, in_order(k, tables), in_order(v, tables), seen, cap=rule.softcap, sinks=sinks))


@pytest.mark.parametrize(
    ("rule", "tiles", "has_sinks"),
    [
        (Rule(17, 2.0), None, False),
        (Rule(5), None, True),
        (Rule(), PagedTileSizes(16, 16, 1024, 4, 2), True),
        (Rule(1), PagedTileSizes(16, 16, 1024, 4, 2), False),
        (Rule(40), PagedTileSizes(32, 32, 32, 4, 2), True),
    ],
)
def test_paged(rule, tiles, has_sinks):
    q, k, v, tables, positions = paged_case(6, 2, 16, 16, 4, rows=4)
    sinks = sinks_of(6, has_sinks, "float32")
    if tiles is None:
        out = jax.jit(reference.paged_attention, static_argnums=5)(q, k, v, tables, positions, rule, sinks)
    else:
        positions[3, 1] = -1
        how = {"rule": rule, "sinks_H": sinks, "tiles": tiles, "interpret": True}
        out = paged_pallas.paged_attention(q, k, v, tables, positions, **how)
    live = positions >= 0
    expected = naive_paged(q, k, v, tables, positions, rule, sinks)
    np.testing.assert_allclose(np.asarray(out)[live], expected[live], rtol=0, atol=1e-5)
    assert (np.asarray(out)[~live] == 0).all()


def test_the_kernel_reads_nothing_before_a_window():
    q, k, v, tables, positions = paged_case(6, 2, 16, 16, 2, width=6)
    positions[:] = 90 + np.arange(2)
    how = {"rule": Rule(20), "tiles": PagedTileSizes(16, 16, 32, 4, 2), "interpret": True}
    clean = paged_pallas.paged_attention(q, k, v, tables, positions, **how)
    k[:, tables[:, :4]] = v[:, tables[:, :4]] = np.nan  # positions 0 .. 63; the first that is seen is 71
    np.testing.assert_array_equal(clean, paged_pallas.paged_attention(q, k, v, tables, positions, **how))


@pytest.mark.parametrize(("window", "piece"), [(1, 64), (30, 32)])
def test_decode_kernel(window, piece):
    arguments = case(6, 2, norms=False)
    out = decode(arguments, piece, window)[0]
    active = arguments["positions_R"] >= 0
    expected = separate(**arguments, rule=Rule(window))[0]
    np.testing.assert_allclose(out[active], np.asarray(expected)[active], rtol=0, atol=1e-5)


def test_capped_scores_are_not_the_kernels():
    heads = attention.Heads(4, 2, 16, "float32", 50.0)
    assert attention.choose_packed("auto", "gpu", heads).implementation == "tiles"
    with pytest.raises(ValueError, match=r"actor.attention \(pallas\) must be auto or reference .* capped \(50\)"):
        attention.choose_packed("pallas", "gpu", heads)
    with pytest.raises(ValueError, match=r"rollout.attention \(pallas\) must be .* whose scores are capped"):
        attention.choose_paged("pallas", "gpu", 50.0)
    arrays = paged_case(4, 2, 16, 16, 2)
    out = attention.choose_paged("auto", "gpu", 0.5).attend(*arrays, Rule(0, 0.5))
    np.testing.assert_allclose(out, naive_paged(*arrays, Rule(0, 0.5)), rtol=0, atol=1e-5)


# ---------------------------------------------------------------- gathered windows


@partial(jax.jit, static_argnames="rule")
def steps_of(pools, fresh, window, tiles, tables, start, q, k, v, positions, at, sinks, rule):
    valid = jnp.ones(positions.shape, bool)
    pools = [reference.write_kv(pool, new, tables, positions, valid) for pool, new in zip(pools, (k, v), strict=True)]
    fresh = gathered.put_several(fresh, k, v, at)
    several = gathered.attend(q, window, tiles, fresh, start, at, rule, sinks)
    one = gathered.attend(q[:, -1:], window, tiles, fresh, start, at[0, -1], rule, sinks)
    return pools, fresh, several, one


@pytest.mark.parametrize(("rule", "has_sinks"), [(Rule(6, 1.5), False), (Rule(3), True)])
def test_gathered(x64, rule, has_sinks):
    rows, kv_heads, heads, dim, queries = 3, 3, 9, 8, 2
    rng, sinks = np.random.default_rng(2), sinks_of(heads, has_sinks)
    pools = list(rng.normal(size=(2, kv_heads, 1 + rows * WIDTH, BLOCK, dim)))
    tables = (1 + rng.permutation(rows * WIDTH).reshape(rows, WIDTH)).astype(np.int32)
    start = np.array([0, 3, 7], np.int32)
    tiles = gathered.window_tiles(tables.tolist(), 2, 8, BLOCK)
    window, fresh = gathered.gather(*pools, tiles.blocks_UW), gathered.blank(pools[1], rows, 4)
    for step in range(2):
        q = rng.normal(size=(rows, queries, heads, dim))
        k, v = (rng.normal(size=(rows, queries, kv_heads, dim)) for _ in range(2))
        at = np.broadcast_to(step * queries + np.arange(queries), (rows, queries))
        positions = start[:, None] + at
        pools, fresh, several, one = steps_of(
            pools, fresh, window, tiles, tables, start, q, k, v, positions, at, sinks, rule=rule
        )
        expected = naive_paged(q, *(np.asarray(pool) for pool in pools), tables, positions, rule, sinks)
        np.testing.assert_allclose(several, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(one, expected[:, -1:], rtol=0, atol=1e-12)
