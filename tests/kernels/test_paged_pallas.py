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


oracle = jax.jit(reference.paged_attention)


def run(*arrays, tiles=None):
    return np.asarray(paged_pallas.paged_attention(*arrays, tiles=tiles, interpret=True), np.float32)


def expect(out, arrays):
    expected = np.asarray(oracle(*arrays), np.float32)
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE[str(arrays[0].dtype)])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size", "queries", "dtype"),
    [
        (9, 3, 64, 16, 1, "float32"),
        (12, 2, 128, 16, 4, "bfloat16"),
        pytest.param(28, 4, 128, 32, 33, "bfloat16", marks=pytest.mark.slow),
        pytest.param(32, 8, 128, 32, 64, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_decode_and_verify(heads, kv_heads, dim, size, queries, dtype):
    arrays = case(heads, kv_heads, dim, size, queries, dtype=dtype)
    expect(run(*arrays), arrays)


TILES = {
    "one step a block, several tiles of queries": PagedTileSizes(16, 16, 1, 4, 2),
    "a step of many blocks, past the table's end": PagedTileSizes(16, 128, 1, 4, 2),
    "tiles and parts, some of them empty": PagedTileSizes(32, 32, 4, 4, 2),
}


@pytest.mark.parametrize("name", TILES)
def test_any_cut_of_the_work_gives_the_same(name):
    """13 queries of 3 heads a group: 39 together, which no tile divides; 7 blocks of 16, which no step divides."""
    arrays = case(6, 2, 32, 16, 13, width=7)
    expect(run(*arrays, tiles=TILES[name]), arrays)


@pytest.mark.parametrize("parts", [1, 3])
def test_what_a_row_must_not_read_changes_nothing(parts):
    """nan in every block but those that hold positions up to a row's latest query's, the row's own ones included. And
    a query before the sequence sees nothing, and gets zeros."""
    q, k, v, tables, positions = case(6, 2, 32, 16, 3, rows=5, width=6)
    own = {int(b) for row, last in zip(tables, positions.max(1), strict=True) for b in row[: int(last) // 16 + 1]}
    others = np.array([block for block in range(k.shape[1]) if block not in own])
    assert len(others) > 8
    tiles = PagedTileSizes(16, 32, parts, 4, 2)
    clean = run(q, k, v, tables, positions, tiles=tiles)
    k[:, others] = v[:, others] = np.nan
    poisoned = run(q, k, v, tables, positions, tiles=tiles)
    np.testing.assert_array_equal(clean, poisoned)
    assert np.isfinite(clean).all()
    positions[:, 1] = -1
    out = run(q, k, v, tables, positions, tiles=tiles)
    assert (out[:, 1] == 0).all()
    assert np.isfinite(out).all()


def test_rows_share_blocks():
    *_, tables, _ = arrays = case(9, 3, 64, 16, 1)
    tables[2, :2] = tables[1, :2]
    expect(run(*arrays), arrays)


@pytest.mark.parametrize("rows", [1, 16, 256])
@pytest.mark.parametrize("queries", [1, 9, 33, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_fit_the_work(rows, queries, dtype):
    tiles = paged_pallas.choose_tiles(rows, queries, 28, 4, 8192, 128, dtype)
    for size in (tiles.queries, tiles.positions):
        assert size >= 16
        assert size & (size - 1) == 0
    assert tiles.queries < 2 * max(16, queries * 7), "no more than half a tile is padding"
    assert 1 <= tiles.parts <= 8192 // paged_pallas.MIN_PART_POSITIONS
    assert tiles.parts == 1 or rows * 4 * tiles.parts <= paged_pallas.WANTED_PROGRAMS


# ---------------------------------------------------------------- the interface


def test_cpu_takes_the_reference():
    arrays = case(4, 2, 16, 16, 2)
    for implementation in ("auto", "reference"):
        out = jax.jit(attention.choose_paged(implementation, "cpu").attend)(*arrays)
        np.testing.assert_array_equal(out, oracle(*arrays))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q.astype(jnp.float16), k, v), "must be all bfloat16 or all float32"),
        (lambda q, k, v: (q, k.astype(jnp.bfloat16), v), "must be all bfloat16 or all float32"),
        (lambda q, k, v: tuple(x[..., :24] for x in (q, k, v)), r"head_dim \(24\) must be one of"),
        (lambda q, k, v: (q[:, :, :3], k, v), r"key/value heads \(2\) must divide query heads \(3\)"),
    ],
)
def test_what_the_kernel_refuses(change, message):
    q, k, v, tables, positions = case(4, 2, 32, 16, 1)
    with pytest.raises(ValueError, match=f"{message}.*use implementation='reference'"):
        PALLAS.attend(*change(q, k, v), tables_RW=tables, positions_RC=positions)


def test_unknown_implementation():
    with pytest.raises(ValueError, match=r"implementation \('cudnn'\) must be one of"):
        attention.choose_paged("cudnn", "gpu")  # pyright: ignore


# ---------------------------------------------------------------- lowering for CUDA, without a GPU

DEPRECATED = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"


def shapes(rows, queries, heads, kv_heads, dim, size, width, dtype):
    def of(*dims, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(dims, dtype)

    pool = of(kv_heads, rows * width + 1, size, dim, dtype=dtype)
    return of(rows, queries, heads, dim, dtype=dtype), pool, pool, of(rows, width), of(rows, queries)


@pytest.mark.filterwarnings(DEPRECATED)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("rows", "queries", "heads", "kv_heads", "dim", "size"),
    [(1, 1, 12, 2, 128, 16), (256, 1, 28, 4, 128, 16), (16, 33, 32, 8, 128, 32), (4, 256, 9, 3, 64, 16)],
)
def test_lowers_for_cuda(rows, queries, heads, kv_heads, dim, size, dtype):
    arrays = shapes(rows, queries, heads, kv_heads, dim, size, 64, dtype)
    text, kernels = lowered_for_cuda(PALLAS.attend, *arrays)
    parts = paged_pallas.choose_tiles(rows, queries, heads, kv_heads, 64 * size, dim, dtype).parts
    assert kernels == (1 if parts == 1 else 2)
    assert "gather" not in text, "the cache is never gathered"


@pytest.mark.filterwarnings(DEPRECATED)
def test_auto_follows_the_devices_that_are_compiled_for():
    """The kernel for GPUs, whatever this process runs on; the reference for CPU, and for what the kernel refuses."""
    for platform, dim, kernels in (("gpu", 64, 1), ("cpu", 64, 0), ("gpu", 24, 0)):
        arrays = shapes(4, 1, 4, 2, dim, 16, 4, jnp.bfloat16)
        assert lowered_for_cuda(attention.choose_paged("auto", platform).attend, *arrays)[1] == kernels
