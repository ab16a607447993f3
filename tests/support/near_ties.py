"""Whether two tokens that two runs drew at one place are a near-tie of the sampling race (docs/architecture.md)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.rollout.sampling import SamplingState, request_key, sample
from jaxrl.scheduling.tokens.plan import Request

EPSILON = 1e-3


def is_near_tie(logits: jax.Array, request: Request, position: int, tokens: tuple[int, int]) -> bool:
    """Whether either of two tokens is drawn at a position once their logits [V] are shifted by EPSILON against each
    other. For requests without truncation."""
    params = request.params
    state = SamplingState(
        jnp.asarray(request_key(0, request.key)),
        jnp.float32(params.temperature),
        jnp.int32(0),
        jnp.float32(1),
        jnp.float32(0),
    )

    def draws(up: int, down: int) -> bool:
        shifted = logits.at[up].add(EPSILON).at[down].add(-EPSILON)
        return int(sample(shifted, jnp.int32(position), state, truncate=False).token) == up

    return draws(*tokens) and draws(*tokens[::-1])
