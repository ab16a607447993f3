"""`jaxrl export`: a run's last checkpoint, or any model that loads, as a folder that other programs read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml

from jaxrl.config import from_recorded
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models import decoder
from jaxrl.models.loading import config_of, load_model, resolve_path
from jaxrl.models.safetensors import export_hf
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import train_shardings
from jaxrl.train.checkpoint import restore_params_only


def export(source: str, folder: str, dtype: str, say: Callable[[str], None] = print) -> list[Path]:
    """Writes a run's last checkpoint, or any model that loads, as a Hugging Face folder; returns the files.

    The folder is written under another name first and renamed at the end: a failed export leaves no partial folder.
    `say` gets which checkpoint is used, which newer one is damaged, and that a model has no tokenizer.
    """
    target = Path(folder)
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} must be empty or absent: an export never overwrites")
    mesh = make_mesh()
    run_config = Path(source) / "config.yaml"
    if run_config.exists():
        config = from_recorded(yaml.safe_load(run_config.read_text()))
        path = resolve_path(config.model.path)
        model = config_of(path)
        shapes = _abstract_params(model, mesh, config.actor.param_dtype)
        params: Any = restore_params_only(source, shapes, say=say)
    else:
        path = resolve_path(source)
        model, params = load_model(path, mesh)
    tokenizer = _tokenizer(path, say)
    draft = target.with_name(target.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    export_hf(params, model, draft, dtype=jnp.dtype(dtype))
    if tokenizer is not None:
        tokenizer.save(draft)
    if target.exists():
        target.rmdir()
    draft.rename(target)
    return sorted(target.iterdir())


def _tokenizer(path: str, say: Callable[[str], None]) -> Tokenizer | None:
    """The tokenizer of a model; None, and said, where its folder has none."""
    source = Path(path.removeprefix("random:"))
    if source.is_dir() and not (source / "tokenizer.json").exists():
        say(f"{source} holds no tokenizer.json: the model is exported without a tokenizer")
        return None
    return Tokenizer.from_path(source)


def _abstract_params(model: Any, mesh: Any, dtype: str) -> Any:

    shapes = jax.eval_shape(lambda key: decoder.init(model, key, dtype), jax.random.key(0))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        train_shardings(model, mesh),
    )
