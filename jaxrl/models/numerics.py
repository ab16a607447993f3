"""`actor.numerics=invariant` of a model: the tiles (`jaxrl.kernels.invariant`) and the parts of weights in which it is
computed, so that a token's numbers do not depend on the degree of tensor parallelism either.

Each weight that tensor parallelism splits is cut into `actor.numerics_tp` parts in every layout: a device computes its
own parts one after another. Sums over heads or MLP columns are added in the order of the mesh's own tree, neighbouring
parts first. The trainer computes all parts, with the zeros that pad the rollout's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from jax.sharding import Mesh, PartitionSpec

from jaxrl.kernels.invariant import Cut, InTiles
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import EXPERT_IDS
from jaxrl.models.lora import Lora, is_adapter, merged
from jaxrl.schema.devices import prime_factors
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import entry_axes
from jaxrl.sharding.rules import TENSOR_DIMS, DeclaredWeight, padded_config, rollout_spec


def in_tiles(
    model: ModelConfig,
    parts: int,
    mesh: Mesh | None = None,
    rows: PartitionSpec | None = None,
    layout: Layout | None = None,
    dtype: str | None = None,
) -> InTiles:
    """How a model's layers and its vocabulary are computed in tiles, in `actor.numerics_tp` parts. Raises ValueError if
    the layout splits weights into other parts.

    Args:
      layout: whose devices have parts of the weights; None: each has them whole.
      dtype: of matrices into which adapters are merged for products; None: there are no adapters beside them.
    """
    factors = tuple(prime_factors(parts))
    axes = () if layout is None else layout.tp_axes
    if layout is not None and (sizes := tuple(layout.mesh.shape[axis] for axis in axes)) != factors[: len(axes)]:
        raise ValueError(
            f"actor.numerics_tp ({parts}) must have the tp of a layout ({layout.tp}) as the product of its first prime "
            f"factors {factors}, as its mesh has: {sizes}"
        )
    padded = padded_config(model.base, parts)

    def cut(name: str, weight: DeclaredWeight) -> Cut | None:
        dims = weight.dims[1:] if weight.dims[0] == "layers" else weight.dims
        found = next((i for i, dim in enumerate(dims) if dim in TENSOR_DIMS), None)
        if found is None:
            return None
        split = entry_axes(rollout_spec(weight, layout, padded)[found]) if axes and layout else ()
        return Cut(found, split, "embed" in dims and not name.endswith("_bias"))

    table = padded.weights()
    weights = {**table["layers"], **{name: w for name, w in table.items() if name != "layers"}}
    cuts = {name: own for name, weight in weights.items() if (own := cut(name, weight)) is not None}
    if model.num_experts:
        cuts[EXPERT_IDS] = cuts["down"]._replace(is_matrix=False)
    prepared = None if dtype is None or model.lora is None else _Merged(model.lora, dtype)
    return InTiles(mesh, PartitionSpec() if rows is None else rows, factors, axes, tuple(cuts.items()), prepared)


def merging_exactly(model: ModelConfig, platform: str, *, interpret: bool = False) -> ModelConfig:
    """The model, whose adapters are added to their matrices with the same bits in all programs of a platform;
    `interpret`: as `InTiles.for_platform` takes it."""
    if model.lora is None:
        return model
    multiply = InTiles().for_platform(platform, interpret=interpret).multiply
    return replace(model, lora=replace(model.lora, multiply=multiply))


class _Merged(NamedTuple):
    """Merges adapters into a layer's matrices, as a weight sync does for the rollout."""

    lora: Lora
    dtype: str

    def __call__(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        def one(name: str, weight: Any) -> Any:
            if name not in self.lora.targets:
                return weight
            return merged(self.lora, name, weight, weights).astype(self.dtype)

        return {name: one(name, weight) for name, weight in weights.items() if not is_adapter(name)}


def refuse_invariant(model: ModelConfig, platform: str, parts: int) -> None:
    """Raises ValueError where invariant numerics are not supported; `parts`: `actor.numerics_tp`."""
    what = ""
    if platform not in ("cpu", "gpu"):
        what = f"devices of the kind {platform}: it is built for CPUs and NVIDIA's GPUs"
    elif model.num_experts % parts:
        what = (
            f"a mixture of {model.num_experts} experts per layer: actor.numerics_tp ({parts}) must divide their number"
        )
    if what:
        raise ValueError(f"actor.numerics (invariant) must be fast for {what}")
