"""Bare decode loops: the cost of a model without an engine around it.

Yardsticks for `bench_decode.py`. Both hold plain weights of their own (one dict per layer, unrolled) and draw all new
tokens of all rows in one dispatch of one jitted `while_loop`. They differ in the cache:

- contiguous: per layer [B, K, S, D], every row at the same position, written with one dynamic slice;
- paged: per layer [K, blocks, P, D] with a block table and a position per row; in each step the new keys and values are
  scattered and all of a row's blocks gathered, as an engine must.

They share no forward pass with `jaxrl.models.decoder`, so they do not follow it when it changes. Matrices are
[out, in] and activations [features, N]: the order of products that XLA runs fastest on CPUs.

Dims: B rows, T prompt tokens, N = B or B*T positions, E embed, H query heads, K key/value heads, G = H / K, D head dim,
S positions of a row's cache, P positions per block, W blocks per row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import rope_tables
from jaxrl.rollout.sampling import SamplingState, sample

Weights = dict[str, Any]
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
BLOCK = 16
QUERIES = 1024
"""Of a prompt, at a time: scores of [T, T] for every row and head would not fit at 8k."""


def bare_weights(params: Any, config: ModelConfig, dtype: str) -> Weights:
    """Training form to embed and head [V, E], and one dict of [out, in] matrices per layer."""
    width = config.hidden_size

    def matrix(name: str, stacked: jax.Array, i: jax.Array) -> jax.Array:
        w = jax.lax.dynamic_index_in_dim(stacked, i, keepdims=False)
        if name.endswith("norm"):
            return w.astype(jnp.float32)
        if name.endswith("bias"):
            return w.reshape(-1, 1).astype(dtype)
        return (w.reshape(-1, width) if name in ("o", "down") else w.reshape(width, -1)).T.astype(dtype)

    one = jax.jit(lambda layers, i: {name: matrix(name, w, i) for name, w in layers.items()})
    embed = jax.jit(lambda w: w.astype(dtype))(params["embed"])
    head = jax.jit(lambda w: w.T.astype(dtype))(params["lm_head"]) if "lm_head" in params else embed
    layers = [one(params["layers"], i) for i in range(config.num_layers)]
    return {"embed": embed, "head": head, "layers": layers, "final_norm": params["final_norm"].astype(jnp.float32)}


def _norm(x: jax.Array, scale: jax.Array, eps: float, axis: int) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = scale[:, None] if axis == 0 else scale
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=axis, keepdims=True) + eps) * scale).astype(x.dtype)


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    c, s = cos[:, None], sin[:, None]
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1).astype(x.dtype)


def _forward(weights: Weights, tokens: jax.Array, positions: jax.Array, attend: Attend, config: ModelConfig) -> Any:
    """Final-normed hidden states [E, N] of tokens [N]; `attend(layer, q [N, H, D], k [N, K, D], v) -> [N, H, D]`."""
    eps, dim = config.rms_norm_eps, config.head_dim
    cos, sin = rope_tables(positions, config, jnp.float32)
    x = jnp.take(weights["embed"], tokens, axis=0, mode="clip").T

    for i, lw in enumerate(weights["layers"]):
        h = _norm(x, lw["attn_norm"], eps, 0)

        def heads(name: str, lw: Weights = lw, h: jax.Array = h) -> jax.Array:
            out = lw[name] @ h
            if f"{name}_bias" in lw:
                out = out + lw[f"{name}_bias"]
            return out.reshape(-1, dim, h.shape[1]).transpose(2, 0, 1)

        q, k, v = heads("q"), heads("k"), heads("v")
        if "q_norm" in lw:
            q, k = _norm(q, lw["q_norm"], eps, -1), _norm(k, lw["k_norm"], eps, -1)
        out = attend(i, _turn(q, cos, sin), _turn(k, cos, sin), v).astype(x.dtype)
        x = x + lw["o"] @ out.reshape(out.shape[0], -1).T
        h = _norm(x, lw["mlp_norm"], eps, 0)
        x = x + lw["down"] @ (jax.nn.silu(lw["gate"] @ h) * (lw["up"] @ h))
    return _norm(x, weights["final_norm"], eps, 0)


def _draw(weights: Weights, hidden: jax.Array, positions: jax.Array, state: SamplingState) -> tuple[jax.Array, ...]:
    logits = jnp.matmul(weights["head"], hidden, preferred_element_type=jnp.float32).T
    drawn = sample(logits, positions, state, truncate=False)
    return drawn.token, drawn.sampled_logprob, drawn.rollout_logprob


def _decode_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, order: Literal["bk", "kb"]
) -> jax.Array:
    """q [B, H, D] over k, v [B, K, S, D] or [K, B, S, D]; visible [B or 1, S]."""
    rows, num_heads, dim = q.shape
    kv_heads = k.shape[1 if order == "bk" else 0]
    q_BKGD = q.reshape(rows, kv_heads, -1, dim)
    scores = jnp.einsum(f"{order}sd,bkgd->bksg", k, q_BKGD, preferred_element_type=jnp.float32) * dim**-0.5
    scores_BKGS = jnp.where(visible[:, None, None], jnp.swapaxes(scores, -1, -2), -jnp.inf)
    weights = jax.nn.softmax(scores_BKGS, axis=-1).astype(v.dtype)
    out = jnp.einsum(f"bkgs,{order}sd->bkgd", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(rows, num_heads, dim)


def _prompt_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal, q [B, T, H, D] over k, v [B, T, K, D] of the same tokens; `QUERIES` queries at a time have scores."""
    rows, length, num_heads, dim = q.shape
    q = q.reshape(rows, length, k.shape[2], -1, dim)
    parts = []
    for start in range(0, length, QUERIES):
        end = min(start + QUERIES, length)
        scores = jnp.einsum("btkgd,bskd->bkgts", q[:, start:end], k[:, :end], preferred_element_type=jnp.float32)
        causal = jnp.arange(start, end)[:, None] >= jnp.arange(end)
        weights = jax.nn.softmax(jnp.where(causal, scores * dim**-0.5, -jnp.inf), axis=-1).astype(v.dtype)
        parts.append(jnp.einsum("bkgts,bskd->btkgd", weights, v[:, :end], preferred_element_type=jnp.float32))
    return jnp.concatenate(parts, axis=1).reshape(rows, length, num_heads, dim)


@dataclass(frozen=True, slots=True)
class Sizes:
    """rows B, prompt tokens T, new tokens; the cache holds both. At most `prefill_tokens` run at once, but a whole row
    does."""

    rows: int
    prompt: int
    new: int
    prefill_tokens: int = 8192

    @property
    def blocks(self) -> int:
        """W, blocks per row."""
        return -(-(self.prompt + self.new) // BLOCK)

    @property
    def rows_at_once(self) -> int:
        """Rows of a call of the prefill: they divide B, so that all calls are one program."""
        most = max(1, self.prefill_tokens // self.prompt)
        return next(count for count in range(min(most, self.rows), 0, -1) if self.rows % count == 0)


class BareLoop:
    """One of the two loops for one size, compiled; `prefill` then `decode`.

    `prefill` runs the prompts and draws the first token of every row; `decode` draws the other `new - 1`.
    """

    def __init__(self, kind: Literal["contiguous", "paged"], config: ModelConfig, sizes: Sizes, seed: int = 0) -> None:
        self.kind, self.config, self.sizes = kind, config, sizes
        # scattered blocks, as a pool has them after a while; block 0 belongs to no row
        blocks = np.random.default_rng(seed).permutation(sizes.rows * sizes.blocks) + 1
        self._tables = jnp.asarray(blocks.reshape(sizes.rows, sizes.blocks), jnp.int32)
        # arguments of the program, not constants of it: the compiler must not see that all rows keep step
        uniform = kind == "contiguous"
        self._at = jnp.int32(sizes.prompt) if uniform else jnp.full((sizes.rows,), sizes.prompt, jnp.int32)
        self._prefill = jax.jit(self._prefill_of, donate_argnums=1)
        self._decode = jax.jit(self._decode_of, donate_argnums=1)

    def prefill(self, weights: Weights, prompts: jax.Array, state: SamplingState) -> Any:
        """(caches, first tokens int32 [B]) of prompts int32 [B, T]."""
        caches = self._blank(weights["embed"].dtype)
        first, count = [], self.sizes.rows_at_once
        for row in range(0, self.sizes.rows, count):
            own = jax.tree.map(lambda x, row=row: x[row : row + count], state)
            caches, tokens = self._prefill(
                weights, caches, prompts[row : row + count], own, self._tables[row : row + count], jnp.int32(row)
            )
            first.append(tokens)
        return jax.block_until_ready((caches, jnp.concatenate(first)))

    def decode(self, weights: Weights, caches: Any, first: jax.Array, state: SamplingState) -> Any:
        """Tokens [B, new - 1] and both log-probabilities; uses the caches up."""
        out, _ = jax.block_until_ready(self._decode(weights, caches, first, state, self._tables, self._at))
        return out

    def _blank(self, dtype: Any) -> list[Any]:
        """Caches without anything in them."""
        kv_heads, dim, blocks = self.config.num_kv_heads, self.config.head_dim, self.sizes.blocks
        if self.kind == "contiguous":
            shape = (self.sizes.rows, kv_heads, blocks * BLOCK, dim)
        else:
            shape = (kv_heads, self.sizes.rows * blocks + 1, BLOCK, dim)
        return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(self.config.num_layers)]

    def _prefill_of(
        self,
        weights: Weights,
        caches: list[Any],
        prompts: jax.Array,
        state: SamplingState,
        tables: jax.Array,
        first_row: jax.Array,
    ) -> Any:
        """Fills the caches of some rows and draws their first tokens."""
        rows, length = prompts.shape
        caches = list(caches)

        def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            q, k, v = (x.reshape(rows, length, *x.shape[1:]) for x in (q, k, v))
            caches[i] = tuple(
                self._fill(cache, x, tables, first_row) for cache, x in zip(caches[i], (k, v), strict=True)
            )
            return _prompt_attention(q, k, v).reshape(rows * length, *q.shape[2:])

        positions = jnp.tile(jnp.arange(length), rows)
        hidden = _forward(weights, prompts.reshape(-1), positions, attend, self.config)
        last = hidden.reshape(-1, rows, length)[:, :, -1]
        token, *_ = _draw(weights, last, jnp.full((rows,), length), state)
        return caches, token

    def _fill(self, cache: jax.Array, x: jax.Array, tables: jax.Array, first_row: jax.Array) -> jax.Array:
        """A layer's cache with x [b, T, K, D] of b rows in it."""
        rows, length = x.shape[:2]
        if self.kind == "contiguous":
            return jax.lax.dynamic_update_slice(cache, jnp.swapaxes(x, 1, 2), (first_row, 0, 0, 0))
        at = jnp.arange(length)
        return cache.at[:, tables[:, at // BLOCK], jnp.broadcast_to(at % BLOCK, (rows, length))].set(
            jnp.moveaxis(x, 2, 0)
        )

    def _decode_of(
        self, weights: Weights, caches: Any, first: jax.Array, state: SamplingState, tables: jax.Array, at: jax.Array
    ) -> Any:
        rows, steps = self.sizes.rows, self.sizes.new - 1
        attend: Any = self._attend_contiguous if self.kind == "contiguous" else partial(self._attend_paged, tables)
        shape = (rows, steps)
        out = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

        def advance(carry: tuple) -> tuple:
            step, token, at, caches, out = carry
            caches = list(caches)
            positions = jnp.broadcast_to(at, (rows,))
            hidden = _forward(weights, token, positions, partial(attend, caches, at), self.config)
            drawn = _draw(weights, hidden, positions + 1, state)
            write = partial(jax.lax.dynamic_update_index_in_dim, index=step, axis=1)
            return step + 1, drawn[0], at + 1, caches, tuple(write(o, d) for o, d in zip(out, drawn, strict=True))

        carry = (jnp.int32(0), first, at, caches, out)
        *_, caches, out = jax.lax.while_loop(lambda carry: carry[0] < steps, advance, carry)
        return out, caches  # caches too: only then does the loop write into those that it was given

    def _attend_contiguous(
        self, caches: list, at: jax.Array, i: int, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> jax.Array:
        def put(cache: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(cache, new[:, :, None], at, axis=2)

        cache_k, cache_v = caches[i] = (put(caches[i][0], k), put(caches[i][1], v))
        visible = jnp.arange(self.sizes.blocks * BLOCK)[None] <= at
        return _decode_attention(q, cache_k, cache_v, visible, "bk")

    def _attend_paged(
        self, tables: jax.Array, caches: list, at: jax.Array, i: int, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> jax.Array:
        block = jnp.take_along_axis(tables, at[:, None] // BLOCK, axis=1)[:, 0]
        span = self.sizes.blocks * BLOCK

        def put(pool: jax.Array, new: jax.Array) -> jax.Array:
            return pool.at[:, block, at % BLOCK].set(jnp.swapaxes(new, 0, 1))

        def gathered(pool: jax.Array) -> jax.Array:
            return pool[:, tables].reshape(pool.shape[0], -1, span, pool.shape[-1])

        pool_k, pool_v = caches[i] = (put(caches[i][0], k), put(caches[i][1], v))
        return _decode_attention(q, gathered(pool_k), gathered(pool_v), jnp.arange(span) <= at[:, None], "kb")
