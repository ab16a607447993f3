"""Files that a crash at any moment leaves readable: JSON lines that only grow, and files that are replaced atomically.

A line is complete when it ends in a newline. Text after the last newline was cut off by a crash: readers skip it, and
the next writer removes it. Readers skip a complete line that cannot be parsed as well, and say so.

All JSON written here is valid JSON: a number that is not finite becomes the text "nan", "inf" or "-inf".
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any, TypeVar

from jaxrl.config.inputs import reading

T = TypeVar("T")

_NUMBER = re.compile(r"os_error_code='(\d+)'|\bOS error (\d+)\b", re.IGNORECASE)
_log = logging.getLogger(__name__)


class JsonLines:
    """Appends JSON objects to a file, one on a line. The file is made by `open`, or with its first line. `begin` drops
    lines of steps after `last_step` (None: all stay); with `sync`, `append` returns when the line is on the disk."""

    def __init__(
        self, path: str | Path, last_step: int | None = None, *, compact: bool = False, sync: bool = False
    ) -> None:
        self._path, self._last_step, self._sync = Path(path), last_step, sync
        self._separators = (",", ":") if compact else (", ", ": ")
        self._has_begun = False
        self._file: FileIO | None = None

    def begin(self) -> None:
        """Drops lines of steps that will run again, and an unfinished last line. The first write."""
        self._has_begun = True
        if not os.path.lexists(self._path):
            return
        with reading(self._path), open(self._path, "rb") as file:
            content = b"".join(line for line in file if line.endswith(b"\n") and not self._is_later(line))
            size = file.tell()
        if len(content) != size:
            write_whole(self._path, content, sync=self._sync)

    def _is_later(self, line: bytes) -> bool:
        """A damaged line is of no step: someone may want to mend it."""
        try:
            step = json.loads(line).get("step")
        except (ValueError, AttributeError, RecursionError):
            return False
        return self._last_step is not None and type(step) is int and step > self._last_step

    def open(self) -> FileIO:
        if not self._has_begun:
            self.begin()
        if self._file is None:
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run lasts
        return self._file

    def append(self, entry: Mapping[str, Any]) -> None:
        line = to_json(entry, separators=self._separators).encode() + b"\n"
        file = self.open()
        with reading(self._path):
            write_all(file, line)  # one write: a crash leaves either all of the line or a tail without a newline
            if self._sync:
                os.fsync(file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_lines(
    path: Path, parse: Callable[[bytes], T] = json.loads, note: Callable[[str], None] = _log.warning
) -> list[T]:
    """Yields `parse` of each complete line, in order. `note` is called for lines that it cannot parse."""
    found: list[T] = []
    if not os.path.lexists(path):
        return found
    with reading(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):  # one by one: with long responses, a run's samples are gigabytes
            if line.endswith(b"\n") and line.strip():  # else unfinished
                try:
                    found.append(parse(line[:-1]))
                except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
                    note(f"{path}, line {number}: damaged ({type(error).__name__}: {error})")
    return found


def to_json(value: Any, **options: Any) -> str:
    """`json.dumps` that always writes valid JSON: a number that is not finite becomes its text."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {_finite(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_all(file: FileIO, content: bytes) -> None:
    """Appends all of it: the system may take a part only. Where the disk is full, half a line may be left."""
    while content:
        content = content[file.write(content) or 0 :]


def write_whole(path: str | Path, content: str | bytes, *, sync: bool = False) -> None:
    """Replaces a file atomically, as `writing_whole` does."""
    with writing_whole(path, sync=sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def writing_whole(path: str | Path, *, sync: bool = False) -> Iterator[IO[bytes]]:
    """A temporary file beside `path`, open for writing, which replaces `path` when the `with` ends without an error. A
    link is followed. What is no ordinary file (a terminal, a pipe) is written itself. `sync`: the content is on the
    disk before it takes the old one's place. An OSError has the name of the file.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        with open(path, "wb") as file:
            yield file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        with open(temporary, "xb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename, error.filename2 = str(path), None
        raise


def temporary_path(path: Path, ending: str = "tmp") -> Path:
    """A new name beside `path` for what will replace it: `.jaxrl-<name>-<12 hexadecimal digits>.tmp`, of which the
    first six are the process."""
    return path.with_name(f".jaxrl-{path.name}-{os.getpid():06x}{secrets.token_hex(3)}.{ending}")


def leftover_temporaries(path: Path) -> list[Path]:
    """The temporary files of the file at `path`, which is no link: of writers that were killed, or still write."""
    digits = "[0-9a-f]" * 12
    return [each for each in path.parent.glob(f".jaxrl-{path.name}-{digits}.tmp") if each.is_file()]


def refuse_folder(path: str | Path, option: str) -> Path:
    """The folder at `path`, which need not exist, without links and `~`. Raises ValueError, with the option's name, if
    no folder can be made or written there."""
    folder = Path(os.path.realpath(os.path.expanduser(path)))
    there = _nearest(folder)
    if not there.is_dir():
        what = f"{folder} is" if there == folder else f"{folder} cannot be made: {there} is"
        raise ValueError(f"{option}: {what} not a folder")
    if not takes_files(there):
        raise ValueError(f"{option}: {folder} cannot be written: {there} may not be changed by this user")
    return folder


def file_problem(path: str | Path) -> str | None:
    """Why no file can be written at `path`, to stand after the name of an option; None if one can."""
    target = Path(os.path.realpath(os.path.expanduser(path)))
    there = _nearest(target)
    if target.is_dir():
        return f"({path}) is a folder: name a file in it"
    if there != target and not there.is_dir():
        return f"({path}) cannot be written: {there} is not a folder"
    above = target.parent if there == target else there  # a file is replaced as a whole
    if not (target.exists() and not target.is_file()) and not takes_files(above):
        return f"({path}) cannot be written: no permission to write in {above}"
    return None


def _nearest(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def takes_files(folder: Path) -> bool:
    """A file without a name is made: the system tells a superuser yes even where nothing can be made, as in /proc."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)


def system_error(error: BaseException) -> OSError | None:
    """The operating system's error behind `error`, or None; one of a full disk comes before others.

    TensorStore (under Orbax) and safetensors raise errors of their own with the system's number in the text.
    """
    found, pending, seen = list[OSError](), [error], set[int]()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        pending += [behind for behind in (each.__cause__, each.__context__) if behind is not None]
        if isinstance(each, OSError) and each.errno is not None:
            found.append(each)
        elif match := _NUMBER.search(str(each)):
            number = int(match[1] or match[2])
            found.append(OSError(number, os.strerror(number)))
    return next((each for each in found if is_full(each)), found[0] if found else None)


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def reason(error: OSError) -> str:
    return "no space left on the device" if is_full(error) else (error.strerror or str(error)).lower()


def way_on(error: OSError) -> str:
    return "make room and run again" if is_full(error) else "mend that and run again"
