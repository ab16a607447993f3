"""Attention over packed rows equals attention of each sequence alone, by a numpy loop; in tiles or not."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels import packed
from jaxrl.kernels.packed import Tiling
from jaxrl.kernels.reference import Keys, MaskInputs, packed_attention


def alone(q, k, v):
    """[T, H, D] causal attention, one query at a time."""
    out = np.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = k[: t + 1, h // group] @ q[t, h] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v[: t + 1, h // group] / weights.sum()
    return out


def random_rows(rows, tokens, seed=0):
    """Segments, positions and prefixes of rows like those of `pack`: groups, samples alone, padding at the end."""
    random = np.random.default_rng(seed)
    segments, positions, prefixes = np.zeros((3, rows, tokens), np.int32)
    for row in range(1, rows):  # the first row is padding only
        column, segment = 0, 0
        while True:
            shared = int(random.integers(0, 9))
            for n in range(int(random.integers(2, 5)) if shared else 1):
                length = int(random.integers(1, 12))
                parts = [(shared, 0)] if n == 0 and shared else []
                for size, first in [*parts, (length, shared)]:
                    segment += 1
                    if (size, first) == (shared, 0):
                        prefix = segment
                    where = slice(column, column := column + size)
                    if column > tokens - 3:
                        break
                    segments[row, where] = segment
                    prefixes[row, where] = prefix if shared else segment
                    positions[row, where] = np.arange(first, first + size)
            if column > tokens - 3:
                break
    return segments, positions, prefixes


def inputs(rows, tokens, dtype, heads=6, kv_heads=2, dim=4):
    random = np.random.default_rng(1)
    shapes = [(rows, tokens, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [random.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes]


@partial(jax.jit, static_argnums=0)
def out_and_gradients(attend, q, k, v, weights, segments):
    real = (segments > 0)[..., None, None]

    def total(q, k, v):
        out = attend(q, k, v)
        return jnp.sum((out * jnp.where(real, weights, 0)).astype(jnp.promote_types(out.dtype, jnp.float32))), out

    gradients, out = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return jnp.where(real, out, 0), *gradients


def in_tiles(rows, how):
    segments, positions, prefixes = rows

    def attend(q, k, v, segments=segments, positions=positions, prefixes=prefixes):
        mask = MaskInputs(segments, positions, prefixes)
        return packed.attention(q, k, v, mask, packed.visible_pairs(mask, how), how)

    return attend


APART, TOGETHER, WIDE, PLAIN = Tiling(0, 8), Tiling(0, 16, together=True), Tiling(0, 64, widen=True), Tiling(64, 8)
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 4e-2}
ROWS = random_rows(5, 44)  # neither tile size divides 44


def dense(q, k, v):
    return packed_attention(q, k, v, MaskInputs(*ROWS))


@pytest.mark.parametrize(
    ("how", "dtype"),
    [(APART, "float64"), (TOGETHER, "float32"), (WIDE, "bfloat16"), (PLAIN, "float64")],
)
def test_tiles_equal_the_oracle(x64, how, dtype):
    arrays = inputs(5, 44, dtype)
    expected = out_and_gradients(dense, *(x.astype(np.float64) for x in arrays), ROWS[0])
    for each, want in zip(out_and_gradients(in_tiles(ROWS, how), *arrays, ROWS[0]), expected, strict=True):
        assert each.dtype == dtype
        error = np.linalg.norm(np.asarray(each, np.float64) - want) / np.linalg.norm(want)
        assert error <= TOLERANCE[dtype]


def in_slices(rows, attend, parts=3):
    """`attend(q, k, v, (segments, positions, prefixes), keys)` of the columns dealt to so many, each of which has some
    of the queries and all keys; in the order in which they were dealt."""
    order = np.random.default_rng(2).permutation(rows[0].shape[1])
    dealt = [x[:, order] for x in rows]

    def sliced(q, k, v):
        keys = Keys(*dealt[:2])
        each = [
            attend(q[:, own], k[:, order], v[:, order], [x[:, at] for x in dealt], keys)
            for own, at in zip(np.array_split(order, parts), np.array_split(np.arange(len(order)), parts), strict=True)
        ]
        return jnp.concatenate(each, axis=1)[:, np.argsort(order)]

    return sliced


@pytest.mark.parametrize("how", [None, APART, TOGETHER])
def test_queries_of_some_tokens_and_keys_of_all_in_any_order(x64, how):
    def attend(q, k, v, rows, keys):
        mask = MaskInputs(*rows, keys=keys)
        if how is None:
            return packed_attention(q, k, v, mask)
        return packed.attention(q, k, v, mask, packed.visible_pairs(mask, how), how)

    arrays = inputs(5, 44, "float64")
    expected = out_and_gradients(dense, *arrays, ROWS[0])
    for each, want in zip(out_and_gradients(in_slices(ROWS, attend), *arrays, ROWS[0]), expected, strict=True):
        np.testing.assert_allclose(each, want, rtol=0, atol=1e-12)


def test_tiles_are_only_those_needed():
    segments, _positions, prefixes = ROWS
    tiles = jax.jit(packed.visible_pairs, static_argnums=1)(MaskInputs(*ROWS), APART)
    assert tiles is not None
    visible = (segments[:, :, None] == segments[:, None]) | (prefixes[:, :, None] == segments[:, None])
    visible &= (segments[:, None] > 0) & np.tril(np.ones((44, 44), bool))
    visible = np.pad(visible, ((0, 0), (0, 4), (0, 4))).reshape(5, 6, 8, 6, 8).any((2, 4))
    expected = {(6 * row + a, 6 * row + b) for row, a, b in np.argwhere(visible)}
    count = int(tiles.num_pairs[0])
    assert {tuple(pair) for pair in np.asarray(tiles.pairs)[:count].tolist()} == expected
    assert len(expected) == count < len(tiles.pairs)
    assert packed.visible_pairs(MaskInputs(*ROWS), Tiling(64, 8)) is None
