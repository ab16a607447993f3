"""Reading and writing config.json: both generations of transformers, defaults, and refusals."""

import json

import pytest

from jaxrl.models.config import ModelConfig

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def raw(**changes):
    return SMOLLM2 | changes


def test_smollm2():
    config = ModelConfig.from_hf(SMOLLM2)
    assert (config.head_dim, config.rope_theta, config.eos_token_ids) == (64, 100_000.0, (2,))
    assert config.num_params() == 134_515_008


ORIGINAL = {"original_max_position_embeddings": 8192}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({}, 8192),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 20480),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 32768),
        # as Qwen's README has it: the old length stays, and the scaling is added
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, **ORIGINAL}}, 32768),
        # as files of models have it that were trained further
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0, **ORIGINAL}}, 32768),
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3 | ORIGINAL}, 131072),
    ],
)
def test_the_longest_sequence_includes_rope_scaling(changes, positions):
    assert ModelConfig.from_hf(raw(**changes)).max_positions == positions


def test_generation_config_is_honoured(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == (2, 0)
    assert ModelConfig.from_hf(tmp_path / "config.json").eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("types", "windows"),
    [
        (["full_attention", "sliding_attention"] * 15, (0, 8) * 15),
        (None, (8,) * 30),
    ],
)
def test_mistral_with_layer_types_is_ministral(types, windows):
    """As in transformers 5: `layer_types` says which layers have the window; without it all have."""
    mistral = raw(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=8, layer_types=types)
    config = ModelConfig.from_hf(mistral)
    assert tuple(config.kind(i).window for i in range(30)) == windows
    assert config.to_hf()["model_type"] == ("mistral" if types is None else "ministral")
    assert ModelConfig.from_hf(config.to_hf()) == config
