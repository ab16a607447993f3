"""Checks that a run fits the checkpoint that it resumes or begins from. It does so before the model is loaded and the
checkpoint is compared with its checksums, which reads all of it and takes minutes for a large one.

What cannot be read here is reported where the checkpoint is compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError
from jaxrl.config.inputs import read_json
from jaxrl.data.prompts import PromptSource
from jaxrl.models.config import ModelConfig
from jaxrl.run.weights import refuse_other_model
from jaxrl.training import manifest
from jaxrl.training.steps import HOST, STATE, find_step, steps_of

if TYPE_CHECKING:
    from jaxrl.run.training import Training

_FILE = f"{HOST}/metadata"


def refuse_other_data(run: Training, prompts: PromptSource) -> None:
    """Raises ConfigError where the run in the folder was saved with other prompts, or the same in another order."""
    saved = _cursor(run.run_dir.file("checkpoints"))
    if saved is not None:
        try:
            prompts.load_state(saved)
            prompts.position = 0  # until the checkpoint is restored
        except ValueError as error:
            raise run.other_data(error) from None


def refuse_other_init(config: Config, model: ModelConfig, mesh: Mesh) -> None:
    """Raises ConfigError where the newest checkpoint in `trainer.init_from` holds other weights than the run trains."""
    folder, place = find_step(config.trainer.init_from)
    place = place or folder / str(steps_of(folder)[-1])
    try:
        manifest.check_file(place, manifest.read(place, None), f"{STATE}/_METADATA")
    except (manifest.Damaged, OSError):
        return  # an older one may be taken
    try:
        refuse_other_model(place, config, model, mesh)
    except ValueError as error:
        raise ConfigError(f"trainer.init_from: {error}") from None


def _cursor(checkpoints: Path) -> dict[str, Any] | None:
    """The newest checkpoint's state of the prompts; None: there is none, or its file has changed."""
    try:
        steps = steps_of(checkpoints)
        if not steps:
            return None
        place = checkpoints / str(steps[-1])
        manifest.check_file(place, manifest.read(place, steps[-1]), _FILE)
        found = read_json(place / _FILE)["values"]["data"]
        return found if {"version", "data", "order", "num_prompts"} <= set(found) else None
    except (manifest.Damaged, OSError, ValueError, KeyError, TypeError):
        return None
