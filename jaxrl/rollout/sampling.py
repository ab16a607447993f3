"""Sampling tokens so that they depend on the sample's identity and never on the schedule (docs/architecture.md).

A token's random bits come from a key. It folds in the run's seed, epoch, prompt index, sample index and attempt
(`request_key`, on the host), and then the token's position (on the device). The draw is an exponential race (the
Gumbel-max trick without its second logarithm). Competitor i with weight w_i arrives at E_i / w_i, with E_i an
exponential variate from a counter hash of (key, i). The earliest wins, with probability exactly w_i / Σw. There are two
races, among blocks of `BLOCK` neighbouring tokens and then among the tokens of the winning block: V / BLOCK + BLOCK
variates are drawn instead of V, which would be most of the cost. Races shard over a tensor-parallel vocabulary, and
rounding noise flips only near-ties, which an inverse CDF cannot offer.

The hash is two rounds of a 32-bit integer finaliser (the "lowbias32" constants of Wellons' hash prospector). It departs
from threefry, which costs a quarter of a decode step on CPU; `tests/rollout/test_sampling.py` holds both against the
exact distribution.

Dims: leading dims `...` are rows; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl.kernels.by_rows import ByRows, token_logprob
from jaxrl.types import SampleKey

BLOCK = 128
"""Tokens per block of the two-level race: fixed, so that a draw does not depend on how the vocabulary is sharded."""

_MASK64 = (1 << 64) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15


def _mix64(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def request_key(seed: int, key: SampleKey) -> np.ndarray:
    """uint32 [2]: a token's key without its position."""
    state = _mix64((seed + _GOLDEN64) & _MASK64)
    for part in (key.epoch, key.prompt_index, key.sample_index, key.attempt):
        state = _mix64((state + _GOLDEN64 + part * 0xD1342543DE82EF95) & _MASK64)
    return np.array([state & 0xFFFFFFFF, state >> 32], np.uint32)


def _hash32(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def exponential_noise(keys: jax.Array, positions: jax.Array, counters: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Exponential(1) variates [..., N] for keys uint32 [..., 2], positions int32 [...], counters uint32 [..., N]."""
    at = positions.astype(jnp.uint32)
    k0 = _hash32(keys[..., 0] ^ _hash32(at + jnp.uint32(0x9E3779B9)))
    k1 = _hash32(keys[..., 1] + k0)
    spread = counters.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    bits = _hash32(_hash32(spread ^ k0[..., None]) + k1[..., None])
    # The race is decided among the smallest variates, and -log1p(-u) keeps full relative precision for small u.
    uniform = (bits.astype(dtype) + 0.5) * (1 / 4294967296)
    return -jnp.log1p(-jnp.minimum(uniform, 1 - jnp.finfo(dtype).epsneg))


class SamplingState(NamedTuple):
    """Per-row sampling parameters: keys uint32 [..., 2]; temperature, top_p, min_p float32 [...]; top_k int32 [...]."""

    keys: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


class SampledToken(NamedTuple):
    """A token, int32 [...], with two log-probabilities [...]: under the truncated distribution that it was sampled
    from, and before truncation, scaled by temperature. Training can compute the latter again."""

    token: jax.Array
    sampled_logprob: jax.Array
    rollout_logprob: jax.Array


Draw = Callable[..., SampledToken]
"""`sample`, or its replacement (`Forced`): (logits, positions, state, truncate=...)."""


def drawn_by_rows(draw: Draw, by_rows: ByRows) -> Draw:
    """The same, with numbers that do not depend on the other rows, and the `rollout_logprob` of
    `jaxrl.training.logprobs`."""

    def drawn(logits: jax.Array, positions: jax.Array, state: SamplingState, /, *, truncate: bool) -> SampledToken:
        def one(_: tuple[()], logits: jax.Array, positions: jax.Array, state: SamplingState) -> SampledToken:
            return draw(logits, positions, state, truncate=truncate)

        found = by_rows(one, (logits, positions, state))
        temperature = jnp.where(state.temperature == 0, 1.0, state.temperature).astype(logits.dtype)
        both = by_rows(token_logprob, (logits, found.token, temperature))
        return found._replace(rollout_logprob=both[..., 0])

    return drawn


def sample(
    logits: jax.Array, positions: jax.Array, state: SamplingState, *, truncate: bool, of: jax.Array | None = None
) -> SampledToken:
    """Draws one token per row, in prefill, decode and verification alike.

    Training computes `rollout_logprob` again from the same logits and temperature (`jaxrl.training.objectives`).
    Whoever changes the distribution here changes it there as well, or changes both at once in
    `jaxrl.models.decoder.logits`.

    Args:
      logits: float32 or float64 [..., V]; -inf marks padded vocabulary.
      positions: int32 [...], that the new token will have in its sequence.
      state: temperature 0 takes the likeliest token, its `sampled_logprob` is then 0 and its `rollout_logprob` is that
        of temperature 1.
      truncate: whether any row may use top-k, top-p or min-p (they need a sort of the vocabulary).
      of: int32 [...], the tokens whose log-probabilities are returned; None: of the sampled ones.
    """
    greedy = state.temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, state.temperature).astype(logits.dtype)[..., None]
    blocks = _in_blocks(scaled)
    # Kept apart from what follows: XLA would look for the largest of all in the logits a second time.
    highest = lax.optimization_barrier(jnp.max(blocks, axis=-1))
    top = jnp.max(highest, axis=-1)[..., None]
    mass = _mass(blocks, highest, top)
    kept = mass
    if truncate:
        cuts_off = ~greedy & ((state.top_k > 0) | (state.top_p < 1) | (state.min_p > 0))
        # Sorting is half of a decode step of a small model on a CPU: only where a row needs it.
        threshold = lax.cond(
            jnp.any(cuts_off),
            lambda: truncation_threshold(scaled, state)[..., None],
            lambda: jnp.full_like(top[..., None], -jnp.inf),
        )
        blocks = jnp.where(blocks >= threshold, blocks, -jnp.inf)
        kept = _mass(blocks, highest, top)
    # Counters of blocks count down from the top, so that no token has the same counter as a block.
    block_ids = jnp.uint32(0xFFFFFFFF) - jnp.arange(blocks.shape[-2], dtype=jnp.uint32)
    raced = _first(kept, block_ids, positions, state.keys)
    block = jnp.where(greedy, jnp.argmax(highest, axis=-1), raced).astype(jnp.int32)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :] - top
    token_ids = block[..., None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    raced = _first(jnp.exp(inside), token_ids, positions, state.keys)
    index = jnp.where(greedy, jnp.argmax(inside, axis=-1), raced).astype(jnp.int32)
    token = block * BLOCK + index
    if of is not None:
        inside = jnp.take_along_axis(blocks, (of // BLOCK)[..., None, None], axis=-2)[..., 0, :] - top
        index = of % BLOCK
    chosen = jnp.take_along_axis(inside, index[..., None], axis=-1)[..., 0]
    sampled = jnp.where(greedy, 0.0, chosen - jnp.log(jnp.sum(kept, axis=-1)))
    return SampledToken(token, sampled, chosen - jnp.log(jnp.sum(mass, axis=-1)))


def _in_blocks(scaled: jax.Array) -> jax.Array:
    """[..., V] -> [..., V / BLOCK, BLOCK], filled up with -inf."""
    num_blocks = -(-scaled.shape[-1] // BLOCK)
    padding = [(0, 0)] * (scaled.ndim - 1) + [(0, num_blocks * BLOCK - scaled.shape[-1])]
    padded = jnp.pad(scaled, padding, constant_values=-jnp.inf)
    return padded.reshape(*scaled.shape[:-1], num_blocks, BLOCK)


def _mass(blocks: jax.Array, highest: jax.Array, top: jax.Array) -> jax.Array:
    """[..., B]: the sum of exp(x - top) over each of blocks [..., B, BLOCK]. Summed relative to the block's own
    maximum, so that a block is read once for both, and one pass over the vocabulary is enough."""
    own = jnp.maximum(highest, jnp.finfo(blocks.dtype).min)  # a block that is all padding has -inf
    return jnp.sum(jnp.exp(blocks - own[..., None]), axis=-1) * jnp.exp(own - top)


def _first(weights: jax.Array, counters: jax.Array, positions: jax.Array, keys: jax.Array) -> jax.Array:
    """int [...]: the competitor that arrives first, of those with weights [..., N]; 0 if no weight is above 0."""
    return jnp.argmin(exponential_noise(keys, positions, counters, weights.dtype) / weights, axis=-1)


def truncation_threshold(scaled: jax.Array, state: SamplingState) -> jax.Array:
    """The smallest scaled logit [..., 1] that survives top-k, then top-p of what top-k left, then min-p; ties survive
    too."""
    vocab = scaled.shape[-1]
    ranked = jnp.flip(jnp.sort(scaled, axis=-1), axis=-1)
    ranked_weights = jnp.exp(ranked - ranked[..., :1])
    top_k = jnp.where(state.top_k <= 0, vocab, jnp.minimum(state.top_k, vocab))[..., None]
    in_k = jnp.arange(vocab) < top_k
    ranked_weights = jnp.where(in_k, ranked_weights, 0)
    before = jnp.cumsum(ranked_weights, axis=-1) - ranked_weights
    # top_p = 1 must keep everything: the rounded cumulative sum may reach the total early
    mass = jnp.where(state.top_p >= 1, jnp.inf, state.top_p)[..., None] * jnp.sum(ranked_weights, -1, keepdims=True)
    in_p = in_k & (before < mass)
    last = jnp.sum(in_p, axis=-1, keepdims=True) - 1
    by_rank = jnp.take_along_axis(ranked, last, axis=-1)
    by_min_p = ranked[..., :1] + jnp.log(state.min_p.astype(scaled.dtype))[..., None]
    return jnp.maximum(by_rank, by_min_p)


class Forced:
    """A `Draw` of given tokens, so that two ways to compute the same responses stay comparable: each position gets its
    response's token instead of a sampled one (`jaxrl.commands.check_numerics`).

    `SampledToken.token` is the given token and `rollout_logprob` that token's; `sampled_logprob` is the *id* of the
    token that would have been sampled, as a float: float32 holds all below 2^24 exactly. Keys name the rows.

    `given`: for each response its key, the number of its prompt's tokens, and its own tokens.
    """

    def __init__(self, seed: int, given: Sequence[tuple[SampleKey, int, Sequence[int]]]) -> None:
        self._keys = np.stack([request_key(seed, key) for key, _, _ in given])
        self._tokens = np.zeros((len(given), max(start + len(tokens) for _, start, tokens in given)), np.int32)
        for row, (_, start, tokens) in zip(self._tokens, given, strict=True):
            row[start : start + len(tokens)] = tokens

    def __call__(
        self, logits: jax.Array, positions: jax.Array, state: SamplingState, /, *, truncate: bool
    ) -> SampledToken:
        # rows that do not decode have no key here, and positions beyond; what they get is not read
        row = jnp.argmax(jnp.all(state.keys[..., None, :] == self._keys, axis=-1), axis=-1)
        given = jnp.asarray(self._tokens).at[row, positions].get(mode="clip")
        drawn = sample(logits, positions, state, truncate=truncate, of=given)
        return SampledToken(given, drawn.token.astype(logits.dtype), drawn.rollout_logprob)
