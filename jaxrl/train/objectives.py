"""What a model is trained for: the policy, and the critic's values. Both have the programs of `jaxrl.train.programs`.

An objective says what is read from the final hidden states of a microbatch, per token, and what loss that makes. The
decoder before it, packing, sharding, accumulation and the optimizer are the same for both.

Dims: R rows, T tokens, E embed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.config import Config, OptimSection
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.train import losses
from jaxrl.train.logprobs import DEFAULT_CHUNK, HeadOptions, token_logprobs
from jaxrl.train.packing import TokenBatch

Tree = Any


class Objective(Protocol):
    """One model's.

    Attributes:
      name: of its section of options (`actor`, `critic`), and before its metrics.
      optim, grad_clip: of its updates.
      passes: its programs without gradients, those first that are needed first.
    """

    name: str
    optim: OptimSection
    grad_clip: float
    passes: tuple[str, ...]

    def head(self, params: Tree) -> Tree:
        """Of the gathered weights outside the layers, those that `per_token` needs."""
        ...

    def per_token(self, head: Tree, hidden: jax.Array, batch: TokenBatch) -> tuple[jax.Array, ...]:
        """Arrays [R, T] from final-normed hidden states [R, T, E], 0 where the mask is; the first one is what a pass
        without gradients returns."""
        ...

    def loss(self, found: tuple[jax.Array, ...], batch: TokenBatch) -> losses.LossTerms:
        """The loss of what `per_token` has found."""
        ...


class ObjectiveOf(Protocol):
    """Makes the objective of a model. `widen`: as in `HeadOptions`."""

    def __call__(self, config: Config, model_config: ModelConfig, mesh: Mesh, *, widen: bool) -> Objective: ...


def objective_of(config: Config, model_config: ModelConfig, mesh: Mesh, *, widen: bool) -> Objective:
    """A model with a scalar head is a critic, any other one the policy."""
    if model_config.scalar_head:
        return ValueObjective(config)
    return PolicyObjective(config, model_config, mesh, widen=widen)


class PolicyObjective:
    """Log-probabilities of the tokens that were drawn, and `losses.compute`."""

    def __init__(self, config: Config, model_config: ModelConfig, mesh: Mesh, *, widen: bool) -> None:
        actor = config.actor
        self.name, self.optim, self.grad_clip = "actor", actor.optim, actor.grad_clip
        self.passes: tuple[str, ...] = (
            *(("ref_logprobs",) if config.needs_ref else ()),
            *(("logprobs",) if actor.old_logprobs != "rollout" else ()),
        )
        self._config, self._mesh = config, mesh
        self._options = HeadOptions(
            project=partial(_project, config=model_config),
            chunk=DEFAULT_CHUNK if actor.logprob_chunk_tokens == "auto" else actor.logprob_chunk_tokens,
            temperature=config.rollout.temperature or 1.0,
            entropy_gradient=bool(actor.entropy_coeff),
            widen=widen,
        )

    def head(self, params: Tree) -> Tree:
        name = "lm_head" if "lm_head" in params else "embed"
        return {name: params[name]}

    def per_token(self, head: Tree, hidden: jax.Array, batch: TokenBatch) -> tuple[jax.Array, ...]:
        """(log-probabilities, entropies)."""
        tokens, mask = jnp.asarray(batch.tokens), jnp.asarray(batch.loss_mask)
        return token_logprobs(self._options, head, hidden, tokens, mask, self._mesh)

    def loss(self, found: tuple[jax.Array, ...], batch: TokenBatch) -> losses.LossTerms:
        logprobs, entropy = found
        return losses.compute(logprobs, entropy, batch, self._config)


class ValueObjective:
    """What is expected from each token on, before it is drawn, and `losses.compute_values`."""

    def __init__(self, config: Config) -> None:
        self.name, self.grad_clip = "critic", config.critic.grad_clip
        self.optim: OptimSection = config.critic.optim
        self.passes: tuple[str, ...] = ("values",)
        self._options = config.critic

    def head(self, params: Tree) -> Tree:
        return {"score": params["score"]}

    def per_token(self, head: Tree, hidden: jax.Array, batch: TokenBatch) -> tuple[jax.Array, ...]:
        """(values,), in at least float32: one column costs nothing."""
        wide = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
        # column t is about token t, and known once the token before it is; no response begins in column 0
        values = jnp.roll(decoder.score(head, wide), 1, axis=1)
        return (jnp.where(jnp.asarray(batch.loss_mask) > 0, values, 0),)

    def loss(self, found: tuple[jax.Array, ...], batch: TokenBatch) -> losses.LossTerms:
        return losses.compute_values(found[0], batch, self._options)


def _project(head: Tree, x: jax.Array, config: ModelConfig) -> jax.Array:
    return decoder.logits(head, x, config)
