"""Small random models of three families and requests to them, for tests that compare tokens bit for bit; and the one
that is trained."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from drawn_models import draw

from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.types import SampleKey, SamplingParams

VOCABULARY = 300
TRAINED = ModelConfig("llama", 64, 32, 48, 2, 4, 2, 8, tie_word_embeddings=True)
MODELS = {"llama": (8, 4), "qwen2": (14, 2), "smollm2": (9, 3)}


@functools.cache
def model_of(name: str) -> ModelConfig:
    """One of `MODELS`, or a drawn one: `family:seed`."""
    if ":" in name:
        family, seed = name.split(":")
        return ModelConfig.from_hf(draw(family, int(seed)) | {"vocab_size": VOCABULARY})
    heads = MODELS[name]
    return ModelConfig.from_hf(
        {
            "architectures": ["Qwen2ForCausalLM" if name == "qwen2" else "LlamaForCausalLM"],
            "model_type": "qwen2" if name == "qwen2" else "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 8 * heads[0],
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1],
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
            "tie_word_embeddings": name != "llama",
            "max_position_embeddings": 512,
        }
    )


@functools.cache
def weights_of(name: str, dtype: str) -> Any:
    """Random weights, large enough for distributions that are far from flat; biases that are not zero."""
    params = jax.jit(lambda key: decoder.init(model_of(name), key, jnp.dtype(dtype)))(jax.random.key(0))
    random = np.random.default_rng(1)

    def one(path: Any, x: jax.Array) -> np.ndarray:
        if "bias" in jax.tree_util.keystr(path):
            return random.normal(size=x.shape).astype(dtype)
        return np.asarray(x) * jnp.dtype(dtype).type(5 if x.ndim > 1 else 1)

    return jax.tree_util.tree_map_with_path(one, params)


def requests(num_prompts: int = 9, n: int = 3, longest: int = 64, first_id: int = 0) -> list[Request]:
    """More than there are rows. The first sample of each prompt goes on to the end, others stop anywhere."""
    random = np.random.default_rng(first_id)
    made: list[Request] = []
    for p in range(num_prompts):
        prompt = tuple(random.integers(1, VOCABULARY, (23, 3, 17, 9, 2, 16)[p % 6]).tolist())
        for s in range(n):
            limit = int(random.integers(4, longest)) if s else longest
            params = SamplingParams(max_tokens=limit, temperature=(1.0, 0.7, 0.0)[s % 3], stop_token_ids=(7,) * bool(s))
            key = SampleKey(0, first_id + p, s)
            made.append(Request(first_id + len(made), key, prompt, params, share=first_id + p))
    return made
