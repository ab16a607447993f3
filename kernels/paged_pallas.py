"""Attention over a paged KV cache as a Pallas kernel for NVIDIA GPUs: decode, verification and prefill.

One kernel serves all three, because they differ only in the number of queries C per row. A program takes one row, one
key/value head, a tile of that head's C * G queries (all of them, unless they exceed the tile) and one part of the row's
context; it walks the context in steps of some positions with a running softmax in float32. Queries of a group thus
share each key and value that is read, so decoding reads every cached byte once.

When rows are few, each row's context is split over several programs, and a second kernel merges the parts by their
log-sum-exps. Each row's own length is cut into equal parts, so a short row in a wide table is split evenly too.

Sources: running softmax and tiling from FlashAttention-2 (Dao 2023, arXiv:2307.08691, section 3.1); the split over the
context from Flash-Decoding (Dao, Haziza, Massa, Sizov 2023); block tables from PagedAttention (Kwon et al. 2023,
arXiv:2309.06180, section 4). Departures: queries of one group and of several positions stand side by side as the rows
of one matrix; a step looks up the block of every position by itself, so its size need not be a multiple of the block's.

Backend: Pallas on Triton, which JAX deprecates from 0.11 on but which both supported versions run; docs/kernels.md
weighs it against Mosaic GPU and cuDNN.

Dims: R rows, C queries per row, H query heads, K key/value heads, G = H / K, D head dim, N blocks, P positions per
block, W blocks per table, M = C * G queries of a row and key/value head, S parts of a context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxrl.kernels.reference import PLAIN, Rule

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
HEAD_DIMS = (16, 32, 64, 128)  # a Triton tensor has a power of two of elements, a product at least 16 a side
MIN_QUERIES = 16  # a tensor core's smallest tile
MAX_QUERIES = {2: 128, 4: 32}  # by bytes per number; larger tiles spill registers
STEP_BYTES = 16384  # of keys, and as many of values, per step: several steps in flight fit into shared memory
MAX_PARTS, MIN_PART_POSITIONS = 32, 256  # with fewer positions per part, merging costs as much as splitting gains
WANTED_PROGRAMS = 264  # two for each of an H100's 132 multiprocessors
STAGES = 5  # looking up blocks takes two of them; the next step's keys and values load while one step is computed
MERGE_QUERIES = 4  # per merging program: few, since all their parts are loaded at once
NEVER = -1e30  # a score or log-sum-exp of weight zero; finite, because infinities subtract to nan


@dataclass(frozen=True, slots=True)
class PagedTileSizes:
    """How the work is cut; powers of two except `parts`.

    Attributes:
      queries: of one row and key/value head that a program takes, padding included.
      positions: of the context that a program reads in one step.
      parts: programs that share a row's context.
      num_warps, num_stages: for the compiler: threads / 32 per program, and how deep it pipelines the steps.
    """

    queries: int
    positions: int
    parts: int
    num_warps: int
    num_stages: int


def choose_tiles(rows: int, queries: int, heads: int, kv_heads: int, span: int, dim: int, dtype: Any) -> PagedTileSizes:
    """Tile sizes for R rows of C queries over tables that span W * P positions. A rule of thumb, not measured yet."""
    together, itemsize = queries * (heads // kv_heads), jnp.dtype(dtype).itemsize
    tile = min(MAX_QUERIES[itemsize], max(MIN_QUERIES, pl.next_power_of_2(together)))
    positions = min(128, STEP_BYTES // (dim * itemsize))
    programs = rows * kv_heads * pl.cdiv(together, tile)
    parts = min(MAX_PARTS, WANTED_PROGRAMS // programs, span // MIN_PART_POSITIONS)
    return PagedTileSizes(tile, positions, max(1, parts), 8 if tile >= 128 else 4, STAGES)


def refusal(q: Any, k: Any, v: Any, kv_heads: int, softcap: float = 0.0) -> str | None:
    """Why neither these kernels nor those for packed rows can serve queries [., ., H, D] with so many key/value heads.

    None if they can; depends on shapes, dtypes and the rule only.
    """
    heads, dim = q.shape[2:]
    if softcap:
        return f"scores are capped ({softcap:g}), which they do not compute"
    if len({q.dtype, k.dtype, v.dtype}) > 1 or q.dtype not in DTYPES:
        return f"queries, keys and values ({q.dtype}, {k.dtype}, {v.dtype}) must be all bfloat16 or all float32"
    if dim not in HEAD_DIMS:
        return f"head_dim ({dim}) must be one of {HEAD_DIMS}"
    if heads % kv_heads:
        return f"key/value heads ({kv_heads}) must divide query heads ({heads})"
    return None


@partial(jax.jit, static_argnames=("rule", "tiles", "interpret"))  # layers of one shape share one trace of the kernels
def paged_attention(
    q_RCHD: jax.Array,
    k_KNPD: jax.Array,
    v_KNPD: jax.Array,
    tables_RW: jax.Array,
    positions_RC: jax.Array,
    *,
    rule: Rule = PLAIN,
    tiles: PagedTileSizes | None = None,
    interpret: bool = False,
) -> jax.Array:
    """[R, C, H, D]: query (r, c) sees the row's cached positions 0 .. positions[r, c], its own included, as far back as
    the layer's rule has it.

    Of a row's table, only the blocks from the first to the last position that its queries see are read. A query at a
    negative position sees nothing and gets zeros.

    Args:
      tiles: how to cut the work; `choose_tiles` decides if None.
      interpret: run as plain JAX, on any device (slow; for tests).

    Raises:
      ValueError: for shapes or dtypes that `refusal` names.
    """
    if reason := refusal(q_RCHD, k_KNPD, v_KNPD, k_KNPD.shape[0], rule.softcap):
        raise ValueError(f"paged attention's Pallas kernel: {reason}; use implementation='reference'")
    rows, queries, heads, dim = q_RCHD.shape
    kv_heads, blocks, size, _ = k_KNPD.shape
    width = tables_RW.shape[1]
    tiles = tiles or choose_tiles(rows, queries, heads, kv_heads, width * size, dim, q_RCHD.dtype)
    num_tiles = pl.cdiv(queries * (heads // kv_heads), tiles.queries)
    flat = queries * heads

    def of_row(*dims: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *dims), lambda i, r, s: (r, *(0,) * len(dims)))

    pool = pl.BlockSpec((None, blocks * size, dim), lambda i, r, s: (i // num_tiles, 0, 0))
    out_shape: list[Any] = [jax.ShapeDtypeStruct((rows, flat, dim), q_RCHD.dtype)]
    if tiles.parts > 1:
        out_shape = [
            jax.ShapeDtypeStruct((rows, tiles.parts * flat, dim), jnp.float32),
            jax.ShapeDtypeStruct((rows, tiles.parts * flat), jnp.float32),
        ]
    out = pl.pallas_call(
        partial(
            _attend_kernel,
            tiles=tiles,
            num_tiles=num_tiles,
            size=size,
            heads=heads,
            group=heads // kv_heads,
            window=rule.window,
        ),
        grid=(kv_heads * num_tiles, rows, tiles.parts),
        in_specs=[of_row(flat, dim), pool, pool, of_row(width), of_row(queries)],
        out_specs=[of_row(*x.shape[1:]) for x in out_shape],
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
    )(
        q_RCHD.reshape(rows, flat, dim),
        k_KNPD.reshape(kv_heads, blocks * size, dim),
        v_KNPD.reshape(kv_heads, blocks * size, dim),
        tables_RW.astype(jnp.int32),
        positions_RC.astype(jnp.int32),
    )
    merged = out[0] if tiles.parts == 1 else merge(out[0], out[1], tiles.parts, q_RCHD.dtype, interpret)
    return merged.reshape(q_RCHD.shape)


def _attend_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    position_ref: Any,
    out_ref: Any,
    lse_ref: Any = None,
    *,
    tiles: PagedTileSizes,
    num_tiles: int,
    size: int,
    heads: int,
    group: int,
    window: int,
) -> None:
    """Refs of one row: q, out [C * H, D] (out of all parts: [S * C * H, D]), table [W], positions [C], lse [S * C * H];
    of one key/value head: k, v [N * P, D]."""
    (width,), (queries,), dim = table_ref.shape, position_ref.shape, q_ref.shape[-1]
    # Later tiles have longer contexts: started first, they leave no long tail.
    kv_head, tile = lax.div(pl.program_id(0), num_tiles), num_tiles - 1 - lax.rem(pl.program_id(0), num_tiles)
    part = pl.program_id(2)
    query_M = tile * tiles.queries + jnp.arange(tiles.queries, dtype=jnp.int32)
    live_M = query_M < queries * group
    column_M = lax.div(query_M, group)
    flat_M = column_M * heads + kv_head * group + lax.rem(query_M, group)
    position_M = plgpu.load(position_ref.at[column_M], mask=live_M, other=-1)
    q_MD = load_rows(q_ref, flat_M, live_M)

    end = jnp.minimum(jnp.max(position_M) + 1, width * size)
    shape = (tiles.queries,)
    carry = (jnp.zeros((*shape, dim), jnp.float32), jnp.full(shape, NEVER, jnp.float32), jnp.zeros(shape, jnp.float32))
    first_M = jnp.maximum(position_M - (window - 1), 0) if window else None
    carry = walk(q_MD, position_M, k_ref, v_ref, table_ref, size, end, part, tiles, carry, first_M)
    store_softmax(out_ref, lse_ref, part * (queries * heads) + flat_M, carry, live_M)


def walk(
    q_MD: jax.Array,
    position_M: jax.Array,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    size: int,
    end: jax.Array,
    part: jax.Array,
    tiles: PagedTileSizes,
    carry: tuple,
    first_M: jax.Array | None = None,
) -> tuple:
    """One part's share of a row's positions 0 .. end - 1 added to the running softmax `carry` (`softmax_step`).

    Args:
      first_M: the lowest position that each query sees; None: 0.
    """
    steps = lax.div(end + tiles.positions - 1, tiles.positions)
    if first_M is None:
        per_part = lax.div(steps + tiles.parts - 1, tiles.parts)
        first = part * per_part
    else:  # steps that lie before all windows are left out
        seen_M = jnp.where(position_M >= 0, first_M, end)
        before = lax.div(jnp.min(seen_M), tiles.positions)
        per_part = lax.div(jnp.maximum(steps - before, 0) + tiles.parts - 1, tiles.parts)
        first = before + part * per_part

    def step(i: Any, carry: tuple) -> tuple:
        at_B = i * tiles.positions + jnp.arange(tiles.positions, dtype=jnp.int32)
        inside_B = at_B < end
        block_B = plgpu.load(table_ref.at[lax.div(at_B, size)], mask=inside_B, other=0)
        slot_B = block_B * size + lax.rem(at_B, size)
        k_BD, v_BD = load_rows(k_ref, slot_B, inside_B), load_rows(v_ref, slot_B, inside_B)
        visible_MB = at_B[None, :] <= position_M[:, None]
        if first_M is not None:
            visible_MB &= at_B[None, :] >= first_M[:, None]
        return softmax_step(q_MD, k_BD, v_BD, visible_MB, *carry)

    return lax.fori_loop(first, jnp.minimum(first + per_part, steps), step, carry)


def store_softmax(out_ref: Any, lse_ref: Any, rows: jax.Array, carry: tuple, mask: jax.Array) -> None:
    """Writes what a running softmax has come to into these rows, zeros where nothing was seen; its base-2 log-sum-exp
    as well, unless `lse_ref` is None."""
    sum_MD, top_M, total_M = carry
    seen_M = jnp.where(total_M > 0, total_M, 1)
    store_rows(out_ref, rows, sum_MD / seen_M[:, None], mask)
    if lse_ref is not None:
        plgpu.store(lse_ref.at[rows], jnp.where(total_M > 0, top_M + jnp.log2(seen_M), NEVER), mask=mask)


def score_scale(dim: int) -> float:
    """What a product of query and key is multiplied by, for a softmax in base 2."""
    return dim**-0.5 * math.log2(math.e)


def softmax_step(
    q_MD: jax.Array,
    k_BD: jax.Array,
    v_BD: jax.Array,
    visible_MB: jax.Array | None,
    sum_MD: jax.Array,
    top_M: jax.Array,
    total_M: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step of the running softmax, in base 2: the weighted sum of values, the largest score, the sum of weights.

    All is visible where `visible_MB` is None.
    """
    scores_MB = dot(q_MD, k_BD, 1, 1) * score_scale(q_MD.shape[1])
    if visible_MB is not None:
        scores_MB = jnp.where(visible_MB, scores_MB, NEVER)
    new_top_M = jnp.maximum(top_M, jnp.max(scores_MB, axis=1))
    weights_MB = jnp.exp2(scores_MB - new_top_M[:, None])
    if visible_MB is not None:
        # Where nothing has been seen yet, top is NEVER and the difference 0: the mask decides, not the exponential.
        weights_MB = jnp.where(visible_MB, weights_MB, 0)
    keep_M = jnp.exp2(top_M - new_top_M)
    sum_MD = sum_MD * keep_M[:, None] + dot(weights_MB.astype(v_BD.dtype), v_BD, 1, 0)
    return sum_MD, new_top_M, total_M * keep_M + jnp.sum(weights_MB, axis=1)


def merge(parts_RFD: jax.Array, lse_RF: jax.Array, parts: int, dtype: Any, interpret: bool) -> jax.Array:
    """[R, C * H, D] from every part's output and base-2 log-sum-exp, F = S * C * H."""
    rows, flat, dim = parts_RFD.shape[0], parts_RFD.shape[1] // parts, parts_RFD.shape[2]

    def of_row(*dims: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *dims), lambda i, r: (r, *(0,) * len(dims)))

    return pl.pallas_call(
        partial(_merge_kernel, parts=parts),
        grid=(pl.cdiv(flat, MERGE_QUERIES), rows),
        in_specs=[of_row(parts * flat, dim), of_row(parts * flat)],
        out_specs=of_row(flat, dim),
        out_shape=jax.ShapeDtypeStruct((rows, flat, dim), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(parts_RFD, lse_RF)


def _merge_kernel(parts_ref: Any, lse_ref: Any, out_ref: Any, *, parts: int) -> None:
    flat, dim = out_ref.shape
    query_M = pl.program_id(0) * MERGE_QUERIES + jnp.arange(MERGE_QUERIES, dtype=jnp.int32)
    live_M = query_M < flat
    # Unrolled: all loads can be under way at once.
    lse = [plgpu.load(lse_ref.at[part * flat + query_M], mask=live_M, other=NEVER) for part in range(parts)]
    top_M = lse[0]
    for each in lse[1:]:
        top_M = jnp.maximum(top_M, each)
    sum_MD, total_M = jnp.zeros((MERGE_QUERIES, dim), jnp.float32), jnp.zeros((MERGE_QUERIES,), jnp.float32)
    for part, each in enumerate(lse):
        weight_M = jnp.exp2(each - top_M)
        value_MD = load_rows(parts_ref, part * flat + query_M, live_M)
        sum_MD, total_M = sum_MD + value_MD * weight_M[:, None], total_M + weight_M
    store_rows(out_ref, query_M, sum_MD / total_M[:, None], live_M)


def load_rows(ref: Any, rows: jax.Array, mask: jax.Array | None) -> jax.Array:
    """[len(rows), D]: these rows of a ref [., D]; zeros, and nothing read, where the mask is False (None: all read)."""
    at, mask = _elements(ref, rows, mask)
    return plgpu.load(at, mask=mask, other=None if mask is None else 0)


def load_numbers(ref: Any, rows: jax.Array, mask: jax.Array | None) -> jax.Array:
    """[len(rows)]: `load_rows` of a ref that has no further dim."""
    return plgpu.load(ref.at[rows], mask=mask, other=None if mask is None else 0)


def store_rows(ref: Any, rows: jax.Array, values: jax.Array, mask: jax.Array) -> None:
    """Writes values [len(rows), D] to these rows of a ref [., D], in its dtype, where the mask is True."""
    at, mask = _elements(ref, rows, mask)
    plgpu.store(at, values.astype(ref.dtype), mask=mask)


def _elements(ref: Any, rows: jax.Array, mask: jax.Array | None) -> tuple[Any, jax.Array | None]:
    """Every element by its own indices: interpret mode takes no mixture of indices and slices."""
    shape = (len(rows), ref.shape[-1])
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    at = ref.at[jnp.broadcast_to(rows[:, None], shape), columns]
    return at, None if mask is None else jnp.broadcast_to(mask[:, None], shape)


def dot(a: jax.Array, b: jax.Array, over_a: int, over_b: int) -> jax.Array:
    """Summed over dim `over_a` of a and `over_b` of b, in float32.

    Tensor cores round float32 to TF32 (10 bits of fraction), and exact float32 products would run without them and
    spill. So float32 is cut into two TF32 numbers and three products are added: an error of about 2^-21 of the terms,
    whatever `jax_default_matmul_precision` says.
    """

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        dims = (((over_a,), (over_b,)), ((), ()))
        return lax.dot_general(a, b, dims, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)

    if a.dtype != jnp.float32:
        return product(a, b)
    high_a, high_b = _to_tf32(a), _to_tf32(b)
    return product(a - high_a, high_b) + product(high_a, b - high_b) + product(high_a, high_b)


def _to_tf32(x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 13))
    return lax.bitcast_convert_type(bits, jnp.float32)
