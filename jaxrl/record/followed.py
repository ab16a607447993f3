"""A run's directory as a process sees it that is not process 0: it reads the run's files and writes its own folder.

Purpose: `FollowedRun` takes `RunDir`'s place there, so that a run is built and goes on alike in every process. It holds
no lock: two processes of one number belong to two runs, of which only one can have the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl.config import Config
from jaxrl.record.files import Written
from jaxrl.record.run_dir import RunFolder, cut_to, remove_empty, sizes_of

HOSTS = "hosts"


class FollowedRun(RunFolder):
    """The directory of a run whose files another process writes. A start that is refused leaves it as it was.

    Args:
      path: of the run's folder.
      process: the number of this one, which is not 0.
    """

    def __init__(self, path: str | Path, process: int, option: str = "trainer.run_dir") -> None:
        assert process > 0, "process 0 leads"
        super().__init__(path, option, process)
        self._folder = self.path / HOSTS / str(process)
        self._started = False
        self._early: dict[Path, int | None] = {}
        self._made: list[Path] = []

    def own(self, name: str) -> Path:
        """A file of this process's own; its folder is there then."""
        self._made += [folder for folder in (self._folder, self._folder.parent) if not folder.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / name

    def early_file(self, name: str) -> Path:
        """As `RunDir.early_file`, of this process's own files."""
        path = self.own(name)
        self._early |= sizes_of([path])
        return path

    def close(self) -> None:
        if not self._started:
            cut_to(self._early)
            remove_empty(self._made)

    def record_start(self, config: Config, devices: Mapping[str, Any], step: int, **more: Any) -> None:
        """The start is not refused any more: what this process has written stays. Process 0 records it."""
        self._started = True

    def record_checkpoint(self, step: int | None, written: Mapping[str, Written]) -> None:
        """Process 0 notes it."""

    def record_cache(self, name: str, note: str | None) -> None:
        """Process 0 notes it."""

    def report(self, write: Callable[[Path], Path]) -> Path:
        """Where the page is that process 0 writes."""
        return self.file("report.html")
