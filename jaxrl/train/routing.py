"""What a microbatch's routers did: how evenly experts were loaded, and the loss that evens it out.

Source: Fedus et al. 2021 (arXiv:2101.03961, §2.2): the number of experts times the sum over them of the share of tokens
that chose one and its mean probability, so that an even load has as much as experts per token: transformers' scale.
Departures: means over a microbatch's tokens, so how a batch is cut has a small influence; each layer's loss is its own,
where transformers multiplies means over all layers, in which uneven layers can make up for each other.

Dims: L layers, X experts, C experts per token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.models.experts import Routing
from jaxrl.train.losses import Fraction, LossTerms

LOAD = "moe/load"


class Load(NamedTuple):
    """Sums over tokens: how many chose each expert, and the probabilities of each, [X] (or of all layers [L, X]);
    and the number of tokens."""

    chosen: jax.Array
    probabilities: jax.Array
    tokens: jax.Array


def load_of(routing: Routing, is_token: jax.Array) -> Load:
    """Of one layer; `is_token` [R, T]: padding is not counted."""
    assert routing.probabilities is not None
    probabilities = routing.probabilities
    each, dtype = is_token.astype(jnp.int32), probabilities.dtype
    hits = jnp.zeros(probabilities.shape[-1], jnp.int32).at[routing.experts].add(each[..., None])
    mean = jnp.einsum("rt,rtx->x", each.astype(dtype), probabilities)
    return Load(hits.astype(dtype), mean, jnp.sum(each).astype(dtype))


def with_load(terms: LossTerms, load: Load, coef: float) -> LossTerms:
    """The loss with the mean over layers of the load's loss times `coef` (`actor.router_aux_loss_coef`), and the
    metrics."""
    shares, means = load.chosen / load.tokens[:, None], load.probabilities / load.tokens[:, None]
    own = {LOAD: Fraction(load.chosen, jnp.sum(load.tokens) / load.tokens.size)}
    total = terms.total
    if coef:
        uneven = jnp.mean(jnp.sum(shares * means, axis=-1)) * shares.shape[-1]
        total += coef * uneven * terms.denominator
        own["moe/aux_loss"] = Fraction(uneven * terms.denominator, terms.denominator)
    return terms._replace(total=total, means=terms.means | jax.lax.stop_gradient(own))


def load_metrics(load: jax.Array, per_token: int) -> dict[str, jax.Array]:
    """`moe/*` of an update, from the share of tokens that chose each expert, [L, X].

    `load_max`: the most loaded expert of any layer, over the mean of all. `load_cv`: standard deviation over mean of
    the experts' loads, averaged over layers. `dropped`: the share of choices that no expert computed; always 0.
    """
    mean = jnp.mean(load, axis=-1)
    return {
        "moe/load_max": jnp.max(load / mean[:, None]),
        "moe/load_cv": jnp.mean(jnp.std(load, axis=-1) / mean),
        "moe/dropped": jnp.round(1 - jnp.mean(jnp.sum(load, axis=-1)) / per_token, 6),
    }
