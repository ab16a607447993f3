"""Attention over a paged KV cache for Hopper GPUs, written in Pallas on Mosaic GPU: decode, verification and prefill.

It computes the same as `paged_pallas`, cut into the same pieces, in the language that is to follow Triton in JAX. A
program takes a tile of 64 queries of a row and key/value head, and walks a piece's positions in steps of 64. (`wgmma`
multiplies no fewer; a decode step's empty rows cost nothing while it waits for bytes: docs/kernels.md.) Blocks of keys
and values come into shared memory by asynchronous copies, a step or more ahead of the products. Rows of one matrix do
not mix, so the content of a tile's empty rows never matters. Where tables have room for several pieces, a second kernel
adds up the sums of a row's pieces, in their order.

Sources: as `paged_pallas`. Departures from it: a step copies complete blocks or complete parts of them, and where it
reaches beyond what its queries see, it copies a visible part once more. So numbers behind a row's last position in its
block are multiplied by zero: they must be finite, as a pool's are.

Dims: R rows, C queries per row, H query heads, K key/value heads, D head dim; N blocks, P positions per block, W blocks
per table; F queries of a row and key/value head, padding included, T tiles of them, M queries of a tile, B positions of
a step, S pieces in the list.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl.kernels.pieces import Piece, choose_piece, each_piece, list_work
from jaxrl.kernels.reference import PLAIN, Cached, Codes, Rule

HEAD_DIMS = (64, 128)  # a swizzled row of shared memory has 128 bytes
QUERIES = 64  # that `wgmma` multiplies at once
STEP = 64  # positions; docs/kernels.md counts the shared memory
STAGE_BYTES = 1 << 16  # of keys and values in shared memory: two programs fit on a multiprocessor
MAX_STAGES = 4
MERGE_STAGES = 2
NEVER = -1e30  # a score of weight zero; finite, because infinities subtract to nan
BY_QUERY = plgpu.Layout.WGMMA  # of a matrix in registers whose rows are queries
OF_QUERY = plgpu.Layout.WGMMA.reduce(1)  # of one number for each of its rows
OF_POSITION = plgpu.Layout.WGMMA.reduce(0)  # of one for each of its columns
# jax 0.10 wants an index beside a ref, which 0.11 deprecates.
INDEX = ((),) if inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty else ()

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""The state of a running softmax in base 2: the weighted sum of values [M, D], the largest score [M], the sum of
weights [M]."""


def refusal(q: Any, k: Any, v: Any, kv_heads: int, softcap: float = 0.0) -> str | None:
    """As `paged_pallas.refusal`, for these kernels."""
    heads, dim = q.shape[2:]
    if softcap:
        return f"scores are capped ({softcap:g}), which they do not compute"
    if {q.dtype, *(x.dtype for x in (k, v) if not isinstance(x, Codes))} != {jnp.dtype(jnp.bfloat16)}:
        return f"queries, keys and values ({q.dtype}, {k.dtype}, {v.dtype}) must be all bfloat16"
    if dim not in HEAD_DIMS:
        return f"head_dim ({dim}) must be one of {HEAD_DIMS}"
    if heads % kv_heads:
        return f"key/value heads ({kv_heads}) must divide query heads ({heads})"
    if k.shape[2] % 8:
        return f"rollout.block_size ({k.shape[2]}) must be a multiple of 8"
    return None


@partial(jax.jit, static_argnames=("rule", "piece", "interpret"))  # layers of one shape share one trace of the kernels
def paged_attention(
    q_RCHD: jax.Array,
    k_KNPD: Cached,
    v_KNPD: Cached,
    tables_RW: jax.Array,
    positions_RC: jax.Array,
    *,
    rule: Rule = PLAIN,
    sinks_H: jax.Array | None = None,
    piece: int = 0,
    interpret: bool = False,
) -> jax.Array:
    """`paged_pallas.paged_attention`, of what `refusal` takes.

    Args:
      piece: positions that are summed separately, a multiple of 64; 0: `choose_piece` decides.
      interpret: by JAX's interpreter of Mosaic GPU, on a CPU (slow; for tests; jax 0.11 or later).
    """
    if reason := refusal(q_RCHD, k_KNPD, v_KNPD, k_KNPD.shape[0], rule.softcap):
        raise ValueError(f"paged attention's Mosaic GPU kernel: {reason}; use implementation='reference'")
    rows, queries, heads, dim = q_RCHD.shape
    kv_heads, _, size, _ = k_KNPD.shape
    group, span = heads // kv_heads, tables_RW.shape[1] * size
    flat = queries * group
    tiles = pl.cdiv(flat, QUERIES)
    padded = -(-flat // 8) * 8 if tiles == 1 else tiles * QUERIES
    piece = piece or choose_piece(rows * kv_heads, tiles, rows * kv_heads * padded * dim, span)
    assert piece % STEP == 0
    pieces = pl.cdiv(span, piece)

    def tiled(of_query_XF: jax.Array, fill: Any) -> jax.Array:
        """[X, T, M] of [X, C * G]."""
        padding = ((0, 0), (0, tiles * QUERIES - flat))
        return jnp.pad(of_query_XF, padding, constant_values=fill).reshape(-1, tiles, QUERIES)

    last_RTM = tiled(jnp.repeat(jnp.minimum(positions_RC.astype(jnp.int32), span - 1), group, axis=1), -1)
    begin_RTM = jnp.where(last_RTM < 0, span, jnp.maximum(last_RTM - (rule.window - 1), 0)) if rule.window else 0
    begin_RT = jnp.min(begin_RTM, axis=2) if rule.window else jnp.zeros((rows, tiles), jnp.int32)
    end_RT = jnp.max(last_RTM, axis=2) + 1
    first_R = jnp.min(begin_RT, axis=1)
    # Its window is one position: where a row's first piece is, `begin` says, windows included.
    work, programs = list_work(first_R, jnp.max(end_RT, axis=1) - 1, 1, span, piece, kv_heads * tiles)
    lists = {name: array for name, (array, _) in work.items()}
    q_RKFD = jnp.swapaxes(q_RCHD.reshape(rows, queries, kv_heads, group, dim), 1, 2).reshape(rows, kv_heads, flat, dim)
    inputs = {
        "q": jnp.pad(q_RKFD, ((0, 0), (0, 0), (0, padded - flat), (0, 0))),
        "table": tables_RW.astype(jnp.int32),
        "last": last_RTM,
        "begin": begin_RT,
        "end": end_RT,
        **lists,
    }
    for name, cached in (("k", k_KNPD), ("v", v_KNPD)):
        inputs[name] = cached
        if isinstance(cached, Codes):
            # By position, since a copy into shared memory begins at a multiple of 128 bytes: 32 of them.
            scales_KRS = cached.scales[..., 0][:, tables_RW].reshape(kv_heads, rows, span)
            inputs |= {name: cached.codes, f"{name}_scale": jnp.pad(scales_KRS, ((0, 0), (0, 0), (0, -span % STEP)))}
    sinks = {}
    if sinks_H is not None:
        sinks_KF = jnp.tile(sinks_H.astype(jnp.float32).reshape(kv_heads, group) * math.log2(math.e), queries)
        sinks["sink"] = tiled(sinks_KF, 0)
    out = jax.ShapeDtypeStruct((rows, kv_heads, padded, dim), q_RCHD.dtype)
    scratch = scratch_of(size, dim, inputs["k"].dtype if isinstance(k_KNPD, Codes) else None)
    grid = programs, kv_heads * tiles
    attend = partial(_paged_kernel, piece=piece, window=rule.window)
    if pieces == 1:
        made = call(attend, grid, inputs | sinks, {"out": out}, scratch, interpret)
    else:
        sums = {"sum": jax.ShapeDtypeStruct((rows * pieces, kv_heads, padded, dim), jnp.float32)}
        for name in ("top", "total"):
            sums[name] = jax.ShapeDtypeStruct((rows * pieces, kv_heads, tiles, QUERIES), jnp.float32)
        sums = call(attend, grid, inputs, sums, scratch, interpret)
        scratch = {
            "out_smem": matrix((QUERIES, dim), jnp.bfloat16),
            "sum_smem": matrix((MERGE_STAGES, QUERIES, dim), jnp.float32),
            "sum_here": plgpu.Barrier(num_barriers=MERGE_STAGES),
        }
        inputs = sums | {"bounds": lists["bounds"]} | sinks
        made = call(_merge_kernel, (rows, kv_heads * tiles), inputs, {"out": out}, scratch, interpret)
    out_RKCGD = made["out"][:, :, :flat].reshape(rows, kv_heads, queries, group, dim)
    return jnp.swapaxes(out_RKCGD, 1, 2).reshape(q_RCHD.shape)


def scratch_of(size: int, dim: int, code: Any) -> dict[str, Any]:
    """Shared memory and barriers, for blocks of this size; `code`: the dtype of a cache of codes."""
    copies, step_bytes = STEP // math.gcd(size, STEP), 2 * STEP * dim * (2 if code is None else 1)
    # Codes leave room for a step of numbers, which have twice as many bytes.
    stages = min(MAX_STAGES, (STAGE_BYTES - (0 if code is None else 2 * step_bytes)) // step_bytes)
    numbers = matrix((stages if code is None else 1, STEP, dim), jnp.bfloat16)
    here = plgpu.Barrier(num_arrivals=copies + (code is not None), num_barriers=stages)
    scratch = {
        "q_smem": matrix((QUERIES, dim), jnp.bfloat16),
        "weight_smem": matrix((QUERIES, STEP), jnp.bfloat16),
        "shared": plgpu.RefUnion([numbers, numbers], [matrix((QUERIES, dim), jnp.float32)]),
        "q_here": plgpu.Barrier(),
        "k_here": here,
        "v_here": here,
    }
    for name in () if code is None else ("k", "v"):
        scratch[f"{name}_code_smem"] = matrix((stages, STEP, dim), code)
        scratch[f"{name}_scale_smem"] = plgpu.SMEM((stages, STEP), jnp.float32)
    return scratch


def matrix(dims: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory that copies and `wgmma` write and read without conflicts of banks: swizzled by 128 bytes of a row,
    or by the row where it is shorter."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = min(128, dims[-1] * itemsize)
    return plgpu.SMEM(
        dims, dtype, transforms=(plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    )


def call(
    kernel: Callable[..., None],
    grid: tuple[int, int],
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    interpret: bool,
) -> dict[str, jax.Array]:
    """The outputs of a kernel `(refs by name, program, tile, number of programs)`."""
    names = (*inputs, *outputs, *scratch)

    def named(*refs: Any) -> None:
        kernel(dict(zip(names, refs, strict=True)), lax.axis_index("program"), lax.axis_index("tile"), grid[0])

    named.__name__ = getattr(kernel, "func", kernel).__name__
    found = plgpu.kernel(
        named,
        out_type=tuple(outputs.values()),
        grid=grid,
        grid_names=("program", "tile"),
        scratch_types=tuple(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=vars(plgpu)["InterpretGPUParams"]() if interpret else None,
    )(*inputs.values())
    return dict(zip(outputs, found, strict=True))


def _paged_kernel(ref: dict[str, Any], program: Any, tile: Any, programs: int, *, piece: int, window: int) -> None:
    """Refs by name: q [R, K, F, D], k, v [K, N, P, D], table [R, W], last [R, T, M], begin, end [R, T], those of
    `list_work`, sink [K, T, M]; where k and v are codes k_scale, v_scale [K, R, W * P]; out [R, K, F, D], or sum [S, K,
    F, D] and top, total [S, K, T, M]."""
    size, dim = ref["k"].shape[2:]
    (k_smem, v_smem), (sum_smem,) = ref["shared"]
    smem, has_codes = {"k": k_smem, "v": v_smem}, "k_scale" in ref
    code_smem = {name: ref[f"{name}_code_smem"] if has_codes else smem[name] for name in smem}
    tiles, stages, filled = ref["last"].shape[1], code_smem["k"].shape[0], min(ref["q"].shape[2], QUERIES)
    chunk = math.gcd(size, STEP)
    # Later tiles have longer contexts: started first, they leave no long tail.
    head, number = lax.div(tile, jnp.int32(tiles)), tiles - 1 - lax.rem(tile, jnp.int32(tiles))
    here = pl.ds(number * QUERIES, filled)

    def visit(at: Piece) -> None:
        plgpu.copy_gmem_to_smem(ref["q"].at[at.row, head, here], ref["q_smem"].at[pl.ds(0, filled)], ref["q_here"])
        last_M = load(ref["last"].at[at.row, number], OF_QUERY)
        begin, end = ref["begin"][at.row, number], ref["end"][at.row, number]
        low = jnp.maximum(at.number * (piece // STEP), lax.div(begin, jnp.int32(STEP)))
        high = jnp.minimum((at.number + 1) * (piece // STEP), lax.div(end + STEP - 1, jnp.int32(STEP)))

        def fetch(step: Any) -> None:
            slot = lax.rem(step, jnp.int32(stages))
            for part in range(0, STEP, chunk):
                seen = jnp.clip(
                    lax.div(step * STEP + part, jnp.int32(chunk)),
                    lax.div(begin, jnp.int32(chunk)),
                    lax.div(end - 1, jnp.int32(chunk)),
                )
                position = seen * chunk
                block = ref["table"][at.row, lax.div(position, jnp.int32(size))]
                there = head, block, pl.ds(lax.rem(position, jnp.int32(size)), chunk)
                for name, into in code_smem.items():
                    into = into.at[slot, pl.ds(part, chunk)]
                    plgpu.copy_gmem_to_smem(ref[name].at[there], into, ref[f"{name}_here"].at[slot])
            for name in smem if has_codes else ():
                scales, into = ref[f"{name}_scale"], ref[f"{name}_scale_smem"].at[slot]
                there = head, at.row, pl.ds(step * STEP, STEP)
                plgpu.copy_gmem_to_smem(scales.at[there], into, ref[f"{name}_here"].at[slot])

        def arrived(name: str, slot: Any) -> tuple[Any, jax.Array | None]:
            """Keys or values of a step, and the scale of each position's product, [M, B]."""
            plgpu.barrier_wait(ref[f"{name}_here"].at[slot])
            if not has_codes:
                return smem[name].at[slot], None
            code_BD = load(code_smem[name].at[slot], BY_QUERY)
            if code_BD.dtype != jnp.int8:
                code_BD = code_BD.astype(jnp.float32)  # a GPU cannot turn float8 into bfloat16 at once
            smem[name].at[0][...] = code_BD.astype(jnp.bfloat16)
            plgpu.commit_smem()
            scale_B = load(ref[f"{name}_scale_smem"].at[slot], OF_POSITION)
            return smem[name].at[0], lax.broadcast_in_dim(scale_B, (QUERIES, STEP), (1,))

        def step(i: Any, carry: Carry) -> Carry:
            sum_MD, top_M, total_M = carry
            slot = lax.rem(i, jnp.int32(stages))
            pl.when(i + (stages - 1) < high)(lambda: fetch(i + (stages - 1)))
            k_BD, scale_MB = arrived("k", slot)
            scores_MB = product(ref["q_smem"], k_BD.transpose((1, 0)), STEP) * (dim**-0.5 * math.log2(math.e))
            if scale_MB is not None:
                scores_MB *= scale_MB
            at_MB = plgpu.broadcasted_iota(jnp.int32, scores_MB.shape, 1, layout=BY_QUERY) + i * STEP
            visible_MB = at_MB <= by_query(last_M, STEP)
            if window:
                visible_MB &= at_MB >= by_query(last_M - (window - 1), STEP)
            scores_MB = jnp.where(visible_MB, scores_MB, NEVER)
            new_top_M = jnp.maximum(top_M, jnp.max(scores_MB, axis=1))
            # Where nothing has been seen yet, top is NEVER and the difference 0: the mask decides, not the exponential.
            weights_MB = jnp.where(visible_MB, jnp.exp2(scores_MB - by_query(new_top_M, STEP)), 0.0)
            keep_M = jnp.exp2(top_M - new_top_M)
            total_M = total_M * keep_M + jnp.sum(weights_MB, axis=1)
            v_BD, scale_MB = arrived("v", slot)
            if scale_MB is not None:
                weights_MB = jnp.where(visible_MB, weights_MB * scale_MB, 0.0)
            ref["weight_smem"][...] = weights_MB.astype(jnp.bfloat16)
            plgpu.commit_smem()
            sum_MD = sum_MD * by_query(keep_M, dim) + product(ref["weight_smem"], v_BD, dim)
            return sum_MD, new_top_M, total_M

        for ahead in range(stages - 1):
            pl.when(low + ahead < high)(partial(fetch, low + ahead))
        plgpu.barrier_wait(ref["q_here"])
        part = lax.fori_loop(low, high, step, start(None, dim))
        if at.index is None:
            sink = ref["sink"].at[head, number] if "sink" in ref else None
            store(ref["q_smem"], ref["out"].at[at.row, head, here], divided(added(start(sink, dim), part)))
        else:
            store(sum_smem, ref["sum"].at[at.index, head, here], part[0])
            for name, number_M in zip(("top", "total"), part[1:], strict=True):
                ref[name].at[at.index, head, number][...] = number_M

    each_piece(ref, program, programs, visit)


def _merge_kernel(ref: dict[str, Any], row: Any, tile: Any, rows: int) -> None:
    """Refs by name: sum [S, K, F, D], top, total [S, K, T, M], bounds [R + 1], sink [K, T, M]; out [R, K, F, D]."""
    del rows
    tiles, dim, filled = ref["top"].shape[2], ref["out"].shape[3], min(ref["out"].shape[2], QUERIES)
    head, number = lax.div(tile, jnp.int32(tiles)), lax.rem(tile, jnp.int32(tiles))
    here, begin, end = pl.ds(number * QUERIES, filled), ref["bounds"][row], ref["bounds"][row + 1]

    def fetch(index: Any) -> None:
        slot = lax.rem(index, jnp.int32(MERGE_STAGES))
        into = ref["sum_smem"].at[slot, pl.ds(0, filled)]
        plgpu.copy_gmem_to_smem(ref["sum"].at[index, head, here], into, ref["sum_here"].at[slot])

    def step(index: Any, carry: Carry) -> Carry:
        slot = lax.rem(index, jnp.int32(MERGE_STAGES))
        pl.when(index + 1 < end)(lambda: fetch(index + 1))
        top_M, total_M = (load(ref[name].at[index, head, number], OF_QUERY) for name in ("top", "total"))
        plgpu.barrier_wait(ref["sum_here"].at[slot])
        sum_MD = load(ref["sum_smem"].at[slot], BY_QUERY)
        plgpu.commit_smem()  # the next copy into that slot comes after this load
        return added(carry, (sum_MD, top_M, total_M))

    fetch(begin)
    sink = ref["sink"].at[head, number] if "sink" in ref else None
    carry = lax.fori_loop(begin, end, step, start(sink, dim))
    store(ref["out_smem"], ref["out"].at[row, head, here], divided(carry))


# ---------------------------------------------------------------- inside a kernel


def load(ref: Any, layout: Any) -> jax.Array:
    """All of a ref, in this layout of registers."""
    return plgpu.load(ref, *INDEX, layout=layout, optimized=False)


def by_query(number_M: jax.Array, columns: int) -> jax.Array:
    """[M, columns]."""
    return lax.broadcast_in_dim(number_M, (QUERIES, columns), (0,))


def product(a: Any, b: Any, columns: int) -> jax.Array:
    """[M, columns] of two refs of shared memory, summed in float32."""

    def multiply(into: Any) -> jax.Array:
        plgpu.wgmma(into, a, b)
        return into[...]

    return pl.run_scoped(multiply, plgpu.ACC((QUERIES, columns), jnp.float32))


def start(sink: Any, dim: int) -> Carry:
    """The running softmax of queries that have seen nothing but a sink (ref [M], in base 2), if there is one."""

    def full(dims: tuple[int, ...], number: float, layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full(dims, number, jnp.float32), layout)

    top_M = full((QUERIES,), NEVER, OF_QUERY) if sink is None else load(sink, OF_QUERY)
    return full((QUERIES, dim), 0, BY_QUERY), top_M, full((QUERIES,), 0 if sink is None else 1, OF_QUERY)


def added(carry: Carry, part: Carry) -> Carry:
    """The running softmax over the positions of both."""
    (sum_MD, top_M, total_M), (part_MD, part_top_M, part_total_M) = carry, part
    new_top_M, dim = jnp.maximum(top_M, part_top_M), sum_MD.shape[1]
    keep_M, share_M = jnp.exp2(top_M - new_top_M), jnp.exp2(part_top_M - new_top_M)
    sum_MD = sum_MD * by_query(keep_M, dim) + part_MD * by_query(share_M, dim)
    return sum_MD, new_top_M, total_M * keep_M + part_total_M * share_M


def divided(carry: Carry) -> jax.Array:
    """The online-softmax result: zeros where nothing was seen."""
    sum_MD, _, total_M = carry
    return sum_MD / by_query(jnp.where(total_M > 0, total_M, 1.0), sum_MD.shape[1])


def store(smem: Any, gmem: Any, numbers_MD: jax.Array) -> None:
    """Stores as many rows as the ref of global memory has, by way of shared memory."""
    smem[...] = numbers_MD.astype(smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, gmem.shape[0])], gmem)
    plgpu.wait_smem_to_gmem(0)
