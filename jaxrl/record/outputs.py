"""What a command writes must not take the place of what it reads, nor of a run's own files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from jaxrl.config import Config
from jaxrl.record.run_dir import RUN_FILE, RUN_FILES


def refuse_overwriting(out: str | Path, option: str, inputs: Iterable[str | Path] = ()) -> None:
    """Raises ValueError if a file written at `out` would replace one of `inputs`, or part of a run.

    Args:
      option: the argument that gives `out`, for the message.
      inputs: files that the command reads; empty ones are left out.
    """
    target = _real(out)
    for each in inputs:
        if str(each) and _real(each) == target:
            raise ValueError(f"{option} ({out}) would replace {each}, which this command reads: name another file")
    runs = [folder for folder in target.parents if (folder / RUN_FILE).is_file()]
    for folder in runs:
        inside = target.relative_to(folder)
        if str(inside) in RUN_FILES or inside.parts[0] == "checkpoints":
            raise ValueError(f"{option} ({out}) would replace a file of the run in {folder}: name another file")


def inputs_of(config: Config) -> list[str]:
    """The files that a configuration names for reading."""
    files = [*config.data.train_files, *config.data.val_files, config.reward.path, config.algorithm.filter_groups.path]
    files += [each.path for named in (config.reward.domains, config.reward.parts) for each in named.values()]
    return [*files, config.rollout.partial_rollout.buffer_filter_path, config.simulate.calibration]


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(os.path.expanduser(path)))
