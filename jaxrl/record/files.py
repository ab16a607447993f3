"""Files that a crash at any moment leaves readable: JSON lines that only grow, and files that are replaced as a whole.

Purpose: `JsonLines` is the writer behind metrics, samples, layouts and the journal; `read_lines` reads back what it
wrote; `write_whole` writes a file that is never seen half written.

A line is complete when it ends in a newline. Text after the last newline was cut off by a crash: it counts as not
written, readers skip it, and the next writer removes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class JsonLines:
    """Appends JSON objects to a file, one on a line. The file is made by `make`, or with its first line.

    Args:
      stays: whether lines of a given step that are already in the file are kept; a line without a step always is.
      compact: no spaces between names and values.
      sync: `append` and `keep` return only when the lines are on the disk.
    """

    def __init__(
        self, path: str | Path, stays: Callable[[int], bool], *, compact: bool = False, sync: bool = False
    ) -> None:
        self._path, self._sync = Path(path), sync
        self._encode = json.JSONEncoder(separators=(",", ":") if compact else None).encode
        self._file: FileIO | None = None
        self.keep(stays)

    def make(self) -> FileIO:
        """The open file, made if it is missing."""
        if self._file is None:
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run lasts
        return self._file

    def append(self, entry: Mapping[str, Any]) -> None:
        line = self._encode(entry).encode() + b"\n"
        file = self.make()
        file.write(line)  # one write: a crash leaves either all of the line or a tail without a newline
        if self._sync:
            os.fsync(file.fileno())

    def keep(self, stays: Callable[[int], bool]) -> None:
        """Drops the lines of all other steps, and an unfinished last line."""

        def kept(line: bytes) -> bytes:
            step = json.loads(line).get("step")
            return line + b"\n" if step is None or stays(step) else b""

        self.close()
        content = b"".join(read_lines(self._path, kept))
        if self._path.exists() and self._path.read_bytes() != content:
            write_whole(self._path, content, sync=self._sync)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_lines(path: Path, parse: Callable[[bytes], T] = json.loads) -> list[T]:
    """What `parse` makes of each whole line, in order; nothing where there is no file. ValueError names a bad line."""
    found: list[T] = []
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(parse(line))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                kind = error.__class__.__name__
                raise ValueError(f"{path}, line {number}: not a line of {path.stem} ({kind}: {error})") from None
    return found


def write_whole(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Writes a draft beside the file and renames it, so a reader finds either the old content or the new.

    Args:
      sync: the content is on the disk before it takes the old one's place.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    with open(draft, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    os.replace(draft, path)
