"""What the model tests share: tiny models, plain attention, and transformers where it is installed."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside import import_transformers

from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import Lora
from jaxrl.models.rope import RopeScaling
from jaxrl.models.weights import Weight

SCALINGS = {
    "none": RopeScaling(),
    "linear": RopeScaling("linear", 2.5),
    "llama3": RopeScaling("llama3", 8.0, 64, 1.0, 4.0),
    "yarn": RopeScaling("yarn", 4.0, 32, attention_factor=1.1386294361119891),
}
TOKENS = np.random.default_rng(1).integers(0, 97, (2, 40))
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE: dict[str, dict[str, Any]] = {
    "nothing": {"rope_theta": None, "rope_scaling": None, "rope_parameters": None},
    "theta in both": {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
    "theta in the scaling": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 2e4}},
    "scaling takes the place of all parameters": {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 2e4, "beta_fast": 16.0},
    },
    "parameters alone": {"rope_parameters": _YARN | {"rope_theta": 2e4}},
    "original at the top alone": {
        "original_max_position_embeddings": 1024,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    },
    "original nowhere": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "original at the top, llama3": {"original_max_position_embeddings": 64, "rope_scaling": _LLAMA3},
    "yarn's factor null": {"rope_scaling": _YARN | {"factor": None}},
    "yarn's mscale": {"rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    "yarn's own attention factor": {"rope_scaling": _YARN | {"attention_factor": 1.5, "mscale": 0.7}},
    "yarn's betas": {"rope_scaling": _YARN | {"beta_fast": 8.0, "beta_slow": 2.0}},
    "yarn not truncated": {"rope_scaling": _YARN | {"truncate": False}},
}
"""What is laid over the config.json of `tiny_config()` (None takes a key away): recorded as transformers reads it."""


def rope_config(name: str) -> dict[str, Any]:
    return {key: value for key, value in (tiny_config().to_hf() | ROPE[name]).items() if value is not None}


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


LORAS = {
    "llama": Lora(3, 6.0, ("q", "k", "v", "o", "gate", "up", "down")),
    "qwen2": Lora(4, 2.0, ("q", "v", "down"), use_rslora=True),
    "qwen3": Lora(2, 5.0, ("k", "o", "gate")),
}


def lora_config(family: str) -> ModelConfig:
    """A tiny model with adapters, some of which leave matrices out."""
    return dataclasses.replace(tiny_config(family), lora=LORAS[family])


def lively(config: ModelConfig, dtype: Any = np.float32, scale: float = 0.3) -> Any:
    """Random parameters in training form, large by default, so that every weight matters to the logits. As numpy,
    because jax's own would be a program for each shape."""
    random = np.random.default_rng(0)

    def one(path: Any, weight: Weight) -> np.ndarray:
        norm = "norm" in jax.tree_util.keystr(path)
        return random.normal(1.0 if norm else 0.0, scale, weight.shape).astype(dtype)

    return jax.tree_util.tree_map_with_path(one, config.weights(), is_leaf=lambda x: isinstance(x, Weight))


def causal(q: jax.Array, k: jax.Array, v: jax.Array, window: Any = 0, cap: float = 0.0, sinks: Any = None) -> jax.Array:
    """Plain causal attention of [B, T, heads, D]; sinks: [heads]."""
    B, T, H, D = q.shape
    K = k.shape[2]
    scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, K, H // K, D), k) / D**0.5
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    seen = jnp.tril(jnp.ones((T, T), bool))
    if not isinstance(window, int) or window:
        behind = jnp.arange(T)[:, None] - jnp.arange(T)
        seen &= (behind < window) | (window == 0)
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.reshape(K, H // K, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :T]
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(B, T, H, D)


def attention_of(config: ModelConfig) -> Callable[..., jax.Array]:
    """`causal` with the windows of a model's layers and its cap."""
    windows = [kind.window for kind in config.kinds]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *more: Any) -> jax.Array:
        *kind, sinks = more if config.attention_sinks else (*more, None)
        window = jnp.asarray(windows)[kind[0]] if kind else windows[0]
        return causal(q, k, v, window, config.attn_logit_softcapping, sinks)

    return attend


def positions_of(tokens: Any) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)


@functools.partial(jax.jit, static_argnames=("config", "dtype", "remat"))
def scan_logits(params: Any, tokens: Any, config: ModelConfig, dtype: Any = jnp.float32, remat: Any = "none") -> Any:
    attend = attention_of(config)
    hidden = decoder.forward_scan(params, tokens, positions_of(tokens), attend, config, dtype=dtype, remat=remat)
    return decoder.logits(params, hidden, config)


@functools.partial(jax.jit, static_argnames="config")
def drawn_gradients(params: Any, tokens: Any, cotangent: Any, config: ModelConfig) -> tuple[jax.Array, Any]:
    """Logits of tokens [B, T], and the gradients of the sum of log-softmax times `cotangent`; float64."""

    def total(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = scan_logits(params, tokens, config, jnp.float64)
        return jnp.sum(jax.nn.log_softmax(logits) * cotangent), logits

    gradients, logits = jax.grad(total, has_aux=True)(params)
    return logits, gradients


def gradient_sums(gradients: Any) -> np.ndarray:
    """[weights, 2]: each gradient's sum, and its sum with signs drawn for each number."""
    flat = [np.asarray(x).ravel() for x in jax.tree.leaves(gradients)]
    signs = [np.random.default_rng(7).choice([-1, 1], x.size) for x in flat]
    return np.array([(x.sum(), x @ s) for x, s in zip(flat, signs, strict=True)])


@pytest.fixture(scope="session")
def transformers() -> Any:
    return import_transformers()


@pytest.fixture
def torch_logits(transformers: Any) -> Callable[..., np.ndarray]:
    import torch

    def run(folder: Path, tokens: np.ndarray, dtype: Any = torch.float32) -> np.ndarray:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
            return model(torch.tensor(tokens)).logits.float().numpy()

    return run
