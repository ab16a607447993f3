"""Checks that a run fits the checkpoint that it resumes or begins from. It does so before the model is loaded and the
checkpoint is compared with its checksums, which reads all of it and takes minutes for a large one.

Different options alone are no reason to refuse: a run resumes with equal problems in another file. What cannot be read
here is reported where the checkpoint is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxrl.config import Config, ConfigError
from jaxrl.config.inputs import read_json
from jaxrl.data.prompts import PromptSource
from jaxrl.models.config import ModelConfig
from jaxrl.record.run_dir import RunDir
from jaxrl.run.weights import refuse_other_model
from jaxrl.training import manifest
from jaxrl.training.steps import HOST, STATE, find_step, steps_of

_FILE = f"{HOST}/metadata"
_ORDER = ("data.seed", "data.shuffle", "data.source_quotas")
_NEITHER = ("train_batch_size", "gen_batch_size", "max_response_length", "val_files", "val_size")
"""Options of `data` that do not affect the training prompts."""


def refuse_other_data(run_dir: RunDir, prompts: PromptSource, config: Config, changes: Sequence[str]) -> None:
    """Raises ConfigError where the run in the folder was saved with other prompts, or the same in another order.
    `changes`: of its options since then."""
    saved = _cursor(run_dir.file("checkpoints"))
    if saved is None or not (differs := prompts.differs(saved)):
        return
    by_option = {line.partition(":")[0]: line for line in changes}
    if differs == "order":
        lines = [line for option, line in by_option.items() if option in _ORDER]
        what, why = "its data in another order", "; ".join(lines) or "another version of grain"
    else:
        lines = [line for option, line in by_option.items() if _may_matter(option, config)]
        counts = f"{saved['num_prompts']} prompts then, {prompts.num_prompts} now"
        if saved["num_prompts"] != prompts.num_prompts or not lines:
            lines.append(counts if lines else f"the files have changed: {counts}")
        what, why = "other data", "; ".join(lines)
    raise ConfigError(
        f"{run_dir.path} holds a run with {what} ({why}): choose another trainer.run_dir, with "
        f"trainer.init_from={run_dir.path} to begin from its parameters"
    )


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


def _may_matter(option: str, config: Config) -> bool:
    section, _, name = option.partition(".")
    if option == "data.seed":
        return bool(config.data.task)  # whose problems are drawn with it
    return option == "model.path" or (section == "data" and option not in _ORDER and name not in _NEITHER)


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
