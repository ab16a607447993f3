"""An optimizer's moments in fewer bytes: in bfloat16, or in one byte a number with a magnitude for each block.

Source: Dettmers et al. 2022 (arXiv:2110.02861) for 8 bits, blocks, and the small weights that keep their type;
stochastic rounding as in Gupta et al. 2015 (arXiv:1502.02551). Departures: codes are logarithmic, in place of the
paper's dynamic tree. There are eight to an octave below the block's largest magnitude: first moments, with a sign,
reach down to 2^-15.75 of it, second moments to 2^-31.75. So each number has the same relative error, which matters
because one moment is divided by the root of the other. A linear code would round small second moments to 0, and the
update would have no bound; here only a second moment of 0 has code 0. Rounding is stochastic: a second moment moves by
a thousandth per update, and would not move if it were rounded to the nearest code. It is unbiased, except for second
moments below the range.

Random bits depend only on the number of updates, the weight, its layer and the number's position, and blocks only on
the weight (`block_of`). So numbers and checkpoints do not depend on the number of devices.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxrl.models.weights import Weight
from jaxrl.sharding.rules import TENSOR_DIMS

Tree = Any
StateType = Literal["float32", "bfloat16", "int8"]

_MOST = 256  # numbers of a block
_FEWEST = 32  # less would be no saving
_SMALLEST = 4096  # numbers of a weight, or of a layer's share: bitsandbytes' `min_8bit_size`
_PER_OCTAVE = 8


class Block(NamedTuple):
    """The dim of a weight along which blocks lie, and the numbers in a block."""

    dim: int
    size: int


class Codes(NamedTuple):
    """A moment in one byte a number."""

    codes: jax.Array  # of the weight's shape; int8, or uint8 for second moments, which have no sign
    absmax: jax.Array  # the largest magnitude of each block, float32; the same shape except for the blocks' dim


def block_of(weight: Weight) -> Block | None:
    """The blocks of a weight's moments, of up to 256 numbers: along `head_dim`, which is never split, or the longest
    dim that tensor parallelism does not split (training may: `axes_of_dims`). None: the weight is too small or has no
    such dim, and its moments keep their type."""
    stacked = weight.dims[0] == "layers"
    sizes = {i: weight.shape[i] for i, dim in enumerate(weight.dims) if i >= stacked and dim not in TENSOR_DIMS}
    if not sizes:
        return None
    dim = max(sizes, key=lambda i: (weight.dims[i] == "head_dim", sizes[i]))
    size = max(n for n in range(1, _MOST + 1) if sizes[dim] % n == 0)
    return Block(dim, size) if size >= _FEWEST and prod(weight.shape[stacked:]) >= _SMALLEST else None


def kept_as(
    dtype: StateType, inner: optax.GradientTransformation, blocks: Mapping[str, Block | None]
) -> optax.GradientTransformationExtraArgs:
    """`inner` (`scale_by_adam`, `scale_by_muon`), with its moments `mu` and `nu` in `dtype` between updates.

    Its update takes `place`, the index of a layer where it is called with one layer alone. `blocks`: for int8, of each
    weight by its path (`layers/q`).
    """

    def packed(state: Tree, count: Any, place: Any) -> Tree:
        """`count` None: the moments are 0."""

        def one(path: Any, x: jax.Array) -> Any:
            if (found := _moment(path)) is None or (dtype == "int8" and blocks[found[1]] is None):
                return x
            is_square, name = found

            def rounded(bits: jax.Array) -> Any:
                block = blocks.get(name)
                return encoded(x, block, bits, is_square=is_square) if block else _rounded(x, bits)

            if count is None:
                bits = jax.ShapeDtypeStruct(x.shape, jnp.uint32)
                return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(rounded, bits))
            words = jnp.uint32(zlib.crc32(name.encode())) ^ count.astype(jnp.uint32), jnp.asarray(place, jnp.uint32)
            bits = jax.random.bits(jax.random.wrap_key_data(jnp.stack(words), impl="threefry2x32"), x.shape, jnp.uint32)
            return rounded(bits & 0xFFFF if is_square else bits >> 16)  # XLA draws once for both

        return jax.tree_util.tree_map_with_path(one, state)

    def unpacked(state: Tree, updates: Tree) -> Tree:
        wide = jnp.result_type(*jax.tree.leaves(updates), jnp.float32) if jax.tree.leaves(updates) else jnp.float32

        def one(path: Any, x: Any) -> jax.Array:
            if _moment(path) is None:
                return x
            return (decoded(x) if isinstance(x, Codes) else x).astype(wide)

        return jax.tree_util.tree_map_with_path(one, state, is_leaf=lambda x: isinstance(x, Codes))

    def init(params: Tree) -> Tree:
        return packed(inner.init(params), None, 0)

    def update(updates: Tree, state: Tree, params: Tree = None, *, place: Any = 0, **_: Any) -> Any:
        count = state.count
        updates, state = inner.update(updates, unpacked(state, updates), params)
        return updates, packed(state, count, place)

    return optax.GradientTransformationExtraArgs(init, update)


def _moment(path: Any) -> tuple[bool, str] | None:
    """(whether it is the second moment, the weight's path) of a leaf of a state; None for other leaves."""
    for i, key in enumerate(path):
        if getattr(key, "name", None) in ("mu", "nu"):
            return key.name == "nu", jax.tree_util.keystr(path[i + 1 :], simple=True, separator="/")
    return None


def _rounded(x: jax.Array, bits: jax.Array) -> jax.Array:
    """To bfloat16, up with the probability that makes it unbiased. `bits`: 16 random ones, uint32."""
    raised = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) + bits
    return lax.bitcast_convert_type(raised & jnp.uint32(0xFFFF0000), jnp.float32).astype(jnp.bfloat16)


def encoded(x: jax.Array, block: Block, bits: jax.Array, *, is_square: bool) -> Codes:
    """Codes of a moment, rounded by 16 random bits each."""
    magnitudes, top = jnp.abs(x.astype(jnp.float32)), 255 if is_square else 127
    split = (*x.shape[: block.dim], -1, block.size, *x.shape[block.dim + 1 :])
    absmax = magnitudes.reshape(split).max(block.dim + 1)
    ratios = magnitudes / jnp.repeat(jnp.where(absmax == 0, 1, absmax), block.size, block.dim)
    drawn = (bits.astype(jnp.float32) + 0.5) / 65536
    exact = top + _PER_OCTAVE * jnp.log2(ratios)
    below = jnp.floor(exact)
    share = (jnp.exp2((exact - below) / _PER_OCTAVE) - 1) / (2 ** (1 / _PER_OCTAVE) - 1)
    smallest = 2 ** ((1 - top) / _PER_OCTAVE)
    first = ratios > 0 if is_square else drawn < ratios / smallest
    codes = jnp.where(ratios < smallest, first, jnp.minimum(below + (drawn < share), top))
    if is_square:
        return Codes(codes.astype(jnp.uint8), absmax)
    return Codes((codes * jnp.sign(x)).astype(jnp.int8), absmax)


def decoded(kept: Codes) -> jax.Array:
    """The moment of these codes, float32."""
    codes, absmax = kept
    (dim,) = (i for i, size in enumerate(codes.shape) if size != absmax.shape[i])
    top = 255 if codes.dtype == jnp.uint8 else 127
    values = codes.astype(jnp.float32)
    magnitudes = jnp.exp2((jnp.abs(values) - top) / _PER_OCTAVE) * jnp.sign(values)
    return magnitudes * jnp.repeat(absmax, codes.shape[dim] // absmax.shape[dim], dim)
