"""Frozen matrices in few bits, in the formats of bitsandbytes: codes, and the largest magnitude of each block of them.

Source: `nf4` is QLoRA's NormalFloat (Dettmers et al. 2023, arXiv:2305.14314): 16 values for blocks of 64 inputs of an
output, two codes a byte, the first in the upper half. `int8` is that of LLM.int8() (Dettmers et al. 2022,
arXiv:2208.07339): whole numbers from -127 to 127, each output's inputs a block. Departures: the magnitudes are float32
(no double quantisation), and no outliers are left out of int8. Matrices are dequantised before they are multiplied.

In training form codes [L, O, ...] stand under the matrix's own name, and magnitudes [L, O, blocks] under that with
`_absmax` behind it. O and I, outputs and inputs, are in the order of Hugging Face files, which is bitsandbytes'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxrl.models.weights import Weight
from jaxrl.schema.limits import Quantization

if TYPE_CHECKING:
    import jax

ABSMAX = "_absmax"
BLOCK = 64
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values that codes stand for: quantiles of a normal distribution, zero among them."""


def quantized(kind: Quantization, layers: Mapping[str, Weight]) -> dict[str, Weight]:
    """The table of layers with quantised matrices. Raises ValueError for a matrix that has no whole blocks."""
    found: dict[str, Weight] = {}
    for name, weight in layers.items():
        if kind == "none" or not weight.is_linear:
            found[name] = weight
            continue
        outputs, inputs = weight.hf_shape
        if kind == "nf4" and inputs % BLOCK:
            raise ValueError(
                f"model.base_quantization=nf4 has blocks of {BLOCK} inputs, and "
                f"{weight.hf_name.split('.', 3)[-1].removesuffix('.weight')} has {inputs}: use int8"
            )
        dims = ("layers", weight.dims[1 + weight.num_inputs], weight.dims[1])
        sizes = {"nf4": (inputs // 2, inputs // BLOCK), "int8": (inputs, 1)}[kind]
        for each, size, dtype in zip((name, name + ABSMAX), sizes, (_CODES[kind], "float32"), strict=True):
            found[each] = Weight((weight.shape[0], outputs, size), dims, "zeros", "", "", (outputs, size), dtype=dtype)
    return found


_CODES = {"nf4": "uint8", "int8": "int8"}


def quantized_layer(kind: Quantization, layers: Mapping[str, Weight], own: Mapping[str, jax.Array]) -> dict[str, Any]:
    """One layer's weights with their matrices quantised; `layers` is the plain table."""
    found = dict(own)
    for name, weight in layers.items():
        if kind != "none" and weight.is_linear:
            found[name], found[name + ABSMAX] = quantize(kind, weight.to_file(own[name]))
    return found


def quantize(kind: Quantization, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes and magnitudes of a matrix [O, I]."""
    import jax.numpy as jnp  # what only looks at a model loads without

    from jaxrl.sharding.narrow_weights import codes_of

    wide = matrix.astype(jnp.float32)
    if kind == "int8":
        codes, magnitudes = codes_of("int8", wide, 1)
        return codes, magnitudes[:, None]
    outputs = matrix.shape[0]
    blocks = wide.reshape(outputs, -1, BLOCK)
    magnitudes = jnp.abs(blocks).max(-1)
    divisors = jnp.where(magnitudes == 0, 1, magnitudes)[..., None]
    values = jnp.asarray(NF4, jnp.float32)
    codes = jnp.searchsorted((values[1:] + values[:-1]) / 2, blocks / divisors, method="compare_all")
    pairs = codes.astype(jnp.uint8).reshape(outputs, -1, 2)
    return pairs[..., 0] << 4 | pairs[..., 1], magnitudes


def dequantize(codes: jax.Array, magnitudes: jax.Array) -> jax.Array:
    """The matrix [O, I] of codes and magnitudes, in float32."""
    import jax.numpy as jnp

    if codes.dtype == jnp.uint8:
        pairs = jnp.stack([codes >> 4, codes & 15], axis=-1)
        values = jnp.take(jnp.asarray(NF4, jnp.float32), pairs, mode="clip")
    else:
        values = codes.astype(jnp.float32) / 127
    blocks = values.reshape(*magnitudes.shape, -1) * magnitudes[..., None]
    return blocks.reshape(codes.shape[0], -1)
