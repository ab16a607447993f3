"""A run's directory: the places of its files, and `run.json`.

docs/architecture.md, "The run directory", says what each file holds. A lock (`.lock`) keeps a second run out; the
operating system drops it when the process ends, however it ends.

A start that is refused leaves the folder as it was: before `record_start` only the lock, the folder and early files are
written, and without `record_start`, `close` takes those back.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import filelock
import yaml

from jaxrl.config import Config, ConfigError, differences, to_mapping
from jaxrl.config.files import load_recorded
from jaxrl.config.inputs import reading
from jaxrl.record.files import leftover_temporaries, read_lines, reason, refuse_folder, to_json, write_whole
from jaxrl.record.journal import FILE_NAME as JOURNAL
from jaxrl.schema.hidden import hider

CONFIG_FILE, RUN_FILE = "config.yaml", "run.json"
RUN_FILES = {
    *(CONFIG_FILE, RUN_FILE, "metrics.jsonl", "samples.jsonl", "batches.jsonl", "layouts.jsonl", "journal.jsonl"),
    *("state.json", "timeline.json", "rewards.log"),
    *("mlflow_id.txt", "trackio_name.txt", "trackio_step.txt", "wandb_id.txt", "wandb_step.txt"),
}
"""The files that only the run itself writes; `report.html` is written by `jaxrl report` as well."""
SIMULATED = "simulated"  # the platform that `jaxrl simulate` writes for its devices
_PACKAGES = ("jaxrl", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "grain", "tokenizers", "reasoning-gym")


class RunDir:
    """An open run directory, made if it is missing, and locked against other runs. `option` names it in messages;
    `kind` is the command that the run belongs to. Raises ValueError if this process cannot write it, or another one
    holds it."""

    def __init__(self, path: str | Path, option: str = "trainer.run_dir", *, kind: str = "train") -> None:
        self.kind = kind
        self.path, self._option = refuse_folder(path, option), option
        self._started = False
        self._early: dict[Path, int | None] = {}  # sizes before this start; None: the file was missing
        # folders that this start makes, the innermost first
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        file = self.path / ".lock"
        self._lock_is_new = not file.exists()
        self._lock = filelock.FileLock(file)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ValueError(
                f"{self.path} belongs to a run that is still going (it holds {file}): wait for it, or choose another "
                f"{option}"
            ) from None
        except OSError as error:
            remove_empty(self._made)
            where = error.filename or self.path
            raise ValueError(f"{option}: {where}: {reason(error)}") from None

    def refuse_other_kind(self) -> None:
        earlier = recorded_start(self.path)
        if earlier is not None and earlier.get("kind", self.kind) != self.kind:
            raise ValueError(
                f"{self.path} holds a run of `jaxrl {earlier['kind']}`, and this is `jaxrl {self.kind}`: choose "
                f"another {self._option}"
            )

    def file(self, name: str) -> Path:
        return self.path / name

    def early_file(self, name: str) -> Path:
        """A file that something may append to before the start is recorded."""
        path = self.file(name)
        self._early[path] = path.stat().st_size if path.exists() else None
        return path

    def close(self) -> None:
        if not self._started:
            if self._lock_is_new:
                self.file(".lock").unlink(missing_ok=True)  # still held: nothing can lock it in between
            for path, size in self._early.items():
                if size is None:
                    path.unlink(missing_ok=True)
                elif path.exists():
                    os.truncate(path, size)
            remove_empty(self._made)
        self._lock.release()

    @property
    def earlier(self) -> Config | None:
        """The configuration of the last run in this directory, if there was one."""
        return recorded_config(self.path)

    def changes(self, config: Config) -> list[str]:
        earlier = self.earlier
        return [] if earlier is None else differences(earlier, config)

    def resuming(self, changes: Sequence[str], step: int, total_steps: int = 0) -> list[str]:
        of = f" of {total_steps}" if total_steps else ""
        return [f"resuming {self.path} after step {step}{of}", *(f"  changed since: {change}" for change in changes)]

    def record_start(self, config: Config, devices: Mapping[str, Any], step: int, **more: Any) -> None:
        """Writes config.yaml, and an entry about this start to run.json, which gets `more` as well."""
        earlier = recorded_start(self.path)
        self._started = True
        for name in RUN_FILES:
            for leftover in leftover_temporaries(self.file(name)):  # of a killed start: no other run can write here now
                leftover.unlink()
        write_whole(self.file(CONFIG_FILE), yaml.safe_dump(to_mapping(config), sort_keys=False), sync=True)
        starts = (earlier or {}).get("starts") or []
        now = {
            "kind": self.kind,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "from_step": step,
            "command": hider()(shlex.join(sys.argv)),
            "commit": commit(),
            "host": platform.node(),
            "devices": dict(devices),
            "versions": versions(),
        }
        record = {"config": to_mapping(config), "seeds": {"trainer": config.trainer.seed, "data": config.data.seed}}
        self._write_record(record | now | {"starts": [*starts, now]} | more)

    def record_checkpoint(self, step: int) -> None:
        file = self.file(RUN_FILE)
        with reading(file):
            record = json.loads(file.read_text(encoding="utf-8"))
        self._write_record(record | {"checkpoint": step})

    def missing_checkpoint(self, found: int | None) -> str | None:
        """A warning if the last checkpoint is missing and the run resumes from an older one, `found`. Raises ValueError
        if none is there: to start from step 1 would drop the metrics of the steps that were saved."""
        saved = (recorded_start(self.path) or {}).get("checkpoint")
        if saved is None or (found is not None and found >= saved):
            return None
        if found is not None:
            return f"checkpoint {saved} is missing, though {self.file(RUN_FILE)} names it"
        metrics = self.file("metrics.jsonl")
        if not any(line.get("step") for line in read_lines(metrics)):
            return None  # moved away: a new start is what is wanted
        raise ValueError(
            f"{self.file('checkpoints')} holds no checkpoint, though step {saved} was saved: bring the folder back, "
            f"choose another trainer.run_dir, or move {metrics} away to start from step 1"
        )

    def missing_journal(self) -> str | None:
        """A warning if the journal is gone although a run began here."""
        file = self.file(JOURNAL)
        if os.path.lexists(file) or "checkpoint" not in (recorded_start(self.path) or {}):
            return None
        return f"{file} is gone: steps after the last checkpoint ask the clock again, and may come out another way"

    def _write_record(self, record: Mapping[str, Any]) -> None:
        """Synced: a checkpoint is on the disk before it is noted here, and the note must survive a power failure."""
        write_whole(self.file(RUN_FILE), to_json(record, indent=1), sync=True)


def remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it was not made, or something else is in it by now
            folder.rmdir()


def recorded_config(folder: str | Path) -> Config | None:
    """The configuration of the run in a folder, if there is one. Raises ConfigError if it is damaged or of another
    version."""
    file = Path(folder).expanduser() / CONFIG_FILE
    if not os.path.lexists(file):
        return None
    if file.is_file() and not file.stat().st_size:
        raise ConfigError(f"{file}: empty, though it held the options of a run: bring it back, or move it away")
    return load_recorded(file)


def recorded_start(folder: str | Path) -> Mapping[str, Any] | None:
    """The content of run.json: the last start in a folder, and all `starts`. Raises ValueError if it is damaged."""
    file = Path(folder).expanduser() / RUN_FILE
    if not os.path.lexists(file):
        return None
    with reading(file):
        found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not isinstance(found.get("devices"), dict):
        raise ValueError(f"{file}: damaged: mend it, or move it away")
    return found


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


def refuse_overwriting(out: str | Path, option: str, inputs: Iterable[str | Path] = ()) -> None:
    """Raises ValueError if a file written at `out`, which `option` gives, would replace one of `inputs`, or part of a
    run."""
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
    files = [*config.data.train_files, *config.data.val_files, config.reward.path, config.algorithm.filter_groups.path]
    return files + [each.path for named in (config.reward.domains, config.reward.parts) for each in named.values()]


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(os.path.expanduser(path)))
