"""Decode over gathered windows against the paged oracle, step by step, and what is written back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels import gathered, reference

BLOCK, WIDTH, STEPS = 4, 3, 4


@pytest.mark.parametrize("tile", [1, 2, WIDTH])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 4), (14, 2), (2, 2)])
def test_steps_over_a_window_equal_paged_steps(heads: int, kv_heads: int, tile: int, x64):
    rows, dim = 3, 8
    rng = np.random.default_rng(0)
    shape = (kv_heads, 1 + rows * WIDTH, BLOCK, dim)
    pool_k, pool_v = (jnp.asarray(rng.normal(size=shape)) for _ in range(2))
    tables = jnp.asarray(1 + rng.permutation(rows * WIDTH).reshape(rows, WIDTH), jnp.int32)
    start = jnp.asarray([0, 3, 8], jnp.int32)  # nothing cached yet, across a block, the last block from its beginning
    counts = jnp.asarray([4, 2, 0], jnp.int32)
    held = [tables[row, : 1 + int(start[row] + STEPS - 1) // BLOCK].tolist() for row in range(rows)]
    count = gathered.num_tiles(held, tile) + 2  # some pad the list
    tiles = gathered.WindowTiles(*map(jnp.asarray, gathered.window_tiles(held, tile, count, BLOCK)))
    window = gathered.gather(pool_k, pool_v, tiles.blocks_UW)
    fresh = gathered.blank(pool_v, rows, STEPS)
    paged_k, paged_v = pool_k, pool_v
    for step in range(STEPS):
        q = jnp.asarray(rng.normal(size=(rows, heads, dim)))
        k, v = (jnp.asarray(rng.normal(size=(rows, kv_heads, dim))) for _ in range(2))
        positions = (start + step)[:, None]
        valid = (step < counts)[:, None]
        paged_k = reference.write_kv(paged_k, k[:, None], tables, positions, valid)
        paged_v = reference.write_kv(paged_v, v[:, None], tables, positions, valid)
        expected = reference.paged_attention(q[:, None], paged_k, paged_v, tables, positions)[:, 0]
        fresh = gathered.put(fresh, k, v, jnp.int32(step))
        actual = gathered.attend(q, window, tiles, fresh, start, jnp.int32(step))
        going = np.asarray(valid[:, 0])
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual[going], expected[going], rtol=0, atol=1e-12)
    written = gathered.scatter(pool_k, pool_v, fresh, tables, start, counts)
    for new, expected in zip(written, (paged_k, paged_v), strict=True):
        np.testing.assert_array_equal(new[:, 1:], expected[:, 1:])  # block 0 is no row's


def test_a_window_holds_what_rows_have_cached_and_no_more():
    tables = [[7], [3, 4, 5, 6, 9], [], [8, 2]]
    assert gathered.num_tiles(tables, 2) == 5
    tiles = gathered.window_tiles(tables, 2, 6, BLOCK)
    assert tiles.blocks_UW.tolist() == [[7, 0], [3, 4], [5, 6], [9, 0], [8, 2], [0, 0]]
    assert tiles.owner_U.tolist() == [0, 1, 1, 1, 3, 0]
    assert tiles.first_U[:5].tolist() == [0, 0, 8, 16, 0]
    assert tiles.first_U[5] > 1 << 29, "behind any sequence: it is hidden"


def test_scores_and_sums_are_float32_for_bfloat16():
    rng = np.random.default_rng(1)
    pool = [jnp.asarray(rng.normal(size=(1, 9, BLOCK, 16)), jnp.bfloat16) for _ in range(2)]
    tiles = gathered.WindowTiles(*map(jnp.asarray, gathered.window_tiles([list(range(1, 9))], 8, 1, BLOCK)))
    window = gathered.gather(*pool, tiles.blocks_UW)
    fresh = gathered.blank(pool[1], 1, 1)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 1, 16)), jnp.bfloat16) for _ in range(3))
    fresh = gathered.put(fresh, k, v, jnp.int32(0))
    actual = gathered.attend(q, window, tiles, fresh, jnp.asarray([32]), jnp.int32(0))
    keys = jnp.concatenate([window.keys_BDS[0].T, k[0]]).astype(jnp.float32)
    values = jnp.concatenate([window.values_BSD[0], v[0]]).astype(jnp.float32)
    expected = jax.nn.softmax(q[0].astype(jnp.float32) @ keys.T / 4) @ values
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(actual[0], np.float32), expected, atol=2e-2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 4)])
def test_several_positions_a_step_equal_paged_ones_and_rejected_ones_leave_no_trace(heads: int, kv_heads: int, x64):
    """Rows keep different numbers of the positions that they try; the next step writes over what they did not keep."""
    rows, dim, queries, room = 3, 8, 3, 7
    rng = np.random.default_rng(2)
    shape = (kv_heads, 1 + rows * WIDTH, BLOCK, dim)
    pool_k, pool_v = (jnp.asarray(rng.normal(size=shape)) for _ in range(2))
    tables = jnp.asarray(1 + rng.permutation(rows * WIDTH).reshape(rows, WIDTH), jnp.int32)
    start, gained = jnp.asarray([0, 3, 5], jnp.int32), np.zeros(rows, np.int32)
    tiles = gathered.WindowTiles(*map(jnp.asarray, gathered.window_tiles(tables.tolist(), 2, 8, BLOCK)))
    window = gathered.gather(pool_k, pool_v, tiles.blocks_UW)
    fresh, (paged_k, paged_v) = gathered.blank(pool_v, rows, room), (pool_k, pool_v)
    for tried, kept in (([3, 1, 2], [2, 1, 0]), ([3, 3, 3], [1, 3, 3]), ([2, 3, 1], [2, 1, 1])):
        q = jnp.asarray(rng.normal(size=(rows, queries, heads, dim)))
        k, v = (jnp.asarray(rng.normal(size=(rows, queries, kv_heads, dim))) for _ in range(2))
        offset, valid = np.arange(queries), np.arange(queries) < np.array(tried)[:, None]
        positions = start[:, None] + gained[:, None] + offset
        paged_k = reference.write_kv(paged_k, k, tables, positions, valid)
        paged_v = reference.write_kv(paged_v, v, tables, positions, valid)
        expected = reference.paged_attention(q, paged_k, paged_v, tables, positions)
        at = jnp.asarray(np.where(valid, gained[:, None] + offset, room))
        fresh = gathered.put_several(fresh, k, v, at)
        actual = gathered.attend_several(q, window, tiles, fresh, start, at)
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual[valid], expected[valid], rtol=0, atol=1e-12)
        gained += np.array(kept, np.int32)
    written = gathered.scatter(pool_k, pool_v, fresh, tables, start, jnp.asarray(gained))
    for new, paged, old in zip(written, (paged_k, paged_v), (pool_k, pool_v), strict=True):
        for row in range(rows):
            own = [jnp.moveaxis(each[:, tables[row]], 0, 2).reshape(-1, kv_heads, dim) for each in (new, paged, old)]
            end = int(start[row] + gained[row])
            np.testing.assert_array_equal(own[0][:end], own[1][:end])
            np.testing.assert_array_equal(own[0][end:], own[2][end:], "nothing of what was rejected")
