"""The kernels of a decode step in interpret mode against the separate operations, and their lowering for CUDA.

Tolerances as in test_paged_pallas.py. What is written into the pool is rounded at the same places on both sides; the
bfloat16 of a sum in another order may differ by a unit in the last place.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lowered_for_cuda

from jaxrl.kernels import reference
from jaxrl.kernels.attention import choose_paged
from jaxrl.kernels.decode_pallas import HeadNorms, decode_attention
from jaxrl.kernels.paged_pallas import PagedTileSizes
from jaxrl.sharding.narrow_weights import narrowed

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
EPS = 1e-6
WIDTH, SIZE = 4, 16


def case(heads, kv_heads, dim=32, dtype="float32", *, bias=True, norms=True, shares=2, rows=5, seed=0):
    """Arguments of `decode_attention`. Row 0 stands at position 0, row 1 at the table's end, row 2 does not decode,
    row 3 shares its first two blocks with row 1, row 4 begins a block."""
    rng = np.random.default_rng(seed)
    slab, blocks = heads // kv_heads + 2, rows * WIDTH + 1

    def normal(*shape, dtype=dtype):
        return rng.normal(size=shape).astype(jnp.dtype(dtype))

    tables = rng.permutation(np.arange(1, blocks)).reshape(rows, WIDTH)
    tables[3, :2] = tables[1, :2]
    angles = rng.uniform(0, 6, (rows, dim // 2))
    return {
        "qkv_SRKXD": normal(shares, rows, kv_heads, slab, dim, dtype="float32"),
        "bias_KXD": normal(kv_heads, slab, dim) if bias else None,
        "norms": HeadNorms(normal(dim, dtype="float32"), normal(dim, dtype="float32")) if norms else None,
        "cos_RC": np.cos(angles).astype(np.float32),
        "sin_RC": np.sin(angles).astype(np.float32),
        "k_KNPD": normal(kv_heads, blocks, SIZE, dim),
        "v_KNPD": normal(kv_heads, blocks, SIZE, dim),
        "tables_RW": tables.astype(np.int32),
        "positions_R": np.array([0, WIDTH * SIZE - 1, -1, 2 * SIZE + 5, SIZE], np.int32),
    }


def coded(array, kind):
    codes, scales = narrowed(kind, jnp.asarray(array), -1)
    return reference.Codes(codes, scales[..., None])


@partial(jax.jit, static_argnames=("rule", "dtype", "kind"))
def separate(
    qkv_SRKXD,
    bias_KXD,
    norms,
    cos_RC,
    sin_RC,
    k_KNPD,
    v_KNPD,
    tables_RW,
    positions_R,
    rule=reference.PLAIN,
    dtype=None,
    kind=None,
):
    """The same by an operation each, rounded after each."""
    dtype = dtype or k_KNPD.dtype
    slab = jnp.sum(qkv_SRKXD, axis=0).astype(dtype)
    if bias_KXD is not None:
        slab = slab + bias_KXD
    q, k, v = slab[:, :, :-2], slab[:, :, -2:-1], slab[:, :, -1]
    if norms is not None:
        q, k = (normed(x, scale) for x, scale in ((q, norms.q), (k, norms.k)))
    q, k = (turned(x, cos_RC, sin_RC) for x in (q, k))
    rows, valid = positions_R.shape[0], (positions_R >= 0)[:, None]
    at = jnp.maximum(positions_R, 0)[:, None]
    pools = [
        reference.write_kv(pool, coded(new[:, None], kind) if kind else new[:, None], tables_RW, at, valid)
        for pool, new in ((k_KNPD, k[:, :, 0]), (v_KNPD, v))
    ]
    out = reference.paged_attention(q.reshape(rows, 1, -1, q.shape[-1]), *pools, tables_RW, at, rule)
    return out[:, 0], *pools


@jax.jit
def normed(x, scale):
    wide = x.astype(jnp.float32)
    return (wide / jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS) * scale).astype(x.dtype)


def turned(x, cos_RC, sin_RC):
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_RC[:, None, None], sin_RC[:, None, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def run(arguments, piece=64, window=0):
    tiles = PagedTileSizes(16, 32, piece, 4, 2)
    out = decode_attention(**arguments, eps=EPS, window=window, tiles=tiles, interpret=True)
    return [np.asarray(x, np.float32) for x in out]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "bias", "norms", "piece"),
    [
        (6, 2, 32, "float32", True, True, 64),
        (14, 2, 16, "bfloat16", True, False, 32),
        pytest.param(9, 3, 64, "float32", False, False, 64, marks=pytest.mark.slow),
        pytest.param(28, 4, 128, "float32", True, False, 64, marks=pytest.mark.slow),
        pytest.param(32, 8, 128, "bfloat16", False, True, 32, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_is_the_separate_operations(heads, kv_heads, dim, dtype, bias, norms, piece):
    arguments = case(heads, kv_heads, dim, dtype, bias=bias, norms=norms)
    out, k, v = run(arguments, piece)
    active = arguments["positions_R"] >= 0
    expected = [np.asarray(x, np.float32) for x in separate(**arguments)]
    # outputs are larger than one here: a unit in bfloat16's last place is up to 2^-7 of them
    rtol = 1e-2 if dtype == "bfloat16" else 0
    np.testing.assert_allclose(out[active], expected[0][active], rtol=rtol, atol=TOLERANCE[dtype])
    assert (out[~active] == 0).all()
    for pool, want, before in zip((k, v), expected[1:], (arguments["k_KNPD"], arguments["v_KNPD"]), strict=True):
        np.testing.assert_allclose(
            pool[:, 1:], want[:, 1:], rtol=2e-2 if dtype == "bfloat16" else 1e-5, atol=TOLERANCE[dtype]
        )
        # elsewhere not a bit has changed; block 0, to which the separate operations send what is void, included
        changed = (pool != before.astype(np.float32)).any(axis=(0, 3))
        assert changed.sum() == active.sum()


@pytest.mark.parametrize(("kind", "dtype", "piece"), [("int8", "float32", 32), ("fp8", "bfloat16", 64)])
def test_codes_are_read_and_written(kind, dtype, piece):
    """The new key and value stand for what the pool then holds of them, also where they are not read from it."""
    arguments = case(6, 2, dtype=dtype)
    arguments |= {name: coded(arguments[name], kind) for name in ("k_KNPD", "v_KNPD")}
    tiles = PagedTileSizes(16, 32, piece, 4, 2)
    found = decode_attention(**arguments, dtype=jnp.dtype(dtype), eps=EPS, tiles=tiles, interpret=True)
    wanted = separate(**arguments, dtype=jnp.dtype(dtype), kind=kind)
    active = arguments["positions_R"] >= 0
    for pool, want, name in zip(found[1:], wanted[1:], ("k_KNPD", "v_KNPD"), strict=True):
        assert pool.codes.dtype == arguments[name].codes.dtype
        np.testing.assert_allclose(pool.scales[:, 1:], want.scales[:, 1:], rtol=TOLERANCE[dtype] / 2)
        codes, others = (np.asarray(x.codes[:, 1:], np.float32) for x in (pool, want))
        # a sum in another order may make the next code of it
        assert (codes != others).sum() <= (4 if dtype == "float32" else 40)
        changed = (codes != np.asarray(arguments[name].codes[:, 1:], np.float32)).any(axis=(0, 3))
        assert changed.sum() == active.sum()
        np.testing.assert_allclose(codes, others, rtol=0.13, atol=1)
    atol = {"float32": 2e-2, "bfloat16": 0.15}[dtype]
    out, expected = (np.asarray(x[0][active], np.float32) for x in (found, wanted))
    np.testing.assert_allclose(out, expected, rtol=0, atol=atol)
    assert np.abs(out - expected).mean() < atol / 50


def test_what_a_row_must_not_read_changes_nothing():
    """nan in every slot but those of positions before a row's own: the new one included, which it writes."""
    arguments, piece = case(6, 2), 32
    own = np.zeros(arguments["k_KNPD"].shape[1:3], bool)
    for row, position in zip(arguments["tables_RW"], arguments["positions_R"], strict=True):
        for at in range(max(position, 0)):
            own[row[at // SIZE], at % SIZE] = True
    assert 30 < own.sum() < own.size - 100
    poison = {name: np.where(own[None, ..., None], arguments[name], np.nan) for name in ("k_KNPD", "v_KNPD")}
    clean, poisoned = run(arguments, piece), run(arguments | poison, piece)
    np.testing.assert_array_equal(clean[0], poisoned[0])
    assert np.isfinite(clean[0]).all()


def test_a_row_does_not_depend_on_the_others():
    """The same bits in another order, and where other rows stand elsewhere: whichever program takes a row's pieces."""
    arguments = case(6, 2)
    out = run(arguments, 32)[0]
    order = np.array([1, 4, 0, 3, 2])
    by_row = {name: arguments[name][order] for name in ("cos_RC", "sin_RC", "tables_RW", "positions_R")}
    turned = arguments | by_row | {"qkv_SRKXD": arguments["qkv_SRKXD"][:, order]}
    np.testing.assert_array_equal(run(turned, 32)[0], out[order])
    elsewhere = np.array([WIDTH * SIZE - 1, WIDTH * SIZE - 1, 40, 2 * SIZE + 5, 63], np.int32)
    np.testing.assert_array_equal(run(arguments | {"positions_R": elsewhere}, 32)[0][[1, 3]], out[[1, 3]])


# ---------------------------------------------------------------- what is refused, and which platform gets it


@pytest.mark.parametrize(
    ("implementation", "platform", "interpret", "decodes"),
    [("auto", "gpu", False, True), ("auto", "cpu", False, False), ("reference", "gpu", False, False),
     ("pallas", "cpu", True, True), ("auto", "cpu", True, True)],
)  # fmt: skip
def test_the_devices_platform_decides(implementation, platform, interpret, decodes):
    how = choose_paged(implementation, platform, interpret=interpret)
    assert how.decodes(12, 2, 128, "bfloat16") == decodes
    for heads, kv_heads, dim in ((12, 2, 24), (5, 2, 128), (4096, 1, 128)):
        assert not how.decodes(heads, kv_heads, dim, "bfloat16")


# ---------------------------------------------------------------- lowering for CUDA, without a GPU


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "norms", "dtype"), [(28, 4, False, "float32"), (16, 8, True, "bfloat16")]
)
def test_lowers_for_cuda(heads, kv_heads, norms, dtype):
    arguments = case(heads, kv_heads, 128, dtype, norms=norms, bias=not norms)
    tiles = PagedTileSizes(16, 32, 32, 4, 5)
    text, kernels = lowered_for_cuda(lambda given: decode_attention(**given, eps=EPS, tiles=tiles), arguments)
    assert kernels == 2, "attention and the merge of its pieces"
    assert "scatter" not in text
