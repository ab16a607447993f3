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
    content, tokens, _, expected, _ = recorded(family, int(family == "llama"))  # the second has biases in its MLP
    config = ModelConfig.from_hf(content)
    logits = np.asarray(scan_logits(lively(config, np.float64), tokens, config, jnp.float64))[:, ::8]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        ("gemma3_text", 1),
        *(pytest.param(family, i % 2, marks=pytest.mark.slow) for i, family in enumerate(FAMILIES)),
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
    for seed in range(6):
        content = draw(family, seed)
        config = ModelConfig.from_hf(content)
        assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    params = lively(config)
    export_hf(params, config, tmp_path, dtype=np.float32, max_file_bytes=9_000)
    again, loaded = load_model(tmp_path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
