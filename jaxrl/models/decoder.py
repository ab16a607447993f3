"""The decoder behind all families: one forward pass over plain pytrees.

What a family does otherwise than Llama are switches of `ModelConfig`; nothing here asks for a family. Layers of several
kinds (`ModelConfig.kinds`: windows, ropes) are scanned all the same: their tables of cos and sin lie in one array.

Training and rollout share `layer`; they differ in the attention that they pass in and in the form of the parameters:

- *training form*: `{"embed": [V,E], "layers": {"q": [L,E,H,D], ...}, "final_norm": [E], "lm_head": [E,V]}`, layers
  stacked on a leading dim and scanned (fast compiles);
- *rollout form*: the same, but `layers` is a list of dicts without that dim, and the forward pass is unrolled: a
  scanned stack makes XLA copy each layer's weights before every product, which is what decoding spends its time on.
  With `features_first` its matrices are [out..., in...] and the residual stream is [E, ...] instead of [..., E]:
  XLA:CPU then multiplies weights from the left, two to three times as fast for a few dozen rows
  (docs/performance.md). Attention always gets its heads as [..., heads, D];
- *with fused projections* (`jaxrl.sharding.fused_projections`): the rollout form with features last, where a layer
  has `qkv` [E,K,G+2,D] and `gate_up` [E,2,F]: one product each;
- *quantised* (`jaxrl.sharding.narrow_weights`): the rollout form in which a layer's matrices are codes. A product is
  that of the codes, and takes the factors of its outputs before it is rounded.

Rollout weights may hold zero heads, zero MLP columns and extra vocabulary rows (padding for tensor parallelism); so
head counts are read from the weights, never from the config, and padded vocabulary has logits of -inf.

Matrix products run in the given dtype; norms, rotary embeddings and logits in at least float32. Experts
(`jaxrl.models.experts`) take the MLP's place where a layer has a router.

Letters in comments and einsums: e embed, h query heads, k key/value heads, d head_dim, f mlp, v vocab.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxrl.kernels.by_rows import ByRows, Multiply, at_once
from jaxrl.kernels.reference import ATTENTION, operands
from jaxrl.models.config import LayerKind, ModelConfig
from jaxrl.models.lora import A, B
from jaxrl.models.rope import Rope
from jaxrl.models.streaming import LayerFeed
from jaxrl.models.weights import Weight
from jaxrl.sharding.narrow_weights import SCALE

if TYPE_CHECKING:
    from jaxrl.models import experts

    Mix = Callable[[jax.Array, experts.Routing, Mapping[str, jax.Array], experts.ExpertSettings], jax.Array]
    """(h [..., E], routing, weights of experts, how) -> [..., E]."""

Params = dict[str, Any]
Remat = Literal["none", "full", "dots"]
INIT_STD = 0.02
_PRODUCT = "product"  # the name under which a remat policy keeps products with weights


def init(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random weights in training form. A weight's values depend on its path and the key, not on the other weights."""
    return init_table(config.weights(), key, dtype)


def init_table(table: Params, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    def one(path: Any, weight: Weight) -> jax.Array:
        if weight.init in ("ones", "less_one", "zeros"):
            return jnp.full(weight.shape, 1 if weight.init == "ones" else 0, dtype)
        own_key = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        if weight.init == "inputs":
            bound = weight.hf_shape[1] ** -0.5
            return jax.random.uniform(own_key, weight.shape, _at_least_float32(dtype), -bound, bound).astype(dtype)
        return (INIT_STD * jax.random.normal(own_key, weight.shape, _at_least_float32(dtype))).astype(dtype)

    return jax.tree_util.tree_map_with_path(one, table, is_leaf=lambda x: isinstance(x, Weight))


def rope_frequencies(config: ModelConfig, rope: Rope | None = None) -> np.ndarray:
    """Angle per position of each rotated pair: float64 [rotary_dim / 2], scaling applied."""
    rope, dim = config.rope if rope is None else rope, config.rotary_dim
    scaling = rope.scaling
    frequency = rope.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    match scaling.kind:
        case "none":
            return frequency
        case "linear":
            return frequency / scaling.factor
        case "llama3":
            # Turns within the original context: few -> interpolate, many -> keep, in between -> blend linearly.
            turns = scaling.original_max_position_embeddings * frequency / (2 * np.pi)
            span = scaling.high_freq_factor - scaling.low_freq_factor
            keep = np.clip((turns - scaling.low_freq_factor) / span, 0, 1)
            return frequency * (keep + (1 - keep) / scaling.factor)
        case "longrope":
            return frequency / np.asarray(scaling.short_factor)
        case "yarn":
            keep = 1 - _yarn_ramp(rope, dim)
            return frequency * (keep + (1 - keep) / scaling.factor)


def _yarn_ramp(rope: Rope, dim: int) -> np.ndarray:
    """0 for pairs that turn fast enough to be kept, 1 for those to interpolate (arXiv:2309.00071, section 3.2)."""
    scaling = rope.scaling

    def pair_with(turns: float) -> float:
        ratio = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # A ramp of no width would divide by zero; transformers widens it by the same amount.
    width = high - low if high != low else 0.001
    return np.clip((np.arange(dim // 2) - low) / width, 0, 1)


Tables = tuple[jax.Array, jax.Array] | tuple[None, None]
"""cos and sin, each [..., rotary_dim / 2]; None for layers without rope."""


def rope_tables(
    positions: jax.Array, config: ModelConfig, dtype: Any = jnp.float32, rope: Rope | None = None
) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each [..., rotary_dim / 2], for positions [...]; in at least float32, for any `dtype`."""
    dtype = _at_least_float32(dtype)
    angles = positions[..., None].astype(dtype) * jnp.asarray(rope_frequencies(config, rope), dtype)
    factor = (config.rope if rope is None else rope).scaling.attention_factor
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def _tables_of_kinds(
    positions: jax.Array, config: ModelConfig, dtype: Any, by_rows: ByRows = at_once
) -> dict[LayerKind, Tables]:
    """The tables of each kind of layer; kinds with one rope share them."""
    ropes = {kind.rope for kind in config.kinds}

    def of_rope(rope: Rope) -> Tables:
        return by_rows(lambda _, at: rope_tables(at[..., 0], config, dtype, rope), (positions[..., None],))

    tables: dict[Any, Tables] = {rope: of_rope(rope) for rope in ropes if rope is not None}
    return {kind: tables.get(kind.rope, (None, None)) for kind in config.kinds}


def _rotate(x: jax.Array, cos: jax.Array | None, sin: jax.Array | None, factor: float = 1.0) -> jax.Array:
    """Rotary embedding of [..., heads, D], times a factor: the first half of what is turned of a head pairs with the
    second."""
    if cos is None or sin is None:
        return x if factor == 1.0 else (x.astype(_at_least_float32(x.dtype)) * factor).astype(x.dtype)
    half, wide = cos.shape[-1], x.astype(cos.dtype)
    first, second, rest = jnp.split(wide, (half, 2 * half), axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    turned = jnp.concatenate([*parts, rest] if rest.shape[-1] else parts, axis=-1)
    return (turned if factor == 1.0 else turned * factor).astype(x.dtype)


def _norm(x: jax.Array, scale: jax.Array, config: ModelConfig, features_first: bool = False) -> jax.Array:
    wide = x.astype(_at_least_float32(x.dtype))
    if config.norm_plus_one:
        scale = scale.astype(wide.dtype) + 1
    scale = _along(scale.astype(wide.dtype), x, features_first)
    mean = jnp.mean(jnp.square(wide), axis=0 if features_first else -1, keepdims=True)
    return (wide * lax.rsqrt(mean + config.rms_norm_eps) * scale).astype(x.dtype)


def _along(features: jax.Array, x: jax.Array, features_first: bool) -> jax.Array:
    """[E] in a shape that broadcasts against x [..., E], or [E, ...]."""
    return features.reshape(-1, *(1,) * (x.ndim - 1)) if features_first else features


def _at_least_float32(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def layer(
    lp: Mapping[str, Any],
    x: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    attend: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]],
    config: ModelConfig,
    *,
    features_first: bool = False,
    widen: bool = False,
    reduce_dtype: Any = jnp.float32,
    keys: jax.Array | None = None,
    mix: Mix | None = None,
    by_rows: ByRows = at_once,
) -> tuple[jax.Array, Any, experts.Routing | None]:
    """One decoder layer on the residual stream x [..., E] ([E, ...] with `features_first`), in x's dtype, to which the
    weights are cast. Returns (x, extra, the router's decision); the last is None without experts.

    Args:
      cos, sin: [..., rotary_dim / 2] from `rope_tables`; None: the layer has no rope.
      attend: (q [..., H, D], k [..., K, D], v [..., K, D]) -> (out [..., H, D], extra). Query head h belongs to
        key/value head h // (H // K). `attend` scales by 1/sqrt(D). With sinks it is called as (q, k, v, sinks [H]).
      features_first: matrices are [out..., in...].
      widen: multiply narrow operands as float32 (exactly), for backends with slow narrow products; without
        `features_first`.
      reduce_dtype: the narrowest type in which devices add their parts of matrices' gradients.
      keys: [R] of x [R, T, E], for the dropout of adapters; None: no dropout.
      mix: computes experts that are split over devices; None: `experts.mix` of all.
      by_rows: how everything before and behind attention is computed; in tiles it excludes `mix`, `keys` and
        `features_first`.
    """
    sums = x.dtype if by_rows is at_once else _at_least_float32(x.dtype)

    def run(step: Callable[..., Any], *rows: Any, of: Mapping[str, Any] = lp, **how: Any) -> Any:
        def stretch(lp: Mapping[str, Any], *rows: Any) -> Any:
            own = keys, sums, reduce_dtype, by_rows.multiply
            return step(_LayerWeights(lp, x.dtype, config, features_first, widen, *own), *rows)

        return by_rows(stretch, rows, of, **how)

    def some(*names: str) -> dict[str, Any]:
        return {name: lp[name] for name in names if name in lp}

    if "q_norm" in lp and lp["q_norm"].ndim > 1:  # its norm is of all heads together: no part of them is enough
        qkv = run(_projected, x, join=_HEADS)
        q, k, v = run(_turned, *qkv, cos, sin, of=some("q_norm", "k_norm"), heads=True)
    else:
        q, k, v = run(lambda own, x, *tables: _turned(own, *_projected(own, x), *tables), x, cos, sin, join=_HEADS)
    out, extra = attend(q, k, v, *([lp["sinks"]] if "sinks" in lp else []))
    part = run(_attention_part, out.astype(x.dtype), join="sum", heads=True)
    x = run(partial(_with_part, "o", "attn_post_norm"), x, part, of=some("o_bias", "attn_post_norm"))
    if "router" not in lp:
        part = run(_mlp_part, x, join="sum")
        x = run(partial(_with_part, "down", "mlp_post_norm"), x, part, of=some("down_bias", "mlp_post_norm"))
        return x, extra, None
    from jaxrl.models import experts

    h = run(_input_of_experts, x, of=some("mlp_norm"))
    routing = run(_routing, h, of=some("router", "router_bias"))
    own = some(*experts.WEIGHTS) | {EXPERT_IDS: jnp.arange(config.num_experts)}
    part = run(partial(_experts_part, mix), h, routing, of=own, join="sum", in_kernels=True)
    x = run(partial(_with_part, "", "mlp_post_norm"), x, part, of=some("mlp_post_norm"))
    return x, extra, routing


_HEADS = ("q", "k", "v")
EXPERT_IDS = "expert_ids"
"""Beside the weights of experts, their numbers: so each part of them knows its own."""


class _LayerWeights(NamedTuple):
    """A layer's weights, and how they are multiplied with activations of `dtype`; `sums`: the type of what may be a
    part of a sum. See `layer` for the other fields."""

    lp: Mapping[str, Any]
    dtype: Any
    config: ModelConfig
    features_first: bool
    widen: bool
    keys: jax.Array | None
    sums: Any = None
    reduce_dtype: Any = jnp.float32
    multiply: Multiply | None = None

    def get(self, name: str) -> jax.Array:
        return self.lp[name].astype(self.dtype)

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        """x with a norm of its features, if the layer has that norm."""
        return _norm(x, self.lp[name], self.config, self.features_first) if name in self.lp else x

    def biased(self, name: str, x: jax.Array) -> jax.Array:
        """A matrix's output with its bias, if the layer has one."""
        if (name := f"{name}_bias") not in self.lp:
            return x
        return x + _along(self.get(name), x, self.features_first)

    def head_norm(self, name: str, x: jax.Array, num_heads: int) -> jax.Array:
        """x [..., heads, D] with its norm, of each head or of all together, if the layer has it. Heads beyond the
        model's `num_heads` are zeros."""
        if name not in self.lp or self.lp[name].ndim == 1:
            return _norm(x, self.lp[name], self.config) if name in self.lp else x
        wide, scale = x.astype(_at_least_float32(x.dtype)), self.lp[name]
        mean = jnp.sum(jnp.square(wide), axis=(-2, -1), keepdims=True) / (num_heads * x.shape[-1])
        normed = wide * lax.rsqrt(mean + self.config.rms_norm_eps)
        return (normed * scale.astype(wide.dtype)).astype(x.dtype)

    def product(self, x: jax.Array, name: str, dtype: Any = None) -> jax.Array:
        """x [..., I] times a matrix with its inputs and its outputs flattened: [..., O], in x's dtype or `dtype`."""
        if self.features_first:
            return self.from_the_left("oe,e...->o...", name, x)
        if name + SCALE in self.lp:
            codes = self.get(name).reshape(x.shape[-1], -1)
            return self.scaled("...e,eo->...o", name, x, codes).astype(dtype or x.dtype)

        def dense(x: jax.Array, name: str) -> Any:
            how = _Product(self.widen, dtype or x.dtype, self.reduce_dtype, self.multiply)
            return _dense(how, x, self.get(name).astype(x.dtype).reshape(x.shape[-1], -1))

        out = dense(x, name)
        if name + A in self.lp:
            assert self.config.lora is not None
            out = out + self.config.lora.scale * dense(dense(self._dropped(x, name), name + A), name + B)
        # the remat policy finds what to keep by this name: of a matrix with its adapter the sum
        return checkpoint_name(out, _PRODUCT)

    def _dropped(self, x: jax.Array, name: str) -> jax.Array:
        lora = self.config.lora
        if self.keys is None or lora is None or not lora.dropout:
            return x
        kept, salt = 1 - lora.dropout, zlib.crc32(name.encode())
        draw = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, salt), kept, x.shape[1:]))
        return jnp.where(draw(self.keys), x / kept, 0).astype(x.dtype)

    def heads(self, name: str, h: jax.Array) -> jax.Array:
        if self.features_first:
            return jnp.moveaxis(self.from_the_left("hde,e...->hd...", name, h), (0, 1), (-2, -1))
        return self.product(h, name).reshape(*h.shape[:-1], *self.lp[name].shape[1:])

    def fused(self, spec: str, name: str, x: jax.Array) -> jax.Array:
        if name + SCALE in self.lp:
            return self.scaled(spec, name, x, self.get(name)).astype(x.dtype)
        return jnp.einsum(spec, x, self.get(name))

    def scaled(self, spec: str, name: str, x: jax.Array, codes: jax.Array) -> jax.Array:
        """The product with a quantised matrix, outputs last, in at least float32."""
        out = jnp.einsum(spec, x, codes, preferred_element_type=_at_least_float32(x.dtype))
        return out * self.lp[name + SCALE].reshape(out.shape[x.ndim - 1 :])

    def from_the_left(self, spec: str, name: str, x: jax.Array, matrix: jax.Array | None = None) -> jax.Array:
        """A product with features first, in x's dtype; `matrix`: where it is another shape of the weight."""
        matrix = self.get(name) if matrix is None else matrix
        # for a bfloat16 result some versions of XLA:CPU do not use the processor's own bfloat16 products
        out = jnp.einsum(spec, matrix, x, preferred_element_type=_at_least_float32(x.dtype))
        if (scale := self.lp.get(name + SCALE)) is not None:
            out = out * scale.reshape(*scale.shape, *(1,) * (x.ndim - 1))
        return out.astype(x.dtype)


def _projected(weights: _LayerWeights, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    h = weights.norm("attn_norm", x)
    if "qkv" in weights.lp:
        slab = weights.fused("...e,ekxd->...kxd", "qkv", h)
        if "qkv_bias" in weights.lp:
            slab = slab + weights.get("qkv_bias")
        q = slab[..., :-2, :]
        q, k, v = q.reshape(*h.shape[:-1], -1, q.shape[-1]), slab[..., -2, :], slab[..., -1, :]
    else:
        q, k, v = (weights.heads(name, h) for name in _HEADS)
    if "q_bias" in weights.lp:
        q, k, v = q + weights.get("q_bias"), k + weights.get("k_bias"), v + weights.get("v_bias")
    return q, k, v


def _turned(
    weights: _LayerWeights,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    config = weights.config
    q, k = weights.head_norm("q_norm", q, config.num_heads), weights.head_norm("k_norm", k, config.num_kv_heads)
    if weights.multiply is not None and "q_norm" in weights.lp:
        # in some programs XLA would multiply by the norm's scale in the next kernel
        q, k = lax.optimization_barrier((q, k))
    if clip := config.clip_qkv:
        q, k, v = (jnp.clip(each, -clip, clip) for each in (q, k, v))
    return _rotate(q, cos, sin, config.query_factor), _rotate(k, cos, sin), v


def _attention_part(weights: _LayerWeights, out: jax.Array) -> jax.Array:
    out = out.reshape(*out.shape[:-2], -1)
    if weights.features_first:
        # a product with two summed dims makes XLA:CPU transpose the weights in every call, so they are joined into one
        return weights.from_the_left("ef,...f->e...", "o", out, weights.get("o").reshape(-1, out.shape[-1]))
    return weights.product(out, "o", weights.sums)


def _with_part(bias: str, norm: str, weights: _LayerWeights, x: jax.Array, part: jax.Array) -> jax.Array:
    """The residual stream plus the output of attention or the MLP, with its bias and norm where the layer has them."""
    part, factor = weights.norm(norm, weights.biased(bias, part.astype(x.dtype))), weights.config.residual_multiplier
    return x + (part if factor == 1.0 else part * factor)


def _mlp_part(weights: _LayerWeights, x: jax.Array) -> jax.Array:
    h = weights.norm("mlp_norm", x)
    if "gate_up" in weights.lp:
        # two dims of outputs, not joined: F may be split over devices
        both = weights.fused("...e,exf->...xf", "gate_up", h)
        gate, up = both[..., 0, :], both[..., 1, :]
    else:
        gate, up = weights.product(h, "gate"), weights.product(h, "up")
    gate, up = weights.biased("gate", gate), weights.biased("up", up)
    return weights.product(_gated(weights.config)(gate, up), "down", weights.sums)


def _input_of_experts(weights: _LayerWeights, x: jax.Array) -> jax.Array:
    h = weights.norm("mlp_norm", x)
    return jnp.moveaxis(h, 0, -1) if weights.features_first else h


def _routing(weights: _LayerWeights, h: jax.Array) -> experts.Routing:
    from jaxrl.models import experts

    lp, config = weights.lp, weights.config
    how = {"normalised": config.norm_topk_prob, "multiply": weights.multiply}
    return experts.route(h, lp["router"], lp.get("router_bias"), config.num_experts_per_tok, **how)


def _experts_part(mix: Mix | None, weights: _LayerWeights, h: jax.Array, routing: experts.Routing) -> jax.Array:
    from jaxrl.models import experts

    found = {name: weights.lp[name] for name in experts.WEIGHTS if name in weights.lp}
    # codes and factors stay as they are: of all experts, only those are read that have tokens
    own = found if f"down{SCALE}" in found else {name: weights.get(name) for name in found}
    shape = experts.ExpertSettings(_gated(weights.config), weights.widen)
    if weights.multiply is not None:
        out = experts.mix_in_kernels(h, routing, own, shape, weights.lp[EXPERT_IDS], weights.multiply)
    elif mix is None:
        out = experts.mix(h, routing, own, shape, weights.lp[EXPERT_IDS][0])
    else:
        out = mix(h, routing, own, shape)
    return jnp.moveaxis(out, -1, 0) if weights.features_first else out


@functools.cache
def _gated(config: ModelConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(gate, up) -> what the MLP's last matrix multiplies. One function for a config, since programs are cached by
    it."""
    if not (limit := config.swiglu_limit):
        act = _ACTIVATIONS[config.hidden_act]
        return lambda gate, up: act(gate) * up

    def clipped(gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(config.swiglu_alpha * gate)

    return clipped


_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True)}


class _Product(NamedTuple):
    """How x is multiplied with a matrix: `widen` and `reduce_dtype` as in `layer`, `multiply` as in `ByRows`; `dtype`:
    of the result. Hashable."""

    widen: bool = False
    dtype: Any = jnp.float32
    reduce_dtype: Any = jnp.float32
    multiply: Multiply | None = None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(how: _Product, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """x [..., I] @ matrix [I, O]; the gradient for the matrix in the cheaper of its two orders."""
    return _dense_forward(how, x, matrix)[0]


def _dense_forward(how: _Product, x: jax.Array, matrix: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    if how.multiply is not None:
        return how.multiply(x, matrix, dtype=how.dtype), (x, matrix)
    wide_x, wide_matrix = operands(how.widen, (x, matrix))
    return (wide_x @ wide_matrix).astype(how.dtype), (x, matrix)


def _dense_backward(how: _Product, saved: tuple[jax.Array, jax.Array], d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, matrix, d_out = operands(how.widen, (*saved, d_out))
    over = tuple(range(x.ndim - 1))
    summed = partial(  # over tokens; devices add their parts in this type
        jnp.tensordot, axes=(over, over), preferred_element_type=jnp.promote_types(x.dtype, how.reduce_dtype)
    )
    # XLA:CPU writes the left operand of a product over tokens anew, transposed: let that be the narrower
    if x.shape[-1] <= d_out.shape[-1]:
        d_matrix = summed(x, d_out)
    else:
        d_matrix = summed(d_out, x).T
    return (d_out @ matrix.T).astype(saved[0].dtype), d_matrix.astype(saved[1].dtype)


_dense.defvjp(_dense_forward, _dense_backward)


def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of an embedding [V, E] for tokens [...]. Ids must lie in the vocabulary (padding: any id that does)."""
    # "clip" spares the select of out-of-range rows, which the default mode would add.
    return jnp.take(table, tokens, axis=0, mode="clip")


def embed(
    params: Params,
    tokens: jax.Array,
    config: ModelConfig,
    dtype: Any,
    find: Callable[[jax.Array, jax.Array], jax.Array] = look_up,
) -> jax.Array:
    rows = find(params["embed"], tokens).astype(dtype)
    if config.scale_embedding:  # the factor is rounded as well, in transformers too
        rows = rows * jnp.asarray(config.hidden_size**0.5, dtype)
    return rows if config.embedding_multiplier == 1.0 else rows * config.embedding_multiplier


def final_norm(
    params: Params, x: jax.Array, config: ModelConfig, *, features_first: bool = False, by_rows: ByRows = at_once
) -> jax.Array:
    return by_rows(lambda scale, x: _norm(x, scale, config, features_first), (x,), params["final_norm"])


def head(params: Params) -> Params:
    """The weights outside the layers that `logits` needs."""
    name = "lm_head" if "lm_head" in params else "embed"
    return {name: params[name]}


def logits(
    params: Params,
    x: jax.Array,
    config: ModelConfig,
    *,
    features_first: bool = False,
    widen: bool = False,
    by_rows: ByRows = at_once,
) -> jax.Array:
    """[..., V] in at least float32 from final-normed x [..., E]; -inf for rows that pad the vocabulary. With
    `features_first`, x is [E, ...] and a separate head [V, E], and logits are still [..., V]. In parts each has its
    own rows of the vocabulary."""

    def some(params: Params, x: jax.Array) -> jax.Array:
        params, x = operands(widen, (params, x))
        return _logits(params, x, config, features_first, by_rows.multiply)

    out = by_rows(some, (x,), params, join="vocab")
    if out.shape[-1] > config.vocab_size:
        out = jnp.where(jnp.arange(out.shape[-1]) < config.vocab_size, out, -jnp.inf)
    return out


def _logits(
    params: Params, x: jax.Array, config: ModelConfig, features_first: bool, multiply: Multiply | None
) -> jax.Array:
    wide = _at_least_float32(x.dtype)
    out: Any
    if features_first:
        head = params["lm_head"] if "lm_head" in params else params["embed"]
        out = jnp.einsum("ve,e...->v...", head.astype(x.dtype), x, preferred_element_type=wide)
        out = jnp.moveaxis(out, 0, -1)
    elif "lm_head" in params:
        out = _head_product("ev", multiply, x, params["lm_head"].astype(x.dtype))
    else:
        out = _head_product("ve", multiply, x, params["embed"].astype(x.dtype))
    if config.logits_scaling != 1.0:
        out = out / config.logits_scaling
    if cap := config.final_logit_softcapping:
        out = jnp.tanh(out / cap) * cap
    return out


def score(params: Params, x: jax.Array, *, features_first: bool = False) -> jax.Array:
    """A reward model's number: [...] in at least float32 from final-normed x [..., E], or [E, ...]."""
    head, wide = params["score"].astype(x.dtype), _at_least_float32(x.dtype)
    spec = "le,e...->...l" if features_first else "...e,el->...l"
    both = (head, x) if features_first else (x, head)
    return jnp.einsum(spec, *both, preferred_element_type=wide)[..., 0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _head_product(order: str, multiply: Multiply | None, x: jax.Array, head: jax.Array) -> jax.Array:
    """x [..., E] times the head in its `order` of dims, in at least float32. The gradient of the logits is rounded to
    x's dtype before it is multiplied: else XLA makes a float32 copy of the head and multiplies at half the rate."""
    wide = _at_least_float32(x.dtype)
    if multiply is not None:
        return multiply(x, head, transposed=order == "ve", dtype=wide)
    return jnp.einsum(f"...e,{order}->...v", x, head, preferred_element_type=wide)


def _head_forward(
    order: str, multiply: Multiply | None, x: jax.Array, head: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _head_product(order, multiply, x, head), (x, head)


def _head_backward(
    order: str, _: Multiply | None, saved: tuple[jax.Array, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, head = saved
    d_out, wide = d_out.astype(x.dtype), d_out.dtype
    d_x = jnp.einsum(f"...v,{order}->...e", d_out, head, preferred_element_type=wide)
    flat = d_out.reshape(-1, d_out.shape[-1]), x.reshape(-1, x.shape[-1])
    d_head = jnp.einsum(f"tv,te->{order}", *flat, preferred_element_type=wide)
    return d_x.astype(x.dtype), d_head.astype(head.dtype)


_head_product.defvjp(_head_forward, _head_backward)


def forward_scan(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Callable[..., jax.Array],
    config: ModelConfig,
    *,
    dtype: Any,
    remat: Remat = "none",
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x,
    gather: Callable[[Params], Params] = lambda layer_params: layer_params,
    find: Callable[[jax.Array, jax.Array], jax.Array] = look_up,
    widen: bool = False,
    reduce_dtype: Any = jnp.float32,
    keys: jax.Array | None = None,
    mix: Mix | None = None,
    by_rows: ByRows = at_once,
    tally: Callable[[experts.Routing], Any] | None = None,
) -> Any:
    """Training form: final-normed hidden states [..., E] of tokens [...]. `widen`, `reduce_dtype`, `mix` and `by_rows`
    as in `layer`.

    Args:
      attend: (q, k, v) -> out, the same for every layer (`layer` has the shapes). With layers of several kinds it is
        called as (q, k, v, kind), an int32 scalar: the index of the layer's kind among `config.kinds`. Sinks [H] come
        last.
      remat: what the backward pass recomputes: `none`, `full` (each layer from its input) or `dots` (all but the
        products with weights and attention).
      constrain: a sharding constraint on the residual stream after the embedding and after each layer.
      find: (embedding, tokens) -> rows, as `look_up` does.
      gather: applied to a layer's weights inside the scanned, rematerialised body (FSDP's all-gather).
      keys: of each row, for the dropout of adapters; None: no dropout.
      tally: summarises each layer's routing; the result is then (hidden states, the stacked summaries).
    """

    def body(x: jax.Array, own: tuple[Params, Any, Any]) -> tuple[jax.Array, Any]:
        lp, index, kind = own
        drawn = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, index)
        cos, sin = (table[kind] for table in tables) if ropes_differ else tables
        of_layer = attend if kind is None else lambda q, k, v, *sinks: attend(q, k, v, kind, *sinks)
        how = {"widen": widen, "reduce_dtype": reduce_dtype, "keys": drawn, "mix": mix, "by_rows": by_rows}
        x, _, routing = layer(gather(lp), x, cos, sin, lambda *qkv: (of_layer(*qkv), None), config, **how)
        return constrain(x), None if tally is None or routing is None else tally(routing)

    if keys is not None:  # what is dropped is drawn for a row of tokens as a whole
        by_rows = at_once
    by_kind = _tables_of_kinds(positions, config, dtype, by_rows)
    x = constrain(embed(params, tokens, config, dtype, find))
    layers = params["layers"]
    num_layers = layers["o"].shape[0]
    indices = None if keys is None else jnp.arange(num_layers)
    kinds: Any = None
    tables: Any = next(iter(by_kind.values()))
    if len(by_kind) > 1:
        order = list(by_kind)
        kinds = jnp.asarray([order.index(config.kind(i)) for i in range(num_layers)], jnp.int32)
    if ropes_differ := len({kind.rope for kind in by_kind}) > 1:
        tables = _stacked_tables(list(by_kind.values()))
    x, tallies = lax.scan(_rematerialised(body, remat), x, (layers, indices, kinds))
    hidden = final_norm(params, x, config, by_rows=by_rows)
    return hidden if tally is None else (hidden, tallies)


def _stacked_tables(tables: list[Tables]) -> tuple[jax.Array, jax.Array]:
    """The tables of several kinds of layers, stacked; the identity where there is no rope."""
    like = next(cos for cos, _ in tables if cos is not None)
    cos = [jnp.ones_like(like) if c is None else c for c, _ in tables]
    sin = [jnp.zeros_like(like) if s is None else s for _, s in tables]
    return jnp.stack(cos), jnp.stack(sin)


def _rematerialised(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    # Inside a scan the loop itself keeps XLA from merging the two passes, so prevent_cse only costs.
    match remat:
        case "none":
            return body
        case "full":
            return jax.checkpoint(body, prevent_cse=False)
        case "dots":
            policy = jax.checkpoint_policies.save_only_these_names(_PRODUCT, ATTENTION)
            return jax.checkpoint(body, prevent_cse=False, policy=policy)


def forward_layers(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    attends: Callable[[int, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]],
    config: ModelConfig,
    *,
    dtype: Any,
    features_first: bool = False,
    mix: Mix | None = None,
    widen: bool = False,
    by_rows: ByRows = at_once,
) -> tuple[jax.Array, list[Any]]:
    """Rollout form, unrolled: (final-normed hidden states [..., E], each layer's cache).

    `attends(layer_index, q, k, v) -> (out, cache_of_layer)`. With `features_first` hidden states are [E, ...]. Weights
    in the host's memory are streamed (`jaxrl.models.streaming.LayerFeed`).
    """
    tables = _tables_of_kinds(positions, config, dtype, by_rows)
    x = embed(params, tokens, config, dtype)
    how = {"features_first": features_first, "mix": mix, "widen": widen, "by_rows": by_rows}
    if features_first:
        x = jnp.moveaxis(x, -1, 0)
    caches, feed = [], LayerFeed(params["layers"])
    for i in range(len(params["layers"])):
        attend = partial(attends, i)
        x, lp = feed.take(i, x)
        cos, sin = tables[config.kind(i)]
        x, cache, _ = layer(lp, x, cos, sin, attend, config, **how)
        caches.append(cache)
    return final_norm(params, x, config, features_first=features_first, by_rows=by_rows), caches
