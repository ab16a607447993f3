"""Routers choose the same experts in rollouts and in training: counted token by token and layer by layer.

`pytest --slow -s tests/rollout/test_routing.py` prints the counts of docs/your-model.md.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.attention import Heads, choose_packed
from jaxrl.kernels.reference import MaskInputs, operands
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.rollout import kv_cache
from jaxrl.rollout.programs import ExecutorConfig, Programs
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import to_rollout

ROWS, LENGTH, BLOCK, PREFILL = 32, 64, 16, 16
CONFIG = ModelConfig.from_hf(
    {
        **{"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 512, "hidden_size": 128, "head_dim": 32},
        **{"moe_intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True, "max_position_embeddings": 128},
    }
)


class Recording:
    """A `Mix` that keeps what routers decide while it is traced."""

    def __init__(self, mix: decoder.Mix) -> None:
        self.mix, self.seen = mix, list[Any]()

    def __call__(self, h: jax.Array, routing: Any, *rest: Any) -> jax.Array:
        self.seen.append((routing.experts, routing.probabilities))
        return self.mix(h, routing, *rest)


def rolled_out(params: Any, tokens: np.ndarray, dtype: str, tp: int) -> np.ndarray:
    """[L, R, T, C]: a prefill of some positions, then one after another."""
    layout = Layout(make_mesh(jax.devices()[:tp]), tp)
    programs = Programs(CONFIG, layout, ExecutorConfig(ROWS, decode_steps=1, dtype=dtype, max_tp=tp))
    weights = to_rollout(params, CONFIG, layout, dtype, tp, **programs.form)
    shape = kv_cache.CacheShape(
        CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, 1 + ROWS * LENGTH // BLOCK, BLOCK, jnp.dtype(dtype)
    )
    pool = kv_cache.allocate(layout, shape)
    tables = 1 + jnp.arange(ROWS * LENGTH // BLOCK, dtype=jnp.int32).reshape(1, ROWS, -1)
    assert programs.mix is not None
    plain = programs.mix

    @jax.jit
    def run(pool: Any, tokens: jax.Array, start: jax.Array) -> tuple[Any, jax.Array]:
        programs.mix = recording = Recording(plain)
        positions = start + jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        _, pool = programs.forward(weights, pool, tokens, (tables,), positions, jnp.ones(tokens.shape, bool))
        return pool, jnp.stack([chosen for chosen, _ in recording.seen])

    found, ends = [], [0, PREFILL, *range(PREFILL + 1, LENGTH + 1)]
    for start, end in pairwise(ends):
        pool, chosen = run(pool, tokens[None, :, start:end], jnp.int32(start))
        found.append(np.asarray(chosen)[:, 0])
    return np.concatenate(found, axis=2)


def trained(params: Any, tokens: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """[L, R, T, C] and probabilities [L, R, T, X], as the trainer computes them."""
    heads = Heads(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, dtype)
    packed = choose_packed("auto", "cpu", heads)
    ids, positions = np.ones(tokens.shape, np.int32), np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)

    @jax.jit
    def run(params: Any, tokens: jax.Array) -> Any:
        mask = MaskInputs(ids, positions, ids)
        tiles = packed.tile_pairs(mask, dtype)
        return decoder.forward_scan(
            params,
            tokens,
            jnp.asarray(positions),
            lambda q, k, v: packed.attend(q, k, v, mask, tiles),
            CONFIG,
            dtype=jnp.dtype(dtype),
            widen=packed.tiling.widen,
            tally=lambda routing: (routing.experts, routing.probabilities),
        )[1]

    return tuple(np.asarray(x) for x in run(operands(False, params), tokens))  # type: ignore[return-value]


def count(dtype: str, tp: int, batches: int) -> tuple[int, int, float]:
    """Tokens, choices (of a token in a layer) that differ, and the largest gap between the last probability that was
    chosen and the first that was not among them, over the former."""
    params = jax.jit(lambda key: decoder.init(CONFIG, key))(jax.random.key(0))
    narrow = jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), params)
    differ, widest = 0, 0.0
    for batch in range(batches):
        tokens = np.random.default_rng(batch).integers(0, CONFIG.vocab_size, (ROWS, LENGTH)).astype(np.int32)
        ours, (theirs, probabilities) = rolled_out(narrow, tokens, dtype, tp), trained(narrow, tokens, dtype)
        wrong = (ours != theirs).any(-1)
        ordered = np.sort(probabilities[wrong], axis=-1)[:, ::-1]
        last, next_ = (ordered[:, CONFIG.num_experts_per_tok + i] for i in (-1, 0))
        widest = max(widest, float((1 - next_ / last).max(initial=0)))
        differ += int(wrong.sum())
    return batches * ROWS * LENGTH, differ, widest


@pytest.mark.slow  # in `test_families.py` log-probabilities of a mixture would be others with other experts
def test_in_float64_they_never_differ(x64):
    assert count("float64", 2, 1)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most", "gap", "tp"), [("float32", 1e-5, 1e-5, 1), ("bfloat16", 0.03, 0.05, 2)])
def test_in_narrower_types_what_differs_are_near_ties(dtype, most, gap, tp):
    tokens, differ, widest = count(dtype, tp, 50)
    choices = tokens * CONFIG.num_layers
    print(f"\n{dtype}, tp {tp}: {tokens} tokens, {differ} of {choices} choices differ, the widest gap {widest:.1e}")
    assert tokens >= 10**5
    assert differ <= most * choices
    assert widest < gap
