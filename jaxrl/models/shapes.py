"""Shapes of well-known models by name, for benchmarks, planning and simulation without a download.

Source: the config.json files that the models' authors publish on the Hugging Face Hub (the base models, not the
instruction-tuned ones, where the Hub has the base model under the plain name; Qwen3's plain names are the trained
ones). Weights of a shape are random: speed and memory do not depend on them.

`tiny` is no published model: its two layers serve to try out a benchmark's own machinery.
"""

from __future__ import annotations

import difflib
from types import MappingProxyType
from typing import Any

from jaxrl.models.config import Family, ModelConfig
from jaxrl.models.rope import RopeScaling

_QWEN: dict[Family, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True, "max_position_embeddings": 131072, "eos_token_ids": (151643,)},
    "qwen3": {"qk_norm": True, "max_position_embeddings": 40960, "eos_token_ids": (151645,)},
}


def _qwen(
    family: Family,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int = 8,
    vocab_size: int = 151936,
    rms_norm_eps: float = 1e-6,
    tie_word_embeddings: bool = False,
    head_dim: int = 128,
    **more: Any,
) -> ModelConfig:
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=1_000_000.0,
        rms_norm_eps=rms_norm_eps,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=151643,
        **_QWEN[family] | more,
    )


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
        "Qwen2.5-0.5B": _qwen(
            "qwen2",
            896,
            4864,
            24,
            14,
            2,
            tie_word_embeddings=True,
            head_dim=64,
            max_position_embeddings=32768,
        ),
        "Qwen2.5-1.5B": _qwen("qwen2", 1536, 8960, 28, 12, 2, tie_word_embeddings=True),
        "Qwen2.5-3B": _qwen("qwen2", 2048, 11008, 36, 16, 2, tie_word_embeddings=True, max_position_embeddings=32768),
        "Qwen2.5-7B": _qwen("qwen2", 3584, 18944, 28, 28, 4, 152064),
        "Qwen2.5-14B": _qwen("qwen2", 5120, 13824, 48, 40, 8, 152064, rms_norm_eps=1e-5),
        "Qwen2.5-32B": _qwen("qwen2", 5120, 27648, 64, 40, 8, 152064, rms_norm_eps=1e-5),
        "Qwen3-4B": _qwen("qwen3", 2560, 9728, 36, 32, tie_word_embeddings=True),
        "Qwen3-8B": _qwen("qwen3", 4096, 12288, 36, 32),
        "Qwen3-14B": _qwen("qwen3", 5120, 17408, 40, 40),
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
    """The config of a named shape; for an unknown name, a ValueError lists the known ones (and the nearest)."""
    if name in SHAPES:
        return SHAPES[name]
    near = difflib.get_close_matches(name, SHAPES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"--shape ({name}) must be one of {', '.join(SHAPES)}{hint}")
