"""Sinks in every implementation of attention, against a softmax written out in `test_rules.dense`: values, and the
gradient of everything, the sinks' own included."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels import gathered, packed, packed_pallas, paged_pallas, reference
from jaxrl.kernels.packed import Tiling
from jaxrl.kernels.packed_pallas import PackedTileSizes
from jaxrl.kernels.paged_pallas import PagedTileSizes
from jaxrl.kernels.reference import Rule

from .test_gathered import BLOCK, WIDTH
from .test_packed_attention import inputs
from .test_paged_pallas import case as paged_case
from .test_rules import ROWS, dense, in_order, seen_in_rows


def sinks_of(heads: int, dtype: Any = "float64") -> Any:
    return np.random.default_rng(9).normal(size=heads).astype(dtype) * 2


def differentiated(attend: Any, *arrays: Any, d_out: Any) -> Any:
    def total(*arrays: Any) -> Any:
        out = attend(*arrays)
        return jnp.sum(out * d_out), out

    return jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True))(*arrays)


@pytest.mark.parametrize("how", [None, Tiling(0, 16, together=True), "kernels"])
def test_packed_rows(how):
    segments, positions, _prefixes = ROWS
    exact = how != "kernels"
    with jax.enable_x64(exact):
        dtype = "float64" if exact else "float32"
        q, k, v, d_out = inputs(5, 44, dtype, dim=16)
        first, real = positions - 6, (segments > 0)[..., None, None]
        mask = reference.MaskInputs(*ROWS, first)

        def attend(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            if how is None:
                return reference.packed_attention(q, k, v, *ROWS, first, sinks=sinks)
            if not isinstance(how, Tiling):
                tiles = (PackedTileSizes(16, 16, 4, 2),) * 3
                return packed_pallas.packed_attention(q, k, v, mask, tiles=tiles, interpret=True, sinks=sinks)
            return packed.attention(q, k, v, mask, packed.visible_pairs(mask, how), how, sinks=sinks)

        def naive(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            return dense(q, k, v, seen_in_rows(ROWS, 7), sinks=sinks)

        arrays, d_out = (q, k, v, sinks_of(q.shape[2], dtype)), np.where(real, d_out, 0)
        found, expected = (differentiated(each, *arrays, d_out=d_out) for each in (attend, naive))
        found, expected = ((*each[0], np.where(real, each[1], 0)) for each in (found, expected))
        for got, want in zip(found, expected, strict=True):
            assert np.abs(np.asarray(got) - want).max() <= (1e-12 if exact else 4e-6) * np.abs(want).max()


def naive_paged(q: Any, k: Any, v: Any, tables: Any, positions: Any, rule: Rule, sinks: Any) -> np.ndarray:
    behind = positions[..., None] - np.arange(tables.shape[1] * k.shape[2])
    seen = (behind >= 0) & (behind < (rule.window or 10**6))
    return np.asarray(dense(q, in_order(k, tables), in_order(v, tables), seen, sinks=sinks))


@pytest.mark.parametrize(
    ("rule", "tiles"),
    [(Rule(5), None), (Rule(), PagedTileSizes(16, 16, 1024, 4, 2)), (Rule(5), PagedTileSizes(32, 32, 32, 4, 2))],
)
def test_paged(rule, tiles):
    arrays, sinks = paged_case(6, 2, 16, 16, 4), sinks_of(6, "float32")
    if tiles is None:
        out = jax.jit(reference.paged_attention, static_argnums=5)(*arrays, rule, sinks)
    else:
        out = paged_pallas.paged_attention(*arrays, rule=rule, sinks_H=sinks, tiles=tiles, interpret=True)
    np.testing.assert_allclose(out, naive_paged(*arrays, rule, sinks), rtol=0, atol=1e-5)


def test_gathered(x64):
    rule, rows, kv_heads, heads, dim = Rule(3), 3, 3, 9, 8
    rng, sinks = np.random.default_rng(2), sinks_of(9)
    pools = [jnp.asarray(rng.normal(size=(kv_heads, 1 + rows * WIDTH, BLOCK, dim))) for _ in range(2)]
    tables = (1 + rng.permutation(rows * WIDTH).reshape(rows, WIDTH)).astype(np.int32)
    start = np.array([0, 3, 7], np.int32)
    tiles = gathered.window_tiles(tables.tolist(), 2, 8, BLOCK)
    window, fresh = gathered.gather(*pools, tiles.blocks_UW), gathered.blank(pools[1], rows, 4)
    q = rng.normal(size=(rows, 2, heads, dim))
    k, v = (jnp.asarray(rng.normal(size=(rows, 2, kv_heads, dim))) for _ in range(2))
    at = np.broadcast_to(np.arange(2), (rows, 2))
    positions, valid = start[:, None] + at, np.ones((rows, 2), bool)
    written = [reference.write_kv(pool, new, tables, positions, valid) for pool, new in zip(pools, (k, v), strict=True)]
    fresh = gathered.put_several(fresh, k, v, at)
    expected = naive_paged(q, *(np.asarray(pool) for pool in written), tables, positions, rule, sinks)
    several = gathered.attend_several(q, window, tiles, fresh, start, at, rule, sinks)
    one = gathered.attend(q[:, -1], window, tiles, fresh, start, at[0, -1], rule, sinks)
    np.testing.assert_allclose(several, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(one, expected[:, -1], rtol=0, atol=1e-12)
