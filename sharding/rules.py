"""How each weight is split in training and in rollout, and how it gets from one form to the other.

Training splits a weight's tensor dim over all axes, nested in the order (x0, x1, ...), or the other side of its matrix
where heads are too few; a rollout layout splits the tensor dim over a prefix of them; so a weight sync is an all-gather
and a cast. Query and key/value heads that do not divide into whole groups are padded with zero heads; MLP columns and
vocabulary rows likewise; training never sees them. Adapters are merged into their matrices on the way, and quantised
weights (`jaxrl.sharding.narrow_weights`) are quantised before they are gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.schema.devices import prime_factors
from jaxrl.schema.limits import Narrow
from jaxrl.sharding.fused_projections import can_fuse, fuse, fused_shardings
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import dividing_factors, dividing_prefix, entry_axes, nested_axes
from jaxrl.sharding.narrow_weights import SCALE, Scale, inputs, narrowed, scale_shardings

TENSOR_DIMS = ("heads", "kv_heads", "experts", "mlp", "vocab")
"""The dims that tensor parallelism splits; a weight has at most one of them, but for those of experts: their number is
split first, and `mlp` over the axes that are left."""

Tree = dict[str, Any]


DeclaredWeight = Any
"""A `jaxrl.models.weights.Weight`, which this room cannot import."""
Model = Any
"""A `jaxrl.models.config.ModelConfig`: its sizes, `base`, `weights()` and `merged()` are read."""


class Form(TypedDict, total=False):
    """How rollout weights lie, beside their layout."""

    features_first: bool  # matrices as [out..., in...]
    fused_projections: bool  # `jaxrl.sharding.fused_projections`
    quantization: Narrow  # of layers' matrices (`jaxrl.sharding.narrow_weights`)


def pad_heads(num_heads: int, num_kv_heads: int, tp: int) -> tuple[int, int]:
    """The fewest (query, key/value) heads with which attention shards at `tp` and every smaller degree.

    Either each shard has complete groups (`K' % tp == 0`), or K' is itself a degree on the way to `tp`. Then each shard
    has one key/value head, and a group's query heads divide over the shards that share it. Groups only grow: G' >= G.
    """
    group = num_heads // num_kv_heads
    candidates = [(group * kv, kv) for kv in [-(-num_kv_heads // tp) * tp]]
    degree = 1
    for factor in (1, *prime_factors(tp)):
        degree *= factor
        if degree >= num_kv_heads:
            sharers = tp // degree
            candidates.append((-(-group // sharers) * sharers * degree, degree))
    return min(candidates)


def padded_config(config: Model, max_tp: int) -> Model:
    """The config of rollout weights padded for degrees up to `max_tp`."""
    num_heads, num_kv_heads = pad_heads(config.num_heads, config.num_kv_heads, max_tp)
    sizes = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "intermediate_size": -(-config.intermediate_size // max_tp) * max_tp,
        "vocab_size": -(-config.vocab_size // max_tp) * max_tp,
    }
    return dataclasses.replace(config, **sizes)


def axes_of_dims(weight: DeclaredWeight, factors: Sequence[int], *, in_rollout: bool = False) -> list[slice]:
    """For each dim of a weight the axes that split it in training, as a slice of all of them.

    The tensor dim is split over as many axes as divide it, so that a rollout layout is a prefix. Where that leaves more
    copies than a split of the matrix's other side would (8 key/value heads on 64 devices), that side is split instead:
    not both, since XLA then adds gradients by an all-reduce in place of a reduce-scatter. Weights outside the layers
    and experts are split along tensor dims alone.

    `factors`: sizes of the axes (x0, x1, ...). `in_rollout`: the axes of tensor parallelism, which leave the other side
    whole.
    """
    begin, found = 0, [slice(0)] * len(weight.dims)
    for i, (dim, size) in enumerate(zip(weight.dims, weight.shape, strict=True)):
        if dim in TENSOR_DIMS:
            end = begin + len(dividing_factors(factors[begin:], size))
            begin, found[i] = end, slice(begin, end)
    has_two_sides = weight.dims[0] == "layers" and "embed" in weight.dims and {*TENSOR_DIMS} & {*weight.dims}
    if has_two_sides and "experts" not in weight.dims and not in_rollout:
        other = weight.dims.index("embed")
        if (most := len(dividing_factors(factors, weight.shape[other]))) > begin:
            return [slice(most if i == other else 0) for i in range(len(weight.dims))]
    return found


def train_spec(weight: DeclaredWeight, mesh: Mesh) -> PartitionSpec:
    axes = nested_axes(mesh)
    splits = axes_of_dims(weight, [mesh.shape[axis] for axis in axes])
    return PartitionSpec(*(axes[own] or None for own in splits))


def _splits_other_side(weight: DeclaredWeight, mesh: Mesh) -> bool:
    return any(entry and dim == "embed" for dim, entry in zip(weight.dims, train_spec(weight, mesh), strict=True))


def train_shardings(config: Model, mesh: Mesh, whole: Mesh | None = None) -> Tree:
    """The training form's tree of shardings. `whole`: a mesh of which `mesh` is a part; the same dims are split as
    over it."""

    def one(weight: DeclaredWeight) -> NamedSharding:
        entries = map(entry_axes, train_spec(weight, whole or mesh))
        own = [tuple(axis for axis in entry if axis in mesh.axis_names) or None for entry in entries]
        return NamedSharding(mesh, PartitionSpec(*own))

    return map_weights(one, config.weights())


def rollout_spec(weight: DeclaredWeight, layout: Layout, padded: Model, features_first: bool = False) -> PartitionSpec:
    """One layer's weight in rollout form: tensor dims over tp, key/value heads over as much as divides them."""
    kv_axes = layout.kv_axes(padded.num_kv_heads)
    entries: dict[str, str | tuple[str, ...]] = {**dict.fromkeys(TENSOR_DIMS, "tp"), "kv_heads": kv_axes}
    if "experts" in weight.dims:
        of_experts = dividing_prefix(layout.mesh, layout.tp_axes, weight.shape[weight.dims.index("experts")])
        entries |= {"experts": of_experts, "mlp": layout.tp_axes[len(of_experts) :]}
    dims = weight.dims[1:] if weight.dims[0] == "layers" else weight.dims
    order = weight.outputs_first if features_first else range(len(dims))
    return layout.spec(*(entries.get(dims[i]) for i in order))


def rollout_shardings(config: Model, layout: Layout, max_tp: int | None = None, **form: Unpack[Form]) -> Tree:
    """The rollout form's tree of shardings for weights padded up to `max_tp` (default: the layout's own degree)."""
    features_first, fused_projections = form.get("features_first", False), form.get("fused_projections", False)
    max_tp = _checked(layout, max_tp)
    padded = padded_config(config, max_tp)
    if fused_projections and (features_first or not can_fuse(padded.num_kv_heads, max_tp)):
        raise ValueError(
            "rollout weights with fused projections must have features last, and key/value heads "
            f"({padded.num_kv_heads}, padded) in whole groups on each of {max_tp} devices (rollout.max_tp)"
        )

    def one(weight: DeclaredWeight) -> NamedSharding:
        return NamedSharding(layout.mesh, rollout_spec(weight, layout, padded, features_first))

    table = config.base.weights()
    tree = map_weights(one, table)
    layer = tree["layers"]
    if form.get("quantization", "none") != "none":
        of_layer: Mapping[str, DeclaredWeight] = table["layers"]
        last = {name: NamedSharding(layout.mesh, rollout_spec(w, layout, padded)) for name, w in of_layer.items()}
        layer = layer | scale_shardings(of_layer, last)
    layer = fused_shardings(layer, layout) if fused_projections else layer
    return tree | {"layers": [dict(layer) for _ in range(config.num_layers)]}


def map_weights(function: Callable[..., Any], *trees: Mapping[str, Any]) -> Tree:
    """A tree like the first (nested dicts of weights); each leaf is `function` of all trees' leaves at that place."""
    first = trees[0]
    return {
        name: map_weights(function, *(tree[name] for tree in trees))
        if isinstance(value, Mapping)
        else function(*(tree[name] for tree in trees))
        for name, value in first.items()
    }


def _checked(layout: Layout, max_tp: int | None) -> int:
    max_tp = layout.tp if max_tp is None else max_tp
    if max_tp % layout.tp:
        raise ValueError(
            f"rollout weights padded for tp {max_tp} cannot run at tp {layout.tp}: the layout's tp must divide the "
            "largest configured one (rollout.max_tp)"
        )
    return max_tp


def _grow(array: jax.Array, dim: int, size: int) -> jax.Array:
    return jnp.pad(array, [(0, size - have if i == dim else 0) for i, have in enumerate(array.shape)])


def _convert(
    weight: DeclaredWeight,
    padded_weight: DeclaredWeight,
    group: tuple[int, int],
    array: jax.Array,
    dtype: Any,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Casts and pads one weight; norm scales keep at least float32. `group`: query heads per key/value head, before and
    after; `mesh`: on which it is still split as in training."""
    array = array.astype(jnp.promote_types(dtype, jnp.float32) if weight.is_norm else dtype)
    if mesh is not None and _splits_other_side(weight, mesh):  # XLA would do no better, and say so each time
        array = lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec()))
    return _pad(weight, padded_weight, group, array)


def _pad(weight: DeclaredWeight, padded_weight: DeclaredWeight, group: tuple[int, int], array: jax.Array) -> jax.Array:
    skipped = len(weight.dims) - array.ndim
    dims = weight.dims[skipped:]
    for dim, (name, size) in enumerate(zip(dims, padded_weight.shape[skipped:], strict=True)):
        if array.shape[dim] == size:
            continue
        if name == "heads":
            # Real query heads come first in their key/value head's group, so that groups keep their members.
            head, tail = array.shape[:dim], array.shape[dim + 1 :]
            array = _grow(array.reshape(*head, -1, group[0], *tail), dim + 1, group[1])
            array = _grow(array, dim, size // group[1]).reshape(*head, size, *tail)
        else:
            array = _grow(array, dim, size)
    return array


def padded_weights(config: Model, max_tp: int, weights: Tree) -> Tree:
    """Weights by name, of one layer or outside the layers, in training form and padded for degrees up to `max_tp`."""
    after, group = padded_config(config, max_tp), _groups(config, max_tp)

    def one(name: str, array: jax.Array) -> jax.Array:
        own, grown = ((table["layers"] | table)[name] for table in (config.weights(), after.weights()))
        return _convert(own, grown, group, array, array.dtype)

    return {name: one(name, array) for name, array in weights.items()}


def _groups(config: Model, max_tp: int) -> tuple[int, int]:
    """Query heads per key/value head, before and after padding."""
    after = padded_config(config, max_tp)
    return config.num_heads // config.num_kv_heads, after.num_heads // after.num_kv_heads


def _converters(
    config: Model,
    mesh: Mesh,
    max_tp: int,
    dtype: Any,
    *,
    features_first: bool = False,
    fused_projections: bool = False,
    quantization: Narrow = "none",
) -> tuple[Callable[[Tree], Tree], Callable[..., list[Tree]]]:
    """(the conversion of the weights outside the layers, that of `count` layers from `start` on)."""
    before, after = config.base.weights(), padded_config(config, max_tp).base.weights()
    group = _groups(config, max_tp)

    def convert(
        weight: DeclaredWeight, padded_weight: DeclaredWeight, array: jax.Array, dtype: Any = dtype
    ) -> jax.Array:
        array = _convert(weight, padded_weight, group, array, dtype, mesh)
        return jnp.transpose(array, weight.outputs_first) if features_first else array

    def of_layer(name: str, weight: DeclaredWeight, array: jax.Array) -> Tree:
        padded = after["layers"][name]
        if quantization == "none" or not inputs(weight):
            return {name: convert(weight, padded, array)}
        codes, scales = narrowed(quantization, array, inputs(weight))
        if _splits_other_side(weight, mesh):  # so that codes are gathered, and not what they are made of
            split = PartitionSpec(*train_spec(weight, mesh)[1:])
            codes = lax.with_sharding_constraint(codes, NamedSharding(mesh, split))
        return {
            name: convert(weight, padded, codes, codes.dtype),
            name + SCALE: _pad(Scale.of(weight), Scale.of(padded), group, scales),
        }

    def outer(params: Tree) -> Tree:
        return {name: convert(before[name], after[name], array) for name, array in params.items()}

    def layers(stacked: Tree, start: int | jax.Array, count: int) -> list[Tree]:
        def one(index: int | jax.Array) -> Tree:
            own = {name: lax.dynamic_index_in_dim(array, index, keepdims=False) for name, array in stacked.items()}
            found: Tree = {}
            for name, weight in before["layers"].items():
                if name in own:
                    found |= of_layer(name, weight, config.merged(name, own))
            return found

        separate = [one(start + i) for i in range(count)]
        return [fuse(layer) for layer in separate] if fused_projections else separate

    return outer, layers


@lru_cache(maxsize=64)
def _compiled(
    config: Any, layout: Layout, dtype: Any, max_tp: int, count: int, **form: Unpack[Form]
) -> tuple[Any, Any]:
    shardings = rollout_shardings(config, layout, max_tp, **form)
    outer, layers = _converters(config, layout.mesh, max_tp, dtype, **form)
    rest = {name: value for name, value in shardings.items() if name != "layers"}
    chunk = jax.jit(lambda stacked, start: layers(stacked, start, count), out_shardings=shardings["layers"][:count])
    return jax.jit(outer, out_shardings=rest), chunk


def to_rollout(
    params: Tree,
    config: Model,
    layout: Layout,
    dtype: Any,
    max_tp: int | None = None,
    *,
    layers_per_call: int = 4,
    **form: Unpack[Form],
) -> Tree:
    """Training form to rollout form on the layout's mesh, a few layers per compiled call and nothing through the host.

    `params`: unpadded, on the devices of the layout's mesh; perhaps the layers alone. `dtype`: of the result's matrices
    and biases (norms: at least float32). More `layers_per_call` mean fewer dispatches and a higher peak.
    """
    out, layers = {}, list[Tree]()
    calls = rollout_calls(params, config, layout, dtype, max_tp, layers_per_call=layers_per_call, **form)
    for program, arguments in calls:
        made = program(*arguments)
        if len(arguments) == 1:
            out = made
        else:
            layers += made
    return out | {"layers": layers}


def rollout_calls(
    params: Tree,
    config: Model,
    layout: Layout,
    dtype: Any,
    max_tp: int | None = None,
    *,
    layers_per_call: int = 4,
    **form: Unpack[Form],
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The programs that `to_rollout` with the same arguments runs: each program with its arguments, first the one for
    what is outside the layers, then some layers each."""

    def programs(count: int) -> tuple[Any, Any]:
        return _compiled(config, layout, jnp.dtype(dtype), _checked(layout, max_tp), count, **form)

    if rest := {name: value for name, value in params.items() if name != "layers"}:
        yield programs(layers_per_call)[0], (rest,)
    for start in range(0, config.num_layers, layers_per_call):
        _, chunk = programs(min(layers_per_call, config.num_layers - start))
        yield chunk, (params["layers"], start)
