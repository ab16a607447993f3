"""The objective of a model: RL's policy loss, the likelihood of SFT and DPO, or a critic's values.

An objective says what is computed per token from the final hidden states of a microbatch, and the loss of that. The
decoder, packing, sharding, accumulation and the optimizer are the same for all (`jaxrl.training.programs`). All have

- `name`, `optim`, `grad_clip`: of a section of options (`actor`, `critic`); `name` is also the prefix of metrics;
- `passes`: the programs without gradients, in the order in which they are needed; `learns`: whether there are others;
- `teacher_top_k`: how many of a teacher's tokens the loss reads in each column;
- `per_token(head(params), hidden, batch)`: arrays [R, T] or [R, T, ...] from final-normed hidden states [R, T, E], 0
  where the mask is, whose loss is `loss(found, batch)`. A pass without gradients returns the first one.

Dims: R rows, T tokens, E embed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxrl.config import Config, OptimSection
from jaxrl.kernels.by_rows import ByRows, at_once
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.sharding.rules import padded_weights, train_shardings
from jaxrl.training import losses
from jaxrl.training.logprobs import DEFAULT_CHUNK, HeadOptions, token_logprobs
from jaxrl.training.packing import TokenBatch
from jaxrl.training.vocabulary import split_of

Tree = Any
_Read = tuple[HeadOptions, Tree, jax.Array, jax.Array, jax.Array, Mesh]


class PolicyObjective:
    """Log-probabilities of the sampled tokens, and `losses.compute`. `widen`, `by_rows`: as in `HeadOptions`."""

    learns = True

    def __init__(self, config: Config, model_config: ModelConfig, mesh: Mesh, *, widen: bool, by_rows: ByRows) -> None:
        actor = config.actor
        self.name, self.optim, self.grad_clip = "actor", actor.optim, actor.grad_clip
        self.teacher_top_k = config.algorithm.teacher.top_k
        self.passes: tuple[str, ...] = (
            *(("ref_logprobs",) if config.needs_ref else ()),
            *(("logprobs",) if actor.old_logprobs != "rollout" else ()),
        )
        self._config, self._mesh, weights = config, mesh, model_config.weights()
        self._options = HeadOptions(
            project=partial(_project, config=model_config, parts=actor.numerics_tp),
            chunk=DEFAULT_CHUNK if actor.logprob_chunk_tokens == "auto" else actor.logprob_chunk_tokens,
            temperature=config.rollout.temperature or 1.0,
            entropy_gradient=bool(actor.entropy_coeff),
            widen=widen,
            split=split_of("lm_head" if "lm_head" in weights else "embed", train_shardings(model_config, mesh)),
            by_rows=by_rows,
        )

    def head(self, params: Tree) -> Tree:
        return decoder.head(params)

    def per_token(self, head: Tree, hidden: jax.Array, batch: TokenBatch) -> tuple[jax.Array, ...]:
        """(log-probabilities, entropies), and with a teacher's tokens their log-probabilities."""
        ids = None if batch.teacher_ids is None else jnp.asarray(batch.teacher_ids)
        return token_logprobs(*self._read(head, hidden, batch), ids)

    def _read(self, head: Tree, hidden: jax.Array, batch: TokenBatch) -> _Read:
        return self._options, head, hidden, jnp.asarray(batch.targets), jnp.asarray(batch.loss_mask), self._mesh

    def loss(self, found: tuple[jax.Array, ...], batch: TokenBatch) -> losses.LossTerms:
        logprobs, entropy, *named = found
        return losses.compute(logprobs, entropy, batch, self._config, *named)


class LikelihoodObjective(PolicyObjective):
    """The objective of `jaxrl sft` and `jaxrl dpo`: log-likelihood, each token with a weight.

    Loss = -Σ w·log π(token), averaged as `algorithm.loss_agg_mode` says. The weights stand in `TokenBatch.advantages`.
    A demonstration's tokens have the weight 1. The gradient of a preference loss has this form as well, with weights
    computed from the log-probabilities of both responses (`jaxrl.training.supervised`); so the two need not lie in one
    microbatch.
    """

    def loss(self, found: tuple[jax.Array, ...], batch: TokenBatch) -> losses.LossTerms:
        logprobs, _ = found
        mode = self._config.algorithm.loss_agg_mode
        total = losses.aggregate_sum(-logprobs * jnp.asarray(batch.advantages), batch, mode)
        denominator = losses.aggregate_denominator(batch, mode)
        means = {"train/loss": losses.Fraction(total, denominator)}
        return losses.LossTerms(total, denominator, lax.stop_gradient(means), {})


class ValueObjective:
    """The expected return from each token on, before it is sampled, and `losses.compute_values`."""

    learns = True

    def __init__(self, config: Config) -> None:
        self.name, self.grad_clip, self.teacher_top_k = "critic", config.actor.grad_clip, 0
        self.optim: OptimSection = config.critic_optim
        self.passes: tuple[str, ...] = ("values",)
        self._config = config

    def head(self, params: Tree) -> Tree:
        return {"score": params["score"]}

    def per_token(self, head: Tree, hidden: jax.Array, batch: TokenBatch) -> tuple[jax.Array, ...]:
        """(values,), in at least float32: one column costs nothing."""
        wide = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
        return (jnp.where(jnp.asarray(batch.loss_mask) > 0, decoder.score(head, wide), 0),)

    def loss(self, found: tuple[jax.Array, ...], batch: TokenBatch) -> losses.LossTerms:
        return losses.compute_values(found[0], batch, self._config)


Objective = PolicyObjective | ValueObjective
ObjectiveOf = Callable[..., Objective]
"""Makes the objective of a model; arguments as of `objective_of`."""


def objective_of(config: Config, model_config: ModelConfig, mesh: Mesh, *, widen: bool, by_rows: ByRows) -> Objective:
    """The default: a model with a scalar head is a critic, any other one the policy."""
    if model_config.scalar_head:
        return ValueObjective(config)
    return PolicyObjective(config, model_config, mesh, widen=widen, by_rows=by_rows)


def critic_config(model_config: ModelConfig) -> ModelConfig:
    """The same decoder with one number in place of the vocabulary head."""
    return dataclasses.replace(model_config, scalar_head=True)


def _project(
    head: Tree, x: jax.Array, config: ModelConfig, parts: int, widen: bool = False, by_rows: ByRows = at_once
) -> jax.Array:
    if by_rows is not at_once:
        head = padded_weights(config, parts, head)
    return decoder.logits(head, x, config, widen=widen, by_rows=by_rows)
