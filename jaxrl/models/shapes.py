"""Shapes of well-known models by name, for benchmarks and planning without a download.

Source: the config.json files that the models' authors publish on the Hugging Face Hub (the base models, not the
instruction-tuned ones, where both exist). Weights of a shape are random: speed and memory do not depend on them.

`tiny` is made up: two layers on which a benchmark's own machinery is tried out.
"""

from __future__ import annotations

import difflib
from types import MappingProxyType

from jaxrl.models.config import ModelConfig, RopeScaling

SHAPES: MappingProxyType[str, ModelConfig] = MappingProxyType(
    {
        "tiny": ModelConfig(
            family="llama",
            vocab_size=256,
            hidden_size=32,
            intermediate_size=48,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            bos_token_id=0,
            eos_token_ids=(0,),
        ),
        "SmolLM2-135M": ModelConfig(
            family="llama",
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            rope_theta=100_000.0,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
            bos_token_id=0,
            eos_token_ids=(0,),
        ),
        "Qwen2.5-1.5B": ModelConfig(
            family="qwen2",
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_layers=28,
            num_heads=12,
            num_kv_heads=2,
            head_dim=128,
            rope_theta=1_000_000.0,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            qkv_bias=True,
            max_position_embeddings=131072,
            bos_token_id=151643,
            eos_token_ids=(151643,),
        ),
        "Qwen2.5-7B": ModelConfig(
            family="qwen2",
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_layers=28,
            num_heads=28,
            num_kv_heads=4,
            head_dim=128,
            rope_theta=1_000_000.0,
            rms_norm_eps=1e-6,
            qkv_bias=True,
            max_position_embeddings=131072,
            bos_token_id=151643,
            eos_token_ids=(151643,),
        ),
        "Llama-3.1-8B": ModelConfig(
            family="llama",
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope_theta=500_000.0,
            rope_scaling=RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
            rms_norm_eps=1e-5,
            max_position_embeddings=131072,
            bos_token_id=128000,
            eos_token_ids=(128001,),
        ),
    }
)


def named_shape(name: str) -> ModelConfig:
    """The config of a named shape; ValueError names the known ones (and the nearest)."""
    if name in SHAPES:
        return SHAPES[name]
    near = difflib.get_close_matches(name, SHAPES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"--shape ({name}) must be one of {', '.join(SHAPES)}{hint}")
