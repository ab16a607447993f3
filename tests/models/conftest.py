"""What the model tests share: tiny models, plain attention, and transformers where it is installed."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside import import_transformers

from jaxrl.models.config import ModelConfig
from jaxrl.models.rope import RopeScaling

SCALINGS = {
    "none": RopeScaling(),
    "linear": RopeScaling("linear", 2.5),
    "llama3": RopeScaling("llama3", 8.0, 64, 1.0, 4.0),
    "yarn": RopeScaling("yarn", 4.0, 32, attention_factor=1.1386294361119891),
}
FAMILIES = ("llama", "qwen2", "qwen3")


def tiny_config(family: str = "llama", scaling: str = "none", **changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16 if family == "qwen3" else 8,
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "tie_word_embeddings": family == "qwen2",
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        "rope_scaling": SCALINGS[scaling],
    }
    return ModelConfig(family=family, **(sizes | changes))  # type: ignore[arg-type]


def unstack(params: Any) -> Any:
    """Training form to rollout form, values unchanged."""
    layers = params["layers"]
    count = layers["attn_norm"].shape[0]
    return params | {"layers": [{name: w[i] for name, w in layers.items()} for i in range(count)]}


def lively(params: Any, seed: int = 0, dtype: Any = np.float32) -> Any:
    """The tree with larger random numbers everywhere, so that every weight matters to the logits."""
    random = np.random.default_rng(seed)

    def one(path: Any, leaf: jax.Array) -> jax.Array:
        norm = "norm" in jax.tree_util.keystr(path)
        return jnp.asarray(random.normal(1.0 if norm else 0.0, 0.3, leaf.shape), dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Plain causal attention of [B, T, heads, D]."""
    B, T, H, D = q.shape
    K = k.shape[2]
    scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, K, H // K, D), k) / D**0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(B, T, H, D)


def positions_of(tokens: Any) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)


@pytest.fixture(scope="session")
def transformers() -> Any:
    return import_transformers()


@pytest.fixture
def torch_logits(transformers: Any) -> Callable[..., np.ndarray]:
    """Logits by transformers of a Hugging Face folder."""
    import torch

    def run(folder: Path, tokens: np.ndarray, dtype: Any = torch.float32) -> np.ndarray:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
            return model(torch.tensor(tokens)).logits.float().numpy()

    return run
