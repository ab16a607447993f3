"""A decode step's layers on GPUs, with few kernels: eight a layer, nine where a row's context is split.

    add and norm | q, k, v product | attention [, merge] | output product | add and norm | gate and up | silu | down

Needs weights with fused projections (`jaxrl.sharding.fused_projections`) and shapes that `PagedAttention.decodes`
takes. The numbers are those of `decoder.layer` with `kv_cache.attend`: rounded at the same places, sums in another
order.

The products before a kernel of ours give partial sums over equal shares of the features, and the kernel adds them up: a
product of few rows has too few tiles for all multiprocessors otherwise. XLA would cut the sum itself, but cannot put
the addition into a kernel that is not its own. All runs in `shard_map`: Pallas calls are opaque to XLA's partitioner.

Dims: R rows of a dp group, E embed, I inputs and O outputs of a product, S shares, F mlp, K, G, D as in the kernels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxrl.kernels.attention import PagedAttention
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.kv_layers import KvLayers
from jaxrl.rollout import kv_cache
from jaxrl.schema.limits import Narrow
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.narrow_weights import SCALE
from jaxrl.sharding.rules import rollout_shardings

TILE = (128, 64)
"""Rows and columns of a product's tile, about."""

PROGRAMS = 200
"""Tiles times shares that a product should come to: one and a half for each of an H100's 132 multiprocessors."""

MIN_SHARE, MAX_SHARE = 224, 4096
"""Features of a share. Shorter ones write more partial sums than they save; longer ones XLA cuts once more."""


def computes(config: ModelConfig) -> bool:
    """Whether a step has no more than is said above: Llama, Qwen2, Qwen3 and Mistral, and what is like them."""
    plain, ropes = dataclasses.replace(config.base, **_ELSE), {kind.rope for kind in config.kinds}
    return plain == config.base and ropes == {config.rope}


_ELSE: dict[str, Any] = {
    **{"o_bias": False, "mlp_bias": False, "qk_norm_over_heads": False, "norms": "before", "norm_plus_one": False},
    **{"hidden_act": "silu", "scale_embedding": False, "embedding_multiplier": 1.0, "residual_multiplier": 1.0},
    **{"attention_multiplier": 0.0, "query_pre_attn_scalar": 0.0, "attn_logit_softcapping": 0.0},
    **{"partial_rotary_factor": 1.0, "num_experts": 0, "attention_sinks": False, "clip_qkv": 0.0},
}
"""What switches must be for a step that is made of these kernels."""


def forward(
    params: Any,
    pool: kv_cache.Pool,
    tokens: jax.Array,
    tables: kv_cache.Tables,
    positions: jax.Array,
    active: jax.Array,
    *,
    config: ModelConfig,
    layout: Layout,
    max_tp: int,
    how: PagedAttention,
    dtype: Any,
    layers: KvLayers,
    quantization: Narrow,
) -> tuple[jax.Array, kv_cache.Pool]:
    """(final-normed hidden states [dp, R, E], the pool with the new keys and values).

    Args:
      params: with fused projections, padded for `max_tp`.
      tokens, positions, active: [dp, R]; rows that are not active read no KV, and write none.
      tables: of each stack int32 [dp, R, W]. layers: how they share the pool.
    """
    cos, sin = decoder.rope_tables(positions, config, dtype)
    x = decoder.embed(params, tokens, config, dtype)
    shardings = rollout_shardings(config, layout, max_tp, fused_projections=True, quantization=quantization)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings["layers"])
    rows, paged = PartitionSpec(layout.dp_axes or None), kv_cache.pool_spec(layout, pool[0][0].shape[1])

    def local(weights, final_norm, pool, x, *by_row):
        here = jax.tree.map(lambda x: x[0], pool)
        step = _Step(config, layers, layout.tp_axes, how.interpret, *jax.tree.map(lambda x: x[0], by_row))
        hidden, here = step.run(weights, final_norm, here, x[0])
        return hidden[None], jax.tree.map(lambda x: x[None], here)

    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(specs, PartitionSpec(), [(paged, paged)] * len(pool), *[rows] * 5),
        out_specs=(rows, [(paged, paged)] * len(pool)),
        check_vma=False,  # hidden states are replicated over tp
    )(params["layers"], params["final_norm"], pool, x, cos, sin, tables, jnp.where(active, positions, -1))


class _Step:
    """The layers of one step on one device: `cos`, `sin` [R, D / 2], of each stack `tables` [R, W], `positions` [R]
    (-1: none)."""

    def __init__(
        self,
        config: ModelConfig,
        layers: KvLayers,
        tp_axes: tuple[str, ...],
        interpret: bool,
        cos: jax.Array,
        sin: jax.Array,
        tables: kv_cache.Tables,
        positions: jax.Array,
    ) -> None:
        # Imported here: a run on CPU need not wait for them, and works with a JAX that lacks this backend of Pallas.
        from jaxrl.kernels import decode_pallas

        self._kernels = decode_pallas
        self._windows = [config.kind(i).window for i in range(config.num_layers)]
        self._eps, self._tp_axes, self._interpret = config.rms_norm_eps, tp_axes, interpret
        self._rope = cos, sin
        self._places, self._tables, self._positions = layers.places, tables, positions

    def run(
        self, layers: list[Any], final_norm: jax.Array, pool: kv_cache.Pool, x_RE: jax.Array
    ) -> tuple[jax.Array, kv_cache.Pool]:
        """Final-normed hidden states [R, E], and the pool."""
        new = list(pool)
        pending_SRE = jnp.zeros((1, *x_RE.shape), jnp.float32)
        for lp, (stack, place), window in zip(layers, self._places, self._windows, strict=True):
            x_RE, h_RE = self._add_norm(x_RE, pending_SRE, lp["attn_norm"])
            out_RF, new[place] = self._attend(lp, h_RE, new[place], self._tables[stack], window)
            pending_SRE = self._whole(partial_sums(out_RF, lp["o"].reshape(-1, x_RE.shape[1]), lp.get("o" + SCALE)))
            x_RE, h_RE = self._add_norm(x_RE, pending_SRE, lp["mlp_norm"])
            both_RXF = _gate_up(h_RE, lp["gate_up"], lp.get("gate_up" + SCALE))
            gated_RF = jax.nn.silu(both_RXF[:, 0]) * both_RXF[:, 1]
            pending_SRE = self._whole(partial_sums(gated_RF, lp["down"], lp.get("down" + SCALE)))
        return self._add_norm(x_RE, pending_SRE, final_norm)[1], new

    def _add_norm(self, x: jax.Array, parts: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._kernels.add_norm(x, parts, scale, eps=self._eps, interpret=self._interpret)

    def _attend(self, lp: Any, h_RE: jax.Array, cached: Any, tables: jax.Array, window: int) -> tuple[jax.Array, Any]:
        """Attention's output [R, H * D], and the layer's new arrays."""
        features, *slab = lp["qkv"].shape
        qkv_SRO = partial_sums(h_RE, lp["qkv"].reshape(features, -1), lp.get("qkv" + SCALE))
        norms = self._kernels.HeadNorms(lp["q_norm"], lp["k_norm"]) if "q_norm" in lp else None
        out_RHD, k, v = self._kernels.decode_attention(
            qkv_SRO.reshape(*qkv_SRO.shape[:2], *slab),
            lp.get("qkv_bias"),
            norms,
            *self._rope,
            *cached,
            tables,
            self._positions,
            dtype=h_RE.dtype,
            eps=self._eps,
            window=window,
            interpret=self._interpret,
        )
        return out_RHD.reshape(out_RHD.shape[0], -1), (k, v)

    def _whole(self, parts_SRE: jax.Array) -> jax.Array:
        """A sum over features that are split over tp."""
        if not self._tp_axes:
            return parts_SRE
        return lax.psum(jnp.sum(parts_SRE, axis=0, keepdims=True), self._tp_axes)


def _gate_up(h_RE: jax.Array, w_EXF: jax.Array, scale_XF: jax.Array | None) -> jax.Array:
    if scale_XF is None:
        return jnp.einsum("re,exf->rxf", h_RE, w_EXF)
    codes = w_EXF.astype(h_RE.dtype)
    out = jnp.einsum("re,exf->rxf", h_RE, codes, preferred_element_type=jnp.float32) * scale_XF
    return out.astype(h_RE.dtype)


def partial_sums(x_RI: jax.Array, w_IO: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """float32 [S, R, O]: the product of x and w, summed over each of S equal shares of the features. `scale`: of a
    quantised w the factors of its outputs, in any shape."""
    (rows, inner), outer = x_RI.shape, w_IO.shape[1]
    shares = num_shares(rows, inner, outer)
    x_RSI, w_SIO = x_RI.reshape(rows, shares, -1), w_IO.reshape(shares, -1, outer).astype(x_RI.dtype)
    out = jnp.einsum("rsi,sio->sro", x_RSI, w_SIO, preferred_element_type=jnp.float32)
    return out if scale is None else out * scale.reshape(-1)


def num_shares(rows: int, inner: int, outer: int) -> int:
    """Into how many shares a product's features are cut: a rule of thumb that has not been measured. It comes close to
    what XLA does by itself, and gives products that XLA (of jax 0.11.2, compiling for an H100) does not cut again,
    which would cost a kernel."""
    tiles = -(-rows // TILE[0]) * -(-outer // TILE[1])
    shares = 1
    while inner % (shares * 32) == 0 and inner >= 2 * shares * MIN_SHARE:
        if tiles * shares >= PROGRAMS and inner <= shares * MAX_SHARE:
            break
        shares *= 2
    return shares
