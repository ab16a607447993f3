"""The event journal: the decisions of a clock since the last checkpoint, so that a resumed run decides the same.

Purpose: everything in a run follows from its config and seeds, except for a few decisions that a clock or the machine
took (a scorer that timed out or crashed; a layout switch from measured latencies). Each is written here as one line
before it takes effect. A step that runs again after a crash finds its line and does not ask the clock again
(docs/architecture.md).

The file is append-only JSONL: a header `{"journal": 1}`, then `{"step": .., "kind": .., "key": [..], ...}` per
decision. Lines of steps that a checkpoint holds are dropped when the journal is opened and when a checkpoint commits
(`cut`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.record.files import JsonLines, read_lines

SCHEMA = 1


class Journal:
    """Decisions of the steps after `last_step`, the checkpoint that this run starts from.

    Example::

        journal = Journal(run_dir / "journal.jsonl", last_step=10)
        earlier = journal.find(11, "verdict", key)      # None, or what was decided before the crash
        if earlier is None:
            journal.append(11, "verdict", key, {"status": "timeout"})

    `begin=False` reads the file, and writes nothing before `begin` is called.
    """

    def __init__(self, path: str | Path, last_step: int, *, begin: bool = True) -> None:
        lines = read_journal(path)
        self._is_new = not lines
        self._entries = {_place(entry): entry for entry in lines[1:] if entry["step"] > last_step}
        self._lines = JsonLines(path, lambda step: step > last_step, compact=True, sync=True, begin=False)
        if begin:
            self.begin()

    def begin(self) -> None:
        """Drops the lines of other steps; from here on, decisions can be written."""
        self._lines.begin()
        if self._is_new:
            self._lines.append({"journal": SCHEMA})

    def find(self, step: int, kind: str, key: tuple[int, ...]) -> Mapping[str, Any] | None:
        """What was decided about `key` in `step`, if anything was."""
        return self._entries.get((step, kind, key))

    def entries(self, step: int, kind: str) -> list[Mapping[str, Any]]:
        """Every decision of one kind in `step`, in the order in which they were first written."""
        return [entry for (at, name, _), entry in self._entries.items() if (at, name) == (step, kind)]

    def append(self, step: int, kind: str, key: tuple[int, ...], decision: Mapping[str, Any]) -> None:
        """Writes a decision to the disk; it may take effect once this returns."""
        entry = {"step": step, "kind": kind, "key": list(key), **decision}
        self._entries[_place(entry)] = entry
        self._lines.append(entry)

    def cut(self, step: int) -> None:
        """A checkpoint of `step` has been committed: decisions up to it have had their effect."""
        self._entries = {place: entry for place, entry in self._entries.items() if place[0] > step}
        self._lines.keep(lambda at: at > step)

    def close(self) -> None:
        self._lines.close()


def _place(entry: Mapping[str, Any]) -> tuple[int, str, tuple[int, ...]]:
    return entry["step"], entry["kind"], tuple(entry["key"])


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """The header and the decisions after it; empty if not even the header was written.

    Raises:
      ValueError: this is not a journal, or a line is damaged: the run could not decide again as it did.
    """
    path, header = Path(path), True

    def parse(line: bytes) -> dict[str, Any]:
        nonlocal header
        entry, is_header, header = json.loads(line), header, False
        if is_header:
            if not isinstance(entry, dict) or entry.get("journal") != SCHEMA:
                raise ValueError(f"it must be the header of a journal of schema {SCHEMA}, found {line[:80]!r}")
            return entry
        step, kind, key = _place(entry)
        if not (isinstance(step, int) and isinstance(kind, str) and all(isinstance(part, int) for part in key)):
            raise ValueError("step must be a whole number, kind text, key whole numbers")
        return entry

    return read_lines(path, parse)
