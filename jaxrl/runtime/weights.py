"""The weights of a run: those of `model.path`, with adapters where the model has some, and those of checkpoints.

A checkpoint holds what is trained: all weights, or the adapters alone, whose base is read from `model.path` again.
Adapters are new, or begin as those of `model.lora_adapter_path`, which then says what they are like.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError
from jaxrl.config.options import ModelSection
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import load_model, resolve_path
from jaxrl.models.lora import Lora, adapters_alone, chosen, with_adapters
from jaxrl.models.peft import load_adapter, read_lora
from jaxrl.sharding.rules import train_shardings
from jaxrl.train import checkpoint


def adapted(config: Config, model: ModelConfig) -> ModelConfig:
    """The model as a run trains it: with the adapters that `model.lora_rank` or `model.lora_adapter_path` asks for.

    Raises:
      ConfigError: for modules that it does not have, or options that contradict the folder.
      ValueError: the folder's adapters cannot be computed.
    """
    asked = config.model
    if not asked.has_adapters:
        return model
    if (folder := _adapter_folder(config)) is None:
        lora = Lora(asked.lora_rank, asked.lora_alpha, _targets(asked, model), asked.use_rslora)
    else:
        lora = read_lora(folder, model)
        _refuse_contradiction(asked, model, lora)
    return dataclasses.replace(model, lora=lora)


def _targets(asked: ModelSection, model: ModelConfig) -> tuple[str, ...]:
    try:
        return chosen(model.weights()["layers"], asked.target_modules, asked.exclude_modules)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _refuse_contradiction(asked: ModelSection, model: ModelConfig, found: Lora) -> None:
    """Raises ConfigError for an option that is set, to something else than the folder's adapters have."""
    default = ModelSection()
    pairs: list[tuple[str, Any, Any]] = [
        ("lora_rank", asked.lora_rank or found.rank, found.rank),
        ("lora_alpha", asked.lora_alpha, found.alpha),
        ("use_rslora", asked.use_rslora, found.use_rslora),
    ]
    if any(getattr(asked, name) != getattr(default, name) for name in ("target_modules", "exclude_modules")):
        pairs.append(("target_modules", ", ".join(_targets(asked, model)), ", ".join(found.targets)))
    for name, own, theirs in pairs:
        if own not in (getattr(default, name), theirs):
            raise ConfigError(
                f"model.{name} ({own}) contradicts the adapters of model.lora_adapter_path "
                f"({asked.lora_adapter_path}: {theirs}): leave it out"
            )


def _adapter_folder(config: Config) -> Path | None:
    asked = config.model.lora_adapter_path
    return Path(asked).expanduser() if asked else None


def load_weights(config: Config, model: ModelConfig, mesh: Mesh, place: Path | None = None) -> Any:
    """The weights that `model.path` names, with training's shardings, and the adapters that a run begins with.

    Args:
      place: a checkpoint, whose weights are taken: the adapters, or all, where those of `model.path` are not read.

    Raises:
      ValueError: it holds another model, or files are not what the model's config asks for.
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
    if (folder := _adapter_folder(config)) is not None:
        return with_adapters(base, load_adapter(folder, model, mesh, dtype))
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
