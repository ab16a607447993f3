"""Mixtures of experts: a router chooses some MLPs for each token, and their outputs are summed.

Source: Shazeer et al. 2017 (arXiv:1701.06538) and Fedus et al. 2021 (arXiv:2101.03961), without capacity: no token is
ever dropped. Departures: tokens are not copied into the order of experts. A loop runs over *blocks*, each some tokens
of one expert, and adds its outputs to those tokens' sums, so the cost follows the actual loads. The backward pass
computes each block again from the layer's input and keeps nothing else. A token's experts are added in ascending order,
in at least float32, independently of other tokens. (`jax.lax.ragged_dot` computes every expert for every token on CPUs:
42 times the time with 32 experts. On GPUs it was not tried.)

Experts may be split over devices. Each then computes its own experts' share for all tokens that it receives, and the
shares are added: in rollouts by the reduction that an MLP needs anyway. In training each device has different tokens,
which are gathered before and scattered after.

Letters: T tokens, E embed, F mlp, X experts (of this device), C experts per token, B tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl.kernels.by_rows import Multiply, with_gradient_of
from jaxrl.kernels.expert_groups import ExpertGroups, expert_groups
from jaxrl.kernels.reference import operands
from jaxrl.sharding.mesh import axes_size, entry_axes
from jaxrl.sharding.narrow_weights import SCALE

WEIGHTS = tuple(f"{name}{of}" for of in ("", "_bias", SCALE) for name in ("gate", "up", "down"))
"""The weights of experts in a layer, each with a leading dim of experts; biases and factors where there are any."""

_BATCHED = 256  # tokens up to which reading all weights takes longer than multiplying them all, on H100 and TPU v5
_SMALLEST, _LARGEST = 8, 1024  # tokens of a block


class Routing(NamedTuple):
    """A router's decision for tokens."""

    experts: jax.Array  # int32 [..., C], ascending
    weights: jax.Array  # [..., C], of their sum, in at least float32
    probabilities: jax.Array | None  # [..., X] of all experts; `mix` does not read them


class ExpertSettings(NamedTuple):
    """The experts' computation and its form. Hashable."""

    activation: Any  # (gate, up) -> the input of the last matrix
    widen: bool = False  # multiply narrow operands as float32 (exactly)
    batched: bool = False  # for few tokens one batched product over all experts, which suits accelerators
    parts: int = 1  # over how many devices experts are split


def route(
    x_TE: jax.Array,
    router_EX: jax.Array,
    bias_X: jax.Array | None,
    num_chosen: int,
    *,
    normalised: bool,
    multiply: Multiply | None = None,
) -> Routing:
    """Chooses `num_chosen` experts per token by the softmax of a router's logits, all in at least float32.
    `normalised`: whether a token's weights sum to one; `multiply`: as in `jaxrl.kernels.by_rows.ByRows`."""
    wide = jnp.promote_types(x_TE.dtype, jnp.float32)

    def plain(x: jax.Array, router: jax.Array) -> jax.Array:
        return jnp.matmul(x, router, precision=lax.Precision.HIGHEST)

    logits = (with_gradient_of(plain, multiply) if multiply else plain)(x_TE.astype(wide), router_EX.astype(wide))
    if bias_X is not None:
        logits = logits + bias_X.astype(wide)
    probabilities = jax.nn.softmax(logits)
    _, experts = lax.top_k(lax.stop_gradient(logits), num_chosen)
    experts = jnp.sort(experts.astype(jnp.int32))
    # of the logits, not by dividing what may have become zero
    weights = jax.nn.softmax(_taken(logits, experts)) if normalised else _taken(probabilities, experts)
    return Routing(experts, weights, probabilities)


def _taken(values: jax.Array, experts: jax.Array) -> jax.Array:
    """[..., C] of [..., X]; the gradient adds nothing twice, and says so, that no order of additions is left open."""
    flat, own = values.reshape(-1, values.shape[-1]), experts.reshape(-1, experts.shape[-1])
    rows = jnp.arange(own.shape[0])[:, None]
    return flat.at[rows, own].get(mode="promise_in_bounds", unique_indices=True).reshape(experts.shape)


def mix(
    x: jax.Array, routing: Routing, weights: Mapping[str, jax.Array], shape: ExpertSettings, first: Any = 0
) -> jax.Array:
    """[..., E] in at least float32: the weighted sum of each token's experts, of those among the X whose `WEIGHTS`
    are given, in x's dtype or as codes (`jaxrl.sharding.narrow_weights`). `first`: the number of the first of them."""
    x_TE, chosen = jax.tree.map(lambda each: each.reshape(-1, each.shape[-1]), (x, routing))
    own = chosen.experts - first
    if shape.batched and x_TE.shape[0] <= _BATCHED:
        out = _batched(x_TE, own, chosen.weights, weights, shape)
    else:
        load = own.size // (weights["down"].shape[0] * shape.parts)  # the mean
        block = min(max(1 << max(load - 1, 0).bit_length(), _SMALLEST), _LARGEST)
        out = _in_blocks(shape, block, x_TE, chosen.weights, dict(weights), own)
    return out.reshape(x.shape)


def mix_in_kernels(
    x: jax.Array,
    routing: Routing,
    weights: Mapping[str, Any],
    shape: ExpertSettings,
    ids: jax.Array,
    multiply: Multiply,
) -> jax.Array:
    """`mix` of the experts with the numbers `ids`, in kernels of `multiply`, whose sums have one order; the gradient is
    that of `mix`."""

    def plain(x: jax.Array, share: jax.Array, weights: dict[str, Any], chosen: jax.Array, ids: jax.Array) -> jax.Array:
        return mix(x, Routing(chosen, share, None), weights, shape, ids[0])

    def exact(x: jax.Array, share: jax.Array, weights: dict[str, Any], chosen: jax.Array, ids: jax.Array) -> jax.Array:
        x_TE, own_TC, share_TC = (each.reshape(-1, each.shape[-1]) for each in (x, chosen - ids[0], share))
        return multiply.experts(x_TE, own_TC, share_TC, weights, shape.activation, len(ids)).reshape(x.shape)

    return with_gradient_of(plain, exact)(x, routing.weights, dict(weights), routing.experts, ids)


def _batched(
    x_TE: jax.Array, own_TC: jax.Array, weights_TC: jax.Array, weights: Mapping[str, jax.Array], shape: ExpertSettings
) -> jax.Array:
    """Every expert for every token, weighted with zero where it is not chosen; or the chosen ones' weights gathered,
    where they are few."""
    count, (tokens, chosen) = weights["down"].shape[0], own_TC.shape
    if 3 * tokens * chosen <= count:  # a gather writes and reads again what it takes
        inside = (own_TC >= 0) & (own_TC < count)
        taken = {name: jnp.take(w, own_TC.reshape(-1), axis=0, mode="clip") for name, w in weights.items()}
        each = jax.vmap(partial(_mlp, shape))(jnp.repeat(x_TE, chosen, axis=0)[:, None], taken)[:, 0]
        parts = each.reshape(tokens, chosen, -1) * jnp.where(inside, weights_TC, 0)[..., None]
        return jnp.sum(parts, axis=1)
    is_chosen_TCX = own_TC[..., None] == jnp.arange(count)
    share_TX = jnp.sum(jnp.where(is_chosen_TCX, weights_TC[..., None], 0), axis=1)
    # tokens are a batch's, too: else XLA joins experts and columns into one dim, and transposes all weights for it
    each_XTE = jax.vmap(partial(_mlp, shape))(jnp.broadcast_to(x_TE, (count, *x_TE.shape)), dict(weights))
    return jnp.einsum("tx,xte->te", share_TX, each_XTE)


def _mlp(shape: ExpertSettings, x_BE: jax.Array, expert: Mapping[str, jax.Array]) -> jax.Array:
    """One expert of tokens: [B, E] in at least float32."""
    wide = jnp.promote_types(x_BE.dtype, jnp.float32)

    def product(x: jax.Array, name: str) -> jax.Array:
        matrix = expert[name].astype(x.dtype)
        out = jnp.matmul(*operands(shape.widen, (x, matrix)), preferred_element_type=wide)
        if f"{name}{SCALE}" in expert:
            out = out * expert[f"{name}{SCALE}"]
        return out + expert[f"{name}_bias"].astype(wide) if f"{name}_bias" in expert else out

    gate, up = (product(x_BE, name).astype(x_BE.dtype) for name in ("gate", "up"))
    return product(shape.activation(gate, up), "down")


def over_devices(
    mesh: Mesh, specs: Mapping[str, PartitionSpec], rows: PartitionSpec, *, batched: bool, gathered: bool
) -> Callable[..., jax.Array]:
    """`mix` of experts that are split over a mesh, for hidden states [..., E] whose leading dim has the spec `rows`.
    `specs`: of each weight of one layer's experts: (experts, ..., mlp, ...). `gathered`: devices that share experts
    have different tokens; else they have the same."""
    of_experts, *others = specs["down"]
    experts = entry_axes(of_experts)
    columns = entry_axes(others[0] if others else None)
    sharing, how = experts + columns, {"batched": batched, "parts": axes_size(mesh, experts)}

    def local(x: jax.Array, routing: Routing, weights: dict[str, jax.Array], shape: ExpertSettings) -> jax.Array:
        if gathered and sharing:
            x, routing = lax.all_gather((x, routing), sharing, tiled=True)
        if columns and "down_bias" in weights:  # one of those that share an expert adds it
            weights["down_bias"] = jnp.where(lax.axis_index(columns) == 0, weights["down_bias"], 0)
        first = lax.axis_index(experts) * weights["down"].shape[0] if experts else 0
        out = mix(x, routing, weights, shape._replace(**how), first)
        if sharing:
            out = lax.psum_scatter(out, sharing, tiled=True) if gathered else lax.psum(out, sharing)
        return out

    def mixed(h: jax.Array, routing: Routing, weights: Mapping[str, jax.Array], shape: ExpertSettings) -> jax.Array:
        chosen = routing._replace(probabilities=None)
        own = {name: specs[name] for name in weights}
        split = jax.shard_map(
            partial(local, shape=shape), mesh=mesh, in_specs=(rows, rows, own), out_specs=rows, check_vma=False
        )
        return split(h, chosen, dict(weights))

    return mixed


class _ExpertBlock(NamedTuple):
    """One block: its expert, its (token, expert) pairs and tokens (out of range where the block is not full)."""

    expert: jax.Array
    pairs: jax.Array
    tokens: jax.Array


def _step(blocks: ExpertGroups, i: jax.Array, block: int, chosen: int) -> _ExpertBlock:
    expert = jnp.searchsorted(blocks.ends, i, side="right").astype(jnp.int32)
    before = jnp.where(expert > 0, blocks.ends[expert - 1], 0)
    offset = (i - before) * block + jnp.arange(block)
    is_pair = offset < blocks.counts[expert]
    pairs = blocks.order.at[blocks.starts[expert] + offset].get(mode="clip")
    missing = blocks.order.size + jnp.arange(block)  # each elsewhere: indices are unique
    pairs = jnp.where(is_pair, pairs, missing)
    return _ExpertBlock(expert, pairs, jnp.where(is_pair, pairs // chosen, missing))


def _block(shape: ExpertSettings, x_BE: jax.Array, share_B: jax.Array, expert: Mapping[str, jax.Array]) -> jax.Array:
    return _mlp(shape, x_BE, expert) * share_B[:, None]


def _of_step(step: _ExpertBlock, x_TE: jax.Array, share: jax.Array, weights: dict[str, jax.Array]) -> tuple[Any, ...]:
    x_BE = x_TE.at[step.tokens].get(mode="fill", fill_value=0)
    share_B = share.reshape(-1).at[step.pairs].get(mode="fill", fill_value=0)
    return x_BE, share_B, {name: w[step.expert] for name, w in weights.items()}


def _forward(
    shape: ExpertSettings,
    block: int,
    x_TE: jax.Array,
    share_TC: jax.Array,
    weights: dict[str, jax.Array],
    own_TC: jax.Array,
) -> tuple[jax.Array, Any]:
    blocks = expert_groups(own_TC, weights["down"].shape[0], block)

    def body(i: jax.Array, out_TE: jax.Array) -> jax.Array:
        step = _step(blocks, i, block, own_TC.shape[1])
        part = _block(shape, *_of_step(step, x_TE, share_TC, weights))
        return out_TE.at[step.tokens].add(part, mode="drop", unique_indices=True)

    out = jnp.zeros(x_TE.shape, jnp.promote_types(x_TE.dtype, jnp.float32))
    out = lax.fori_loop(0, blocks.ends[-1], body, out)
    return out, (x_TE, share_TC, weights, own_TC)


def _backward(shape: ExpertSettings, block: int, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    x_TE, share_TC, weights, own_TC = saved
    blocks = expert_groups(own_TC, weights["down"].shape[0], block)

    def body(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        d_x, d_share, d_weights = carry
        step = _step(blocks, i, block, own_TC.shape[1])
        _, pull_back = jax.vjp(partial(_block, shape), *_of_step(step, x_TE, share_TC, weights))
        own_x, own_share, own = pull_back(d_out.at[step.tokens].get(mode="fill", fill_value=0))
        unique: Any = {"mode": "drop", "unique_indices": True}
        return (
            d_x.at[step.tokens].add(own_x.astype(d_x.dtype), **unique),
            d_share.at[step.pairs].set(own_share, **unique),
            {name: d.at[step.expert].add(own[name].astype(d.dtype)) for name, d in d_weights.items()},
        )

    wide = d_out.dtype
    start = (
        jnp.zeros(x_TE.shape, wide),
        jnp.zeros(share_TC.size, share_TC.dtype),
        {name: jnp.zeros(w.shape, wide) for name, w in weights.items()},
    )
    d_x, d_share, d_weights = lax.fori_loop(0, blocks.ends[-1], body, start)
    d_weights = {name: d.astype(weights[name].dtype) for name, d in d_weights.items()}
    return d_x.astype(x_TE.dtype), d_share.reshape(share_TC.shape), d_weights, None


# the forward pass without what it saves
_in_blocks = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], nondiff_argnums=(0, 1))
_in_blocks.defvjp(_forward, _backward)
