"""Low-rank adapters: beside a frozen matrix W of a layer, A and B, so that W + s·A·B is what the layer multiplies with.

Source: Hu et al. 2021 (arXiv:2106.09685): s = alpha / rank, A random and B zero at the start; s = alpha / sqrt(rank) as
an option (Kalajdzievski 2023, arXiv:2312.03732). Names of options, the start of A (uniform, at most one over the square
root of its inputs) and names in files are those of peft.

An adapter's two weights are declared in the model's table like all others, under the matrix's name with `_lora_a`
[L, in..., R] and `_lora_b` [L, R, out...]. Matrices that share a tensor in files have an adapter each; peft has one for
the tensor, whose A becomes that of each, and B's rows theirs.

Letters: L layers, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxrl.models.weights import Weight

if TYPE_CHECKING:
    import jax

    from jaxrl.kernels.by_rows import Multiply

A, B = "_lora_a", "_lora_b"
ALL_LINEAR = "all-linear"
_IN_FILES = "base_model.model."


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapters of a decoder's layers."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of matrices, as in the model's table
    use_rslora: bool = False
    dropout: float = 0.0  # share of an adapter's inputs that is dropped where gradients are computed
    multiply: Multiply | None = None  # A and B where an adapter is added to its matrix; None: by the compiler

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def matrices(layers: Mapping[str, Weight]) -> dict[str, str]:
    """The matrices of a layer that may have adapters: by name in files (`q_proj`), the name in the table."""
    return {_module(name, weight).rpartition(".")[2]: name for name, weight in layers.items() if weight.is_linear}


def _module(name: str, weight: Weight) -> str:
    """The module of a matrix in files; for one that shares a tensor, its name in files that keep it apart."""
    module = weight.hf_name.removesuffix(".weight")
    return module if weight.file_rows is None else f"{module.rpartition('.')[0]}.{name}_proj"


def chosen(
    layers: Mapping[str, Weight], target_modules: Sequence[str], exclude_modules: Sequence[str]
) -> tuple[str, ...]:
    """The matrices that the options name, in the order of the table. Raises ValueError for an unknown module, and where
    no matrix is left."""
    known = matrices(layers)
    for option, names in (("target_modules", target_modules), ("exclude_modules", exclude_modules)):
        for name in names:
            if name not in known and not (option == "target_modules" and name == ALL_LINEAR):
                raise ValueError(
                    f"model.{option} names {name!r}, and the layers of this model have {', '.join(known)} "
                    f"({ALL_LINEAR}: all of them)"
                )
    wanted = {*known} if ALL_LINEAR in target_modules else {*target_modules}
    found = tuple(known[name] for name in known if name in wanted and name not in exclude_modules)
    if not found:
        raise ValueError("model.target_modules and model.exclude_modules leave no matrix that has an adapter")
    return found


def adapters(lora: Lora, layers: Mapping[str, Weight]) -> dict[str, Weight]:
    found: dict[str, Weight] = {}
    for name in lora.targets:
        weight = layers[name]
        split = 1 + weight.num_inputs
        module = f"{_IN_FILES}{weight.hf_name.removesuffix('.weight')}."  # matrices of one tensor: one A, rows of one B
        outputs, inputs = weight.hf_shape
        found[name + A] = replace(
            weight,
            shape=(*weight.shape[:split], lora.rank),
            dims=(*weight.dims[:split], "rank"),
            init="inputs",
            hf_name=f"{module}lora_A.weight",
            gguf_name="",
            hf_shape=(lora.rank, inputs),
            file_rows=None,
        )
        found[name + B] = replace(
            weight,
            shape=(weight.shape[0], lora.rank, *weight.shape[split:]),
            dims=("layers", "rank", *weight.dims[split:]),
            init="zeros",
            hf_name=f"{module}lora_B.weight",
            gguf_name="",
            hf_shape=(outputs, lora.rank),
        )
    return found


def is_adapter(path: str) -> bool:
    return path.endswith((A, B))


def is_trained(path: str) -> bool:
    """Whether a model with adapters trains this weight: adapters and a critic's head."""
    return is_adapter(path) or path == "score"


def without_adapters(params: Mapping[str, Any]) -> dict[str, Any]:
    return {**params, "layers": {name: x for name, x in params["layers"].items() if not is_adapter(name)}}


def adapters_alone(params: Mapping[str, Any]) -> dict[str, Any]:
    return {"layers": {name: x for name, x in params["layers"].items() if is_adapter(name)}}


def with_adapters(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {**base, "layers": {**base["layers"], **own["layers"]}}


def merged(lora: Lora, name: str, matrix: jax.Array, layer: Mapping[str, Any]) -> jax.Array:
    """A matrix of one layer, [in..., out...], plus its adapter, added in at least float32, if it has one."""
    import jax.numpy as jnp  # what only looks at a model loads without
    from jax.lax import optimization_barrier

    if name + A not in layer:
        return matrix
    wide = jnp.result_type(matrix, layer[name + A], jnp.float32)
    matrix, a, b = (x.astype(wide) for x in (matrix, layer[name + A], layer[name + B]))
    if lora.multiply is None:
        return matrix + lora.scale * jnp.tensordot(a, b, 1, precision="highest")
    product = lora.multiply(a.reshape(-1, lora.rank), b.reshape(lora.rank, -1)).reshape(matrix.shape)
    # each rounded by itself: a compiler may join a product with the addition behind it, in one program of two
    matrix, product = optimization_barrier((matrix, lora.scale * product))
    return matrix + product
