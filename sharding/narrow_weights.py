"""Rollout weights in a byte a number: the matrices of layers as codes, and a factor for each output of a matrix.

Source: symmetric quantisation per output channel, as in LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339) for whole
numbers and in Micikevicius et al. 2022 (arXiv:2209.05433) for float8. Departure: activations keep their type, so a
product is that of the codes, which every type of activations holds exactly, and then takes the factors.

`int8`: whole numbers from -127 to 127, rounded to nearest. `fp8`: float8_e4m3fn, up to 448. An output's factor follows
from the trained weights of all its inputs, so it is the same in every layout, and a code as well.

Norms, biases, routers, embedding and head stay in the rollout's type: an error of the head is one of the
log-probabilities themselves, and with tied embeddings both are one array.

In a layer of the rollout form codes stand under the matrix's own name, in its shape; factors, float32 in the shape of
its outputs, under that with `_scale` behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.schema.limits import Narrow

SCALE = "_scale"
_CODES: Mapping[str, tuple[Any, float]] = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}
_SMALLEST = 1e-35  # of magnitudes: neither the factor nor its inverse leaves the range of float32
_SPLIT = {"heads", "kv_heads", "mlp"}  # a side of each matrix; routers, norms and biases have none beside `embed`


@dataclass(frozen=True, slots=True)
class Scale:
    """The factors of a matrix of layers as a weight: it has the matrix's dims without those of inputs."""

    shape: tuple[int, ...]
    dims: tuple[str, ...]

    @classmethod
    def of(cls, weight: Any) -> Scale:
        kept = [i for i in range(len(weight.dims)) if i - 1 not in inputs(weight)]
        return cls(tuple(weight.shape[i] for i in kept), tuple(weight.dims[i] for i in kept))


def inputs(weight: Any) -> tuple[int, ...]:
    """The dims of a layer's matrix (`jaxrl.models.weights.Weight`) that a product sums over; () for a weight that is
    not quantised."""
    dims = weight.dims[1:]
    if weight.dims[0] != "layers" or "embed" not in dims or not _SPLIT & {*dims}:
        return ()
    at, first = dims.index("embed"), int(dims[0] == "experts")
    return (at,) if at == first else tuple(range(first, at))


def codes_of(kind: Narrow, array: jax.Array, axes: int | tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Codes in the array's shape, and the largest magnitudes over `axes`, without those dims. The value is the code
    times its magnitude, divided by `largest(kind)`. The array is in at least float32."""
    dtype, most = _CODES[kind]
    magnitudes = jnp.max(jnp.abs(array), axis=axes, keepdims=True, initial=_SMALLEST)
    scaled = array * (most / magnitudes)
    codes = (jnp.round(scaled) if kind == "int8" else scaled).astype(dtype)
    return codes, jnp.squeeze(magnitudes, axes)


def largest(kind: Narrow) -> float:
    return _CODES[kind][1]


def dtype_of(kind: Narrow) -> Any:
    return _CODES[kind][0]


def narrowed(kind: Narrow, array: jax.Array, axes: int | tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Codes in the array's shape, and float32 factors without the dims `axes`, over which numbers share one."""
    codes, magnitudes = codes_of(kind, array.astype(jnp.promote_types(array.dtype, jnp.float32)), axes)
    return codes, (magnitudes / largest(kind)).astype(jnp.float32)


def scale_shardings(weights: Mapping[str, Any], shardings: Mapping[str, NamedSharding]) -> dict[str, NamedSharding]:
    """The shardings of factors by name, derived from a layer's matrices with features last. An output's factor is where
    the output is, replicated on all devices that have some of its inputs."""
    found = {}
    for name, weight in weights.items():
        if left_out := inputs(weight):
            spec = shardings[name].spec
            entries = [entry for i, entry in enumerate(spec) if i not in left_out]
            found[name + SCALE] = NamedSharding(shardings[name].mesh, PartitionSpec(*entries))
    return found
