"""Models as Flax NNX modules: the same logits, and weights there and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl.models.config import ModelConfig
from jaxrl.models.nnx import Decoder

from .conftest import TOKENS, lively, tiny_config
from .test_families import recorded


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "olmo2"])
def test_a_module_has_the_logits_of_transformers(family, x64):
    content, tokens, _, expected, _ = recorded(family, 0)
    config = ModelConfig.from_hf(content)
    params = lively(config, np.float64)
    model = Decoder(config, params, jnp.float64)
    jax.tree.map(np.testing.assert_array_equal, model.tree(), params)
    logits = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens)))
    np.testing.assert_allclose(logits[:, ::8], expected, rtol=0, atol=1e-9 * np.abs(expected).max())


def test_padding_on_either_side_changes_nothing(x64):
    config = tiny_config()
    model = Decoder(config, lively(config, np.float64), jnp.float64)
    alone = model(jnp.asarray(TOKENS[:, :8]))
    for left, right in ((3, 0), (0, 3)):
        padded = np.pad(TOKENS[:, :8], ((0, 0), (left, right)))
        mask = np.pad(np.ones((2, 8), bool), ((0, 0), (left, right)))
        out = model(jnp.asarray(padded), jnp.asarray(mask))[:, left : left + 8]
        np.testing.assert_allclose(out, alone, rtol=0, atol=1e-12)
