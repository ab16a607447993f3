"""Small models whose sizes no mesh divides, and their weights, for tests of shardings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.models.config import ModelConfig
from jaxrl.models.weights import Weight
from jaxrl.sharding.rules import train_shardings


def uneven(num_heads: int = 9, num_kv_heads: int = 3, family: str = "llama", **changes: Any) -> ModelConfig:
    """Of three layers; what is common in its family is on, and `changes` are other fields."""
    sizes: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 24,
        "intermediate_size": 30,
        "num_layers": 3,
        "head_dim": 4,
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "tie_word_embeddings": family == "qwen2",
    }
    return ModelConfig(family=family, num_heads=num_heads, num_kv_heads=num_kv_heads, **(sizes | changes))


def normal_params(config: ModelConfig, dtype: Any) -> Any:
    """Random weights with a mean that is not 0, norms and biases among them, on the host."""
    random = np.random.default_rng(3)
    return jax.tree.map(
        lambda weight: random.normal(0.5, 0.5, weight.shape).astype(jnp.dtype(dtype)),
        config.weights(),
        is_leaf=lambda x: isinstance(x, Weight),
    )


def placed(params: Any, config: ModelConfig, mesh: Mesh) -> Any:
    """In training form on a mesh."""
    return jax.tree.map(jax.device_put, params, train_shardings(config, mesh))
