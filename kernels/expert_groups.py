"""Pairs of a token and an expert that it chose, by expert: the order in which a mixture's products take them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ExpertGroups(NamedTuple):
    """Pairs, numbered token by token, that are cut into blocks of one expert each."""

    order: jax.Array  # [T * C], the pairs by expert, and within one by token
    starts: jax.Array  # [X], of each expert's in it
    counts: jax.Array  # [X]
    ends: jax.Array  # [X], the number of blocks up to and with each expert


def expert_groups(own_TC: jax.Array, num_experts: int, block: int) -> ExpertGroups:
    """The pairs of chosen experts 0 .. X - 1, in blocks of at most `block` pairs; other experts are left out."""
    flat = own_TC.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[flat].add(1)[:num_experts]
    ends = jnp.cumsum(-(-counts // block))
    return ExpertGroups(jnp.argsort(flat, stable=True), jnp.cumsum(counts) - counts, counts, ends)
