"""The weights of a run: those of `model.path`, with adapters where the model has some, and those of checkpoints.

A checkpoint holds what is trained: all weights, or the adapters alone, whose base is read from `model.path` again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import load_model, resolve_path
from jaxrl.models.lora import Lora, adapters_alone, chosen, with_adapters
from jaxrl.sharding.rules import train_shardings
from jaxrl.train import checkpoint


def adapted(config: Config, model: ModelConfig) -> ModelConfig:
    """The model as a run trains it: with the adapters that `model.lora_rank` asks for. Raises ConfigError for modules
    that it does not have."""
    asked = config.model
    if not asked.lora_rank:
        return model
    try:
        targets = chosen(model.weights()["layers"], asked.target_modules, asked.exclude_modules)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return dataclasses.replace(model, lora=Lora(asked.lora_rank, asked.lora_alpha, targets, asked.use_rslora))


def load_weights(config: Config, model: ModelConfig, mesh: Mesh, place: Path | None = None) -> Any:
    """The weights that `model.path` names, with training's shardings, and new adapters.

    Args:
      place: a checkpoint, whose weights are taken: the adapters, or all, where those of `model.path` are not read.

    Raises:
      ValueError: it holds another model.
    """
    if place is not None and model.lora is None:
        return trained_weights(place, config, model, mesh)
    seed, dtype = config.trainer.seed, config.actor.param_dtype
    path = resolve_path(config.model.path, weights=not config.model.random_init)
    _, base = load_model(path, mesh, dtype, random_init_seed=seed if config.model.random_init else None)
    if model.lora is None:
        return base
    if place is not None:
        return with_adapters(base, trained_weights(place, config, model, mesh))
    table, shardings = adapters_alone(model.weights()), adapters_alone(train_shardings(model, mesh))
    new = jax.jit(lambda key: decoder.init_table(table, key, dtype), out_shardings=shardings)(jax.random.key(seed))
    return with_adapters(base, new)


def trained_weights(place: Path, config: Config, model: ModelConfig, mesh: Mesh) -> Any:
    """What a checkpoint holds of the weights of a run with this model. Raises ValueError where it holds another one."""
    return checkpoint.restore_params(place, _saved(config, model, mesh))


def refuse_other_model(place: Path, config: Config, model: ModelConfig, mesh: Mesh) -> None:
    """Raises ValueError if a checkpoint holds other weights than a run with this model trains; no weight is read."""
    checkpoint.refuse_other_model(place, _saved(config, model, mesh))


def _saved(config: Config, model: ModelConfig, mesh: Mesh) -> Any:
    """Shapes, dtypes and training's shardings of what a checkpoint holds of a model's weights."""
    shapes = jax.eval_shape(lambda key: decoder.init(model, key, config.actor.param_dtype), jax.random.key(0))
    placed = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        train_shardings(model, mesh),
    )
    return placed if model.lora is None else adapters_alone(placed)
