"""The trainer: the policy in training, and the reference that it is compared with.

Source: docs/architecture.md; what it has of any model in training is in `jaxrl.train.learner`. Memory besides that:
logits of `actor.logprob_chunk_tokens` tokens per device, and the reference's weights where an option needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from jaxrl.config import Config
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import without_adapters
from jaxrl.sharding.compiled import Meet, alone
from jaxrl.train import optimizer as optimizers
from jaxrl.train.learner import Learner, placed
from jaxrl.train.programs import Accumulator, TrainPrograms
from jaxrl.types import TrainBatch

Tree = Any


class Trainer(Learner):
    """Holds the policy in training. One minibatch is any number of `accumulate` calls and one `apply`.

    Example::

        trainer = Trainer(config, model_config, params, make_mesh())
        batch.old_logprobs = trainer.token_logprobs(batch)
        trainer.accumulate(batch.select([0, 1]))
        trainer.accumulate(batch.select([2, 3]))
        metrics = trainer.apply()
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        params: Tree,
        mesh: Mesh,
        *,
        total_updates: int = 0,
        trainable: optimizers.Trainable | None = None,
        interpret: bool = False,
        programs: TrainPrograms | None = None,
        on_progress: Callable[[], None] = lambda: None,
        meet: Meet = alone,
    ) -> None:
        """Places `params` on the mesh, what is trained as a copy.

        Args:
          config: `actor`, `algorithm`, `rollout.temperature` and the lengths in `data` are read. `auto` means `dots`
            for `actor.remat` and `logprobs.DEFAULT_CHUNK` for `actor.logprob_chunk_tokens` here;
            `jaxrl.runtime.build.with_planned_update` replaces both before by what the memory allows.
          model_config: of the decoder.
          params: training form, numpy or jax arrays of any floating dtype. The caller keeps them. A reference model, if
            one is needed, has these weights.
          mesh: rows of tokens and weights are split over all of its axes.
          total_updates: optimizer updates in the whole run; only schedules that decay need it.
          trainable: which parameters are trained; the rest is kept as it is. Default: the adapters of a model that has
            some, else all.
          interpret: run the GPU kernels of `actor.attention: pallas` as plain JAX, on any device (slow; for tests).
          programs: of the same options, model and mesh, some of them compiled or being compiled; they decide
            `total_updates`, `trainable` and `interpret`. Made here if None.
          on_progress: called when a microbatch has run.
          meet: as in `CompiledPrograms`.

        Raises:
          ValueError: `actor.attention: pallas` on other devices than GPUs, or for a model that the kernels refuse.
        """
        if programs is None:
            programs = TrainPrograms(
                config,
                model_config,
                mesh,
                total_updates=total_updates,
                trainable=trainable,
                interpret=interpret,
            )
        super().__init__(programs, params, on_progress=on_progress, meet=meet)
        self._ref: Tree | None = None
        if self.config.needs_ref and model_config.lora is None:
            self._ref = placed(params, programs.places, programs.ref_dtypes)

    @property
    def ref_params(self) -> Tree | None:
        """The reference's weights in training form; None where no option needs them. With adapters those of the base,
        which training leaves as they are: there is no second copy."""
        if self.config.needs_ref and self.model_config.lora is not None:
            return without_adapters(self.params)
        return self._ref

    def token_logprobs(self, batch: TrainBatch, which: Literal["actor", "ref"] = "actor") -> list[np.ndarray]:
        """Log-probability of every response token under the temperature-scaled model.

        Args:
          batch: advantages and log-probabilities in it are not read.
          which: `actor` (the model in training) or `ref` (the reference).

        Returns:
          Per sample float32 [T_i].

        Raises:
          ValueError: `ref` without a KL option that needs one; a sample that is too long.
        """
        if which == "ref" and not self.config.needs_ref:
            raise ValueError(
                "the reference model is only kept with actor.use_kl_loss or algorithm.use_kl_in_reward: set one of them"
            )
        params, kind = (self.params, "logprobs") if which == "actor" else (self.ref_params, "ref_logprobs")
        return self._forward(params, batch, kind)

    def take_over(self, sums: Accumulator) -> None:
        """Begins the minibatch with sums of other devices, which then have these shardings: `programs.sums`. Nothing
        may have been accumulated yet."""
        assert self._passes.accumulator is None, "sums come from elsewhere before a minibatch is accumulated here"
        self._passes.accumulator = sums
