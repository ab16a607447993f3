"""Tokens that are given: their own log-probabilities, and what would have been drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.rollout.sampling import Forced, SamplingState, request_key, sample
from jaxrl.types import SampleKey

ROWS, VOCABULARY, SEED = 5, 300, 3
KEYS = [SampleKey(0, row, 1) for row in range(ROWS)]


def state() -> SamplingState:
    keys = jnp.asarray(np.stack([request_key(SEED, key) for key in KEYS]))
    temperature = jnp.asarray([1.0, 0.7, 0.0, 1.0, 1.3], jnp.float32)
    rest = jnp.zeros(ROWS, jnp.int32), jnp.ones(ROWS), jnp.zeros(ROWS)
    return SamplingState(keys, temperature, *rest)


@pytest.mark.parametrize("truncate", [False, True])
def test_a_given_token_has_the_log_probability_that_it_would_have_drawn(truncate: bool):
    logits = jax.random.normal(jax.random.key(0), (ROWS, VOCABULARY)) * 4
    positions = jnp.arange(10, 10 + ROWS)
    drawn = sample(logits, positions, state(), truncate=truncate)
    # rows in another order than the responses, and each at a place of its own
    responses = [(KEYS[row], 10 + row, [int(drawn.token[row])]) for row in reversed(range(ROWS))]
    found = Forced(SEED, responses)(logits, positions, state(), truncate=truncate)
    assert found.token.tolist() == drawn.token.tolist() == found.sampled_logprob.astype(int).tolist()
    assert np.asarray(found.rollout_logprob).tobytes() == np.asarray(drawn.rollout_logprob).tobytes()


def test_another_token_than_the_one_that_would_be_drawn():
    logits = jax.random.normal(jax.random.key(1), (ROWS, VOCABULARY)) * 4
    positions = jnp.full(ROWS, 7)
    drawn = sample(logits, positions, state(), truncate=False)
    given = (np.asarray(drawn.token) + 100) % VOCABULARY
    responses = [(key, 5, [0, 0, int(token)]) for key, token in zip(KEYS, given, strict=True)]
    found = Forced(SEED, responses)(logits, positions, state(), truncate=False)
    assert found.token.tolist() == given.tolist()
    assert found.sampled_logprob.astype(int).tolist() == drawn.token.tolist()
    temperature = np.asarray(state().temperature)
    scaled = np.asarray(logits, np.float64) / np.where(temperature == 0, 1, temperature)[:, None]
    expected = scaled[np.arange(ROWS), given] - np.log(np.exp(scaled).sum(-1))
    np.testing.assert_allclose(found.rollout_logprob, expected, atol=1e-5)
