"""Trainers whose updates are of random gradients: no batch has to pass for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from small_models import TRAINED
from trainer_fixtures import programs_of, weights_of

from jaxrl.train.packing import BatchShape, row_length
from jaxrl.train.trainer import MeshTrainer

LONG = (BatchShape(1, row_length(96)),)
WIDE = dataclasses.replace(TRAINED, hidden_size=96, head_dim=16, intermediate_size=64)
"""Most of its matrices have moments of enough numbers for int8."""


def trainer_of(config: Any, model: Any, devices: int) -> MeshTrainer:
    programs = programs_of(config, model, devices, LONG)
    return MeshTrainer(config, model, weights_of(model, "float32"), programs.mesh, programs=programs)


def update(trainer: MeshTrainer, seed: int, scale: float = 1.0) -> dict[str, float]:
    """One update; gradients of `scale` infinity are not finite."""
    zeros, random = trainer.programs.to_run(("zeros", 0, 0))(), np.random.default_rng(seed)

    def drawn(x: jax.Array) -> jax.Array:
        return jax.device_put((scale * random.normal(size=x.shape)).astype(x.dtype), x.sharding)

    gradients = jax.tree.map(drawn, zeros.gradients)
    denominator = jax.device_put(np.asarray(7, zeros.denominator.dtype), zeros.denominator.sharding)
    trainer._sums = dataclasses.replace(zeros, gradients=gradients, denominator=denominator)
    return trainer.apply()


def read(tree: Any) -> Any:
    """A copy, as numpy."""
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)
