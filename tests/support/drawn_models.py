"""Tiny random models of every family: the content of a config.json that turns on what the family's config class has.

`draw(family, seed)` draws sizes, heads, tied or separate heads, biases, multipliers, caps, windows shorter than the
tests' sequences, kinds of layers and kinds of rope, and leaves keys out now and then, so that defaults count, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tiny import CONFIG

from jaxrl.models.config import ModelConfig
from jaxrl.models.families import FAMILIES, FULL, SLIDING

LENGTH = 40
"""Tokens of the sequences that models are compared on: windows are shorter, contexts are not."""


def runnable(family: str) -> dict[str, Any]:
    """The first of the drawn models that has a window shorter than a run's sequences, if the family has any, and
    experts to choose from; with the tiny model's tokenizer."""
    own = {name: CONFIG[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}

    def wanted(config: ModelConfig) -> bool:
        chooses = 0 <= config.num_experts_per_tok < max(config.num_experts, 1)
        return config.num_layers > 1 and config.max_positions >= 128 and chooses

    drawn = (draw(family, seed) | own | {"max_position_embeddings": 512} for seed in range(60))
    found = [content for content in drawn if wanted(ModelConfig.from_hf(content))]
    return next((each for each in found if 1 < ModelConfig.from_hf(each).sliding_window < 20), found[0])


def draw(family: str, seed: int) -> dict[str, Any]:
    """The content of config.json of a tiny model, as transformers reads it."""
    chance = random.Random(f"{family} {seed}")
    kv_heads = chance.choice([1, 1, 2, 3])
    heads, dim = kv_heads * chance.choice([1, 2, 3, 4]), chance.choice([4, 8, 12])
    hidden, layers = heads * chance.choice([4, 8, 10]), chance.randint(1, 5)
    vocab, mlp = chance.randint(60, 97), chance.randint(9, 40)
    content: dict[str, Any] = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "max_position_embeddings": chance.choice([64, 96, 128]),
        "bos_token_id": 1,
        "eos_token_id": chance.choice([2, [2, 3]]),
        "pad_token_id": None,
    }
    optional = {
        "rms_norm_eps": chance.choice([1e-6, 1e-5, 3e-3]),
        "tie_word_embeddings": chance.random() < 0.5,
        FAMILIES[family].activation: chance.choice(["silu", "gelu_pytorch_tanh"]),
        **{name: chance.random() < 0.5 for name in FAMILIES[family].biases},
        **{
            key: type(usual)(chance.randint(1, 40) if isinstance(usual, int) else round(chance.uniform(0.2, 3), 2))
            for key, usual in FAMILIES[family].keys.values()
        },
    }
    content |= {key: value for key, value in optional.items() if chance.random() < 0.8}
    content |= _experts(chance, family, content)
    rope = _ROPES.get(family, _rope)(chance, content)
    return content | rope | _LAYERS.get(family, _alike)(chance, layers)


def _experts(chance: random.Random, family: str, content: dict[str, Any]) -> dict[str, Any]:
    """A mixture's sizes; `intermediate_size` is an expert's, where the family has no other name for it."""
    if (experts := FAMILIES[family].experts) is None:
        return {}
    count = chance.randint(1, 9)
    own: dict[str, Any] = {experts.key: count, "num_experts_per_tok": chance.randint(1, min(count, 4))}
    if "intermediate_size" in FAMILIES[family].sizes:
        own["moe_intermediate_size"] = chance.randint(5, 20)
    if not experts.normalised and chance.random() < 0.8:
        own["norm_topk_prob"] = chance.random() < 0.5
    if family == "olmoe":  # its norms take the heads for hidden_size
        own["head_dim"] = content["hidden_size"] // content["num_attention_heads"]
        own |= {"clip_qkv": round(chance.uniform(0.2, 2), 2)} if chance.random() < 0.5 else {}
    return own


def _alike(chance: random.Random, layers: int) -> dict[str, Any]:
    return {}


def _types(chance: random.Random, layers: int) -> list[str]:
    return [chance.choice([FULL, SLIDING]) for _ in range(layers)]


def _window(chance: random.Random) -> int:
    return chance.choice([1, 2, 5, 16, 31])


def _qwen(chance: random.Random, layers: int) -> dict[str, Any]:
    content = {"use_sliding_window": chance.random() < 0.7, "sliding_window": _window(chance)}
    if content["use_sliding_window"] and chance.random() < 0.5:
        return content | {"layer_types": _types(chance, layers)}
    return content | {"max_window_layers": chance.randint(0, layers)}


def _smollm3(chance: random.Random, layers: int) -> dict[str, Any]:
    content: dict[str, Any] = {"no_rope_layer_interval": chance.randint(1, 3)}
    if chance.random() < 0.5:
        content = {"no_rope_layers": [chance.randint(0, 1) for _ in range(layers)]}
    if chance.random() < 0.6:
        content |= {"use_sliding_window": True, "sliding_window": _window(chance)}
        content |= {"layer_types": _types(chance, layers)} if chance.random() < 0.5 else {}
    return content


def _everywhere(chance: random.Random, layers: int) -> dict[str, Any]:
    return {"sliding_window": _window(chance) if chance.random() < 0.8 else None}


def _by_type(chance: random.Random, layers: int) -> dict[str, Any]:
    content: dict[str, Any] = {"sliding_window": _window(chance)}
    return content | ({"layer_types": _types(chance, layers)} if chance.random() < 0.7 else {})


def _gemma3(chance: random.Random, layers: int) -> dict[str, Any]:
    content = _by_type(chance, layers)
    return content | ({} if "layer_types" in content else {"sliding_window_pattern": chance.randint(1, 3)})


def _granite_hybrid(chance: random.Random, layers: int) -> dict[str, Any]:
    return {
        "num_local_experts": 0,
        "shared_intermediate_size": chance.randint(9, 40),
        "mamba_n_heads": 1,
        "layer_types": ["attention"] * layers,
        "position_embedding_type": chance.choice(["rope", None]),
    }


def _qwen_moe(chance: random.Random, layers: int) -> dict[str, Any]:
    return {"use_sliding_window": chance.random() < 0.5, "sliding_window": _window(chance)}


_LAYERS: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "qwen2": _qwen,
    "qwen3": _qwen,
    "smollm3": _smollm3,
    "mistral": _everywhere,
    "phi3": _everywhere,
    "ministral": _by_type,
    "olmo3": _by_type,
    "gemma2": _by_type,
    "gemma3_text": _gemma3,
    "granitemoehybrid": _granite_hybrid,
    "qwen3_moe": _qwen_moe,
    "mixtral": _everywhere,
    "gpt_oss": _by_type,
}


def _scaling(chance: random.Random) -> dict[str, Any]:
    """A stretched rope, or a plain one."""
    kinds: list[dict[str, Any]] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": chance.choice([2.0, 2.5])},
        {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 64,
        },
        {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            **({"attention_factor": 1.25} if chance.random() < 0.5 else {}),
        },
    ]
    return chance.choice(kinds)


def _rope(chance: random.Random, content: dict[str, Any]) -> dict[str, Any]:
    theta = {"rope_theta": chance.choice([1e4, 5e5])}
    if chance.random() < 0.2:
        return {}
    return {"rope_parameters": _scaling(chance) | theta}


def _phi3(chance: random.Random, content: dict[str, Any]) -> dict[str, Any]:
    dim = content["hidden_size"] // content["num_attention_heads"]
    content["head_dim"] = dim = dim - dim % 4
    content["hidden_size"] = dim * content["num_attention_heads"]
    partial = chance.choice([1.0, 0.5])
    top = {"partial_rotary_factor": partial, "rope_theta": 1e4}
    if chance.random() < 0.5:
        return top
    pairs = int(dim * partial) // 2
    lists = {name: [round(chance.uniform(1, 4), 2) for _ in range(pairs)] for name in ("short_factor", "long_factor")}
    return {**top, "original_max_position_embeddings": 48, "rope_scaling": {"type": "longrope", **lists}}


def _two(key: str) -> Callable[[random.Random, dict[str, Any]], dict[str, Any]]:
    """A rope for layers with full attention, another for those with a window; `key` is the latter's theta."""

    def draw_two(chance: random.Random, content: dict[str, Any]) -> dict[str, Any]:
        theta = {"rope_theta": chance.choice([1e4, 5e5])}
        match chance.randint(0, 2):
            case 0:
                return {}
            case 1:
                return {**theta, "rope_scaling": _scaling(chance), **({key: 2e4} if key else {})}
            case _:
                return {"rope_parameters": {FULL: _scaling(chance) | theta, SLIDING: _scaling(chance)}}

    return draw_two


_ROPES: dict[str, Callable[[random.Random, dict[str, Any]], dict[str, Any]]] = {
    "phi3": _phi3,
    "olmo3": _two(""),
    "gemma3_text": _two("rope_local_base_freq"),
}
