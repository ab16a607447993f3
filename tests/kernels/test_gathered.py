"""Decode over gathered windows against the paged oracle, step by step, and what is written back."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from jaxrl.kernels import gathered, reference

BLOCK, WIDTH, STEPS = 4, 3, 4


@partial(jax.jit, static_argnums=(2, 3))
def opened(pools, blocks_UW, rows, steps):
    """The window of a chunk of plans, and where it keeps what is new."""
    return gathered.gather(*pools, blocks_UW), gathered.blank(pools[1], rows, steps)


def test_a_window_holds_what_rows_have_cached_and_no_more():
    tables = [[7], [3, 4, 5, 6, 9], [], [8, 2]]
    assert gathered.num_tiles(tables, 2) == 5
    tiles = gathered.window_tiles(tables, 2, 6, BLOCK)
    assert tiles.blocks_UW.tolist() == [[7, 0], [3, 4], [5, 6], [9, 0], [8, 2], [0, 0]]
    assert tiles.owner_U.tolist() == [0, 1, 1, 1, 3, 0]
    assert tiles.first_U[:5].tolist() == [0, 0, 8, 16, 0]
    assert tiles.first_U[5] > 1 << 29, "behind any sequence: it is hidden"


@jax.jit
def several(pools, fresh, window, tiles, tables, start, q, k, v, positions, valid, at):
    """A step of several positions a row, over pages and over the window."""
    pools = [reference.write_kv(pool, new, tables, positions, valid) for pool, new in zip(pools, (k, v), strict=True)]
    fresh = gathered.put_several(fresh, k, v, at)
    actual = gathered.attend(q, window, tiles, fresh, start, at)
    return reference.paged_attention(q, *pools, tables, positions), actual, pools, fresh


def test_several_positions_a_step_equal_paged_ones_and_rejected_ones_leave_no_trace(x64):
    """Rows keep different numbers of the positions that they try; the next step writes over what they did not keep."""
    heads, kv_heads, rows, dim, queries, room = 9, 3, 3, 8, 3, 7
    rng = np.random.default_rng(2)
    pools = rng.normal(size=(2, kv_heads, 1 + rows * WIDTH, BLOCK, dim))
    tables = (1 + rng.permutation(rows * WIDTH).reshape(rows, WIDTH)).astype(np.int32)
    start, gained = np.array([0, 3, 5], np.int32), np.zeros(rows, np.int32)
    tiles = gathered.window_tiles(tables.tolist(), 2, 8, BLOCK)
    window, fresh = opened(pools, tiles.blocks_UW, rows, room)
    paged = list(pools)
    for tried, kept in (([3, 1, 2], [2, 1, 0]), ([3, 3, 3], [1, 3, 3]), ([2, 3, 1], [2, 1, 1])):
        q = rng.normal(size=(rows, queries, heads, dim))
        k, v = (rng.normal(size=(rows, queries, kv_heads, dim)) for _ in range(2))
        offset, valid = np.arange(queries), np.arange(queries) < np.array(tried)[:, None]
        positions = start[:, None] + gained[:, None] + offset
        at = np.where(valid, gained[:, None] + offset, room)
        expected, actual, paged, fresh = several(
            paged, fresh, window, tiles, tables, start, q, k, v, positions, valid, at
        )
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(np.asarray(actual)[valid], np.asarray(expected)[valid], rtol=0, atol=1e-12)
        gained += np.array(kept, np.int32)
    written = jax.jit(gathered.scatter)(*pools, fresh, tables, start, gained)
    for new, full, old in zip(*(map(np.asarray, each) for each in (written, paged, pools)), strict=True):
        for row in range(rows):
            own = [np.moveaxis(each[:, tables[row]], 0, 2).reshape(-1, kv_heads, dim) for each in (new, full, old)]
            end = int(start[row] + gained[row])
            np.testing.assert_array_equal(own[0][:end], own[1][:end])
            np.testing.assert_array_equal(own[0][end:], own[2][end:], "nothing of what was rejected")
