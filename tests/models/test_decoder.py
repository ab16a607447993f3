"""The decoder's parts: rope as transformers reads it, what the backward pass keeps, narrow products, first weights.

`test_families.py` has logits and gradients of transformers; `tests/rollout/test_families.py` the rollout's form."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lowered_for_cuda

from jaxrl.kernels import attention
from jaxrl.kernels.reference import MaskInputs
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import load_model
from jaxrl.models.safetensors import export_hf
from jaxrl.models.weights import Weight

from .conftest import ROPE, TOKENS, lively, rope_config, scan_logits, tiny_config

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("name", ROPE)
def test_rope_is_read_as_transformers_reads_it(name):
    recorded = json.loads((DATA / "rope.json").read_text(encoding="utf-8"))["cases"][name]
    config = ModelConfig.from_hf(rope_config(name))
    np.testing.assert_allclose(decoder.rope_frequencies(config), recorded["frequencies"], rtol=2e-6)
    assert config.rope_scaling.attention_factor == pytest.approx(recorded["attention_factor"], rel=1e-6)


def test_logits_with_rope_added_to_our_own_export(tmp_path, torch_logits):
    """What a user does who stretches a trained model's context."""
    params = lively(tiny_config())
    export_hf(params, tiny_config(), tmp_path, dtype=jnp.float32)
    (tmp_path / "config.json").write_text(json.dumps(rope_config("original nowhere")))
    config, params = load_model(tmp_path)
    np.testing.assert_allclose(
        scan_logits(params, TOKENS, config), torch_logits(tmp_path, TOKENS), atol=1e-4, rtol=1e-4
    )


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("remat", "calls"), [("dots", 3), ("full", 4)])
def test_remat_dots_keeps_what_the_attention_kernels_gave(remat, calls):
    """In the program for CUDA: the forward pass and two gradients, and with `full` the forward pass once more."""
    config = tiny_config(head_dim=16)
    params = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    ids = jax.ShapeDtypeStruct((1, 64), jnp.int32)

    def loss(params, ids):
        kernels = attention.PackedAttention("pallas")
        mask = MaskInputs(ids, ids, ids)
        tiles = kernels.tile_pairs(mask, jnp.float32)  # outside of the layers, as the trainer does

        def attend(q, k, v):
            return kernels.attend(q, k, v, mask, tiles)

        return jnp.sum(decoder.forward_scan(params, ids, ids, attend, config, dtype=jnp.float32, remat=remat))

    assert lowered_for_cuda(jax.grad(loss), params, ids)[1] == calls


def test_widened_products_are_exact_and_stay_narrow():
    random = np.random.default_rng(0)
    x, matrix = (random.normal(size=size).astype(jnp.bfloat16) for size in ((6, 64), (64, 9)))

    @partial(jax.jit, static_argnums=0)
    def with_gradients(product, x, matrix):
        out, pull_back = jax.vjp(product, x, matrix)
        return out, *pull_back(jnp.ones_like(out))

    narrow = with_gradients(lambda x, w: decoder._dense(decoder._Product(True, x.dtype), x, w), x, matrix)
    wide = with_gradients(jnp.matmul, x.astype(np.float32), matrix.astype(np.float32))
    for a, b in zip(narrow, wide, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_array_equal(a, np.asarray(b).astype(jnp.bfloat16))


def test_init_has_the_declared_shapes_and_scale():
    config = tiny_config("qwen2", hidden_size=256, vocab_size=512, tie_word_embeddings=False)
    made = jax.jit(lambda key: decoder.init(config, key))(jax.random.key(3))
    params = jax.tree.map(np.asarray, made)
    assert jax.tree.map(lambda x: x.shape, params) == jax.tree.map(
        lambda w: w.shape, config.weights(), is_leaf=lambda w: isinstance(w, Weight)
    )
    assert sum(x.size for x in jax.tree.leaves(params)) == config.num_params()
    assert np.std(params["embed"]) == pytest.approx(0.02, rel=0.02)
    assert np.all(params["layers"]["attn_norm"] == 1)
    assert np.all(params["layers"]["q_bias"] == 0)
    assert not np.array_equal(params["layers"]["gate"], params["layers"]["up"])
