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

from jaxrl.models.config import ModelConfig
from jaxrl.models.rope import RopeScaling

_QWEN: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True, "max_position_embeddings": 131072, "eos_token_ids": (151643,)},
    "qwen3": {"qk_norm": True, "max_position_embeddings": 40960, "eos_token_ids": (151645,)},
}


def _qwen(
    family: str,
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


def _published(
    family: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    **more: Any,
) -> ModelConfig:
    """Of the lines of a config.json that are not its family's defaults."""
    return ModelConfig.from_hf(
        {
            "model_type": family,
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            **more,
        }
    )


def _qwen_moe(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> ModelConfig:
    return _published(
        "qwen3_moe",
        *(151936, hidden_size, intermediate_size, num_layers, num_heads, 4),
        **{"moe_intermediate_size": intermediate_size, "head_dim": 128, "norm_topk_prob": True},
        **{"rope_theta": 1e6, "max_position_embeddings": 40960, "bos_token_id": 151643, "eos_token_id": 151645},
    )


_GEMMA = {"bos_token_id": 2, "eos_token_id": 1}
_GEMMA_3 = _GEMMA | {"sliding_window": 512, "max_position_embeddings": 32768}
_OLMO = {"rms_norm_eps": 1e-6, "rope_theta": 500_000.0, "eos_token_id": 100257}
_GPT_OSS = {"bos_token_id": 199998, "eos_token_id": 200002}
_GRANITE = {
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0, "num_experts_per_tok": 8},
    **{"rope_theta": 1.5e6, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    **{"bos_token_id": 0, "eos_token_id": 0},
}
_YARN = {
    **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.2079441541679836},
}

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
        "Qwen2.5-72B": _qwen("qwen2", 8192, 29568, 80, 64, 8, 152064, rms_norm_eps=1e-5),
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
        "Gemma-2-2B": _published("gemma2", 256000, 2304, 9216, 26, 8, 4, **_GEMMA),
        "Gemma-3-270M": _published("gemma3_text", 262144, 640, 2048, 18, 4, 1, **_GEMMA_3),
        "Gemma-3-1B": _published("gemma3_text", 262144, 1152, 6912, 26, 4, 1, **_GEMMA_3),
        "Mistral-7B": _published(
            "mistral",
            *(32000, 4096, 14336, 32, 32, 8),
            **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
        ),
        "Ministral-8B": _published(
            "mistral",
            *(131072, 4096, 12288, 36, 32, 8),
            **{"head_dim": 128, "sliding_window": 32768, "max_position_embeddings": 32768, "rope_theta": 1e8},
            **{"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
        ),
        "SmolLM3-3B": _published(
            "smollm3",
            *(128256, 2048, 11008, 36, 16, 4),
            **{"rope_theta": 5e6, "max_position_embeddings": 65536, "bos_token_id": 128000, "eos_token_id": 128012},
        ),
        "OLMo-2-1B": _published("olmo2", 100352, 2048, 8192, 16, 16, 16, max_position_embeddings=4096, **_OLMO),
        "OLMo-2-7B": _published("olmo2", 100352, 4096, 11008, 32, 32, 32, max_position_embeddings=4096, **_OLMO),
        "OLMo-3-7B": _published(
            "olmo3", 100278, 4096, 11008, 32, 32, 32, max_position_embeddings=65536, rope_scaling=_YARN, **_OLMO
        ),
        "Phi-4": _published(
            "phi3",
            *(100352, 5120, 17920, 40, 40, 10),
            **{"rope_theta": 250_000.0, "max_position_embeddings": 16384, "bos_token_id": 100257},
            eos_token_id=100257,
        ),
        "Granite-3.1-2B": _published(
            "granite",
            *(49152, 2048, 8192, 40, 32, 8),
            **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625},
            **{"logits_scaling": 8.0, "rope_theta": 5e6, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
            **{"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0},
        ),
        "Qwen3-30B-A3B": _qwen_moe(2048, 768, 48, 32),
        "Qwen3-235B-A22B": _qwen_moe(4096, 1536, 94, 64),
        "OLMoE-1B-7B": _published("olmoe", 50304, 2048, 1024, 16, 16, 16, eos_token_id=50279),
        "Mixtral-8x7B": _published(
            "mixtral",
            *(32000, 4096, 14336, 32, 32, 8),
            **{"max_position_embeddings": 32768, "bos_token_id": 1, "eos_token_id": 2},
        ),
        "gpt-oss-20b": _published("gpt_oss", 201088, 2880, 2880, 24, 64, 8, num_local_experts=32, **_GPT_OSS),
        "gpt-oss-120b": _published("gpt_oss", 201088, 2880, 2880, 36, 64, 8, num_local_experts=128, **_GPT_OSS),
        "Granite-3.1-1B-A400M": _published(
            "granitemoe", 49155, 1024, 512, 24, 16, 8, num_local_experts=32, attention_multiplier=0.015625, **_GRANITE
        ),
        "Granite-3.1-3B-A800M": _published(
            "granitemoe", 49155, 1536, 512, 32, 24, 8, num_local_experts=40, attention_multiplier=0.015625, **_GRANITE
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
