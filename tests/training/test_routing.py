"""The load of experts: the loss that evens it out and the metrics, against numpy; and what else trains a mixture."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_models import draw

from jaxrl.models.config import ModelConfig
from jaxrl.models.experts import Routing
from jaxrl.training import losses
from jaxrl.training.losses import LossTerms

LAYERS, ROWS, TOKENS, EXPERTS, CHOSEN = 3, 2, 7, 5, 2
MODEL = ModelConfig.from_hf(draw("qwen3_moe", 2) | {"vocab_size": 64})


def case() -> tuple[np.ndarray, np.ndarray]:
    """Logits of routers, and which tokens are none."""
    random = np.random.default_rng(0)
    return random.normal(size=(LAYERS, ROWS, TOKENS, EXPERTS)), random.uniform(size=(ROWS, TOKENS)) < 0.7


def of_layers(logits: jax.Array, is_token: np.ndarray) -> losses.Load:
    probabilities = jax.nn.softmax(logits)
    experts = jax.lax.top_k(logits, CHOSEN)[1]
    return jax.vmap(lambda *own: losses.load_of(Routing(own[0], own[1], own[1]), is_token))(experts, probabilities)


def terms_of(logits: jax.Array, is_token: np.ndarray, coef: float) -> LossTerms:
    empty = LossTerms(jnp.float64(0), jnp.float64(11), {}, {})
    return losses.with_load(empty, of_layers(logits, is_token), coef)


def test_the_loss_is_that_of_transformers_for_each_layer(x64):
    """The share of tokens that chose an expert at each of the k places, times its mean probability, summed over both,
    times the number of experts; averaged over layers."""
    logits, is_token = case()
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-logits, -1)[..., :CHOSEN]
    expected = []
    for layer in range(LAYERS):
        own = [np.mean((chosen[layer] == i).any(-1)[is_token]) for i in range(EXPERTS)]
        expected.append(EXPERTS * np.dot(own, shares[layer][is_token].mean(0)))
    found = terms_of(jnp.asarray(logits), is_token, 0.5)
    assert float(found.total) == pytest.approx(0.5 * np.mean(expected) * 11)
    total, count = found.means["moe/aux_loss"]
    assert float(total / count) == pytest.approx(np.mean(expected))
    gradient = jax.grad(lambda x: terms_of(x, is_token, 0.5).total)(jnp.asarray(logits))
    assert np.abs(gradient[:, is_token]).max() > 0
    assert not np.asarray(gradient)[:, ~is_token].any(), "padding has no load"
    off = terms_of(jnp.asarray(logits), is_token, 0.0)
    assert float(off.total) == 0
    assert "moe/aux_loss" not in off.means


def test_metrics(x64):
    logits, is_token = case()
    total, count = terms_of(jnp.asarray(logits), is_token, 0.0).means[losses.LOAD]
    chosen = np.argsort(-logits, -1)[..., :CHOSEN]
    load = np.array(
        [[np.sum((chosen[i] == x).any(-1) & is_token) for x in range(EXPERTS)] for i in range(LAYERS)], float
    )
    np.testing.assert_allclose(total, load)
    assert float(count) == is_token.sum()
    found = losses.load_metrics(total / count, CHOSEN)
    mean = load.mean(-1, keepdims=True)
    assert float(found["moe/load_max"]) == pytest.approx((load / mean).max())
    assert float(found["moe/load_cv"]) == pytest.approx((load / mean).std(-1).mean())
    assert float(found["moe/dropped"]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("optimizer", "devices"), [("muon", 8), pytest.param("adamw", 1, marks=pytest.mark.slow)])
def test_an_update_with_the_loss_on_moves_everything(optimizer, devices, make_config, make_batch, make_trainer):
    config = make_config(actor__router_aux_loss_coef=0.1, actor__optim__name=optimizer, actor__optim__lr=1e-3)
    model = dataclasses.replace(MODEL, max_position_embeddings=512)
    trainer = make_trainer(config, devices, model)
    before = jax.tree.map(np.asarray, trainer.params["layers"])
    trainer.accumulate(make_batch())
    metrics = trainer.apply()
    assert metrics["moe/aux_loss"] > 0
    assert metrics["moe/load_max"] >= 1
    for name, weight in trainer.params["layers"].items():
        assert not np.array_equal(before[name], weight), name
