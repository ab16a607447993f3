"""The attention kernels on a GPU: run with JAX_PLATFORMS=cuda and `-m gpu`.

Against plain jnp in full precision, and against themselves: the same call twice gives the same bits. How fast they are
is asked by `scripts/bench.py attention`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_gpu import DEPRECATED, INTERPRET, assert_equal_bits, sized

from jaxrl.kernels import attention, reference
from jaxrl.kernels.decode_pallas import HeadNorms, decode_attention
from jaxrl.kernels.packed_pallas import packed_attention

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings(DEPRECATED)]

WIDE = {"float32": 2e-5, "bfloat16": 2e-2}  # differences of outputs of size one; see test_paged_pallas.py
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
SIZE = 16


def normal(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def assert_close(got, want, limit):
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), rtol=limit, atol=limit)


def tables_of(rows, width):
    """[rows, width] of blocks in no order; block 0 is nobody's."""
    drawn = np.random.default_rng(0).permutation(np.arange(1, rows * width + 1))
    return jnp.asarray(drawn.reshape(rows, width), jnp.int32)


def paged_arrays(rows, queries, heads, kv_heads, dim, size, context, dtype):
    """Rows that stand between half the context and its end; row 0 at position 0."""
    width = -(-context // size)
    pool = (kv_heads, rows * width + 1, size, dim)
    q, k, v = normal(0, rows, queries, heads, dim, dtype=dtype), *(normal(i, *pool, dtype=dtype) for i in (1, 2))
    first = np.random.default_rng(0).integers(context // 2, context - queries + 1, (rows, 1))
    first[0] = 0
    return q, k, v, tables_of(rows, width), jnp.asarray(first + np.arange(queries), jnp.int32)


@DTYPES
@pytest.mark.parametrize(
    ("rows", "queries", "heads", "kv_heads", "dim", "size"),
    sized(
        [(1, 1, 12, 2, 128, 16), (64, 1, 28, 4, 128, 16), (8, 33, 28, 4, 128, 32), (4, 256, 9, 3, 64, 16)],
        [(1, 1, 6, 2, 16, 16), (3, 1, 7, 1, 32, 16), (2, 5, 4, 2, 16, 32), (2, 40, 3, 3, 16, 16)],
    ),
)
def test_paged_kernel_is_the_reference(rows, queries, heads, kv_heads, dim, size, dtype):
    """Also with nan in every block that no row may read. On a GPU rows have one piece, two or three."""
    context = sized(3072, 128)
    q, k, v, tables, positions = arrays = paged_arrays(rows, queries, heads, kv_heads, dim, size, context, dtype)
    attend = jax.jit(attention.choose_paged("pallas", "gpu", interpret=INTERPRET).attend)
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(jax.jit(reference.paged_attention)(*arrays), np.float32)
    out = np.asarray(attend(*arrays), np.float32)
    np.testing.assert_allclose(out, expected, rtol=0, atol=WIDE[dtype])
    last = np.asarray(positions.max(1)) // size
    own = {int(block) for row, entry in zip(np.asarray(tables), last, strict=True) for block in row[: entry + 1]}
    others = np.array([block for block in range(k.shape[1]) if block not in own])
    poisoned = [x.at[:, others].set(jnp.nan) for x in (k, v)]
    np.testing.assert_array_equal(out, np.asarray(attend(q, *poisoned, tables, positions), np.float32))


@DTYPES
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "norms"),
    sized([(1, 12, 2, 128, False), (64, 28, 4, 128, False), (16, 16, 8, 128, True)], [(3, 6, 2, 32, True)]),
)
def test_decode_kernel_is_itself_as_plain_jax(rows, heads, kv_heads, dim, norms, dtype):
    """`test_decode_pallas.py` holds the kernel, as plain JAX, against the separate operations. One row does not decode;
    on a GPU the others have one piece or two."""
    context, slab = sized(2048, 64), heads // kv_heads + 2
    pool = (kv_heads, rows * context // SIZE + 1, SIZE, dim)
    positions = np.random.default_rng(0).integers(context // 3, context, rows)
    positions[1:2] = -1
    angles = normal(3, rows, dim // 2)
    norms = HeadNorms(normal(4, dim), normal(5, dim)) if norms else None
    bias = normal(6, kv_heads, slab, dim, dtype=dtype)
    pools = (normal(7, *pool, dtype=dtype), normal(8, *pool, dtype=dtype))
    where = (tables_of(rows, context // SIZE), jnp.asarray(positions, jnp.int32))
    turns = (jnp.cos(angles), jnp.sin(angles))
    arrays = (normal(9, 2, rows, kv_heads, slab, dim), bias, norms, *turns, *pools, *where)

    def run(interpret):
        return jax.jit(lambda *x: decode_attention(*x, eps=1e-6, interpret=interpret))(*arrays)

    with jax.default_matmul_precision("highest"):
        expected = run(True)
    found = run(INTERPRET)
    for got, want in zip(found, expected, strict=True):
        assert_close(got, want, WIDE[dtype])
    assert_equal_bits(found, run(INTERPRET))


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"), sized([(1024, 12, 2, 128), (1000, 9, 3, 64)], [(96, 4, 2, 16)])
)
def test_packed_kernels_are_the_reference(tokens, heads, kv_heads, dim, dtype):
    """Row 0: a prompt, two responses that continue it, padding. Row 1: one long sample. Values and gradients, and the
    same bits the second time."""
    segments, positions, prefixes = np.zeros((3, 2, tokens), np.int32)
    n = tokens // 4
    for i, (segment, start, prefix) in enumerate([(1, 0, 1), (2, n, 1), (3, n, 1)]):
        part = (0, slice(i * n, (i + 1) * n))
        segments[part], positions[part], prefixes[part] = segment, start + np.arange(n), prefix
    segments[1], positions[1], prefixes[1] = 1, np.arange(tokens), 1
    arrays = [normal(i, 2, tokens, h, dim, dtype=dtype) for i, h in enumerate((heads, kv_heads, kv_heads, heads))]
    arrays[3] = arrays[3] * (segments > 0)[..., None, None].astype(dtype)  # padding's output is anything

    def run(kernels, q, k, v, d_out):
        def attend(q, k, v):
            mask = reference.MaskInputs(segments, positions, prefixes)
            if not kernels:
                return reference.packed_attention(q, k, v, mask)
            return packed_attention(q, k, v, mask, interpret=INTERPRET)

        out, pull = jax.vjp(attend, q, k, v)
        return jnp.where((segments > 0)[..., None, None], out, 0), *pull(d_out)

    run = jax.jit(run, static_argnums=0)
    with jax.default_matmul_precision("highest"):
        expected = run(False, *(x.astype(jnp.float32) for x in arrays))
    found = run(True, *arrays)
    for got, want in zip(found, expected, strict=True):
        worst = float(jnp.abs(got.astype(jnp.float32) - want).max() / jnp.abs(want).max())
        assert worst < (1e-5 if dtype == "float32" else 2e-2)
    assert_equal_bits(found, run(True, *arrays))
