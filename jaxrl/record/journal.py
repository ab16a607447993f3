"""The event journal: what a clock decided since the last checkpoint, so that a run that resumes decides the same.

Purpose: everything in a run follows from its config and seeds but a few decisions that a clock or the machine took (a
scorer that timed out or crashed; a layout switch from measured latencies). Each is one line here before it takes
effect. A step that runs again after a crash finds its line and does not ask the clock again. Design §3.

The file is append-only JSONL: a header `{"journal": 1}`, then `{"step": .., "kind": .., "key": [..], ...}` per
decision. A line without its newline was cut off by a crash and counts as not written. Lines of steps that a
checkpoint holds are dropped when the journal is opened and when a checkpoint commits (`cut`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1


class Journal:
    """Decisions of the steps after `last_step`, the checkpoint that this run starts from.

    Example::

        journal = Journal(run_dir / "journal.jsonl", last_step=10)
        earlier = journal.find(11, "verdict", key)      # None, or what was decided before the crash
        if earlier is None:
            journal.append(11, "verdict", key, {"status": "timeout"})
    """

    def __init__(self, path: str | Path, last_step: int) -> None:
        self._path = Path(path)
        self._entries: dict[tuple[int, str, tuple[int, ...]], dict[str, Any]] = {}
        for entry in _read(self._path):
            if entry["step"] > last_step:
                self._entries[entry["step"], entry["kind"], tuple(entry["key"])] = entry
        self._rewrite()
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run lasts

    def find(self, step: int, kind: str, key: tuple[int, ...]) -> Mapping[str, Any] | None:
        """What was decided about `key` in `step`, if anything was."""
        return self._entries.get((step, kind, key))

    def entries(self, step: int, kind: str) -> list[Mapping[str, Any]]:
        """Every decision of one kind in `step`, in the order in which they were first written."""
        return [entry for (at, name, _), entry in self._entries.items() if (at, name) == (step, kind)]

    def append(self, step: int, kind: str, key: tuple[int, ...], decision: Mapping[str, Any]) -> None:
        """Writes a decision to the disk; it may take effect once this returns."""
        entry = {"step": step, "kind": kind, "key": list(key), **decision}
        self._entries[step, kind, key] = entry
        self._file.write(_line(entry))
        os.fsync(self._file.fileno())

    def cut(self, step: int) -> None:
        """A checkpoint of `step` has been committed: decisions up to it have had their effect."""
        if any(at <= step for at, _, _ in self._entries):
            self._entries = {place: entry for place, entry in self._entries.items() if place[0] > step}
            self._file.close()
            self._rewrite()
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - as above

    def close(self) -> None:
        self._file.close()

    def _rewrite(self) -> None:
        lines = [_line({"journal": SCHEMA}), *map(_line, self._entries.values())]
        draft = self._path.with_suffix(".draft")
        with open(draft, "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    if not lines:
        return []
    try:
        header, *entries = map(json.loads, lines)
    except ValueError as error:
        raise ValueError(f"{path} is not a journal: {error}") from error
    if not isinstance(header, dict) or header.get("journal") != SCHEMA:
        raise ValueError(f"{path}: journal of schema {header!r}; this version reads schema {SCHEMA}")
    return entries
