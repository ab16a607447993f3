"""The steps in a folder of checkpoints, which of them are complete (match their manifest), and which one to restore."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

from jaxrl.training import manifest
from jaxrl.training.manifest import Damaged

SCHEMA_VERSION = 3
"""Version of everything around a step's items. A reader refuses later versions, and takes only parameters from earlier
ones."""

STATE, HOST, ARRAYS = "state", "host", "arrays"
"""The items of a step."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The newest complete checkpoint of a folder, and the faults of newer ones by step."""

    step: int
    faults: Mapping[int, str] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """Warnings for the user, one line each."""
        return [f"checkpoint {step} is damaged and is passed over: {fault}" for step, fault in self.faults.items()]


def choose(folder: str | Path, progress: Callable[[], None] = lambda: None) -> Choice | None:
    """The newest complete step of a folder of checkpoints; None if it has no step. Raises ValueError if each step is
    damaged, or one was written by a later version; OSError if something cannot be read now."""
    folder, faults = Path(folder).absolute(), dict[int, str]()
    for step in steps_of(folder)[::-1]:
        try:
            _compare(folder / str(step), step, progress)
            return Choice(step, faults)
        except Damaged as fault:
            faults[step] = str(fault)
    if faults:
        found = "; ".join(f"{step}: {fault}" for step, fault in faults.items())
        raise ValueError(f"{folder} holds no checkpoint that is whole ({found}): bring one back from a copy")
    return None


def whole_step(
    path: str | Path,
    step: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[], None] = lambda: None,
) -> Path:
    """The folder of a complete step.

    Args:
      path: a folder of checkpoints, a run directory with a folder `checkpoints`, or one step's folder.
      step: default: the newest complete one; not with one step's folder.
      say: receives the step that is used, and notes about it and newer ones.
    """
    folder, place = find_step(path, step)
    if place is None:
        chosen = choose(folder, progress)
        assert chosen is not None, "there are steps"
        place = folder / str(chosen.step)
        for line in chosen.notes():
            say(line)
    else:
        verify(place, progress)
    say(f"parameters of {place}")
    return place


def find_step(path: str | Path, step: int | None = None, option: str = "") -> tuple[Path, Path | None]:
    """Where `whole_step` will look, before any file is compared: the folder of steps, and the only step that may be
    taken (None: any). `option` names the path in messages. Raises FileNotFoundError if there is none."""
    folder = Path(path).absolute()
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    if (folder / STATE).is_dir() or (folder / manifest.FILE_NAME).exists():
        return folder.parent, folder
    if step is not None and (folder / str(step)).exists():
        return folder, folder / str(step)
    if step is None and steps_of(folder):
        return folder, None
    found = ", ".join(map(str, steps_of(folder)))
    there = f"it has {found}" if found else "no folder in it is named like a step (1, 2 ...)"
    if (folder / "config.json").exists():
        there = "it is a model's folder, which model.path takes"
    said, wanted = f"{option}: " if option else "", "no checkpoint" if step is None else f"no checkpoint {step}"
    raise FileNotFoundError(f"{said}{wanted} in {folder}: {there if folder.exists() else 'there is no such folder'}")


def steps_of(folder: Path) -> list[int]:
    """The numbers of all entries with a step's name, ascending."""
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file and must be a folder of checkpoints: move it away")
    return sorted(int(path.name) for path in folder.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name))


def free_name(path: Path) -> Path:
    """`path`, with a number behind it if that is taken."""
    names = chain([path], (path.with_name(f"{path.name}-{i}") for i in count(2)))
    return next(name for name in names if not name.exists())


def verify(place: Path, progress: Callable[[], None] = lambda: None) -> None:
    """Compares a step's folder with what was written, where no other step may take its place: ValueError if it is
    damaged, or was written by a later version."""
    try:
        _compare(place, int(place.name) if place.name.isdigit() else None, progress)
    except Damaged as fault:
        raise ValueError(f"checkpoint {place} is damaged: {fault}") from None


def _compare(place: Path, step: int | None, progress: Callable[[], None]) -> None:
    if not place.is_dir():
        raise Damaged("it is a file, not a folder")
    if not any(place.iterdir()):
        raise Damaged("it is empty")
    content = manifest.read(place, step)
    if (version := content["schema_version"]) > SCHEMA_VERSION:
        raise ValueError(
            f"checkpoint {place} has schema version {version}; this jaxrl reads up to {SCHEMA_VERSION}: update jaxrl"
        )
    manifest.check(place, content, progress)
