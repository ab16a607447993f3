"""Chunked log-probabilities, entropies and their gradients equal those of the whole [tokens, vocabulary] array."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.sharding.mesh import make_mesh
from jaxrl.training.logprobs import LEAST, HeadOptions, token_logprobs, top_logprobs

R, T, E, V = 8, 12, 6, 20


def project(head, x):
    logits = x @ head["w"]
    # two entries pad the vocabulary
    return jnp.where(jnp.arange(V) < V - 2, logits, -jnp.inf)


def reference(head, hidden, targets, mask, temperature):
    log_p = jax.nn.log_softmax(project(head, hidden) / temperature, axis=-1)
    chosen = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * jnp.where(log_p > -1e9, log_p, 0), axis=-1)
    return tuple(jnp.where(mask > 0, x, 0) for x in (chosen, entropy))


def whole_of_ids(head, hidden, tokens, mask, ids, temperature):
    """The log-probabilities of `ids` and of all other tokens together, from the whole array."""
    log_p = jax.nn.log_softmax(project(head, hidden) / temperature, axis=-1)
    named = (jnp.arange(V) == ids[..., None]).any(axis=-2)
    rest = jax.nn.logsumexp(jnp.where(named, -1e30, log_p), axis=-1, keepdims=True)
    found = jnp.concatenate([jnp.take_along_axis(log_p, ids, axis=-1), jnp.maximum(rest, LEAST)], axis=-1)
    return jnp.where(mask[..., None] > 0, found, 0)


@pytest.mark.parametrize(("devices", "chunk", "k"), [(8, 5, 3), (1, 1000, V - 2)])
def test_named_tokens(x64, devices, chunk, k):
    """And all others together, of which there may be none: their gradients are those of the whole array as well, where
    the three results are weighted at once. `top_logprobs` names the likeliest, with the same numbers."""
    random = np.random.default_rng(1)
    head, hidden = {"w": random.normal(size=(E, V))}, random.normal(size=(R, T, E))
    tokens = random.integers(0, V - 2, (R, T))
    mask = (random.random((R, T)) < 0.4).astype(np.float32)
    mask[2] = 0
    ids = np.argsort(random.random((R, T, V - 2)))[..., :k].astype(np.int32)
    weights = [random.normal(size=(R, T)), random.normal(size=(R, T)), random.normal(size=(R, T, k + 1))]
    mesh = make_mesh(jax.devices()[:devices])
    options = HeadOptions(project, chunk, 0.7, entropy_gradient=True)

    def chunked(head, hidden):
        return token_logprobs(options, head, hidden, tokens, mask, mesh, ids)

    def whole(head, hidden):
        return *reference(head, hidden, tokens, mask, 0.7), whole_of_ids(head, hidden, tokens, mask, ids, 0.7)

    @partial(jax.jit, static_argnums=0)
    def with_gradients(function, head, hidden):
        found, pull = jax.vjp(function, head, hidden)
        return found, pull(tuple(weights))

    (found, gradients), (expected, theirs) = (with_gradients(each, head, hidden) for each in (chunked, whole))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), tuple(found), tuple(expected))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12), gradients, theirs)
    known = V - 3 if k < V - 2 else V - 2  # of the last the teacher alone knows
    tops = jax.jit(lambda h: top_logprobs(options, head, h, tokens, mask, mesh, k, known))(hidden)
    likeliest = tops[..., k + 2 :].astype(np.int32)
    again = whole_of_ids(head, hidden, tokens, mask, likeliest, 0.7)
    np.testing.assert_allclose(tops[..., 0], expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(tops[..., 1 : k + 2], again, rtol=1e-9, atol=1e-12)
    log_p = jax.nn.log_softmax(project(head, hidden) / 0.7, axis=-1)[..., :known]
    best = np.sort(log_p, axis=-1)[..., ::-1][..., :k]
    np.testing.assert_allclose(tops[..., 1 : k + 1], np.where(mask[..., None] > 0, best, 0), rtol=1e-12)
