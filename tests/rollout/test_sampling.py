"""The race draws from the exact distribution, whatever the truncation."""

import functools
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole_pass import distributions

from jaxrl.rollout.sampling import Forced, SamplingState, exponential_noise, request_key, sample
from jaxrl.types import SampleKey, SamplingParams

CHI_SQUARE_63 = 119.0  # quantile at 0.9999 of 63 degrees of freedom
ROWS = 20_000


@functools.cache
def keys_of(rows: int) -> np.ndarray:
    return np.stack([request_key(0, SampleKey(0, i // 8, i % 8)) for i in range(rows)])


def state(rows: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> SamplingState:
    """As numpy: an operation of jax for each would be a program for each."""
    floats = [np.full(rows, value, np.float32) for value in (temperature, top_p, min_p)]
    return SamplingState(keys_of(rows), floats[0], np.full(rows, top_k, np.int32), *floats[1:])


draw = jax.jit(sample, static_argnames="truncate")


@partial(jax.jit, static_argnames="truncate")
def draw_alike(logits, positions, state, *, truncate):
    """Rows that have the same logits [V]."""
    return sample(jnp.broadcast_to(logits, (*positions.shape, *logits.shape)), positions, state, truncate=truncate)


ALL = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02}


@pytest.mark.parametrize(
    ("vocab", "params"),
    [
        *((32, params) for params in ({"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2})),
        *((160, params) for params in ({}, ALL)),  # a second block of the race
    ],
    ids=str,
)
def test_chi_square_against_the_exact_distribution(vocab, params):
    logits = np.random.default_rng(0).normal(0, 1.5, vocab).astype(np.float32)
    truncate = not params.keys() <= {"temperature"}
    drawn = draw_alike(logits, np.arange(ROWS) % 7, state(ROWS, **params), truncate=truncate)
    drawn = jax.tree.map(np.asarray, drawn)
    before, after = distributions(logits, SamplingParams(**params))
    expected = np.exp(after)
    counts = np.bincount(drawn.token, minlength=vocab)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - ROWS * expected[kept]) ** 2 / (ROWS * expected[kept])).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 8  # above the 0.9999 quantile for any number of degrees
    np.testing.assert_allclose(drawn.sampled_logprob, after[drawn.token], atol=1e-4)
    np.testing.assert_allclose(drawn.rollout_logprob, before[drawn.token], atol=1e-4)


def test_noise_is_exponential_and_uncorrelated_between_neighbours():
    """Neighbouring keys, positions and tokens differ in few bits: each pair must still be independent."""
    keys = np.stack([request_key(0, SampleKey(0, i, 0)) for i in range(64)])
    positions = np.broadcast_to(np.arange(32)[:, None], (32, 64))
    noise = np.asarray(jax.jit(exponential_noise, static_argnums=3)(keys, positions, np.arange(512), jnp.float32))
    uniform = np.exp(-noise.astype(np.float64))  # [position, key, token]
    counts = np.histogram(uniform, bins=64, range=(0, 1))[0]
    mean = uniform.size / 64
    assert ((counts - mean) ** 2 / mean).sum() < CHI_SQUARE_63
    for axis in range(3):
        a = np.moveaxis(uniform, axis, 0)
        correlation = np.corrcoef(a[:-1].ravel(), a[1:].ravel())[0, 1]
        assert abs(correlation) < 4.5 / np.sqrt(a[1:].size)


def test_every_part_of_the_key_changes_the_draw():
    keys = [SampleKey(*parts) for parts in itertools.product(range(3), repeat=4)]
    words = {tuple(request_key(seed, key)) for seed in (0, 1, 2**31, 2**32 - 1) for key in keys}
    assert len(words) == 4 * 81


def test_rows_that_cut_nothing_off_sort_nothing():
    logits = np.zeros((4, 160), np.float32)
    traced = jax.make_jaxpr(partial(sample, truncate=True))(logits, np.arange(4), state(4)).jaxpr
    assert "sort" not in [each.primitive.name for each in traced.eqns], "but behind a condition"


# ---------------------------------------------------------------- tokens that are given

FEW, VOCABULARY, SEED = 5, 300, 3
KEYS = [SampleKey(0, row, 1) for row in range(FEW)]


def mixed() -> SamplingState:
    keys = jnp.asarray(np.stack([request_key(SEED, key) for key in KEYS]))
    temperature = jnp.asarray([1.0, 0.7, 0.0, 1.0, 1.3], jnp.float32)
    return SamplingState(keys, temperature, jnp.zeros(FEW, jnp.int32), jnp.ones(FEW), jnp.zeros(FEW))


def test_given_tokens_have_the_log_probabilities_of_their_places():
    """Every other row's is the one that it would have drawn."""
    logits = jax.random.normal(jax.random.key(1), (FEW, VOCABULARY)) * 4
    positions = jnp.arange(10, 10 + FEW)
    drawn = sample(logits, positions, mixed(), truncate=False)
    given = (np.asarray(drawn.token) + 100 * (np.arange(FEW) % 2)) % VOCABULARY
    # rows in another order than the responses, and each at a place of its own
    responses = [(KEYS[row], 8 + row, [0, 0, int(given[row])]) for row in reversed(range(FEW))]
    found = Forced(SEED, responses)(logits, positions, mixed(), truncate=False)
    assert found.token.tolist() == given.tolist()
    assert found.sampled_logprob.astype(int).tolist() == drawn.token.tolist()
    temperature = np.asarray(mixed().temperature)
    scaled = np.asarray(logits, np.float64) / np.where(temperature == 0, 1, temperature)[:, None]
    expected = scaled[np.arange(FEW), given] - np.log(np.exp(scaled).sum(-1))
    np.testing.assert_allclose(found.rollout_logprob, expected, atol=1e-5)
