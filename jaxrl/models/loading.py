"""Loads weights from a Hugging Face folder or a GGUF file, or makes random ones for a folder's config."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init
from jaxrl.models.gguf import config_from_gguf, load_gguf, open_gguf
from jaxrl.models.safetensors import load_hf
from jaxrl.sharding import rules

RANDOM = "random:"


def resolve_path(path: str) -> str:
    """`package:file` names a file inside an installed package; any other path stays what it is."""
    package, colon, file = path.partition(":")
    if not colon or path.startswith(RANDOM) or os.path.exists(path):
        return path
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"model.path: {path} names a file of the package {package!r}, which is not installed")
    return str(Path(next(iter(spec.submodule_search_locations))) / file)


def load_model(
    path: str | Path, mesh: Mesh | None = None, dtype: Any = jnp.float32, *, random_init_seed: int | None = None
) -> tuple[ModelConfig, dict[str, Any]]:
    """(config, params in training form), with the mesh's train shardings, or on the first device if there is no mesh.

    Args:
      path: a Hugging Face folder, a .gguf file, or `random:<folder with config.json>` for random weights.
      dtype: of the parameters.
      random_init_seed: use random weights from this seed instead of the folder's (`random:` alone means seed 0).
    """
    text = str(path)
    if text.startswith(RANDOM) or random_init_seed is not None:
        return _random(Path(text.removeprefix(RANDOM)), mesh, dtype, random_init_seed or 0)
    if Path(path).is_dir():
        return load_hf(path, mesh, dtype)
    if Path(path).suffix == ".gguf":
        return load_gguf(path, mesh, dtype)
    raise ValueError(f"{path}: model.path must be a Hugging Face folder, a .gguf file or '{RANDOM}<folder>'")


def config_of(path: str | Path) -> ModelConfig:
    """The model's config alone, without its weights; `path` as in `load_model`."""
    text = str(path).removeprefix(RANDOM)
    if Path(text).suffix == ".gguf":
        return config_from_gguf(open_gguf(text), text)
    return ModelConfig.from_hf(Path(text))


def _random(folder: Path, mesh: Mesh | None, dtype: Any, seed: int) -> tuple[ModelConfig, dict[str, Any]]:
    config = ModelConfig.from_hf(folder)
    shardings = None if mesh is None else rules.train_shardings(config, mesh)
    return config, jax.jit(lambda key: init(config, key, dtype), out_shardings=shardings)(jax.random.key(seed))
