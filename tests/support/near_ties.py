"""Whether two tokens that two runs drew at one place are a near-tie of the sampling race (docs/architecture.md)."""

from __future__ import annotations

import jax
import numpy as np

from jaxrl.rollout.sampling import SamplingState, request_key, sample
from jaxrl.scheduling.tokens.plan import Request

EPSILON = 1e-3


@jax.jit
def _drawn(logits: jax.Array, up: int, down: int, position: int, state: SamplingState) -> jax.Array:
    shifted = logits.at[up].add(EPSILON).at[down].add(-EPSILON)
    return sample(shifted, position, state, truncate=False).token  # pyright: ignore[reportArgumentType]


def is_near_tie(logits: jax.Array, request: Request, position: int, tokens: tuple[int, int]) -> bool:
    """Whether either of two tokens is drawn at a position once their logits [V] are shifted by EPSILON against each
    other. For requests without truncation."""
    temperature, nothing, whole = np.float32(request.params.temperature), np.int32(0), np.float32(1)
    state = SamplingState(request_key(0, request.key), temperature, nothing, whole, np.float32(0))  # pyright: ignore
    one, other = tokens
    return _drawn(logits, one, other, position, state) == one and _drawn(logits, other, one, position, state) == other
