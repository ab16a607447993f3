"""Rollout weights with fused projections: one matrix for queries, keys and values, one for the MLP's gate and up.

What multiplies the same activations is then one product, as `jaxrl.kernels.decode_pallas` needs it.

In a layer, `qkv` [E, K, G + 2, D] takes the place of `q`, `k` and `v`: for each key/value head its G query heads, its
key, its value; `qkv_bias` [K, G + 2, D] that of their biases; `gate_up` [E, 2, F] that of `gate` and `up`. They are
split over tp in K and F, so each shard has whole groups, which `can_fuse` is about.
Factors of quantised matrices (`jaxrl.sharding.narrow_weights`) are joined as the outputs are: [K, G + 2, D] and [2, F].

Dims: E embed, K key/value heads, G query heads a key/value head, D head dim, F mlp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxrl.sharding.layout import Layout
from jaxrl.sharding.narrow_weights import SCALE

Tree = dict[str, Any]


def can_fuse(num_kv_heads: int, max_tp: int) -> bool:
    """Whether shards have whole groups at every degree up to `max_tp`, for which `num_kv_heads` is padded."""
    return num_kv_heads % max_tp == 0


def fuse(layer: Tree) -> Tree:
    """A layer's weights, [in..., out...] and padded, with fused projections."""
    rest = {name: value for name, value in layer.items() if name not in ("q", "k", "v")}
    rest["qkv"] = _heads(layer["q"], layer["k"], layer["v"])
    for of in ("", SCALE):
        if "router" not in layer and f"gate{of}" in layer:
            rest[f"gate_up{of}"] = jnp.stack([rest.pop(f"gate{of}"), rest.pop(f"up{of}")], axis=-2)
    for of in ("_bias", SCALE):
        if f"q{of}" in layer:
            rest[f"qkv{of}"] = _heads(*(rest.pop(f"{name}{of}") for name in "qkv"))
    return rest


def _heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """[..., H, D] and twice [..., K, D] to [..., K, G + 2, D]."""
    grouped = q.reshape(*k.shape[:-1], -1, k.shape[-1])
    return jnp.concatenate([grouped, k[..., None, :], v[..., None, :]], axis=-2)


def fused_shardings(layer: Tree, layout: Layout) -> Tree:
    """The shardings of such a layer, from those of its separate weights."""
    tp = layout.tp_axes or None
    new: dict[str, NamedSharding] = {"qkv": layout.sharding(None, tp)}
    gone = ["q", "k", "v"]
    for of in ("_bias", SCALE):
        if f"q{of}" in layer:
            new[f"qkv{of}"] = layout.sharding(tp)
            gone += [f"{name}{of}" for name in "qkv"]
    if "router" not in layer:
        new["gate_up"] = layout.sharding(None, None, tp)
        gone += ["gate", "up"]
        if f"gate{SCALE}" in layer:
            new[f"gate_up{SCALE}"] = layout.sharding(None, tp)
            gone += [f"gate{SCALE}", f"up{SCALE}"]
    return {name: value for name, value in layer.items() if name not in gone} | new
