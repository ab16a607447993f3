"""The objective of `jaxrl sft` and `jaxrl dpo`: log-likelihood, each token with a weight.

Loss = -Σ w·log π(token), averaged as `algorithm.loss_agg_mode` says. A demonstration's tokens have the weight 1. The
gradient of a preference loss has this form as well, with weights that `jaxrl.train.preferences` computes from the
log-probabilities of both responses; so the two need not lie in one microbatch. The weights stand in
`TokenBatch.advantages`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.train import losses
from jaxrl.train.objectives import PolicyObjective
from jaxrl.train.packing import TokenBatch


class LikelihoodObjective(PolicyObjective):
    """Log-probabilities of tokens that were given."""

    def loss(self, found: tuple[jax.Array, ...], batch: TokenBatch) -> losses.LossTerms:
        logprobs, _ = found
        mode = self._config.algorithm.loss_agg_mode
        total = losses.aggregate_sum(-logprobs * jnp.asarray(batch.advantages), batch, mode)
        denominator = losses.aggregate_denominator(batch, mode)
        means = {"train/loss": losses.Fraction(total, denominator)}
        return losses.LossTerms(total, denominator, lax.stop_gradient(means), {})
