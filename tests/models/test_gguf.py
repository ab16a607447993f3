"""GGUF files: every supported type, the permutation of the llama family, metadata, SmolLM2, and damaged files."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from gguf.quants import dequantize, quantize

from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import load_model
from jaxrl.models.rope import RopeScaling
from jaxrl.models.weights import Weight, leaves

from .conftest import lively, scan_logits, tiny_config

RECORDED = json.loads((Path(__file__).parent / "data" / "smollm2.json").read_text(encoding="utf-8"))


def permute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row i of the first half, then row i of the second half."""
    rows = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return np.stack([rows[:, 0], rows[:, 1]], axis=2).reshape(tensor.shape)


def write(file, config: ModelConfig, params, kind=Kind.F32, *, arch=None, metadata=None, tensors=None) -> None:
    """A GGUF file of a model, matrices quantised."""
    arch = arch or ARCHITECTURES.get(config.family, config.family)
    writer = GGUFWriter(str(file), arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}.get(
            type(value), writer.add_float32
        )
        add(key if key.startswith("split.") else f"{arch}.{key}", value)
    table = jax.tree.leaves_with_path(config.weights(), is_leaf=lambda x: isinstance(x, Weight))
    parts: dict[str, list[tuple[tuple[int, int], np.ndarray]]] = {}
    for (path, weight), param in zip(table, jax.tree.leaves(params), strict=True):
        kind_of_weight = jax.tree_util.keystr(path, simple=True, separator="/")
        weight = weight.in_gguf
        for i, name in enumerate(weight.names()):
            tensor = np.asarray(weight.to_file(weight.unit(param, i)), np.float32)
            heads = {"layers/q": config.num_heads, "layers/k": config.num_kv_heads}.get(kind_of_weight)
            if config.family in ("llama", "smollm3", "granite", "mixtral", "granitemoe") and heads is not None:
                tensor = permute(tensor, heads)
            tensor = tensor + 1 if weight.init == "less_one" else tensor
            parts.setdefault(name, []).append((weight.file_rows or (0, 0), tensor))
    for name, arrays in parts.items():
        tensor = np.concatenate([tensor for _, tensor in sorted(arrays, key=lambda part: part[0])])
        own = kind if tensor.ndim > 1 else Kind.F32
        writer.add_tensor(name, quantize(np.ascontiguousarray(tensor), own), raw_dtype=own)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ARCHITECTURES = {
    **{"gemma3_text": "gemma3", "olmo3": "olmo2", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "mixtral": "llama"}
}
SIZES = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128},
    **{"bos_token_id": 1, "eos_token_id": [2], "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
}
OTHERS = {
    "olmo2": ({}, {}),
    "olmo3": (
        {"sliding_window": 7, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {
            "attention.sliding_window": 7,
            "attention.sliding_window_pattern": [True, True, True, False, True, True],
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 2.0,
        },
    ),
    "smollm3": ({"rope_theta": 5e6}, {}),
    "granite": (
        {
            **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625},
            "logits_scaling": 8.0,
        },
        {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.015625, "logit_scale": 8.0},
    ),
    "gemma2": (
        {"sliding_window": 9, "query_pre_attn_scalar": 16},
        {"attention.sliding_window": 9, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": (
        {"sliding_window": 5, "query_pre_attn_scalar": 16, "rope_theta": 1e6},
        {"attention.sliding_window": 5},
    ),
    "qwen3_moe": (
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "olmoe": (
        {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": False},
        {"expert_count": 4, "expert_used_count": 3},
    ),
    "mixtral": (
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "granitemoe": (
        {"num_local_experts": 3, "num_experts_per_tok": 2, "embedding_multiplier": 12.0},
        {"expert_count": 3, "expert_used_count": 2, "embedding_scale": 12.0},
    ),
    "gpt_oss": (
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "rope_theta": 150000.0},
            "rope_scaling": {
                **{"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
                **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            },
        },
        {
            **{"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96},
            **{"attention.sliding_window": 16, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0},
            "rope.scaling.original_context_length": 4096,
        },
    ),
    "phi3": (
        {"partial_rotary_factor": 0.75, "sliding_window": 20, "rope_theta": 1e4},
        {"rope.dimension_count": 12, "attention.sliding_window": 20},
    ),
}
"""What config.json has beside `SIZES`, and what llama.cpp's converter writes for it."""


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", *OTHERS])
def test_a_round_trip(family, tmp_path):
    content, metadata = OTHERS.get(family, ({}, {}))
    config = ModelConfig.from_hf(SIZES | {"model_type": family} | content)
    params = lively(config)
    write(tmp_path / "m.gguf", config, params, metadata=metadata)
    loaded_config, loaded = load_model(tmp_path / "m.gguf")
    assert loaded_config == config
    assert_same(loaded, params, rtol=0, atol=5e-7 if config.norm_plus_one else 0)


@pytest.mark.parametrize("family", [*OTHERS, "llama", "qwen2", "qwen3"])
def test_names_are_those_of_llama_cpp(family):
    """The package's own map from Hugging Face's names."""
    arch = ARCHITECTURES.get(family, family)
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(kind, 6)
    config = ModelConfig.from_hf(SIZES | {"model_type": family, "head_dim": 16})
    known = {f"{name}.{suffix}" for _, name in names.mapping.values() for suffix in ("weight", "bias")}
    for weight in leaves(config.weights()):
        assert known.issuperset(weight.in_gguf.names()), weight.gguf_name
        if weight.has_experts or ".sinks" in weight.hf_name:
            continue  # the converter gives the map other names for them
        for hf_name, gguf_name in zip(weight.names(), weight.in_gguf.names(), strict=True):
            module, _, suffix = hf_name.rpartition(".")
            assert f"{names.get_name(module)}.{suffix}" == gguf_name


def assert_same(a, b, **tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


def model(family="llama", **changes):
    """Sizes that quantised blocks of 32 divide."""
    config = tiny_config(
        family, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, **changes
    )
    return config, lively(config)


@pytest.mark.parametrize(("kind", "error"), [(Kind.F16, 1e-3), (Kind.Q8_0, 0.02), (Kind.Q4_0, 0.25)])
def test_types_that_can_be_written(kind, error, tmp_path):
    """The loaded weights are what the gguf package makes of each tensor, and near the original."""
    config, params = model("qwen2")
    write(tmp_path / "m.gguf", config, params, kind)
    _, loaded = load_model(tmp_path / "m.gguf")
    weight = config.weights()["layers"]["gate"]
    original = np.ascontiguousarray(weight.to_file(np.asarray(params["layers"]["gate"][1])))
    np.testing.assert_array_equal(
        weight.to_file(loaded["layers"]["gate"][1]), dequantize(quantize(original, kind), kind)
    )
    assert_same(loaded, params, rtol=0, atol=error)


def test_llama3_scaling_is_recovered_from_the_divisors(tmp_path):
    config, params = model("llama", rope_theta=500_000.0)
    scaled = replace(config, rope_scaling=RopeScaling("llama3", 8.0, 8192))
    divisors = (decoder.rope_frequencies(config) / decoder.rope_frequencies(scaled)).astype(np.float32)
    write(tmp_path / "m.gguf", config, params, tensors={"rope_freqs.weight": divisors})
    assert load_model(tmp_path / "m.gguf")[0] == scaled
    divisors[2] = 5.0
    write(tmp_path / "other.gguf", config, params, tensors={"rope_freqs.weight": divisors})
    with pytest.raises(ValueError, match=r"rope_freqs.weight does not come from llama3 scaling"):
        load_model(tmp_path / "other.gguf")


def test_unsupported_files_are_refused(tmp_path):
    config, params = model("qwen2")
    write(tmp_path / "type.gguf", config, params, Kind.Q5_0)
    with pytest.raises(ValueError, match=r"has type Q5_0, which is not supported; supported are F32, F16"):
        load_model(tmp_path / "type.gguf")
    write(tmp_path / "surplus.gguf", config, params, tensors={"blk.0.extra.weight": np.zeros((3,), np.float32)})
    with pytest.raises(ValueError, match=r"surplus.gguf: tensor blk.0.extra.weight of shape \(3,\) has no place"):
        load_model(tmp_path / "surplus.gguf")
    for metadata, words in (
        ({"split.count": 3}, r"split.count 3 is not supported; use a single file"),
        ({"expert_count": 4}, r"expert_count 4 is not supported; models of this kind are dense"),
        ({"attention.sliding_window": 9}, r"attention.sliding_window is not supported; attention must be full everywh"),
        ({"rope.dimension_count": 8}, r"rope.dimension_count \(8\) must equal the head's size \(16\)"),
        ({"rope.scaling.type": "longrope"}, r"rope.scaling.type 'longrope' is not supported; use 'none', 'linear'"),
    ):
        write(tmp_path / "m.gguf", config, params, metadata=metadata)
        with pytest.raises(ValueError, match=f"m.gguf: {words}"):
            load_model(tmp_path / "m.gguf")
    (tmp_path / "short.gguf").write_bytes((tmp_path / "surplus.gguf").read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"short\.gguf: truncated or not a GGUF file \(cannot reshape array"):
        load_model(tmp_path / "short.gguf")


def test_smollm2_first_logits_are_the_recorded_ones(smollm2):
    config, params = load_model(smollm2)
    assert config.num_params() == 134_515_008
    tokens = jnp.asarray([RECORDED["token_ids"]])
    logits = scan_logits(params, tokens, config)[0]
    np.testing.assert_allclose(logits[0, :16], RECORDED["logits_first"], atol=2e-3)
    np.testing.assert_allclose(logits[-1, :16], RECORDED["logits_last"], atol=2e-3)
    assert int(jnp.argmax(logits[-1])) == RECORDED["greedy_ids"][0]
