"""Reading and writing config.json: both generations of transformers, defaults, and refusals."""

import json

import pytest

from jaxrl.models.config import ModelConfig
from jaxrl.models.rope import RopeScaling

from .conftest import FAMILIES, SCALINGS, tiny_config

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


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family, scaling):
    config = tiny_config(family, scaling)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_transformers_5_keys_equal_those_of_4():
    old = raw(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = {k: v for k, v in SMOLLM2.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    assert ModelConfig.from_hf(new).rope_scaling == RopeScaling("linear", 2.0)


def test_yarn_attention_factor_is_resolved():
    def factor(**rope):
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048} | rope
        return ModelConfig.from_hf(raw(rope_scaling=scaling)).rope_scaling.attention_factor

    assert factor() == pytest.approx(1.1386294)
    assert factor(attention_factor=1.5) == 1.5
    assert factor(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert factor(mscale=0.5, mscale_all_dim=1.0) == pytest.approx(1.0693147 / 1.1386294)


def test_yarn_without_a_factor_uses_the_ratio_of_contexts():
    config = ModelConfig.from_hf(raw(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 2048}))
    assert config.rope_scaling.factor == 4.0


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({}, 8192),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 20480),
        # as Qwen's README has it: the old length stays, and the scaling is added
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}},
            32768,
        ),
        # as files of models have it that were trained further
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
            },
            32768,
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 32768),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
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
    ("changes", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            r"architectures \['GemmaForCausalLM'\] is not supported; supported are",
        ),
        ({"architectures": None, "model_type": "phi3"}, r"model_type 'phi3' is not supported; supported are Llama"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            r"rope_type 'longrope' is not supported; supported are 'default'",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"rope scaling 'linear' needs a factor"),
        ({"rope_scaling": [2]}, r"rope_scaling \[2\] is not supported; it must be an object"),
        (
            {"partial_rotary_factor": 0.5},
            r"partial_rotary_factor 0.5 is not supported; rope must rotate the whole head",
        ),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported; the MLP's activation must be 'silu'"),
        ({"attention_bias": True}, r"attention_bias true with model_type 'llama' is not supported; only qwen2"),
        ({"mlp_bias": True}, r"mlp_bias true is not supported"),
        ({"quantization_config": {}}, r"quantization_config is not supported; weights must be float32"),
        ({"hidden_size": None}, r"hidden_size \(None\) must be a whole number from 1 to 1048576"),
        ({"vocab_size": "many"}, r"vocab_size \('many'\) must be a whole number from 1 to 16777216"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps \(0\) must be a number above 0, and at most 1"),
        ({"num_key_value_heads": 2}, r"num_heads \(9\) must be a multiple of num_kv_heads \(2\)"),
        ({"head_dim": 63}, r"head_dim \(63\) must be even"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 64,
            },
            r"use_sliding_window true \(sliding_window 64\) is not supported; attention must be full",
        ),
    ],
)
def test_refusals_name_file_and_value(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw(**changes)))
    with pytest.raises(ValueError, match=r"config.json: " + message):
        ModelConfig.from_hf(tmp_path)


def test_broken_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not valid JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json: must hold a JSON object, found list"):
        ModelConfig.from_hf(tmp_path)


def test_a_model_without_a_name_is_not_exported():
    with pytest.raises(
        ValueError, match=r"a llama model with qkv_bias=True and qk_norm=False has no Hugging Face name"
    ):
        tiny_config(qkv_bias=True).to_hf()
