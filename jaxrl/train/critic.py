"""The critic of `algorithm.adv_estimator=gae`: a second model in training, whose head is one number per token.

It is as large as the policy, and all that is said of a model in training holds for it (`jaxrl.train.learner`). Its
layers begin as the policy's at the beginning of the run, and its head as zeros: before the first update it expects
nothing, and advantages are returns.

Source: Schulman et al. 2017 (arXiv:1707.06347), with weights of its own as in verl. Departures from verl: the head
starts at 0 and not at random; computing type, attention and packing are those of section `actor`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl.config import Config
from jaxrl.models.config import ModelConfig
from jaxrl.sharding.compiled import Meet, alone
from jaxrl.train.learner import Learner
from jaxrl.train.programs import TrainPrograms
from jaxrl.types import TrainBatch

Tree = Any


class Critic(Learner):
    """Holds the critic in training.

    Example::

        critic = Critic(config, model_config, params, make_mesh())
        batch.values = critic.token_values(batch)
        batch.returns = ...  # jaxrl.train.advantages
        critic.accumulate(batch)
        metrics = critic.apply()
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        params: Tree,
        mesh: Mesh,
        *,
        total_updates: int = 0,
        on_progress: Callable[[], None] = lambda: None,
        meet: Meet = alone,
    ) -> None:
        """Arguments as in `Trainer`: the model and the weights are the policy's."""
        model = critic_config(model_config)
        params = {name: params[name] for name in model.weights() if name != "score"}
        params["score"] = np.zeros((model.hidden_size, 1), np.float32)
        super().__init__(
            TrainPrograms(config, model, mesh, total_updates=total_updates),
            params,
            on_progress=on_progress,
            meet=lambda name: meet(f"the critic's {name}"),
        )

    def token_values(self, batch: TrainBatch) -> list[np.ndarray]:
        """What is expected from every response token on, before it is drawn: per sample float32 [T_i]."""
        return self._forward(self.params, batch, "values")


def critic_config(model_config: ModelConfig) -> ModelConfig:
    """The same decoder with one number in place of the vocabulary head."""
    return dataclasses.replace(model_config, scalar_head=True)
