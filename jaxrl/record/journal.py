"""The event journal: a write-ahead log of decisions that a clock took, so that a resumed run decides the same.

A run is a function of its config and seeds, except for a few decisions that depend on a clock or the machine. Examples
are a scorer that times out, or a new layout chosen by measured latencies. Each is written here before it takes effect.
A step that runs again after a crash replays its lines (docs/architecture.md).

The file is JSONL: a header `{"journal": 2, "bytes": .., "crc32": ..}`, then per decision `{"step": .., "kind": ..,
"key": [..], ...}`. Lines of steps that a checkpoint holds are dropped. The header has the length and the CRC-32 of the
lines after it, so that a lost or changed decision is found. It has a fixed length and is overwritten after each line.
After a crash in between it covers fewer lines than there are: the later ones count, without a checksum.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from jaxrl.config.inputs import reading
from jaxrl.record.files import to_json, write_all, write_whole

FILE_NAME = "journal.jsonl"
SCHEMA = 2
_HEADER = re.compile(rb'\{"journal":%d,"bytes": *(\d{1,12}),"crc32": *(\d{1,10})\}' % SCHEMA)


class Journal:
    """Decisions of the steps after `last_step`, the checkpoint that this run starts from. The file is read at once;
    nothing is written before `begin` or the first `append`."""

    def __init__(self, path: str | Path, last_step: int) -> None:
        self._path = Path(path)
        self._entries = {_place(entry): entry for entry in read_journal(path)[1:] if entry["step"] > last_step}
        self._file: FileIO | None = None
        self._size = self._crc32 = 0  # of the decisions in the file

    def begin(self) -> None:
        """Writes the file anew, without the lines of other steps."""
        self.close()
        content = b"".join(map(_line, self._entries.values()))
        self._size, self._crc32 = len(content), zlib.crc32(content)
        write_whole(self._path, _header(self._size, self._crc32) + content, sync=True)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run lasts

    def find(self, step: int, kind: str, key: tuple[int, ...]) -> Mapping[str, Any] | None:
        return self._entries.get((step, kind, key))

    def entries(self, step: int, kind: str) -> list[Mapping[str, Any]]:
        """Every decision of one kind in `step`, as first written."""
        return [entry for (at, name, _), entry in self._entries.items() if (at, name) == (step, kind)]

    def since(self, step: int, kind: str) -> list[Mapping[str, Any]]:
        """Every decision of one kind in `step` and later ones."""
        return [entry for (at, name, _), entry in self._entries.items() if name == kind and at >= step]

    def append(
        self, step: int, kind: str, key: tuple[int, ...], decision: Mapping[str, Any], *, sync: bool = True
    ) -> None:
        """Writes a decision to the disk; it may take effect once this returns. Without `sync` the line may be lost with
        the machine, though not with this process: for frequent decisions."""
        entry = {"step": step, "kind": kind, "key": list(key), **decision}
        if self._file is None:
            self.begin()
        assert self._file is not None
        self._entries[_place(entry)] = entry
        line = _line(entry)
        with reading(self._path):
            write_all(self._file, line)
            if sync:
                os.fsync(self._file.fileno())
            self._size, self._crc32 = self._size + len(line), zlib.crc32(line, self._crc32)
            with open(self._path, "r+b", buffering=0) as start:
                start.write(_header(self._size, self._crc32))

    def cut(self, step: int) -> None:
        """A checkpoint of `step` holds the decisions up to it."""
        kept = {place: entry for place, entry in self._entries.items() if place[0] > step}
        is_shorter, self._entries = len(kept) < len(self._entries), kept
        if is_shorter:
            self.begin()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _header(size: int, crc32: int) -> bytes:
    return b'{"journal":%d,"bytes":%12d,"crc32":%10d}\n' % (SCHEMA, size, crc32)


def _line(entry: Mapping[str, Any]) -> bytes:
    return to_json(entry, separators=(",", ":")).encode() + b"\n"


def _place(entry: Mapping[str, Any]) -> tuple[int, str, tuple[int, ...]]:
    return entry["step"], entry["kind"], tuple(entry["key"])


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """The header and the decisions after it; empty if there is no file. Raises ValueError for what no crash does to a
    journal: the run could not decide again as it did."""
    path = Path(path)
    if not os.path.lexists(path):
        return []
    with reading(path):
        content = path.read_bytes()
        line, _, decisions = content.partition(b"\n")
        match = _HEADER.fullmatch(line)
        size, crc32 = map(int, match.groups()) if match else (0, 0)
        if line + b"\n" != _header(size, crc32) or zlib.crc32(decisions[:size]) != crc32 or len(decisions) < size:
            raise ValueError(
                f"{path}: damaged (not as it was written): bring back the file as it was, or move it away, and steps "
                "after the last checkpoint ask the clock again"
            )
        return [json.loads(each) for each in content.split(b"\n")[:-1]]
