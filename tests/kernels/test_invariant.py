"""Pieces of one shape: a row's bits are the same whatever the number of rows and wherever its context lies, its values
are those of the plain computation, and so are its gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxrl.kernels import invariant_pallas, paged_pallas, reference
from jaxrl.kernels import packed as packed_rows
from jaxrl.kernels.attention import Heads, choose_packed, choose_paged
from jaxrl.kernels.by_rows import at_once
from jaxrl.kernels.invariant import CONTEXT, TILE, Cut, InTiles
from jaxrl.kernels.paged_pallas import PagedTileSizes
from jaxrl.kernels.reference import Rule
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh

WIDTH = 96
COUNTS = (1, 3, 8, TILE, 5 * TILE + 1)


def stretch(weights: Any, x: jax.Array, gate: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A norm, a product, an activation and another product, as a layer has them."""
    wide = x.astype(jnp.float32)
    normed = (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)).astype(x.dtype)
    h = jax.nn.silu(normed @ weights["up"]) * gate[..., None]
    return x + h @ weights["down"], jnp.sum(jnp.square(h.astype(jnp.float32)), -1)


def rows_of(count: int, dtype: Any) -> tuple[Any, Any]:
    random = np.random.default_rng(3)
    x, gate = random.normal(size=(max(COUNTS), WIDTH)), random.normal(size=max(COUNTS))
    return tuple(jnp.asarray(each[:count], dtype) for each in (x, gate))


def weights_of(dtype: Any) -> Any:
    random = np.random.default_rng(4)
    sizes = {"up": (WIDTH, 160), "down": (160, WIDTH)}
    return {name: jnp.asarray(random.normal(size=size) / 10, dtype) for name, size in sizes.items()}


def test_a_row_has_the_same_bits_among_any_number_of_rows():
    dtype = "bfloat16"

    def unlike(by_rows: Any) -> int:
        def computed(count: int) -> Any:
            run = jax.jit(lambda weights, *rows: by_rows(stretch, rows, weights))
            return jax.tree.map(np.asarray, run(weights_of(dtype), *rows_of(count, dtype)))

        most = computed(max(COUNTS))
        found = [(most, computed(count)) for count in COUNTS]
        return sum((a[: len(b)] != b).any() for pair in found for a, b in zip(*pair, strict=True))

    assert unlike(InTiles()) == 0
    assert unlike(at_once) > 0  # so it can be seen


def test_values_and_gradients_are_those_of_the_plain_computation():
    rows, weights = rows_of(45, "float32"), weights_of("float32")
    rows = jax.tree.map(lambda x: x.reshape(5, 9, *x.shape[1:]), rows)

    def total(weights: Any, rows: Any, by_rows: Any) -> tuple[jax.Array, Any]:
        x, size = by_rows(stretch, rows, weights)
        return jnp.sum(jnp.sin(x)) + jnp.sum(size), (x, size)

    gradient = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True), static_argnums=2)
    for got, want in zip(*(jax.tree.leaves(gradient(weights, rows, how)) for how in (InTiles(), at_once)), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


PARTS = 8
CUTS = {"q": 1, "k": 1, "o": 0, "gate": 1, "up": 1, "down": 0, "head": 0}
SIZES = {"q": (48, 16, 4), "k": (48, 2, 4), "o": (16, 4, 48), "up": (48, 32), "down": (32, 48), "head": (40, 48)}


def parts_of(tp: int) -> InTiles:
    """On eight devices."""
    layout = Layout(make_mesh(jax.devices()[:PARTS]), tp)
    cuts = {name: Cut(dim, layout.kv_axes(2) if name == "k" else layout.tp_axes, True) for name, dim in CUTS.items()}
    rows = PartitionSpec(layout.dp_axes or None)
    return InTiles(layout.mesh, rows, (2, 2, 2), layout.tp_axes, tuple(cuts.items()))


def in_parts(by_rows: Any, weights: Any, x: jax.Array) -> tuple[jax.Array, ...]:
    """What a layer and the vocabulary do."""

    def product(x: jax.Array, matrix: Any, dtype: Any = None, *, transposed: bool = False) -> jax.Array:
        matrix = matrix.reshape(-1, x.shape[-1]) if transposed else matrix.reshape(x.shape[-1], -1)
        if by_rows.multiply is not None:
            return by_rows.multiply(x, matrix, transposed=transposed, dtype=dtype)
        return jnp.matmul(x, matrix.T if transposed else matrix, preferred_element_type=dtype or x.dtype)

    def heads(w: Any, x: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(product(x, w[name]).reshape(len(x), *w[name].shape[1:]) for name in ("q", "k"))

    wide = jnp.float32
    q, k = by_rows(heads, (x,), weights, join=("q", "k"))
    out = q * jnp.repeat(k, 8, axis=-2)
    a = by_rows(
        lambda w, out: product(out.reshape(len(out), -1), w["o"], wide), (out,), weights, join="sum", heads=True
    )
    x = x + a.astype(x.dtype)
    b = by_rows(lambda w, x: product(jax.nn.silu(product(x, w["up"])), w["down"], wide), (x,), weights, join="sum")
    x = x + b.astype(x.dtype)
    logits = by_rows(lambda w, x: product(x, w["head"], transposed=True), (x,), weights, join="vocab")
    return q, k, a, b, logits


@pytest.mark.parametrize(("dtype", "platform"), [("float32", "cpu"), ("bfloat16", "gpu")])
def test_parts_have_the_same_bits_on_any_number_of_devices(dtype: str, platform: str):
    """Those of a GPU interpreted."""
    random = np.random.default_rng(10)
    weights = {name: jnp.asarray(random.normal(size=size) / 5, dtype) for name, size in SIZES.items()}
    x = jnp.asarray(random.normal(size=(40, 48)), dtype)

    @partial(jax.jit, static_argnums=0)
    def computed(by_rows: Any) -> tuple[jax.Array, ...]:
        return in_parts(by_rows, weights, x)

    def tiles(own: InTiles) -> InTiles:
        return own.for_platform("cpu", interpret=platform == "gpu")

    cuts = tuple((name, Cut(dim, (), True)) for name, dim in CUTS.items())
    one = jax.tree.map(np.asarray, computed(tiles(InTiles(parts=(2, 2, 2), cuts=cuts))))
    for tp in (1, 2, 4, 8):
        for found, wanted in zip(computed(tiles(parts_of(tp))), one, strict=True):
            np.testing.assert_array_equal(found, wanted, err_msg=f"tp {tp}")
    tolerance = 1e-5 if dtype == "float32" else 0.1
    for found, wanted in zip(one, computed(at_once), strict=True):
        wanted = np.asarray(wanted, np.float32)
        np.testing.assert_allclose(found.astype(np.float32), wanted, atol=tolerance * np.abs(wanted).max())


def test_sums_of_parts_have_the_order_of_the_tree():
    """Of three and two: neighbours in threes first, in their order."""
    values = np.array([1.0, 1e8, -1e8, 3.0, 2.0**-30, 1.0], np.float32)
    shared = {"w": jnp.asarray(values[:, None])}
    by_rows = InTiles(parts=(2, 3), cuts=(("w", Cut(0)),))
    found = jax.jit(lambda: by_rows(lambda w, x: x @ w["w"], (jnp.ones((1, 1), np.float32),), shared, join="sum"))()
    left, right = ((a + b) + c for a, b, c in values.reshape(2, 3))
    assert found.item() == left + right


HEADS, KV_HEADS, DIM, SIZE = 6, 2, 16, 8
LENGTHS, PREFIX = (3 * CONTEXT + 5, 37), 33  # of two sequences with the same beginning


def sequences(dtype: str) -> list[dict[str, Any]]:
    """Queries, keys and values of each position; those of the prefix are the same in both."""
    random = np.random.default_rng(6)
    shapes = {"q": (HEADS, DIM), "k": (KV_HEADS, DIM), "v": (KV_HEADS, DIM)}
    made = [{name: random.normal(size=(n, *shape)) for name, shape in shapes.items()} for n in LENGTHS]
    for name in shapes:
        made[1][name][:PREFIX] = made[0][name][:PREFIX]
    return [{name: jnp.asarray(x, dtype) for name, x in each.items()} for each in made]


def paged(
    made: list[dict[str, Any]], rule: Rule, sinks: Any, chunk: int, parts: int = 1, attend: Any = None
) -> list[np.ndarray]:
    """Of each sequence [T, H, D], `chunk` queries of both rows at a time, over blocks in another order."""
    width = -(-max(LENGTHS) // SIZE) + 2
    tables = np.random.default_rng(7).permutation(np.arange(1, 2 * width + 1)).reshape(2, width).astype(np.int32)
    pools, kv_heads = [], made[0]["k"].shape[1]
    for name in ("k", "v"):
        pool = np.zeros((kv_heads, 2 * width + 1, SIZE, DIM), np.float32)
        for table, own in zip(tables, made, strict=True):
            at = np.arange(len(own[name]))
            pool[:, table[at // SIZE], at % SIZE] = np.moveaxis(np.asarray(own[name], np.float32), 1, 0)
        pools.append(jnp.asarray(pool, made[0]["k"].dtype))
    attend, tables = attend or choose_paged("auto", "cpu", invariant_parts=parts).attend, jnp.asarray(tables)
    run = jax.jit(lambda q, at: attend(q, *pools, tables, at, rule, sinks))
    out = np.zeros((2, max(LENGTHS) + chunk, made[0]["q"].shape[1], DIM), np.float32)
    for start in range(0, max(LENGTHS), chunk):
        at = np.minimum(np.arange(start, start + chunk), np.array(LENGTHS)[:, None] - 1).astype(np.int32)
        q = jnp.stack([own["q"][at[row]] for row, own in enumerate(made)])
        out[:, start : start + chunk] = run(q, at)
    return [out[row, :length] for row, length in enumerate(LENGTHS)]


def packed(
    made: list[dict[str, Any]], rule: Rule, sinks: Any, *, shared: bool, parts: int = 1, attend: Any = None
) -> Any:
    """The same of packed rows: one sequence behind the other, or both behind their prefix, with padding."""
    segments_of = [(0, 0, LENGTHS[0], 1, 0), (1, 0, LENGTHS[1], 2, 0)]
    if shared:
        segments_of = [(0, 0, PREFIX, 1, 0), (1, PREFIX, LENGTHS[1], 2, 1), (0, PREFIX, LENGTHS[0], 3, 1)]
    pad = 11
    segments, prefixes, positions = (
        jnp.asarray(np.concatenate([*(values(part) for part in segments_of), np.zeros(pad)])[None], jnp.int32)
        for values in (
            lambda part: np.full(part[2] - part[1], part[3]),
            lambda part: np.full(part[2] - part[1], part[4]),
            lambda part: np.arange(part[1], part[2]),
        )
    )

    def row(name: str) -> jax.Array:
        own = [made[part[0]][name][part[1] : part[2]] for part in segments_of]
        return jnp.concatenate([*own, jnp.zeros((pad, *own[0].shape[1:]), own[0].dtype)])[None]

    mask = reference.MaskInputs(segments, positions, prefixes, positions - rule.window + 1 if rule.window else None)
    q, k, v = map(row, "qkv")

    def attend_as(how: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if attend is not None:
            return attend(q, k, v, packed_rows.runs(mask), sinks=sinks)
        return how.attend(q, k, v, mask, how.tile_pairs(mask, q.dtype), sinks)

    heads = Heads(HEADS, KV_HEADS, DIM, q.dtype, rule.softcap)
    how = choose_packed("auto", "cpu", heads, invariant_parts=parts)
    found = np.asarray(jax.jit(attend_as, static_argnums=0)(how, q, k, v).astype(jnp.float32))[0]
    out = [np.zeros((length, HEADS, DIM), np.float32) for length in LENGTHS]
    column = 0
    for number, begin, end, *_ in segments_of:
        out[number][begin:end] = found[column : column + end - begin]
        column += end - begin
    if shared:
        out[1][:PREFIX] = out[0][:PREFIX]
    return out


SMALL = PagedTileSizes(queries=16, positions=16, piece=32, num_warps=4, num_stages=2)


@pytest.mark.parametrize(
    ("rule", "has_sinks", "dtype", "chunks", "sizes"),
    [
        (Rule(window=40), True, "bfloat16", (1,), SMALL),
        pytest.param(Rule(), False, "float32", (1, 3, 24), None, marks=pytest.mark.slow),
        pytest.param(Rule(), True, "bfloat16", (1, 3, 24), SMALL, marks=pytest.mark.slow),
    ],
)
def test_kernels_have_the_same_bits_in_prefill_decode_and_packed_rows(
    rule: Rule, has_sinks: bool, dtype: str, chunks: tuple[int, ...], sizes: Any, monkeypatch: pytest.MonkeyPatch
):
    """Interpreted. The contexts are of up to four pieces, which decoding gives to a program each."""
    # of unrolled steps XLA:CPU joins other products with sums than of a loop; PTX joins none (test_invariant_for_gpu)
    monkeypatch.setattr(paged_pallas, "MERGE_PIECES", 1)
    made = sequences(dtype)
    sinks = jnp.asarray(np.random.default_rng(9).normal(size=HEADS) * 2, dtype) if has_sinks else None

    def over_cache(q: Any, k: Any, v: Any, tables: Any, at: Any, rule: Rule, sinks: Any) -> jax.Array:
        tiles = sizes or invariant_pallas.sizes_of(q.dtype)
        return paged_pallas.paged_attention(q, k, v, tables, at, rule=rule, sinks_H=sinks, tiles=tiles, interpret=True)

    over_rows = partial(invariant_pallas.packed_attention, sizes=sizes, interpret=True)
    whole = packed(made, rule, sinks, shared=True, attend=over_rows)
    others = [paged(made, rule, sinks, chunk, attend=over_cache) for chunk in chunks]
    if len(chunks) > 1:
        others += [paged(made, rule, sinks, max(LENGTHS), attend=over_cache)]
        others += [packed(made, rule, sinks, shared=False, attend=over_rows)]
    for other in others:
        for a, b in zip(whole, other, strict=True):
            np.testing.assert_array_equal(a, b)
    for out, wanted in zip(whole, paged(made, rule, sinks, chunk=max(LENGTHS)), strict=True):
        np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-6 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize(
    ("inputs", "outputs", "transposed", "dtype"),
    [
        (1100, 200, False, "bfloat16"),  # cut into shares, which no step divides
        pytest.param(96, 333, True, "float32", marks=pytest.mark.slow),
    ],
)
def test_a_product_has_the_same_bits_among_any_number_of_rows(inputs: int, outputs: int, transposed: bool, dtype: str):
    random = np.random.default_rng(10)
    x = jnp.asarray(random.normal(size=(5 * TILE + 1, inputs)), dtype)
    shape = (outputs, inputs) if transposed else (inputs, outputs)
    matrix = jnp.asarray(random.normal(size=shape), dtype)
    how = {"transposed": transposed, "dtype": jnp.float32, "interpret": True}
    whole = np.asarray(invariant_pallas.product(x, matrix, **how))
    for first, count in ((0, 1), (77, 3), (40, 100)):
        own = invariant_pallas.product(x[first : first + count], matrix, **how)
        np.testing.assert_array_equal(own, whole[first : first + count])
    wide, other = np.asarray(x, np.float64), np.asarray(matrix, np.float64)
    wanted = wide @ (other.T if transposed else other)
    np.testing.assert_allclose(whole, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())
