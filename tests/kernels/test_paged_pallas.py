"""The paged kernel in interpret mode against the jnp oracle, and its lowering for CUDA.

On a GPU, tests/rollout/test_gpu.py runs it.

bfloat16: both sides round the weights and the output to 8 bits, at different points, so outputs of size one may differ
by two units in the last place: 2e-2. float32: products are 21 bits: 1e-5.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lowered_for_cuda

from jaxrl.kernels import attention, paged_pallas, reference
from jaxrl.kernels.paged_pallas import PagedTileSizes
from jaxrl.sharding.narrow_weights import narrowed

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
PALLAS = attention.PagedAttention("pallas")


def case(heads, kv_heads, dim, size, queries, *, rows=3, width=5, dtype="float32", seed=0):
    """Random arrays; row 0 stands at position 0, row 1 at the table's end, the others' queries anywhere."""
    rng = np.random.default_rng(seed)
    blocks = rows * width + 1
    q = rng.normal(size=(rows, queries, heads, dim))
    k, v = rng.normal(size=(2, kv_heads, blocks, size, dim))
    tables = rng.permutation(np.arange(1, blocks)).reshape(rows, width)
    positions = rng.integers(0, width * size, (rows, queries))
    positions[0] = 0
    positions[1] = width * size - queries + np.arange(queries)
    return *(x.astype(jnp.dtype(dtype)) for x in (q, k, v)), tables.astype(np.int32), positions.astype(np.int32)


oracle = jax.jit(reference.paged_attention, static_argnums=5)


def run(*arrays, **how):
    return np.asarray(paged_pallas.paged_attention(*arrays, **how, interpret=True), np.float32)


def expect(out, arrays):
    expected = np.asarray(oracle(*arrays), np.float32)
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE[str(arrays[0].dtype)])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size", "queries", "dtype"),
    [
        (9, 3, 64, 16, 1, "float32"),
        (12, 2, 128, 16, 4, "bfloat16"),
        pytest.param(28, 4, 128, 32, 33, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_decode_and_verify(heads, kv_heads, dim, size, queries, dtype):
    """Rows may share blocks."""
    *_, tables, _ = arrays = case(heads, kv_heads, dim, size, queries, dtype=dtype)
    tables[2, :2] = tables[1, :2]
    expect(run(*arrays), arrays)


@pytest.mark.parametrize(("kind", "dtype"), [("int8", "float32"), ("fp8", "bfloat16")])
def test_codes_are_read(kind, dtype):
    q, *pools, tables, positions = case(9, 3, 64, 16, 2, dtype=dtype)
    pools = [narrowed(kind, jnp.asarray(pool), -1) for pool in pools]
    arrays = (q, *(reference.Codes(codes, scales[..., None]) for codes, scales in pools), tables, positions)
    expect(run(*arrays), arrays)


def test_what_a_row_must_not_read_changes_nothing():
    """nan in every block but those that hold positions up to a row's latest query's, the row's own ones included. And
    a query before the sequence sees nothing, and gets zeros."""
    q, k, v, tables, positions = case(6, 2, 32, 16, 3, rows=5, width=6)
    own = {int(b) for row, last in zip(tables, positions.max(1), strict=True) for b in row[: int(last) // 16 + 1]}
    others = np.array([block for block in range(k.shape[1]) if block not in own])
    assert len(others) > 8
    tiles = PagedTileSizes(16, 32, 32, 4, 2)
    clean = run(q, k, v, tables, positions, tiles=tiles)
    k[:, others] = v[:, others] = np.nan
    poisoned = run(q, k, v, tables, positions, tiles=tiles)
    np.testing.assert_array_equal(clean, poisoned)
    assert np.isfinite(clean).all()
    positions[:, 1] = -1
    out = run(q, k, v, tables, positions, tiles=tiles)
    assert (out[:, 1] == 0).all()
    assert np.isfinite(out).all()


def placed(lengths, width, size, seed=0):
    """Rows of so many positions, the last two of which are the queries'; a row of one length has the same numbers
    wherever it stands. Of length 0: a row that sees nothing."""
    needs = [-(-length // size) for length in lengths]
    free = np.random.default_rng(seed).permutation(np.arange(1, sum(needs) + 1))
    tables, pools = np.zeros((len(lengths), width), np.int32), np.zeros((2, 2, len(free) + 1, size, 16))
    q, positions = np.zeros((len(lengths), 2, 4, 16)), np.zeros((len(lengths), 2), int)
    for row, (length, need) in enumerate(zip(lengths, needs, strict=True)):
        own = np.random.default_rng(length)
        tables[row, :need], free = free[:need], free[need:]
        q[row], pools[:, :, tables[row, :need]] = own.normal(size=q[row].shape), own.normal(size=(2, 2, need, size, 16))
        positions[row] = np.maximum(np.arange(length - 2, length), -1)
    return *(x.astype(np.float32) for x in (q, *pools)), tables, positions.astype(np.int32)


@pytest.mark.parametrize(
    ("lengths", "window", "tiles"),
    [
        ([1000, 32768, 1], 0, None),
        ([31, 1024, 32, 33, 0, 1, 64], 50, PagedTileSizes(16, 16, 32, 4, 2)),
    ],
)
def test_one_long_row_among_short_ones(lengths, window, tiles):
    """The longest has 32 pieces, the others one or two; with a window it has two or three."""
    size = max(lengths) // 64
    q, k, v, tables, positions = arrays = placed(lengths, 64, size)
    found = run(*arrays, rule=reference.Rule(window), tiles=tiles)
    for row, length in enumerate(lengths):
        need = max(1, -(-length // size))
        one = q[row : row + 1], k, v, tables[row : row + 1, :need], positions[row : row + 1]
        seen = positions[row, :, None, None] >= 0
        expected = np.where(seen, oracle(*one, reference.Rule(window))[0], 0)
        np.testing.assert_allclose(found[row], expected, rtol=0, atol=1e-5)


def test_a_row_does_not_depend_on_the_others():
    """The same bits among other rows of other lengths, in another order and in a narrower table: whichever program
    takes its pieces."""
    lengths, tiles = [100, 64, 28, 220], PagedTileSizes(16, 16, 32, 4, 2)
    found = dict(zip(lengths, run(*placed(lengths, 16, 16), tiles=tiles), strict=True))
    for others, width in (([220, 28, 100, 64], 16), ([256, 100, 255, 28], 16), ([100, 28], 7)):
        for length, row in zip(others, run(*placed(others, width, 16, seed=width), tiles=tiles), strict=True):
            if length in found:
                np.testing.assert_array_equal(row, found[length])


# ---------------------------------------------------------------- the interface


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k.astype(jnp.bfloat16), v), "must be all bfloat16 or all float32"),
        (lambda q, k, v: tuple(x[..., :24] for x in (q, k, v)), r"head_dim \(24\) must be one of"),
    ],
)
def test_what_the_kernel_refuses(change, message):
    q, k, v, tables, positions = case(4, 2, 32, 16, 1)
    with pytest.raises(ValueError, match=f"{message}.*use implementation='reference'"):
        PALLAS.attend(*change(q, k, v), tables_RW=tables, positions_RC=positions)


# ---------------------------------------------------------------- lowering for CUDA, without a GPU

DEPRECATED = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"


def shapes(rows, queries, heads, kv_heads, dim, size, width, dtype):
    def of(*dims, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(dims, dtype)

    pool = of(kv_heads, rows * width + 1, size, dim, dtype=dtype)
    return of(rows, queries, heads, dim, dtype=dtype), pool, pool, of(rows, width), of(rows, queries)


@pytest.mark.filterwarnings(DEPRECATED)
@pytest.mark.parametrize(
    ("rows", "queries", "heads", "kv_heads", "dim", "size", "context", "expected", "dtype"),
    [(256, 1, 28, 4, 128, 16, 2048, 2, jnp.bfloat16), (64, 256, 9, 3, 64, 16, 2048, 1, jnp.float32)],
)
def test_lowers_for_cuda(rows, queries, heads, kv_heads, dim, size, context, expected, dtype):
    """Attention, and the merge of pieces where rows may have several; prefill of 64 x 256 tokens has none."""
    arrays = shapes(rows, queries, heads, kv_heads, dim, size, context // size, dtype)
    text, kernels = lowered_for_cuda(PALLAS.attend, *arrays)
    assert kernels == expected
    assert "gather" not in text, "the cache is never gathered"


@pytest.mark.filterwarnings(DEPRECATED)
def test_auto_follows_the_devices_that_are_compiled_for():
    """The kernel for GPUs, whatever this process runs on; the reference for CPU, and for what the kernel refuses."""
    for platform, dim, kernels in (("gpu", 64, 1), ("cpu", 64, 0), ("gpu", 24, 0)):
        arrays = shapes(4, 1, 4, 2, dim, 16, 4, jnp.bfloat16)
        assert lowered_for_cuda(attention.choose_paged("auto", platform).attend, *arrays)[1] == kernels
