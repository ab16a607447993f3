"""Attention and products whose bits depend on a token's own context alone, as Pallas kernels for NVIDIA GPUs. They run
over a paged cache in the rollout, and over packed rows in training (`actor.numerics=invariant`; see
`jaxrl.kernels.invariant`).

The rollout's kernel is `paged_pallas`, with the same sizes for all shapes. The kernel over packed rows computes the
same, but finds a position's keys behind the beginning of a token's segment, or of its prefix. A tile has a fixed number
of queries of a group and of neighbouring positions. It walks the context in steps and pieces that begin at multiples of
their sizes, counted from the sequence's beginning. A piece is summed separately and then added to those before it, in
order: in a rollout by a second kernel, in training by the tile itself. Steps and pieces in which a query sees nothing
change none of its bits: they multiply by one and add zeros.

Sizes depend on dtype alone. Every step is masked: without the mask a compiler may join a product with the subtraction
behind it, and round once less.

Sources: those of `paged_pallas`. Departures: a tile that holds several segments of a packed row walks the context of
one after the other.

Dims: those of `paged_pallas` and `packed_pallas`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxrl.kernels import experts_pallas
from jaxrl.kernels.by_rows import Part
from jaxrl.kernels.packed import Runs
from jaxrl.kernels.paged_pallas import (
    PIECE,
    WANTED_PROGRAMS,
    WHOLE,
    Carry,
    PagedTileSizes,
    added,
    dot,
    load_rows,
    seen,
    start_of,
    store_sums,
    tile_of,
    walk,
)

MIN_INPUTS = 256  # of a share of a product: with fewer, adding shares costs as much as cutting gains


def sizes_of(dtype: Any) -> PagedTileSizes:
    """The one cut for all shapes of a dtype. A rule of thumb, not measured yet."""
    piece = PIECE
    is_narrow = jnp.dtype(dtype).itemsize == 2
    return PagedTileSizes(64, 64, piece, 4, 3) if is_narrow else PagedTileSizes(16, 32, piece, 4, 2)


def _of_row(*dims: int) -> pl.BlockSpec:
    """Row `program_id(1)` of an array [R, ...]."""
    return pl.BlockSpec((None, *dims), lambda i, r: (r, *(0,) * len(dims)))


def _compiled(sizes: PagedTileSizes | ProductSizes, interpret: bool) -> dict[str, Any]:
    how = plgpu.CompilerParams(num_warps=sizes.num_warps, num_stages=sizes.num_stages)
    return {"compiler_params": how, "interpret": interpret}


# ---------------------------------------------------------------- attention


@partial(jax.jit, static_argnames=("sizes", "interpret"))
def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    where: Runs,
    *,
    sinks: jax.Array | None = None,
    sizes: PagedTileSizes | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`reference.packed_attention` of the rows of `runs`, without a gradient. `sizes`: for tests, `sizes_of` if
    None."""
    (rows, tokens, heads, dim), kv_heads = q.shape, k.shape[2]
    sizes, group = sizes or sizes_of(q.dtype), heads // kv_heads
    tiles = pl.cdiv(tokens * group, sizes.queries)
    own_sinks = [] if sinks is None else [sinks.astype(jnp.float32)]
    flat = [x.reshape(rows, -1, dim) for x in (q, k, v)]
    (out,) = pl.pallas_call(
        partial(_packed_kernel, sizes=sizes, tiles=tiles, heads=heads, group=group),
        grid=(kv_heads * tiles, rows),
        in_specs=[*(_of_row(*x.shape[1:]) for x in flat), *[_of_row(tokens)] * len(where), *[WHOLE] * len(own_sinks)],
        out_specs=[_of_row(*flat[0].shape[1:])],
        out_shape=[jax.ShapeDtypeStruct(flat[0].shape, q.dtype)],
        **_compiled(sizes, interpret),
    )(*flat, *where, *own_sinks)
    return out.reshape(q.shape)


def _packed_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any, sizes: PagedTileSizes, tiles: int, heads: int, group: int
) -> None:
    """Refs of one row: q, out [T * H, D], k, v [T * K, D], those of `Runs` [T], sinks [H] if there are any."""
    count = len(Runs._fields)
    where, (*sinks, out_ref) = Runs(*refs[:count]), refs[count:]
    kv_head, number = lax.div(pl.program_id(0), tiles), tiles - 1 - lax.rem(pl.program_id(0), tiles)
    (tokens,), kv_heads = where.own.shape, heads // group
    tile = tile_of(number, kv_head, tokens, heads, group, sizes.queries)
    first_M = plgpu.load(where.first.at[tile.column_M], mask=tile.live_M, other=0)
    last_M = plgpu.load(where.last.at[tile.column_M], mask=tile.live_M, other=-1)
    q_MD = load_rows(q_ref, tile.flat_M, tile.live_M)

    def of_segment(_: Any, carry: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        column, sums = carry
        begin, own, prefix, following = (
            plgpu.load(ref.at[column]) for ref in (where.begin, where.own, where.prefix, where.following)
        )

        def load(at_B: jax.Array, inside_B: jax.Array) -> tuple[jax.Array, jax.Array]:
            slot_B = jnp.where(at_B >= begin, own + at_B - begin, prefix + at_B) * kv_heads + kv_head
            return load_rows(k_ref, slot_B, inside_B), load_rows(v_ref, slot_B, inside_B)

        mine_M = (tile.column_M >= column) & (tile.column_M < following)
        own_M = jnp.where(mine_M, last_M, -1)
        low, high = seen(first_M, own_M)

        def add(piece: Any, sums: Carry) -> Carry:
            return added(sums, walk(q_MD, first_M, own_M, load, sizes, piece))

        pieces = lax.div(low, sizes.piece), lax.div(high + sizes.piece - 1, sizes.piece)
        return following, lax.fori_loop(*pieces, add, sums)

    begin = lax.div(number * sizes.queries, group)
    end = jnp.minimum(lax.div(number * sizes.queries + sizes.queries - 1, group), tokens - 1)
    segments = plgpu.load(where.number.at[end]) - plgpu.load(where.number.at[begin]) + 1
    start = start_of(tile.sinks(*sinks) if sinks else None, q_MD.shape)
    _, carry = lax.fori_loop(0, segments, of_segment, (begin, start))
    store_sums(out_ref, tile.flat_M, carry, tile.live_M)


# ---------------------------------------------------------------- products


class ProductSizes(NamedTuple):
    """How a product is cut, for any number of rows."""

    rows: int  # of a program's tile
    outputs: int
    inputs: int  # that it takes in one step
    shares: int  # of the inputs, each summed by a separate program
    num_warps: int
    num_stages: int


def product_sizes(inputs: int, outputs: int, dtype: Any) -> ProductSizes:
    """The one cut for a matrix [I, O]. A rule of thumb, not measured yet: narrow matrices are cut over their inputs,
    until there are programs enough for a tile of `jaxrl.kernels.invariant.GPU_TILE` rows."""
    is_narrow = jnp.dtype(dtype).itemsize == 2
    rows, own, step, stages = (128, 64, 64, 4) if is_narrow else (32, 64, 32, 2)
    tiles, shares = pl.cdiv(outputs, own), 1
    while 2 * shares * tiles <= WANTED_PROGRAMS and inputs // (2 * shares) >= MIN_INPUTS:
        shares *= 2
    return ProductSizes(rows, own, step, shares, 4, stages)


class Product(NamedTuple):
    """`product`, hashed by its value. interpret: run as plain JAX, on any device (slow; for tests)."""

    interpret: bool = False

    def __call__(
        self, x: jax.Array, matrix: jax.Array | Part, *, transposed: bool = False, dtype: Any = None
    ) -> jax.Array:
        return product(x, matrix, transposed=transposed, dtype=dtype, interpret=self.interpret)

    def experts(
        self,
        x_TE: jax.Array,
        own_TC: jax.Array,
        share_TC: jax.Array,
        weights: Mapping[str, jax.Array | Part],
        activation: Callable[[jax.Array, jax.Array], jax.Array],
        num_experts: int,
    ) -> jax.Array:
        down, whole = weights["down"], {n: w.whole if isinstance(w, Part) else w for n, w in weights.items()}
        first = down.index * num_experts if isinstance(down, Part) else 0
        arrays = x_TE, own_TC, share_TC, whole
        return experts_pallas.mix(*arrays, activation, first, num_experts=num_experts, interpret=self.interpret)


@partial(jax.jit, static_argnames=("transposed", "dtype", "interpret"))
def product(
    x: jax.Array, matrix: jax.Array | Part, *, transposed: bool = False, dtype: Any = None, interpret: bool = False
) -> jax.Array:
    """[..., O] of x [..., I] and a matrix [I, O], or [O, I] where it is `transposed`; x's dtype unless one is given.

    The order of a row's sums does not depend on other rows: steps of a share one after the other, then shares. A part
    of a matrix gives the same sums as a separate matrix of the same numbers.
    """
    (inputs, outputs), dims = matrix.shape[::-1] if transposed else matrix.shape, x.shape[:-1]
    sizes, dtype = product_sizes(inputs, outputs, x.dtype), dtype or x.dtype
    flat, dim = x.reshape(-1, inputs), None
    operands = [flat, matrix]
    if isinstance(matrix, Part):
        dim, operands = matrix.dim, [flat, matrix.whole, jnp.reshape(matrix.index, (1,)).astype(jnp.int32)]
    out = (len(flat), outputs)
    parts = pl.pallas_call(
        partial(_product_kernel, sizes=sizes, transposed=transposed, shape=matrix.shape, dim=dim),
        grid=(pl.cdiv(outputs, sizes.outputs), pl.cdiv(len(flat), sizes.rows), sizes.shares),
        in_specs=[WHOLE] * len(operands),
        out_specs=pl.BlockSpec((None, *out), lambda o, r, s: (s, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((sizes.shares, *out), dtype if sizes.shares == 1 else jnp.float32),
        **_compiled(sizes, interpret),
    )(*operands)
    total = parts[0]
    for each in parts[1:]:
        total += each
    return total.astype(dtype).reshape(*dims, outputs)


def _product_kernel(
    x_ref: Any,
    matrix_ref: Any,
    *refs: Any,
    sizes: ProductSizes,
    transposed: bool,
    shape: tuple[int, int],
    dim: int | None,
) -> None:
    """Refs: x [N, I], matrix [I, O] or [O, I], the index of its part [1] if it has parts, one share's out [N, O].

    Args:
      shape: of the matrix, or of a part. dim: which of them is cut into parts; None: neither.
    """
    *index_ref, out_ref = refs
    inputs = x_ref.shape[1]
    at_O, at_N = (
        pl.program_id(axis) * size + jnp.arange(size, dtype=jnp.int32)
        for axis, size in enumerate((sizes.outputs, sizes.rows))
    )
    offset = 0 if dim is None else plgpu.load(index_ref[0].at[jnp.int32(0)]) * shape[dim]
    begin = [offset if axis == dim else 0 for axis in (0, 1)]
    steps = pl.cdiv(pl.cdiv(inputs, sizes.shares), sizes.inputs)
    first = pl.program_id(2) * steps

    def part(ref: Any, shape: tuple[int, int], begin: list[Any], *at: jax.Array) -> jax.Array:
        mask = (at[0] < shape[0])[:, None] & (at[1] < shape[1])[None, :]
        rows, columns = (own + start for own, start in zip(at, begin, strict=True))
        places = (jnp.broadcast_to(each, mask.shape) for each in (rows[:, None], columns[None, :]))
        return plgpu.load(ref.at[tuple(places)], mask=mask, other=0)

    def step(i: Any, sum_NO: jax.Array) -> jax.Array:
        at_I = (first + i) * sizes.inputs + jnp.arange(sizes.inputs, dtype=jnp.int32)
        x_NI = part(x_ref, x_ref.shape, [0, 0], at_N, at_I)
        if transposed:
            return sum_NO + dot(x_NI, part(matrix_ref, shape, begin, at_O, at_I), 1, 1)
        return sum_NO + dot(x_NI, part(matrix_ref, shape, begin, at_I, at_O), 1, 0)

    start = jnp.zeros((sizes.rows, sizes.outputs), jnp.float32)
    sum_NO = lax.fori_loop(0, steps, step, start)
    mask = (at_N < out_ref.shape[0])[:, None] & (at_O < out_ref.shape[1])[None, :]
    at = tuple(jnp.broadcast_to(each, mask.shape) for each in (at_N[:, None], at_O[None, :]))
    plgpu.store(out_ref.at[at], sum_NO.astype(out_ref.dtype), mask=mask)
