"""`jaxrl export`: a run's last checkpoint, or any model that loads, as a folder that other programs read."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxrl.config import Config
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.config import ModelConfig
from jaxrl.models.loading import RANDOM, config_of, load_model, resolve_path
from jaxrl.models.peft import export_adapter, merged_params
from jaxrl.models.safetensors import export_hf
from jaxrl.record.files import refuse_folder, system_error, temporary_path
from jaxrl.record.run_dir import CONFIG_FILE, SIMULATED, recorded_config, recorded_start
from jaxrl.run.weights import adapted, load_weights, trained_weights
from jaxrl.sharding.mesh import make_mesh
from jaxrl.training.steps import whole_step


def export(
    source: str,
    folder: str,
    dtype: str,
    say: Callable[[str], None] = print,
    *,
    merge: bool = False,
) -> list[Path]:
    """Writes a run's last checkpoint, or any model that loads, as a Hugging Face folder; returns the files. A run that
    trains adapters gives a folder of peft's, with the adapters alone.

    A temporary folder is written and renamed at the end: a failed export leaves no partial folder, and of two into one
    folder the second is refused. `merge` writes the whole model with a run's adapters in its weights.

    Raises ValueError where `source` has no weights to export, or `folder` cannot be written or is not empty.
    """
    target = refuse_folder(folder, "the folder to write")
    if target.exists() and any(target.iterdir()):
        raise ValueError(_taken(target))
    if os.path.ismount(target):  # a container's volume, say
        raise ValueError(
            f"the folder to write: {target} is a mount point, which an export cannot replace: name a folder inside it"
        )
    refuse_folder(target.parent, "the folder to write")  # the temporary folder goes there
    notes: list[str] = []  # shown after all checks
    path, model, params = read_source(source, notes.append, merge=merge)
    tokenizer = _tokenizer(path, notes.append)
    for note in notes:
        say(note)
    partial = temporary_path(target, "partial")  # not a name that a running run's folder above may hold
    partial.mkdir(parents=True)
    try:
        if model.lora is not None:
            export_adapter(params, model, partial, jnp.dtype(dtype), _base_of(source, path, say))
        else:
            export_hf(params, model, partial, dtype=jnp.dtype(dtype))
        if tokenizer is not None:
            tokenizer.save(partial)
        partial.rename(target)  # also in place of an empty folder
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise ValueError(_taken(target)) from None
        cause = system_error(error)
        if cause is not None and not isinstance(error, OSError):  # safetensors has its own error
            raise OSError(cause.errno, cause.strerror, str(target)) from error
        raise
    return sorted(target.iterdir())


def read_source(source: str, say: Callable[[str], None] = print, *, merge: bool) -> tuple[str, ModelConfig, Any]:
    """The path of a model, its config, and its weights, or a run's adapters."""
    config = _config_of_run(source)
    place = None if config is None else whole_step(source, say=say)
    mesh = make_mesh()
    if merge and (config is None or not config.model.has_adapters):
        raise ValueError(
            f"export --merge: {source} has no adapters to merge: it is no run with model.lora_rank or "
            "model.lora_adapter_path"
        )
    if config is None or place is None:
        path = resolve_path(source, weights=True)
        if not os.path.lexists(path.removeprefix(RANDOM)):
            raise ValueError(f"{source}: neither a run nor a model: there is no such file or folder")
        return path, *load_model(path, mesh)
    path = resolve_path(config.model.path)
    model = adapted(config, config_of(path))
    if merge:
        return path, model.base, merged_params(model, load_weights(config, model, mesh, place))
    return path, model, trained_weights(place, config, model, mesh)


def _base_of(source: str, path: str, say: Callable[[str], None]) -> str:
    """The source from which peft loads the adapters' base: a name of the Hub as it was given, or a folder; empty:
    nothing that it could load."""
    config = _config_of_run(source)
    given = "" if config is None else config.model.path.removeprefix(RANDOM)
    if path.endswith(".gguf") or ":" in given:
        say(
            f"the adapters' base is {given}, which peft cannot load by itself: give it the model that this was made "
            "from, or export the merged model (--merge)"
        )
        return ""
    return given if not os.path.exists(given) else os.path.abspath(given)


def _tokenizer(path: str, say: Callable[[str], None]) -> Tokenizer | None:
    """The tokenizer of a model; None, with a note, if its folder has none."""
    source = Path(path.removeprefix(RANDOM))
    if source.is_dir() and not (source / "tokenizer.json").exists():
        say(f"{source} holds no tokenizer.json: the model is exported without a tokenizer")
        return None
    return Tokenizer.from_path(source)


def _taken(target: Path) -> str:
    return f"{target} must be empty or absent: an export never overwrites"


def _config_of_run(source: str) -> Config | None:
    """The configuration of a run's folder; None if it is no run's. Raises ValueError for a run without weights."""
    last = recorded_start(source)
    if last is not None and last["devices"].get("platform") == SIMULATED:
        raise ValueError(f"{source} is a simulated run: it has no weights to export")
    config = recorded_config(source)
    if config is None and last is not None:
        raise ValueError(f"{source} is a run without its {CONFIG_FILE}, which names its model: put it back")
    if config is not None:
        path = resolve_path(config.model.path).removeprefix(RANDOM)
        if not os.path.exists(path):
            raise ValueError(
                f"{source} is a run of the model {path}, which is not there any more: put it back, or name its new "
                f"place as model.path in {Path(source) / CONFIG_FILE}"
            )
    return config
