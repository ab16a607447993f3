"""The packed kernels in interpret mode, values and gradients, against plain jnp, which test_rules.py holds against a
softmax; and their lowering for CUDA.

Errors are relative to the largest entry. float32: products are 21 bits and gradients sum a few hundred of them: 2e-6.
bfloat16: weights and gradients of scores are rounded to 8 bits before they are multiplied, and the results too: 2e-2
(dense attention in bfloat16 is as far from float32: 1.0e-2 where the kernels are at most 1.0e-2).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lowered_for_cuda

from jaxrl.kernels import attention, packed, packed_pallas, reference
from jaxrl.kernels.packed_pallas import PackedTileSizes
from jaxrl.kernels.reference import MaskInputs

from .test_packed_attention import in_slices

HEADS = attention.Heads(4, 2, 16, "float32")
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
SMALL = (PackedTileSizes(32, 16, 4, 2), PackedTileSizes(16, 32, 4, 2), PackedTileSizes(16, 32, 4, 2))


oracle = jax.jit(reference.packed_attention)


def rows_of(tokens):
    """Row 0: a prompt, two responses that continue it, a sample of its own, padding. Row 1: one long sample.
    Row 2: many short ones, then padding."""
    segments, positions, prefixes = np.zeros((3, 3, tokens), np.int32)
    n = tokens // 5
    for i, (segment, start, prefix) in enumerate([(1, 0, 0), (2, n, 1), (3, n, 1), (4, 0, 0)]):
        part = (0, slice(i * n, (i + 1) * n))
        segments[part], positions[part], prefixes[part] = segment, start + np.arange(n), prefix
    segments[1], positions[1] = 1, np.arange(tokens)
    for i in range(tokens // 12):
        segments[2, i * 10 : (i + 1) * 10], positions[2, i * 10 : (i + 1) * 10] = i + 1, np.arange(10)
    return segments, positions, prefixes


def arrays_of(tokens, heads, kv_heads, dim, dtype):
    rng = np.random.default_rng(0)
    shapes = [(3, tokens, h, dim) for h in (heads, kv_heads, kv_heads, heads)]
    return [rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes]


def expect_close(got, expected, dtype):
    got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    assert np.abs(got - expected).max() <= TOLERANCE[dtype] * np.abs(expected).max()


def with_gradients(attend, q, k, v, d_out, rows):
    """Of what is not padding, whose output is anything."""
    real = (rows[0] > 0)[..., None, None]
    out, pull = jax.vjp(attend, q, k, v)
    return jnp.where(real, out, 0), *pull((d_out * real).astype(out.dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients(dtype):
    arrays, rows = arrays_of(100, 6, 2, 16, dtype), rows_of(100)  # no tile divides 100

    def kernel(q, k, v):
        return packed_pallas.packed_attention(q, k, v, MaskInputs(*rows), tiles=SMALL, interpret=True)

    def dense(q, k, v):
        return reference.packed_attention(q, k, v, MaskInputs(*rows))

    found = jax.jit(lambda: with_gradients(kernel, *arrays, rows))()
    expected = jax.jit(lambda: with_gradients(dense, *(x.astype(np.float32) for x in arrays), rows))()
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype
        expect_close(got, want, dtype)


def test_queries_of_some_tokens_and_keys_of_all_in_any_order():
    """As of the kernels of whole rows, to which the other tests hold; with a window and sinks."""
    arrays = arrays_of(100, 6, 2, 16, "float32")
    rows, sinks, window = rows_of(100), np.linspace(-1, 1, 6, dtype=np.float32), 17
    options = {"tiles": SMALL, "sinks": sinks, "interpret": True}

    def kernel(q, k, v, rows, keys):
        segments, positions, prefixes = rows
        mask = MaskInputs(segments, positions, prefixes, positions - window + 1, keys)
        return packed_pallas.packed_attention(q, k, v, mask, **options)

    whole = jax.jit(lambda: with_gradients(lambda *qkv: kernel(*qkv, rows, None), *arrays, rows))()
    found = jax.jit(lambda: with_gradients(in_slices(rows, kernel, 2), *arrays, rows))()
    for got, want in zip(found, whole, strict=True):
        expect_close(got, want, "float32")


def test_tokens_that_are_not_seen_change_nothing():
    """nan in row 0's prompt and its continuations: the sample of its own and the other rows stay as they were."""
    q, k, v, _ = arrays_of(100, 2, 1, 16, "float32")
    segments, positions, prefixes = rows_of(100)

    @jax.jit
    def kernel(k, v):
        # What a tile reads in vain is multiplied by zero, which nan survives; so tokens 64..79 are a tile of their own.
        tiles = (PackedTileSizes(16, 16, 4, 2),) * 3
        mask = MaskInputs(segments, positions, prefixes)
        return packed_pallas.packed_attention(q, k, v, mask, tiles=tiles, interpret=True)

    clean = np.asarray(kernel(k, v))
    k[0, :48] = v[0, :48] = np.nan
    out = np.asarray(kernel(k, v))
    np.testing.assert_array_equal(clean[0, 64:80], out[0, 64:80])
    np.testing.assert_array_equal(clean[1:], out[1:])
    assert np.isnan(out[0, :60]).any()


def test_no_visible_tile_is_missed_most_invisible_ones_are_skipped_and_whole_ones_known():
    segments, positions, prefixes = rows_of(1000)
    own = segments[:, :, None] == segments[:, None]
    shared = (prefixes[:, :, None] != 0) & (prefixes[:, :, None] == segments[:, None])
    pairs = (own | shared) & (positions[:, :, None] >= positions[:, None])
    in_tiles = np.pad(pairs, ((0, 0), (0, 24), (0, 8))).reshape(3, 32, 32, 63, 16)
    needed, full = in_tiles.any((2, 4)), in_tiles.all((2, 4))
    tiles_of = jax.jit(packed_pallas.visible_tiles, static_argnums=(1, 2))
    visible, whole = map(np.asarray, tiles_of(MaskInputs(segments, positions, prefixes), 32, 16))
    assert visible.shape == whole.shape == needed.shape
    assert not (needed & ~visible).any()
    assert visible.sum() <= 1.1 * needed.sum()
    assert not (whole & ~full).any()
    assert whole.sum() >= 0.98 * full.sum()
    listed = packed_pallas.TileList(*map(np.asarray, jax.jit(packed_pallas.list_tiles)(visible, whole)))
    for row, tile in np.ndindex(*listed.count.shape):
        split, end = listed.whole[row, tile], listed.count[row, tile]
        np.testing.assert_array_equal(listed.numbers[row, tile, :split], np.flatnonzero(whole[row, tile]))
        rest = np.flatnonzero((visible & ~whole)[row, tile])
        np.testing.assert_array_equal(listed.numbers[row, tile, split:end], rest)


def test_what_an_option_means_on_a_platform():
    def choose(name, platform, **changes):
        return attention.choose_packed(name, platform, HEADS._replace(**changes))

    for dtype in ("float32", "bfloat16"):
        chosen = [choose(name, "gpu", dtype=dtype).implementation for name in ("auto", "reference", "pallas")]
        assert chosen == ["pallas", "reference", "pallas"]
    assert choose("auto", "cpu") == attention.PackedAttention("tiles", packed.tiling("cpu"))
    assert choose("auto", "gpu").note == choose("auto", "cpu", dim=24).note == ""
    for platform in ("cpu", "tpu"):
        with pytest.raises(ValueError, match=rf"actor\.attention \(pallas\) must be auto or reference on {platform}"):
            choose("pallas", platform)
    for refused in ({"dim": 24}, {"dtype": "float64"}):
        tiles = choose("auto", "gpu", **refused)
        assert tiles.implementation == "tiles"
        assert str(*refused.values()) in tiles.note
        with pytest.raises(ValueError, match=str(*refused.values())):
            choose("pallas", "gpu", **refused)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "dtype"), [(8192, 12, 2, 128, "bfloat16"), (1000, 9, 3, 64, "float32")]
)
def test_lowers_for_cuda(tokens, heads, kv_heads, dim, dtype):
    def gradients(q, k, v, d_out, segments, positions):
        def kernel(q, k, v):
            return attention.PackedAttention("pallas").attend(q, k, v, MaskInputs(segments, positions, segments), None)

        return jax.vjp(kernel, q, k, v)[1](d_out)

    of = [jax.ShapeDtypeStruct((1, tokens, h, dim), dtype) for h in (heads, kv_heads, kv_heads, heads)]
    integers = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    text, kernels = lowered_for_cuda(gradients, *of, integers, integers)
    assert kernels == 3
    assert f"{tokens}x{tokens}" not in text, "nothing of size [T, T]"
