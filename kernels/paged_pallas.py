"""Attention over a paged KV cache as a Pallas kernel for NVIDIA GPUs: decode, verification and prefill.

One kernel serves all three, because they differ only in the number of queries C per row. It takes one row, one
key/value head, and a tile of that head's C * G queries (all of them, unless they exceed the tile). It walks one piece
of the row's context in steps of some positions, with a running softmax in float32. Queries of a group thus share each
key and value that is read, so decoding reads every cached byte once.

Pieces begin at multiples of their size, counted from the sequence's beginning, and each is summed separately. The
pieces of all rows are one list, of which every program takes an equal share, for any lengths of rows: the grid follows
from shapes alone, and the device makes the list (`list_work`). A second kernel adds up the pieces of rows that have
several, in their order. So a row's result depends neither on other rows nor on which program took which piece. Where
tables have room for one piece there is no list, and no second kernel.

Sources: running softmax and tiling from FlashAttention-2 (Dao 2023, arXiv:2307.08691, section 3.1); the split over the
context from Flash-Decoding (Dao, Haziza, Massa, Sizov 2023); its fixed size instead of a fixed number of parts from He
et al. 2025, "Defeating Nondeterminism in LLM Inference"; block tables from PagedAttention (Kwon et al. 2023,
arXiv:2309.06180, section 4). Departures: queries of one group and of several positions are the rows of one matrix; a
step looks up the block of every position by itself, so its size need not be a multiple of the block's.

Backend: Pallas on Triton, which JAX deprecates from 0.11 on but which both supported versions run; docs/kernels.md
weighs it against Mosaic GPU and cuDNN.

Dims: R rows, C queries per row, H query heads, K key/value heads, G = H / K, D head dim; N blocks, P positions per
block, W blocks per table, F = C * H queries of a row, S pieces in the list. Inside a kernel M queries of a tile and B
positions of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxrl.kernels.reference import PLAIN, Cached, Codes, Rule

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
HEAD_DIMS = (16, 32, 64, 128)  # a Triton tensor has a power of two of elements, a product at least 16 a side
MIN_QUERIES = 16  # a tensor core's smallest tile
MAX_QUERIES = {2: 128, 4: 32}  # by bytes per number; larger tiles spill registers
STEP_BYTES = 16384  # of keys, and as many of values, per step: several steps in flight fit into shared memory
PIECE = 1024  # positions: docs/kernels.md weighs others
MAX_SUM_BYTES = 1 << 28  # of the sums of pieces: where these would need more, pieces are longer
WANTED_PROGRAMS = 264  # two for each of an H100's 132 multiprocessors
STAGES = 5  # looking up blocks takes two of them; the next step's keys and values load while one step is computed
MERGE_QUERIES, MERGE_PIECES = 4, 8  # of a merging program, and of its steps: few, since all are loaded at once
NEVER = -1e30  # a score of weight zero; finite, because infinities subtract to nan

WHOLE = pl.BlockSpec()
Inputs = dict[str, tuple[jax.Array, pl.BlockSpec]]
Outputs = dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]]

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""The state of a running softmax in base 2: the weighted sum of values [M, D], the largest score [M], the sum of
weights [M]."""
Load = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(positions [B], which of them to read [B]) -> keys and values [B, D]."""


@dataclass(frozen=True, slots=True)
class PagedTileSizes:
    """How the work is cut; powers of two. Other `positions`, or another `piece`, are another order of sums."""

    queries: int  # of one row and key/value head in a tile, padding included
    positions: int  # of the context in one step
    piece: int  # positions of the context that are summed separately; a multiple of `positions`
    num_warps: int  # threads / 32 per program
    num_stages: int  # how deep the compiler pipelines the steps


def choose_tiles(rows: int, queries: int, heads: int, kv_heads: int, span: int, dim: int, dtype: Any) -> PagedTileSizes:
    """Tile sizes for R rows of C queries over tables that span W * P positions. A rule of thumb, not measured yet."""
    together, itemsize = queries * (heads // kv_heads), jnp.dtype(dtype).itemsize
    tile = min(MAX_QUERIES[itemsize], max(MIN_QUERIES, pl.next_power_of_2(together)))
    positions, tiles = min(128, STEP_BYTES // (dim * itemsize)), pl.cdiv(together, tile)
    # Prefill with programs enough for all multiprocessors waits for products: sums of pieces would only add to it.
    fills, piece = tiles > 1 and rows * kv_heads * tiles >= WANTED_PROGRAMS, PIECE
    while piece < span and (fills or 4 * rows * queries * heads * dim * pl.cdiv(span, piece) > MAX_SUM_BYTES):
        piece *= 2
    return PagedTileSizes(tile, positions, piece, 8 if tile >= 128 else 4, STAGES)


def refusal(q: Any, k: Any, v: Any, kv_heads: int, softcap: float = 0.0) -> str | None:
    """Why neither these kernels nor those for packed rows take queries [., ., H, D] with `kv_heads`; None if they do.
    Depends on shapes, dtypes and the rule only."""
    heads, dim = q.shape[2:]
    if softcap:
        return f"scores are capped ({softcap:g}), which they do not compute"
    if len({q.dtype, *(x.dtype for x in (k, v) if not isinstance(x, Codes))}) > 1 or q.dtype not in DTYPES:
        return f"queries, keys and values ({q.dtype}, {k.dtype}, {v.dtype}) must be all bfloat16 or all float32"
    if dim not in HEAD_DIMS:
        return f"head_dim ({dim}) must be one of {HEAD_DIMS}"
    if heads % kv_heads:
        return f"key/value heads ({kv_heads}) must divide query heads ({heads})"
    return None


@partial(jax.jit, static_argnames=("rule", "tiles", "interpret"))  # layers of one shape share one trace of the kernels
def paged_attention(
    q_RCHD: jax.Array,
    k_KNPD: Cached,
    v_KNPD: Cached,
    tables_RW: jax.Array,
    positions_RC: jax.Array,
    *,
    rule: Rule = PLAIN,
    sinks_H: jax.Array | None = None,
    tiles: PagedTileSizes | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`reference.paged_attention`, of what `refusal` takes. A query at a negative position sees nothing and gets zeros.
    `tiles` and `interpret` as in `packed_pallas`."""
    if reason := refusal(q_RCHD, k_KNPD, v_KNPD, k_KNPD.shape[0], rule.softcap):
        raise ValueError(f"paged attention's Pallas kernel: {reason}; use implementation='reference'")
    rows, queries, heads, dim = q_RCHD.shape
    kv_heads, _, size, _ = k_KNPD.shape
    width, flat, dtype = tables_RW.shape[1], queries * heads, q_RCHD.dtype
    tiles = tiles or choose_tiles(rows, queries, heads, kv_heads, width * size, dim, dtype)
    num_tiles = pl.cdiv(queries * (heads // kv_heads), tiles.queries)
    last_R = first_R = jnp.max(positions_RC, axis=1)
    if rule.window:
        first_R = jnp.min(jnp.where(positions_RC < 0, last_R[:, None], positions_RC), axis=1)
    work, programs = list_work(first_R, last_R, rule.window, width * size, tiles.piece, kv_heads * num_tiles)
    inputs = {
        "q": (q_RCHD.reshape(rows * flat, dim), WHOLE),
        **pool_inputs(k_KNPD, v_KNPD, num_tiles),
        "table": (tables_RW.astype(jnp.int32), WHOLE),
        "position": (positions_RC.astype(jnp.int32), WHOLE),
        **work,
    }
    if sinks_H is not None:
        inputs["sink"] = sinks_H.astype(jnp.float32), WHOLE
    outputs = piece_outputs(rows, flat, dim, dtype, pl.cdiv(width * size, tiles.piece))
    how = tiles.num_warps, tiles.num_stages
    kernel = partial(_paged_kernel, tiles=tiles, num_tiles=num_tiles, size=size, heads=heads, window=rule.window)
    out = call(kernel, (kv_heads * num_tiles, programs), inputs, outputs, how, interpret)
    return merge(out, work, sinks_H, heads, interpret).reshape(q_RCHD.shape)


def _paged_kernel(
    *refs: Any, names: tuple[str, ...], tiles: PagedTileSizes, num_tiles: int, size: int, heads: int, window: int
) -> None:
    """Refs by name: q [R * F, D], table [R, W], position [R, C], sink [H], those of `list_work` and `piece_outputs`; of
    one key/value head k, v [N * P, D], and k_scale, v_scale [N * P] where these are codes."""
    ref = dict(zip(names, refs, strict=True))
    width, queries = ref["table"].shape[1], ref["position"].shape[1]
    # Later tiles have longer contexts: started first, they leave no long tail.
    kv_head, number = lax.div(pl.program_id(0), num_tiles), num_tiles - 1 - lax.rem(pl.program_id(0), num_tiles)
    group = heads // lax.div(pl.num_programs(0), num_tiles)
    tile = tile_of(number, kv_head, queries, heads, group, tiles.queries)

    def visit(at: Piece) -> None:
        row_M = jnp.full(tile.column_M.shape, at.row)
        last_M = plgpu.load(ref["position"].at[row_M, tile.column_M], mask=tile.live_M, other=-1)
        last_M = jnp.minimum(last_M, width * size - 1)
        first_M = last_M - (window - 1) if window else None
        q_MD = load_rows(ref["q"], at.row * (queries * heads) + tile.flat_M, tile.live_M)
        part = walk(q_MD, first_M, last_M, of_table(ref, at.row, size, q_MD.dtype), tiles, at.number)
        store_piece(ref, at, tile, part)

    each_piece(ref, pl.program_id(1), pl.num_programs(1), visit)


# ---------------------------------------------------------------- the list of pieces


def list_work(
    first_R: jax.Array, last_R: jax.Array, window: int, span: int, piece: int, num_tiles: int
) -> tuple[Inputs, int]:
    """The pieces of all rows as one list, and how many programs share it, for each of `num_tiles` tiles of a row whose
    queries have these first and last positions (below 0: they see nothing). Each row has at least one piece. All layers
    of a step have the same list, which XLA makes once.

    int32 `bounds` [R + 1] says where each row's pieces begin in the list, and its end; `first` [R] the number of each
    row's first piece; `row` [programs] the row of each program's first piece. Nothing where rows have one piece.
    """
    rows, pieces = len(last_R), pl.cdiv(span, piece)
    if pieces == 1:
        return {}, rows
    programs = min(rows * pieces, max(rows, WANTED_PROGRAMS // num_tiles))
    last_R = jnp.clip(last_R.astype(jnp.int32), 0, span - 1)
    first_R = jnp.clip(first_R.astype(jnp.int32) - (window - 1), 0, last_R) // piece if window else 0 * last_R
    count_R, ends = last_R // piece - first_R + 1, jnp.arange(rows + 1)[:, None]
    bounds = jnp.sum(jnp.where(jnp.arange(rows) < ends, count_R, 0), axis=1, dtype=jnp.int32)
    begin_P = jnp.arange(programs, dtype=jnp.int32) * bounds[-1] // programs
    row_P = jnp.sum(bounds[1:] <= begin_P[:, None], axis=1, dtype=jnp.int32)
    return {"bounds": (bounds, WHOLE), "first": (first_R, WHOLE), "row": (row_P, WHOLE)}, programs


class Piece(NamedTuple):
    """Piece `number` of a row, at `index` of the list, if there is one; whether it is the row's only piece."""

    row: Any
    number: Any
    index: Any = None
    is_only: Any = True


def each_piece(ref: Mapping[str, Any], program: Any, programs: int | jax.Array, visit: Callable[[Piece], None]) -> None:
    """Inside a kernel: visits the pieces of one of the programs."""
    if "bounds" not in ref:
        visit(Piece(program, 0))
        return
    total = ref["bounds"][ref["first"].shape[0]]

    def one(index: Any, row: Any) -> Any:
        row += (index >= ref["bounds"][row + 1]).astype(jnp.int32)
        begin, end = ref["bounds"][row], ref["bounds"][row + 1]
        visit(Piece(row, ref["first"][row] + index - begin, index, end - begin == 1))
        return row

    begin, end = (lax.div((program + i) * total, programs) for i in range(2))
    lax.fori_loop(begin, end, one, ref["row"][program])


def pool_inputs(k_KNPD: Cached, v_KNPD: Cached, num_tiles: int = 1) -> Inputs:
    """A layer's pool by name, for kernels whose first index counts key/value heads times `num_tiles`."""
    inputs: Inputs = {}
    for name, cached in (("k", k_KNPD), ("v", v_KNPD)):
        for of, array in zip(("", "_scale"), jax.tree.leaves(cached), strict=False):
            heads, blocks, size, dim = array.shape
            dims = (blocks * size,) if of else (blocks * size, dim)
            inputs[name + of] = array.reshape(heads, *dims), of_head(*dims, num_tiles=num_tiles)
    return inputs


def of_head(*dims: int, num_tiles: int = 1) -> pl.BlockSpec:
    """A head's part of an array that has these dims behind its own, for a grid's first index as in `pool_inputs`."""
    return pl.BlockSpec((None, *dims), lambda i, p: (lax.div(i, num_tiles), *(0,) * len(dims)))


def call(
    kernel: Callable[..., None],
    grid: tuple[int, int],
    inputs: Inputs,
    outputs: Outputs,
    warps_and_stages: tuple[int, int],
    interpret: bool,
    aliases: dict[int, int] | None = None,
) -> dict[str, jax.Array]:
    """The outputs of a kernel, by name; it finds its refs by `names`."""
    num_warps, num_stages = warps_and_stages
    found = pl.pallas_call(
        partial(kernel, names=(*inputs, *outputs)),
        grid=grid,
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for _, spec in outputs.values()],
        out_shape=[shape for shape, _ in outputs.values()],
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
    )(*(array for array, _ in inputs.values()))
    return dict(zip(outputs, found, strict=True))


def piece_outputs(rows: int, flat: int, dim: int, dtype: Any, pieces: int) -> Outputs:
    """Attention's output [R * F, D]; where rows may have several pieces also their sums: `Carry` in float32, [S * F, D]
    and [S * F], S = R * `pieces`."""
    shapes = {"out": jax.ShapeDtypeStruct((rows * flat, dim), dtype)}
    if pieces > 1:
        for name, dims in (("sum", (dim,)), ("top", ()), ("total", ())):
            shapes[name] = jax.ShapeDtypeStruct((rows * pieces * flat, *dims), jnp.float32)
    return {name: (shape, WHOLE) for name, shape in shapes.items()}


def store_piece(ref: dict[str, Any], at: Piece, tile: Tile, part: Carry) -> None:
    """Stores attention's output of a row that has one piece, and the piece's sums otherwise."""
    whole = added(start_of(tile.sinks(ref.get("sink")), part[0].shape), part)
    flat = tile.queries * tile.heads
    store_sums(ref["out"], at.row * flat + tile.flat_M, whole, tile.live_M & at.is_only)
    if at.index is not None:
        at_M, mask_M = at.index * flat + tile.flat_M, tile.live_M & ~at.is_only
        store_rows(ref["sum"], at_M, part[0], mask_M)
        for name, number_M in zip(("top", "total"), part[1:], strict=True):
            plgpu.store(ref[name].at[at_M], number_M, mask=mask_M)


def merge(
    made: dict[str, jax.Array], work: Inputs, sinks_H: jax.Array | None, heads: int, interpret: bool
) -> jax.Array:
    """[R * F, D]: adds up the sums of a row's pieces, in order. `made`: a kernel's `piece_outputs`."""
    if not work:
        return made["out"]
    inputs = {f"{name}_in" if name == "out" else name: (array, WHOLE) for name, array in made.items()}
    inputs["bounds"] = work["bounds"]
    if sinks_H is not None:
        inputs["sink"] = sinks_H.astype(jnp.float32), WHOLE
    rows, total = len(work["first"][0]), len(made["out"])
    outputs: Outputs = {"out": (jax.ShapeDtypeStruct(made["out"].shape, made["out"].dtype), WHOLE)}
    grid = pl.cdiv(total // rows, MERGE_QUERIES), rows
    return call(partial(_merge_kernel, heads=heads), grid, inputs, outputs, (4, 1), interpret, {0: 0})["out"]


def _merge_kernel(*refs: Any, names: tuple[str, ...], heads: int) -> None:
    """Refs by name: those of `piece_outputs`, bounds [R + 1], sink [H]. Rows of one piece stay as they are."""
    ref, row = dict(zip(names, refs, strict=True)), pl.program_id(1)
    flat, dim = ref["out"].shape[0] // (ref["bounds"].shape[0] - 1), ref["out"].shape[1]
    tile = tile_of(pl.program_id(0), 0, flat // heads, heads, heads, MERGE_QUERIES)
    begin, end = ref["bounds"][row], ref["bounds"][row + 1]
    is_split = end - begin > 1

    def step(i: Any, carry: Carry) -> Carry:
        parts = []
        for each in range(MERGE_PIECES):  # unrolled: all loads can be under way at once
            index = begin + i * MERGE_PIECES + each
            at_M, mask_M = index * flat + tile.flat_M, tile.live_M & (index < end)
            top_M = plgpu.load(ref["top"].at[at_M], mask=mask_M, other=NEVER)
            parts.append((load_rows(ref["sum"], at_M, mask_M), top_M, load_numbers(ref["total"], at_M, mask_M)))
        for part in parts:
            carry = added(carry, part)
        return carry

    steps = jnp.where(is_split, lax.div(end - begin + MERGE_PIECES - 1, MERGE_PIECES), 0)
    carry = lax.fori_loop(0, steps, step, start_of(tile.sinks(ref.get("sink")), (MERGE_QUERIES, dim)))
    store_sums(ref["out"], row * flat + tile.flat_M, carry, tile.live_M & is_split)


# ---------------------------------------------------------------- inside a kernel


class Tile(NamedTuple):
    """Queries of a tile: the column of each, whether it exists, its head, and its index among [C, H]."""

    column_M: jax.Array
    live_M: jax.Array
    head_M: jax.Array
    flat_M: jax.Array
    queries: int
    heads: int

    def sinks(self, sink_ref: Any) -> jax.Array | None:
        """[M], in base 2."""
        return None if sink_ref is None else plgpu.load(sink_ref.at[self.head_M]) * math.log2(math.e)


def tile_of(number: Any, kv_head: Any, queries: int, heads: int, group: int, size: int) -> Tile:
    """Tile `number` of `size` queries, among the columns of a group."""
    at_M = number * size + jnp.arange(size, dtype=jnp.int32)
    column_M, head_M = lax.div(at_M, group), kv_head * group + lax.rem(at_M, group)
    return Tile(column_M, column_M < queries, head_M, column_M * heads + head_M, queries, heads)


def of_table(ref: dict[str, Any], row: Any, size: int, dtype: Any) -> Load:
    """Loads keys and values of a row's positions, by its block table; codes become numbers in `dtype`."""

    def of_slots(name: str, slot_B: jax.Array, inside_B: jax.Array) -> jax.Array:
        rows_BD = load_rows(ref[name], slot_B, inside_B)
        if (scale := ref.get(f"{name}_scale")) is None:
            return rows_BD
        return (rows_BD.astype(jnp.float32) * load_numbers(scale, slot_B, inside_B)[:, None]).astype(dtype)

    def load(at_B: jax.Array, inside_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        entry_B = lax.div(at_B, size)
        block_B = plgpu.load(ref["table"].at[jnp.full(entry_B.shape, row), entry_B], mask=inside_B, other=0)
        slot_B = block_B * size + lax.rem(at_B, size)
        return of_slots("k", slot_B, inside_B), of_slots("v", slot_B, inside_B)

    return load


def start_of(sink_M: jax.Array | None, shape: tuple[int, ...]) -> Carry:
    """The running softmax of queries that have seen nothing but a sink [M], in base 2, if there is one."""
    zeros, sums = jnp.zeros(shape[:1], jnp.float32), jnp.zeros(shape, jnp.float32)
    return (sums, zeros + NEVER, zeros) if sink_M is None else (sums, sink_M, zeros + 1)


def added(carry: Carry, part: Carry) -> Carry:
    """The running softmax over the positions of both."""
    (sum_MD, top_M, total_M), (part_MD, part_top_M, part_total_M) = carry, part
    new_top_M = jnp.maximum(top_M, part_top_M)
    keep_M, share_M = jnp.exp2(top_M - new_top_M), jnp.exp2(part_top_M - new_top_M)
    sum_MD = sum_MD * keep_M[:, None] + part_MD * share_M[:, None]
    return sum_MD, new_top_M, total_M * keep_M + part_total_M * share_M


def seen(first_M: jax.Array | None, last_M: jax.Array) -> tuple[Any, Any]:
    """The range of positions, without its end, that any query of a tile sees."""
    if first_M is None:
        return 0, jnp.max(last_M) + 1
    first_M = jnp.where(last_M < 0, jnp.iinfo(jnp.int32).max, jnp.maximum(first_M, 0))
    return jnp.min(first_M), jnp.max(last_M) + 1


def walk(
    q_MD: jax.Array,
    first_M: jax.Array | None,
    last_M: jax.Array,
    load: Load,
    tiles: PagedTileSizes,
    piece: Any,
    carry: Carry | None = None,
) -> Carry:
    """A running softmax with a piece's positions, of which each query sees `first` (None: 0) .. `last`.

    Steps in which a query sees nothing change none of its bits: they multiply by one and add zeros.
    """
    begin, end = seen(first_M, last_M)
    steps = tiles.piece // tiles.positions

    def step(i: Any, carry: Carry) -> Carry:
        at_B = i * tiles.positions + jnp.arange(tiles.positions, dtype=jnp.int32)
        inside_B, visible_MB = at_B < end, at_B[None, :] <= last_M[:, None]
        if first_M is not None:
            inside_B, visible_MB = inside_B & (at_B >= begin), visible_MB & (at_B[None, :] >= first_M[:, None])
        return softmax_step(q_MD, *load(at_B, inside_B), visible_MB, *carry)

    low = jnp.maximum(piece * steps, lax.div(begin, tiles.positions)) if first_M is not None else piece * steps
    high = jnp.minimum((piece + 1) * steps, lax.div(end + tiles.positions - 1, tiles.positions))
    return lax.fori_loop(low, high, step, carry or start_of(None, q_MD.shape))


def store_sums(ref: Any, rows: jax.Array, carry: Carry, mask: jax.Array) -> None:
    """Stores the online-softmax result in these rows: zeros where nothing was seen."""
    sum_MD, _, total_M = carry
    store_rows(ref, rows, sum_MD / jnp.where(total_M > 0, total_M, 1)[:, None], mask)


def score_scale(dim: int) -> float:
    """The scale of scores, for a softmax in base 2."""
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
    """One step of the running softmax (`Carry`); everything is visible where `visible_MB` is None."""
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


def load_rows(ref: Any, rows: jax.Array, mask: jax.Array | None) -> jax.Array:
    """[len(rows), D]: these rows of a ref [., D]; zeros, and nothing read, where the mask is False (None: all read)."""
    at, mask = _elements(ref, rows, mask)
    return plgpu.load(at, mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


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
    for any `jax_default_matmul_precision`.
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
