"""A run's directory: where its files are, which process may write them, and what the run was.

    config.yaml      the resolved configuration; `jaxrl train --config` takes it as it is
    run.json         config, versions, commit, devices, seeds, command; one entry per start
    metrics.jsonl    one line per step
    samples.jsonl    a few samples per step, for people
    layouts.jsonl    the layout over each round, where it adapts
    journal.jsonl    decisions of the clock since the last checkpoint
    timeline.json    Chrome trace; Perfetto opens it
    checkpoints/     Orbax; a simulated run has one file, state.json
    report.html      written at the end, or by `jaxrl report`

A lock keeps a second run out; the operating system drops it when the process ends, however it ends.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import yaml

from jaxrl.config import Config, differences, from_recorded, to_mapping
from jaxrl.record.files import write_whole

SIMULATED = "simulated"  # the platform that `jaxrl simulate` writes for its devices
_PACKAGES = ("jaxrl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class RunDir:
    """An open run directory, locked against other runs. Raises ValueError if another process holds it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().resolve()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(self.path / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ValueError(
                f"{self.path} belongs to a run that is still going (it holds {self.path / '.lock'}): wait for it, or "
                "choose another trainer.run_dir"
            ) from None

    def refuse_other_kind(self, *, simulated: bool, option: str) -> None:
        """Raises ValueError if the earlier run here was simulated and this one is not, or the other way round."""
        file = self.file("run.json")
        if not file.exists():
            return
        was_simulated = json.loads(file.read_text())["devices"].get("platform") == SIMULATED
        if was_simulated != simulated:
            kind = "was simulated" if was_simulated else "was not simulated"
            raise ValueError(f"{self.path} holds a run that {kind}: choose another {option}")

    def file(self, name: str) -> Path:
        return self.path / name

    def close(self) -> None:
        self._lock.release()

    @property
    def earlier(self) -> Config | None:
        """The configuration that this directory was last run with; None: never."""
        return recorded_config(self.path)

    def changes(self, config: Config) -> list[str]:
        """Options in which `config` differs from the one this directory was last run with, one line each."""
        return [] if self.earlier is None else differences(self.earlier, config)

    def resuming(self, changes: Sequence[str], step: int, total_steps: int = 0) -> list[str]:
        """The first messages of a resumed run; `changes` come from the method of that name, `total_steps` may be 0."""
        of = f" of {total_steps}" if total_steps else ""
        return [f"resuming {self.path} after step {step}{of}", *(f"  changed since: {change}" for change in changes)]

    def record_start(self, config: Config, devices: Mapping[str, Any], step: int, **more: Any) -> None:
        """Writes config.yaml, and an entry about this start to run.json, which gets `more` as well."""
        write_whole(self.file("config.yaml"), yaml.safe_dump(to_mapping(config), sort_keys=False))
        file = self.file("run.json")
        earlier = json.loads(file.read_text())["starts"] if file.exists() else []
        now = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "from_step": step,
            "command": " ".join(sys.argv),
            "commit": commit(),
            "devices": dict(devices),
            "versions": versions(),
        }
        record = {"config": to_mapping(config), "seeds": {"trainer": config.trainer.seed, "data": config.data.seed}}
        write_whole(file, json.dumps(record | now | {"starts": [*earlier, now]} | more, indent=1))

    def record_checkpoint(self, step: int) -> None:
        """Notes in run.json that checkpoint `step` is complete: a start that finds none can tell that it was lost."""
        file = self.file("run.json")
        write_whole(file, json.dumps(json.loads(file.read_text()) | {"checkpoint": step}, indent=1))


def recorded_config(folder: str | Path) -> Config | None:
    """The configuration of the run in a folder, which need not exist; None: there is no run."""
    file = Path(folder).expanduser() / "config.yaml"
    return from_recorded(yaml.safe_load(file.read_text())) if file.exists() else None


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "source tree"
    return found


def commit() -> str:
    """The commit of the source tree, with `+changes` where it has uncommitted ones; empty outside a checkout."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", here, *arguments], capture_output=True, text=True, check=True).stdout

    try:
        head = git("rev-parse", "HEAD").strip()
        return head + ("+changes" if git("status", "--porcelain", "--untracked-files=no").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
