"""Windows and capped scores in every implementation of attention, against a softmax written out here.

Tolerances of the kernels are those of test_paged_pallas.py and test_packed_pallas.py.
"""

from __future__ import annotations

from functools import partial

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
from .test_packed_attention import inputs, out_and_gradients, random_rows
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


# ---------------------------------------------------------------- packed rows


@pytest.mark.parametrize(
    ("how", "window", "cap"),
    [(None, 3, 0.0), (Tiling(0, 8), 5, 0.7), (Tiling(0, 16, together=True), 2, 0.0)],
)
def test_packed_rows(x64, how, window, cap):
    """Windows of one to three tiles; a window reaches over a segment's beginning into its prefix."""
    segments, positions, _prefixes = ROWS
    first = positions - window + 1

    def attend(q, k, v):
        if how is None:
            return reference.packed_attention(q, k, v, *ROWS, first, cap)
        mask = MaskInputs(*ROWS, first)
        return packed.attention(q, k, v, mask, packed.visible_pairs(mask, how), how, cap)

    arrays = inputs(5, 44, "float64")
    naive = partial(dense, seen=seen_in_rows(ROWS, window), cap=cap)
    expected = out_and_gradients(naive, *arrays, segments)
    for found, want in zip(out_and_gradients(attend, *arrays, segments), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-12)


def test_tiles_behind_the_window_are_left_out():
    segments, positions, prefixes = np.ones((1, 64), np.int32), np.arange(64)[None], np.ones((1, 64), np.int32)
    for window, count in ((1, 8), (8, 15), (9, 15), (10, 21), (64, 36)):
        mask = MaskInputs(segments, positions, prefixes, positions - window + 1)
        tiles = packed.visible_pairs(mask, Tiling(0, 8))
        assert tiles is not None
        assert int(tiles.num_pairs[0]) == count, window
        visible, whole = packed_pallas.visible_tiles(mask, 8, 8)
        assert int(visible.sum()) == count
        pairs = seen_in_rows((segments, positions, prefixes), window)[0].reshape(8, 8, 8, 8)
        assert not (np.asarray(whole[0]) & ~pairs.all((1, 3))).any()


def test_packed_kernels():
    q, k, v, d_out = inputs(5, 44, "float32", dim=16)
    segments, positions, _prefixes = ROWS
    sizes = (PackedTileSizes(16, 16, 4, 2),) * 3
    first = positions - 6

    def with_gradients(attend):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(jnp.where((segments > 0)[..., None, None], d_out, 0))

    def kernel(q, k, v):
        return packed_pallas.packed_attention(q, k, v, MaskInputs(*ROWS, first), tiles=sizes, interpret=True)

    found = jax.jit(lambda: with_gradients(kernel))()
    expected = jax.jit(lambda: with_gradients(partial(dense, seen=seen_in_rows(ROWS, 7))))()
    real = (segments > 0)[..., None, None]
    for got, want in zip(found, expected, strict=True):
        got, want = np.where(real, got, 0), np.where(real, want, 0)
        assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()


# ---------------------------------------------------------------- paged cache


def in_order(pool_KNPD, tables):
    """[R, S, K, D]: what the rows have, in the order of their positions."""
    rows = pool_KNPD[:, tables]
    return jnp.moveaxis(rows.reshape(rows.shape[0], tables.shape[0], -1, rows.shape[-1]), 0, 2)


def naive_paged(q, k, v, tables, positions, rule):
    behind = positions[..., None] - np.arange(tables.shape[1] * k.shape[2])
    seen = (behind >= 0) & (behind < (rule.window or 10**6))
    return np.asarray(dense(q, in_order(k, tables), in_order(v, tables), seen, cap=rule.softcap))


@pytest.mark.parametrize("rule", [Rule(5), Rule(17, 2.0)])
def test_paged(rule):
    arrays = paged_case(6, 2, 16, 16, 4)
    out = jax.jit(reference.paged_attention, static_argnums=5)(*arrays, rule)
    np.testing.assert_allclose(out, naive_paged(*arrays, rule), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "tiles"), [(1, PagedTileSizes(16, 16, 1024, 4, 2)), (40, PagedTileSizes(32, 32, 32, 4, 2))]
)
def test_paged_kernel(window, tiles):
    q, k, v, tables, positions = paged_case(6, 2, 16, 16, 4, rows=4)
    positions[3, 1] = -1
    rule = Rule(window)
    out = paged_pallas.paged_attention(q, k, v, tables, positions, rule=rule, tiles=tiles, interpret=True)
    expected = naive_paged(q, k, v, tables, positions, rule)
    live = positions >= 0
    np.testing.assert_allclose(np.asarray(out)[live], expected[live], rtol=0, atol=1e-5)
    assert (np.asarray(out)[~live] == 0).all()


def test_the_kernel_reads_nothing_before_a_window():
    q, k, v, tables, positions = paged_case(6, 2, 16, 16, 2, width=6)
    positions[:] = 90 + np.arange(2)
    rule, tiles = Rule(20), PagedTileSizes(16, 16, 32, 4, 2)
    clean = paged_pallas.paged_attention(q, k, v, tables, positions, rule=rule, tiles=tiles, interpret=True)
    k[:, tables[:, :4]] = v[:, tables[:, :4]] = np.nan  # positions 0 .. 63; the first that is seen is 71
    poisoned = paged_pallas.paged_attention(q, k, v, tables, positions, rule=rule, tiles=tiles, interpret=True)
    np.testing.assert_array_equal(clean, poisoned)


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
def steps_of(pools, fresh, window, tiles, tables, start, q, k, v, positions, at, rule):
    valid = jnp.ones(positions.shape, bool)
    pools = [reference.write_kv(pool, new, tables, positions, valid) for pool, new in zip(pools, (k, v), strict=True)]
    fresh = gathered.put_several(fresh, k, v, at)
    several = gathered.attend_several(q, window, tiles, fresh, start, at, rule)
    one = gathered.attend(q[:, -1], window, tiles, fresh, start, at[0, -1], rule)
    return pools, fresh, several, one


@pytest.mark.parametrize("rule", [Rule(3), Rule(6, 1.5)])
def test_gathered(x64, rule):
    rows, kv_heads, heads, dim, queries = 3, 3, 9, 8, 2
    rng = np.random.default_rng(2)
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
            pools, fresh, window, tiles, tables, start, q, k, v, positions, at, rule=rule
        )
        expected = naive_paged(q, *(np.asarray(pool) for pool in pools), tables, positions, rule)
        np.testing.assert_allclose(several, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(one, expected[:, -1], rtol=0, atol=1e-12)
