"""Drawn models of every family against transformers: recorded ones here, as many as one likes by `compare_drawn.py`."""

import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_models import draw

from jaxrl.models.config import ModelConfig
from jaxrl.models.families import FAMILIES
from jaxrl.models.loading import load_model
from jaxrl.models.safetensors import export_hf

from .conftest import drawn_gradients, gradient_sums, lively, scan_logits

DATA = Path(__file__).parent / "data" / "drawn.npz"


@cache
def recorded(family, seed):
    """(config.json, tokens, what the gradients are of, logits at every eighth position, sums of gradients)."""
    with np.load(DATA) as data:
        content, logits, sums = (data[f"{family} {seed} {name}"] for name in ("config", "logits", "sums"))
    random, content = np.random.default_rng(1), json.loads(str(content))
    tokens = random.integers(0, content["vocab_size"], (2, 40))
    return content, tokens, random.normal(size=(*tokens.shape, content["vocab_size"])), logits, sums


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, x64):
    content, tokens, _, expected, _ = recorded(family, 0)
    config = ModelConfig.from_hf(content)
    logits = np.asarray(scan_logits(lively(config, np.float64), tokens, config, jnp.float64))[:, ::8]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        ("gemma3_text", 1),
        *(pytest.param(family, seed, marks=pytest.mark.slow) for family in FAMILIES for seed in (0, 1)),
    ],
)
def test_gradients_are_those_of_transformers(family, seed, x64):
    content, tokens, cotangent, expected, sums = recorded(family, seed)
    config = ModelConfig.from_hf(content)
    logits, gradients = drawn_gradients(lively(config, np.float64), tokens, cotangent, config)
    np.testing.assert_allclose(logits[:, ::8], expected, rtol=0, atol=1e-9 * np.abs(expected).max())
    np.testing.assert_allclose(gradient_sums(gradients), sums, rtol=1e-9, atol=1e-8)


def test_layers_may_differ_in_windows_and_have_no_rope_at_all(x64):
    """Found by a draw: kinds of layers, and no rope of which tables could be stacked. Order is known by the masks."""
    content = draw("smollm3", 1) | {"num_hidden_layers": 2, "no_rope_layers": [0, 0], "sliding_window": 2}
    content |= {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    config = ModelConfig.from_hf(content)
    assert [kind.window for kind in config.kinds] == [0, 2]
    params, tokens = lively(config, np.float64), np.arange(12)[None]
    logits = np.asarray(scan_logits(params, tokens, config, jnp.float64))
    changed = np.asarray(scan_logits(params, tokens[:, [1, 0, *range(2, 12)]], config, jnp.float64))
    np.testing.assert_allclose(changed[:, -1], logits[:, -1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_models_are_written_and_read(family, tmp_path):
    """config.json and weights, in several files; `compare_drawn.py` has transformers read them."""
    for seed in range(12):
        content = draw(family, seed)
        config = ModelConfig.from_hf(content)
        assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    params = lively(config)
    export_hf(params, config, tmp_path, dtype=np.float32, max_file_bytes=9_000)
    again, loaded = load_model(tmp_path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_draws_turn_every_switch_on():
    """In some of the models of a family that has it, and in some it is off."""
    drawn = {family: [ModelConfig.from_hf(draw(family, seed)) for seed in range(40)] for family in FAMILIES}
    for family, row in FAMILIES.items():
        models = drawn[family]
        switches = {name: {getattr(each, name) for each in models} for name in row.keys}
        switches |= {"tie_word_embeddings": {each.tie_word_embeddings for each in models}}
        switches |= {"hidden_act": {each.hidden_act for each in models}}
        switches |= {"o_bias": {each.o_bias for each in models}} if "attention_bias" in row.biases else {}
        switches |= {"mlp_bias": {each.mlp_bias for each in models}} if "mlp_bias" in row.biases else {}
        assert all(len(values) > 1 for values in switches.values()), (family, switches)
        assert len({each.rope for each in models}) > 2
        assert len({each.num_heads // each.num_kv_heads for each in models}) > 2
    windowed = {family for family, models in drawn.items() if any(each.sliding_window for each in models)}
    uniform = {"mistral", "phi3", "qwen3_moe", "mixtral"}
    assert windowed == uniform | {
        *("qwen2", "qwen3", "olmo3", "smollm3", "ministral", "gemma2", "gemma3_text", "gpt_oss")
    }
    experts = {family: {each.num_experts for each in drawn[family]} for family, row in FAMILIES.items() if row.experts}
    assert experts
    assert all(len(numbers) > 3 for numbers in experts.values())
    assert all({each.norm_topk_prob for each in drawn[family]} == {True, False} for family in ("qwen3_moe", "olmoe"))
    mixed = {family for family, models in drawn.items() if any(len(each.kinds) > 1 for each in models)}
    assert mixed == windowed - uniform
