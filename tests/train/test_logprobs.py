"""Chunked log-probabilities, entropies and their gradients equal those of the whole [tokens, vocabulary] array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.sharding.mesh import make_mesh
from jaxrl.train.logprobs import HeadOptions, token_logprobs

R, T, E, V = 8, 12, 6, 20


def project(head, x):
    logits = x @ head["w"]
    # two entries pad the vocabulary
    return jnp.where(jnp.arange(V) < V - 2, logits, -jnp.inf)


def reference(head, hidden, tokens, mask, temperature):
    log_p = jax.nn.log_softmax(project(head, hidden) / temperature, axis=-1)
    chosen = jnp.take_along_axis(log_p[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * jnp.where(log_p > -1e9, log_p, 0), axis=-1)[:, :-1]
    keep = mask[:, 1:] > 0
    return tuple(jnp.pad(jnp.where(keep, x, 0), ((0, 0), (1, 0))) for x in (chosen, entropy))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_whole(x64, devices, chunk, temperature):
    random = np.random.default_rng(0)
    head, hidden = {"w": jnp.asarray(random.normal(size=(E, V)))}, jnp.asarray(random.normal(size=(R, T, E)))
    tokens = jnp.asarray(random.integers(0, V - 2, (R, T)))
    mask = jnp.asarray(random.random((R, T)) < 0.4).at[:, 0].set(False).at[2].set(False).astype(jnp.float32)
    weights = [jnp.asarray(random.normal(size=(R, T))) for _ in range(2)]
    mesh = make_mesh(jax.devices()[:devices])
    options = HeadOptions(project, chunk, temperature, entropy_gradient=True)

    def score(function):
        return lambda head, hidden: sum(jnp.sum(w * x) for w, x in zip(weights, function(head, hidden), strict=True))

    def chunked(head, hidden):
        return token_logprobs(options, head, hidden, tokens, mask, mesh)

    def whole(head, hidden):
        return reference(head, hidden, tokens, mask, temperature)

    for found, expected in zip(jax.jit(chunked)(head, hidden), whole(head, hidden), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    found = jax.jit(jax.grad(score(chunked), argnums=(0, 1)))(head, hidden)
    expected = jax.grad(score(whole), argnums=(0, 1))(head, hidden)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, expected)


def test_without_entropy_gradient(x64):
    random = np.random.default_rng(0)
    head, hidden = {"w": jnp.asarray(random.normal(size=(E, V)))}, jnp.asarray(random.normal(size=(R, T, E)))
    tokens, mask = jnp.zeros((R, T), jnp.int32), jnp.ones((R, T)).at[:, 0].set(0)
    options = HeadOptions(project, 16, 1.0)
    gradient = jax.grad(lambda h: token_logprobs(options, head, h, tokens, mask, make_mesh(jax.devices()[:1]))[1].sum())
    assert not np.any(gradient(hidden))
