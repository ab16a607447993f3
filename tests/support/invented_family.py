"""The family that docs/your-model.md invents, computed in numpy from the tensors of its files, as its authors would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

CONTENT: dict[str, Any] = {
    "architectures": ["AcmeForCausalLM"],
    "model_type": "acme",
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "attention_bias": True,
    "sliding_window": 3,
    "residual_scale": 0.7,
}


def logits(weights: Mapping[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """[T, V] of tokens [T] by a model with the config.json above."""
    x, eps = weights["model.embed_tokens.weight"][tokens], 1e-6
    count, heads, kv_heads = len(tokens), 6, 3

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * weights[f"{name}.weight"]

    def turned(x: np.ndarray) -> np.ndarray:
        angles = np.arange(count)[:, None, None] * 500_000.0 ** (-np.arange(x.shape[-1] // 2) * 2 / x.shape[-1])
        first, second = np.split(x, 2, -1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    for i in range(4):
        at = f"model.layers.{i}"

        def linear(x: np.ndarray, name: str, at: str = at) -> np.ndarray:
            return x @ weights[f"{at}.{name}.weight"].T + weights.get(f"{at}.{name}.bias", 0)

        q, k, v = (linear(x, f"self_attn.{name}_proj").reshape(count, -1, 4) for name in "qkv")
        q, k = (turned(normed(y, f"{at}.self_attn.{name}_norm")) for y, name in ((q, "q"), (k, "k")))
        k, v = (np.repeat(y, heads // kv_heads, 1) for y in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / 2
        behind = np.arange(count)[:, None] - np.arange(count)
        window = count if i % 3 == 2 else 3
        scores = np.where((behind >= 0) & (behind < window), scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hts,shd->thd", weight / weight.sum(-1, keepdims=True), v).reshape(count, -1)
        x = x + 0.7 * normed(linear(out, "self_attn.o_proj"), f"{at}.post_attention_layernorm")
        gate, up = np.split(linear(x, "mlp.gate_up_proj"), 2, -1)
        down = linear(gate / (1 + np.exp(-gate)) * up, "mlp.down_proj")
        x = x + 0.7 * normed(down, f"{at}.post_feedforward_layernorm")
    return normed(x, "model.norm") @ weights["model.embed_tokens.weight"].T
