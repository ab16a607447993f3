"""Reading and writing config.json: both generations of transformers, defaults, and refusals."""

import json
import re

import pytest

from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import rope_frequencies
from jaxrl.models.families import FULL, SLIDING

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


def raw(family="llama", **changes):
    content = SMOLLM2 | {"architectures": None, "model_type": family} | changes
    return {name: value for name, value in content.items() if value is not None}


def test_smollm2():
    config = ModelConfig.from_hf(SMOLLM2)
    assert (config.head_dim, config.rope_theta, config.eos_token_ids) == (64, 100_000.0, (2,))
    assert config.num_params() == 134_515_008


ORIGINAL = {"original_max_position_embeddings": 8192}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 2.0] * 16, "long_factor": [4.0] * 32}
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
        ({"family": "phi3", "max_position_embeddings": 131072, "rope_scaling": LONGROPE | {"type": "su"}}, 4096),
        ({"family": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0}}, 8192),
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
    config = ModelConfig.from_hf(raw("mistral", sliding_window=8, layer_types=types))
    assert tuple(config.kind(i).window for i in range(30)) == windows
    assert config.to_hf()["model_type"] == ("mistral" if types is None else "ministral")
    assert ModelConfig.from_hf(config.to_hf()) == config


WRONG = [
    ("llama", {"hidden_size": 100}, "hidden_size (100) must be a multiple of num_attention_heads (9)"),
    ("llama", {"head_dim": 63}, "head_dim (63) must be even: rope rotates pairs"),
    ("phi3", {"partial_rotary_factor": 0.5, "rope_scaling": LONGROPE}, "short_factor has 32 numbers; it must have 16"),
    ("phi3", {"rope_scaling": LONGROPE | {"long_factor": [0]}}, "long_factor ([0]) must be a list of numbers above 0"),
    ("llama", {"rope_scaling": LONGROPE}, "'longrope' is not supported; supported are 'default', 'linear', 'llama3'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' needs a factor"),
    ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "factor (4) must be above low_freq_factor (4)"),
    ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported; rope must rotate the whole"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; the MLP's activation must be 'silu' or"),
    ("qwen2", {"architectures": ["LlamaForCausalLM"]}, "'qwen2' is not supported; the model_type of LlamaForCausalLM"),
    ("mistral", {"attention_bias": True}, "attention_bias true with model_type 'mistral' is not supported"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention true is not supported"),
    ("olmo3", {"layer_types": [FULL] * 29}, f"must be a list with {FULL} or {SLIDING} for each of the 30 layers"),
    ("qwen3", {"layer_types": [SLIDING] * 30}, f"layer_types with {SLIDING} is not supported; there is no window"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
    ("granitemoehybrid", {"num_local_experts": 0}, "layer_types left out, which means state-space layers"),
]


@pytest.mark.parametrize(("family", "changes", "words"), WRONG)
def test_what_the_decoder_does_not_compute_is_refused(family, changes, words):
    with pytest.raises(ValueError, match=f"^config: .*{re.escape(words)}"):
        ModelConfig.from_hf(raw(family, **changes))


def test_a_folder_of_adapters_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"^{tmp_path} has adapters alone: jaxrl export --merge writes a model"):
        ModelConfig.from_hf(tmp_path)


def test_longrope_divides_frequencies_by_the_factors_of_short_texts():
    own, plain = (rope_frequencies(ModelConfig.from_hf(raw("phi3", rope_scaling=x))) for x in (LONGROPE, None))
    assert (own * LONGROPE["short_factor"] == plain).all()
