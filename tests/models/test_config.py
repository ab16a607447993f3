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


PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}


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


def test_an_idle_sliding_window_is_accepted():
    qwen = raw(architectures=["Qwen2ForCausalLM"], model_type="qwen2", sliding_window=4096, use_sliding_window=False)
    assert ModelConfig.from_hf(qwen).qkv_bias
    # a window that starts after the last layer does nothing
    assert ModelConfig.from_hf(qwen | {"use_sliding_window": True, "max_window_layers": 30})


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None, "model_type": "phi"}, r"model_type 'phi' is not supported; supported are Llama"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported; the MLP's activation must be 'silu'"),
        (PHI3 | {"mlp_bias": True}, r"mlp_bias true with model_type 'phi3' is not supported; models of this type have"),
        ({"is_causal": False}, r"is_causal false is not supported; attention must be causal"),
        ({"hidden_size": None}, r"hidden_size \(None\) must be a whole number from 1 to 1048576"),
    ],
)
def test_refusals_name_file_and_value(changes, message, tmp_path):
    """`tests/refusals/test_refused.py` has the others."""
    (tmp_path / "config.json").write_text(json.dumps(raw(**changes)))
    with pytest.raises(ValueError, match=r"config.json: " + message):
        ModelConfig.from_hf(tmp_path)
