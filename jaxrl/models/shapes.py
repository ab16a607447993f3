"""Shapes of well-known models by name, for benchmarks, planning and simulation without a download.

Source: the config.json files that the models' authors publish on the Hugging Face Hub. `tiny` is no published model:
its two layers serve to try out a benchmark's own machinery.
"""

from __future__ import annotations

import difflib
from types import MappingProxyType
from typing import Any

from jaxrl.models.config import ModelConfig

_TIED = {"tie_word_embeddings": True}
_SMOLLM2 = _TIED | {"bos_token_id": 0, "eos_token_id": 0, "rms_norm_eps": 1e-5}
_QWEN = {"rope_theta": 1e6, "bos_token_id": 151643}
_QWEN2 = _QWEN | {"eos_token_id": 151643, "max_position_embeddings": 131072, "head_dim": 128}
_QWEN2_32K = _QWEN2 | _TIED | {"max_position_embeddings": 32768}
_QWEN2_LARGE = _QWEN2 | {"rms_norm_eps": 1e-5}
_QWEN3 = _QWEN | {"eos_token_id": 151645, "max_position_embeddings": 40960, "head_dim": 128}
_QWEN3_MOE = _QWEN3 | {"norm_topk_prob": True}
_LLAMA3 = {
    **{"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
    **{"bos_token_id": 128000, "eos_token_id": 128001},
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
}
_GEMMA = {"bos_token_id": 2, "eos_token_id": 1}
_GEMMA3 = _GEMMA | {"sliding_window": 512, "max_position_embeddings": 32768}
_MISTRAL = {"max_position_embeddings": 32768, "bos_token_id": 1, "eos_token_id": 2}
_OLMO = {"rms_norm_eps": 1e-6, "rope_theta": 500_000.0, "eos_token_id": 100257}
_OLMO2 = _OLMO | {"max_position_embeddings": 4096}
_YARN = {
    **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.2079441541679836},
}
_GPT_OSS = {"bos_token_id": 199998, "eos_token_id": 200002}
_GRANITE = _TIED | {
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625},
    **{"max_position_embeddings": 131072, "bos_token_id": 0, "eos_token_id": 0},
}
_GRANITE_MOE = _GRANITE | {
    **{"logits_scaling": 6.0, "num_experts_per_tok": 8, "rope_theta": 1.5e6, "rms_norm_eps": 1e-6},
}


def _published(
    family: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    *common: dict[str, Any],
    **more: Any,
) -> ModelConfig:
    """From the lines of a config.json that are not its family's defaults."""
    content: dict[str, Any] = {
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
    }
    for lines in (*common, more):
        content |= lines
    return ModelConfig.from_hf(content)


def _qwen3_moe(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> ModelConfig:
    sizes = (151936, hidden_size, intermediate_size, num_layers, num_heads, 4)
    return _published("qwen3_moe", *sizes, _QWEN3_MOE, moe_intermediate_size=intermediate_size)


SHAPES: MappingProxyType[str, ModelConfig] = MappingProxyType(
    {
        "tiny": _published(
            *("llama", 256, 32, 48, 2, 4, 2, _TIED), max_position_embeddings=1024, bos_token_id=0, eos_token_id=0
        ),
        "SmolLM2-135M": _published(
            *("llama", 49152, 576, 1536, 30, 9, 3, _SMOLLM2), rope_theta=100_000.0, max_position_embeddings=8192
        ),
        "Qwen2.5-0.5B": _published("qwen2", 151936, 896, 4864, 24, 14, 2, _QWEN2_32K, head_dim=64),
        "Qwen2.5-1.5B": _published("qwen2", 151936, 1536, 8960, 28, 12, 2, _QWEN2, _TIED),
        "Qwen2.5-3B": _published("qwen2", 151936, 2048, 11008, 36, 16, 2, _QWEN2_32K),
        "Qwen2.5-7B": _published("qwen2", 152064, 3584, 18944, 28, 28, 4, _QWEN2),
        "Qwen2.5-14B": _published("qwen2", 152064, 5120, 13824, 48, 40, 8, _QWEN2_LARGE),
        "Qwen2.5-32B": _published("qwen2", 152064, 5120, 27648, 64, 40, 8, _QWEN2_LARGE),
        "Qwen2.5-72B": _published("qwen2", 152064, 8192, 29568, 80, 64, 8, _QWEN2_LARGE),
        "Qwen3-4B": _published("qwen3", 151936, 2560, 9728, 36, 32, 8, _QWEN3, _TIED),
        "Qwen3-8B": _published("qwen3", 151936, 4096, 12288, 36, 32, 8, _QWEN3),
        "Qwen3-14B": _published("qwen3", 151936, 5120, 17408, 40, 40, 8, _QWEN3),
        "Llama-3.1-8B": _published("llama", 128256, 4096, 14336, 32, 32, 8, _LLAMA3),
        "Gemma-2-2B": _published("gemma2", 256000, 2304, 9216, 26, 8, 4, _GEMMA),
        "Gemma-3-270M": _published("gemma3_text", 262144, 640, 2048, 18, 4, 1, _GEMMA3),
        "Gemma-3-1B": _published("gemma3_text", 262144, 1152, 6912, 26, 4, 1, _GEMMA3),
        "Mistral-7B": _published("mistral", 32000, 4096, 14336, 32, 32, 8, _MISTRAL, rms_norm_eps=1e-5),
        "Ministral-8B": _published(
            *("mistral", 131072, 4096, 12288, 36, 32, 8, _MISTRAL),
            **{"head_dim": 128, "sliding_window": 32768, "rope_theta": 1e8, "rms_norm_eps": 1e-5},
        ),
        "SmolLM3-3B": _published(
            *("smollm3", 128256, 2048, 11008, 36, 16, 4),
            **{"rope_theta": 5e6, "max_position_embeddings": 65536, "bos_token_id": 128000, "eos_token_id": 128012},
        ),
        "OLMo-2-1B": _published("olmo2", 100352, 2048, 8192, 16, 16, 16, _OLMO2),
        "OLMo-2-7B": _published("olmo2", 100352, 4096, 11008, 32, 32, 32, _OLMO2),
        "OLMo-3-7B": _published(
            *("olmo3", 100278, 4096, 11008, 32, 32, 32, _OLMO), max_position_embeddings=65536, rope_scaling=_YARN
        ),
        "Phi-4": _published(
            *("phi3", 100352, 5120, 17920, 40, 40, 10),
            **{"rope_theta": 250_000.0, "max_position_embeddings": 16384},
            **{"bos_token_id": 100257, "eos_token_id": 100257},
        ),
        "Granite-3.1-2B": _published(
            *("granite", 49152, 2048, 8192, 40, 32, 8, _GRANITE),
            **{"logits_scaling": 8.0, "rope_theta": 5e6, "rms_norm_eps": 1e-5},
        ),
        "Qwen3-30B-A3B": _qwen3_moe(2048, 768, 48, 32),
        "Qwen3-235B-A22B": _qwen3_moe(4096, 1536, 94, 64),
        "OLMoE-1B-7B": _published("olmoe", 50304, 2048, 1024, 16, 16, 16, eos_token_id=50279),
        "Mixtral-8x7B": _published("mixtral", 32000, 4096, 14336, 32, 32, 8, _MISTRAL),
        "gpt-oss-20b": _published("gpt_oss", 201088, 2880, 2880, 24, 64, 8, _GPT_OSS, num_local_experts=32),
        "gpt-oss-120b": _published("gpt_oss", 201088, 2880, 2880, 36, 64, 8, _GPT_OSS, num_local_experts=128),
        "Granite-3.1-1B-A400M": _published(
            "granitemoe", 49155, 1024, 512, 24, 16, 8, _GRANITE_MOE, num_local_experts=32
        ),
        "Granite-3.1-3B-A800M": _published(
            "granitemoe", 49155, 1536, 512, 32, 24, 8, _GRANITE_MOE, num_local_experts=40
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
