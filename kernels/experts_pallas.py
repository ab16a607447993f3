"""Mixtures of experts as Pallas kernels for NVIDIA GPUs whose sums have one order: a token's numbers do not depend on
what other tokens chose, or on how many there are (`actor.numerics=invariant`). `jax.lax.ragged_dot` promises no order.

Pairs of a token and an expert are sorted by expert and cut into blocks of one size, each of one expert. Two kernels
walk the list of blocks: one multiplies with gate and up and applies the activation, one multiplies with down and with a
token's weight for the expert. Each sum runs over all inputs in one program, step by step. In the end a token's experts
are added in ascending order. The number of programs follows from shapes alone: those beyond the last block end at once.

Source: grouped products over sorted pairs, as in MegaBlocks (Gale et al. 2022, arXiv:2211.15841, section 5) and vLLM's
`fused_moe`. Departures: rows are not copied into the order of experts, and the activation is part of the first kernel.

Dims: T tokens, E embed, F mlp, X experts, C experts per token, S blocks of the list, B pairs of a block.
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

from jaxrl.kernels.expert_groups import expert_groups
from jaxrl.kernels.paged_pallas import WHOLE, dot

MOST_TOKENS = 2048
"""That are computed at a time: what each of their experts gives exists at once, in float32."""


class Sizes(NamedTuple):
    """How products are cut, by dtype alone."""

    pairs: int  # of a block
    outputs: int  # of a program
    inputs: int  # of its steps
    num_warps: int
    num_stages: int


def sizes_of(dtype: Any) -> Sizes:
    """A rule of thumb, not measured yet."""
    return Sizes(64, 64, 64, 4, 4) if jnp.dtype(dtype).itemsize == 2 else Sizes(32, 64, 32, 4, 2)


class Blocks(NamedTuple):
    """Pairs of token and expert, numbered token by token, in blocks: [T * C] the pairs by expert, and for each block
    [S] its expert, its beginning in that order, and its number of pairs, 0 behind the last one."""

    order: jax.Array
    expert: jax.Array
    start: jax.Array
    count: jax.Array


def blocks_of(own_TC: jax.Array, num_experts: int, size: int) -> Blocks:
    """The blocks of chosen experts 0 .. X - 1; others are left out."""
    groups = expert_groups(own_TC, num_experts, size)
    block = jnp.arange(own_TC.size // size + min(own_TC.size, num_experts), dtype=jnp.int32)
    # compared with all at once: a search is a loop of small kernels
    found = jnp.searchsorted(groups.ends, block, side="right", method="compare_all")
    expert = jnp.minimum(found, num_experts - 1).astype(jnp.int32)
    done = (block - jnp.where(expert > 0, groups.ends[expert - 1], 0)) * size
    count = jnp.where(block < groups.ends[-1], jnp.minimum(groups.counts[expert] - done, size), 0)
    return Blocks(groups.order.astype(jnp.int32), expert, groups.starts[expert] + done, count)


def mix(
    x_TE: jax.Array,
    own_TC: jax.Array,
    share_TC: jax.Array,
    weights: Mapping[str, jax.Array],
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    first: Any = 0,
    *,
    num_experts: int,
    interpret: bool = False,
) -> jax.Array:
    """[T, E] in float32: for each token the sum of its experts' outputs, times their shares.

    Args:
      own_TC: chosen experts, ascending; those outside 0 .. `num_experts` - 1 are left out.
      weights: `gate`, `up` [Y, E, F] and `down` [Y, F, E] of at least as many experts, in x's dtype; biases [X, F] and
        [X, E] where there are any. first: the one of these that is 0 in `own_TC`.
      activation: (gate, up) -> the input of `down`, in float32. Hashable.
    """
    how = partial(_mix, weights=weights, activation=activation, first=first, count=num_experts, interpret=interpret)
    tokens = len(x_TE)
    if tokens <= MOST_TOKENS:
        return how(x_TE, own_TC, share_TC)
    missing = -tokens % MOST_TOKENS
    rows = [
        jnp.pad(x, [(0, missing), (0, 0)], constant_values=fill).reshape(-1, MOST_TOKENS, x.shape[-1])
        for x, fill in ((x_TE, 0), (own_TC, -1), (share_TC, 0))
    ]
    return lax.map(lambda each: how(*each), tuple(rows)).reshape(-1, x_TE.shape[-1])[:tokens]


def _mix(
    x_TE: jax.Array,
    own_TC: jax.Array,
    share_TC: jax.Array,
    weights: Mapping[str, jax.Array],
    activation: Any,
    first: Any,
    count: int,
    interpret: bool,
) -> jax.Array:
    sizes, (tokens, chosen) = sizes_of(x_TE.dtype), own_TC.shape
    blocks = blocks_of(own_TC, count, sizes.pairs)
    run = partial(_grouped, blocks=blocks, first=first, sizes=sizes, chosen=chosen, interpret=interpret)
    inner = run(x_TE, None, weights, ("gate", "up"), activation, x_TE.dtype)
    each = run(inner, share_TC.reshape(-1), weights, ("down",), None, jnp.float32).reshape(tokens, chosen, -1)
    each = jnp.where(((own_TC >= 0) & (own_TC < count))[..., None], each, 0)
    total = each[:, 0]
    for i in range(1, chosen):
        total += each[:, i]
    return total


def _grouped(
    x: jax.Array,
    share: jax.Array | None,
    weights: Mapping[str, jax.Array],
    names: tuple[str, ...],
    activation: Any,
    dtype: Any,
    *,
    blocks: Blocks,
    first: Any,
    sizes: Sizes,
    chosen: int,
    interpret: bool,
) -> jax.Array:
    """[T * C, O]: rows of tokens [T, I] times their experts' matrices, in the order of blocks, after `activation`; or,
    with shares [T * C], such rows times their experts', times shares, pair by pair."""
    matrices = [weights[name] for name in names]
    (_, inputs, outputs), pairs = matrices[0].shape, len(blocks.order)
    biases = [weights[f"{name}_bias"] for name in names if f"{name}_bias" in weights]
    refs = {
        "x": x,
        **blocks._asdict(),
        "first": jnp.reshape(first, (1,)).astype(jnp.int32),
        **{f"matrix_{i}": matrix.reshape(-1, outputs) for i, matrix in enumerate(matrices)},
        **{f"bias_{i}": bias for i, bias in enumerate(biases)},
        **({} if share is None else {"share": share.astype(jnp.float32)}),
    }
    body = partial(_kernel, names=(*refs, "out"), inputs=inputs, sizes=sizes, chosen=chosen, activation=activation)
    return pl.pallas_call(
        body,
        name=f"_experts_{'_'.join(names)}",
        grid=(pl.cdiv(outputs, sizes.outputs), len(blocks.expert)),
        in_specs=[WHOLE] * len(refs),
        out_specs=WHOLE,
        out_shape=jax.ShapeDtypeStruct((pairs, outputs), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.num_warps, num_stages=sizes.num_stages),
        interpret=interpret,
    )(*refs.values())


def _kernel(*refs: Any, names: tuple[str, ...], inputs: int, sizes: Sizes, chosen: int, activation: Any) -> None:
    """Refs: x [., I], those of `Blocks`, first [1], matrices [Y * I, O], biases [X, O], share [T * C] and out
    [T * C, O]."""
    ref = dict(zip(names, refs, strict=True))
    at_O = pl.program_id(0) * sizes.outputs + jnp.arange(sizes.outputs, dtype=jnp.int32)
    expert, start, count = (plgpu.load(ref[name].at[pl.program_id(1)]) for name in ("expert", "start", "count"))
    place_B, live_B = start + jnp.arange(sizes.pairs, dtype=jnp.int32), jnp.arange(sizes.pairs) < count
    pair_B = plgpu.load(ref["order"].at[place_B], mask=live_B, other=0)
    row_B = place_B if "share" in ref else lax.div(pair_B, chosen)
    matrices = [ref[name] for name in names if name.startswith("matrix_")]
    begin = (expert + plgpu.load(ref["first"].at[jnp.int32(0)])) * inputs
    has_O = at_O < ref["out"].shape[1]

    def load(of: Any, rows: jax.Array, columns: jax.Array, mask: jax.Array) -> jax.Array:
        at = (jnp.broadcast_to(each, mask.shape) for each in (rows[:, None], columns[None, :]))
        return plgpu.load(of.at[tuple(at)], mask=mask, other=0)

    def step(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at_I = i * sizes.inputs + jnp.arange(sizes.inputs, dtype=jnp.int32)
        has_I = at_I < inputs
        x_BI = load(ref["x"], row_B, at_I, live_B[:, None] & has_I[None, :])
        both_IO = has_I[:, None] & has_O[None, :]
        return tuple(
            sum_BO + dot(x_BI, load(matrix, begin + at_I, at_O, both_IO), 1, 0)
            for sum_BO, matrix in zip(sums, matrices, strict=True)
        )

    empty = (jnp.zeros((sizes.pairs, sizes.outputs), jnp.float32),) * len(matrices)
    sums = lax.fori_loop(0, jnp.minimum(count, 1) * pl.cdiv(inputs, sizes.inputs), step, empty)
    for i in range(len(matrices)):
        if (bias := ref.get(f"bias_{i}")) is not None:
            own_O = plgpu.load(bias.at[jnp.full(at_O.shape, expert), at_O], mask=has_O, other=0)
            sums = (*sums[:i], sums[i] + own_O.astype(jnp.float32)[None, :], *sums[i + 1 :])
    if "share" in ref:
        share_B = plgpu.load(ref["share"].at[pair_B], mask=live_B, other=0)
        out_BO = sums[0] * share_B[:, None]
        # each elsewhere: interpreted, those that write nothing put back what was there
        place_B = jnp.where(live_B, pair_B, ref["out"].shape[0] + jnp.arange(sizes.pairs, dtype=jnp.int32))
    else:
        gate, up = (each.astype(ref["x"].dtype).astype(jnp.float32) for each in sums)
        out_BO = activation(gate, up)
    mask = live_B[:, None] & has_O[None, :]
    at = tuple(jnp.broadcast_to(each, mask.shape) for each in (place_B[:, None], at_O[None, :]))
    plgpu.store(ref["out"].at[at], out_BO.astype(ref["out"].dtype), mask=mask)
