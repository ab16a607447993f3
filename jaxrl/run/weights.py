"""The weights of a run: those of `model.path`, with adapters where the model has some, and those of checkpoints.

A checkpoint holds what is trained: all weights, or the adapters alone, whose base is read from `model.path` again.
Adapters are new, or begin as those of `model.lora_adapter_path`, which then says what they are like.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError
from jaxrl.config.options import ModelSection
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import load_layerwise, load_model, resolve_path
from jaxrl.models.lora import Lora, adapters_alone, chosen, with_adapters, without_adapters
from jaxrl.sharding.rules import map_weights, train_shardings
from jaxrl.training import checkpoint

Tree = dict[str, Any]


def adapted(config: Config, model: ModelConfig) -> ModelConfig:
    """The model as a run trains it: with the adapters that `model.lora_rank` or `model.lora_adapter_path` asks for.
    Raises ValueError for modules that it does not have, and adapters in the folder that cannot be computed."""
    asked = config.model
    if not asked.has_adapters:
        return model
    if (folder := _adapter_folder(config)) is None:
        lora = Lora(asked.lora_rank, asked.lora_alpha, _targets(asked, model), asked.use_rslora)
    else:
        from jaxrl.models.peft import read_lora

        lora = read_lora(folder, model)
    lora = dataclasses.replace(lora, dropout=asked.lora_dropout)
    return dataclasses.replace(model, lora=lora, quantization=asked.base_quantization)


def _targets(asked: ModelSection, model: ModelConfig) -> tuple[str, ...]:
    try:
        return chosen(model.weights()["layers"], asked.target_modules, asked.exclude_modules)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _adapter_folder(config: Config) -> Path | None:
    asked = config.model.lora_adapter_path
    return Path(asked).expanduser() if asked else None


def load_weights(config: Config, model: ModelConfig, mesh: Mesh, place: Path | None = None) -> Any:
    """The weights that `model.path` names, with training's shardings, and the adapters that a run begins with. `place`:
    a checkpoint, whose weights are taken: the adapters, or all, where those of `model.path` are not read. Raises
    ValueError where it holds another model, or files are not what the model's config asks for."""
    if place is not None and model.lora is None:
        return trained_weights(place, config, model, mesh)
    dtype = config.actor.param_dtype
    given: Any = {
        "path": resolve_path(config.model.path, weights=not config.model.random_init),
        "mesh": mesh,
        "dtype": dtype,
        "random_init_seed": config.trainer.seed if config.model.random_init else None,
    }
    if model.lora is None:
        return load_model(**given)[1]
    _, outer, layers = load_layerwise(**given)
    base = _frozen(config, model, mesh, outer, layers)
    if place is not None:
        return with_adapters(base, trained_weights(place, config, model, mesh))
    if (folder := _adapter_folder(config)) is not None:
        from jaxrl.models.peft import load_adapter

        return with_adapters(base, load_adapter(folder, model, mesh, dtype))
    table, shardings = adapters_alone(model.weights()), adapters_alone(train_shardings(model, mesh))
    key = jax.random.key(config.trainer.seed)
    return with_adapters(base, jax.jit(lambda key: decoder.init_table(table, key, dtype), out_shardings=shardings)(key))


def _frozen(config: Config, model: ModelConfig, mesh: Mesh, outer: Tree, layers: Iterator[Tree]) -> Tree:
    """The base in the types of frozen weights, quantised if it is to be. A layer is read at a time, so that there is
    one that is neither cast nor quantised yet."""
    from jaxrl.models.quantized import quantized_layer

    table, plain = without_adapters(model.weights()), model.base.weights()
    shardings = without_adapters(train_shardings(model, mesh))
    dtypes = model.dtypes(config.actor.param_dtype, config.actor.dtype)
    found = {}
    for name in [*outer]:
        found[name] = jax.jit(partial(jnp.asarray, dtype=dtypes[name]), out_shardings=shardings[name])(outer.pop(name))

    def start() -> Tree:
        return {name: jnp.zeros(weight.shape, dtypes["layers"][name]) for name, weight in table["layers"].items()}

    def put(stacked: Tree, layer: Tree, i: jax.Array) -> Tree:
        own = quantized_layer(model.quantization, plain["layers"], {name: x[0] for name, x in layer.items()})
        return {name: x.at[i].set(own[name].astype(x.dtype)) for name, x in stacked.items()}

    stacked = jax.jit(start, out_shardings=shardings["layers"])()
    put = jax.jit(put, donate_argnums=0, out_shardings=shardings["layers"])
    for i, layer in enumerate(layers):
        stacked = put(stacked, layer, i)
    return found | {"layers": stacked}


def trained_weights(place: Path, config: Config, model: ModelConfig, mesh: Mesh) -> Any:
    """The weights in a checkpoint for a run with this model. Raises ValueError where it holds another model."""
    return checkpoint.restore_params(place, _saved(config, model, mesh))


def refuse_other_model(place: Path, config: Config, model: ModelConfig, mesh: Mesh) -> None:
    """Raises ValueError if a checkpoint holds other weights than a run with this model trains; no weight is read."""
    checkpoint.refuse_other_model(place, _saved(config, model, mesh))


def _saved(config: Config, model: ModelConfig, mesh: Mesh) -> Any:
    """Shapes, dtypes and training's shardings of what a checkpoint holds of a model's weights."""
    dtype = config.actor.param_dtype
    placed = map_weights(
        lambda weight, sharding: jax.ShapeDtypeStruct(weight.shape, dtype, sharding=sharding),
        model.weights(),
        train_shardings(model, mesh),
    )
    return placed if model.lora is None else adapters_alone(placed)
