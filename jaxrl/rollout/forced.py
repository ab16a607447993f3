"""Tokens that are given in place of drawn ones, so that two ways to compute the same responses stay comparable.

Purpose: an executor with `ExecutorConfig.draw=Forced(...)` runs its own programs over known responses: each position's
token is the one of its response, whatever would have been drawn there (`jaxrl.commands.check_numerics`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.rollout.sampling import Drawn, SamplingState, request_key, sample
from jaxrl.types import SampleKey


class Forced:
    """A `jaxrl.rollout.sampling.Draw`.

    `Drawn.token` is the given token and `rollout_logprob` that token's; `sampled_logprob` is the *id* of the token that
    would have been drawn, as a float: float32 holds all below 2^24 exactly. Rows are known by their keys.

    Args:
      seed: the run's.
      given: of each response its key, the tokens of its prompt (a number), and its own.
    """

    def __init__(self, seed: int, given: Sequence[tuple[SampleKey, int, Sequence[int]]]) -> None:
        self._keys = np.stack([request_key(seed, key) for key, _, _ in given])
        self._tokens = np.zeros((len(given), max(start + len(tokens) for _, start, tokens in given)), np.int32)
        for row, (_, start, tokens) in zip(self._tokens, given, strict=True):
            row[start : start + len(tokens)] = tokens

    def __call__(self, logits: jax.Array, positions: jax.Array, state: SamplingState, /, *, truncate: bool) -> Drawn:
        # rows that do not decode have no key here, and positions beyond; what they get is not read
        row = jnp.argmax(jnp.all(state.keys[..., None, :] == self._keys, axis=-1), axis=-1)
        given = jnp.asarray(self._tokens).at[row, positions].get(mode="clip")
        drawn = sample(logits, positions, state, truncate=truncate, of=given)
        return Drawn(given, drawn.token.astype(logits.dtype), drawn.rollout_logprob)
