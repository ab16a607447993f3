"""Large data kept between starts: problems and the tokens of their prompts, mapped into memory.

Reading and tokenising a million problems takes minutes and gigabytes. The result is kept in a folder of
`data.cache_dir` whose name is the digest of everything that determines it: the contents and names of the files, the
options by which rows become problems, and this version of jaxrl (`jaxrl.data.rendered` adds tokenizer and templates). A
later start compares the files with their checksums, maps them, and reads problems on demand. A folder that is still
being written has another name, and a damaged one is made anew. Problems are JSON, and a folder is read only if nobody
else can write to it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from decimal import Decimal
from pathlib import Path
from typing import Any, overload

import numpy as np

import jaxrl
from jaxrl.config import DataSection
from jaxrl.config.inputs import reading
from jaxrl.data.problems import Problem

_log = logging.getLogger(__name__)

CACHED_BYTES = 2**25
"""Of data files that are kept: fewer are read and tokenised in a few seconds."""

_SUMS = "sums.json"
_LEFT_OVER_S = 3600
"""Without a write to it, a folder that is being made is what a killed start has left."""
_KIND = "\0kind"
_KINDS: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    **{kind.__name__: (str, kind.fromisoformat) for kind in (datetime.date, datetime.datetime, datetime.time)},
    "timedelta": (lambda v: [v.days, v.seconds, v.microseconds], lambda parts: datetime.timedelta(*parts)),
    "Decimal": (str, Decimal),
    "bytes": (bytes.hex, bytes.fromhex),
    "tuple": (list, tuple),
}
"""Values that Parquet has and JSON has not: to JSON, and back."""
_COLUMNS = ("prompt_key", "messages_key", "answer_key", "source_key", "reference_time_key")
_COLUMNS += ("prompt_template", "system_prompt")
"""Options of `data` that rows are read by."""


class ProblemStore(Sequence[Problem]):
    """The problems in a folder, each read on demand.

    Attributes:
      sources: the names of all sources; `source_ids`: int32, the index of each problem's source.
      identities: uint64, a hash of each problem's `identity`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._content = np.memmap(folder / "problems.jsonl", np.uint8, "r")
        self._ends = mapped(folder, "ends")
        self.sources: list[str] = json.loads((folder / "sources.json").read_text(encoding="utf-8"))
        self.source_ids, self.identities = mapped(folder, "source_ids"), mapped(folder, "identities")

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, at: int) -> Problem: ...
    @overload
    def __getitem__(self, at: slice) -> list[Problem]: ...
    def __getitem__(self, at: int | slice) -> Problem | list[Problem]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        line = self._content[self._ends[at - 1] if at else 0 : self._ends[at]].tobytes()
        return Problem(*json.loads(line, object_hook=_restored))


def stored(read: Callable[[], Iterable[Problem]], files: Sequence[Path], data: DataSection) -> Sequence[Problem]:
    """The problems of `files`, which `read` reads one after another: large files as a store that is kept, others as
    a list. If `data.cache_dir` cannot be written, a warning says so, and they are a list."""
    if not data.cache_dir or sum(file.stat().st_size for file in files) < CACHED_BYTES:
        return list(read())
    options = {name: getattr(data, name) for name in _COLUMNS}
    key = digest([[str(file), _content(file)] for file in dict.fromkeys(files)], list(map(str, files)), options)
    try:
        return ProblemStore(kept(Path(data.cache_dir).expanduser() / key, lambda folder: _write(folder, read())))
    except OSError as error:  # those of the data files are ValueErrors by now
        _log.warning("data.cache_dir (%s): %s; the data is read anew at every start", data.cache_dir, error)
        return list(read())


def source_names(problems: Sequence[Problem]) -> list[str]:
    if isinstance(problems, ProblemStore):
        return [problems.sources[i] for i in problems.source_ids]
    return [problem.source for problem in problems]


def identities(problems: Sequence[Problem]) -> np.ndarray:
    """uint64: 64 bits of a digest of each problem's `identity`."""
    if isinstance(problems, ProblemStore):
        return problems.identities
    return np.fromiter(map(_identity, problems), np.uint64, len(problems))


def kept(folder: Path, write: Callable[[Path], None]) -> Path:
    """The folder, written by `write` into an empty one if it is missing or damaged; several processes may do so at
    once. Raises OSError where it cannot be written, or others can write to it."""
    if _is_whole(folder):
        return folder
    if folder.exists():
        _log.warning("data.cache_dir: %s is damaged and is made anew", folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.glob("*-new-*"):
        with suppress(OSError):
            if max(file.stat().st_mtime for file in (old, *old.iterdir())) < time.time() - _LEFT_OVER_S:
                shutil.rmtree(old)
    new = Path(tempfile.mkdtemp(prefix=f"{folder.name}-new-", dir=folder.parent))
    try:
        write(new)
        (new / _SUMS).write_text(json.dumps(_sums(new)), encoding="utf-8")
        for file in new.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        if not _is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(FileExistsError):
                new.rename(folder)
    except OSError as error:
        if not _is_whole(folder):  # else another process was first
            raise error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return folder


def mapped(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy", mmap_mode="r")


def digest(*parts: Any) -> str:
    """A digest of JSON values and of this version of jaxrl."""
    text = json.dumps([jaxrl.__version__, *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _content(file: Path) -> str:
    with reading(file), file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _identity(problem: Problem) -> int:
    return int.from_bytes(hashlib.blake2b(problem.identity.encode(), digest_size=8).digest(), "little")


def _sums(folder: Path) -> dict[str, str]:
    return {file.name: _content(file) for file in folder.iterdir() if file.is_file() and file.name != _SUMS}


def _is_whole(folder: Path) -> bool:
    if not folder.exists():
        return False
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is another user's, or others can write to it, so that its data is not trusted")
    try:
        return json.loads((folder / _SUMS).read_text(encoding="utf-8")) == _sums(folder)
    except (OSError, ValueError):
        return False


def _plain(value: Any) -> Any:
    """A value as JSON from which `_restored` makes an equal one, types included."""
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return value
    if kind is list:
        return [_plain(each) for each in value]
    if kind is dict and _KIND not in value:
        return {name: _plain(each) for name, each in value.items()}
    if kind.__name__ not in _KINDS:
        raise OSError(f"a column has a value of the type {kind.__name__}, which cannot be kept")
    return {_KIND: kind.__name__, "value": _plain(_KINDS[kind.__name__][0](value))}


def _restored(found: dict[str, Any]) -> Any:
    return _KINDS[found[_KIND]][1](found["value"]) if _KIND in found else found


def _write(folder: Path, problems: Iterable[Problem]) -> None:
    ends, source_ids, found = array("q"), array("i"), array("Q")
    sources: dict[str, int] = {}
    with (folder / "problems.jsonl").open("wb") as file:
        for problem in problems:
            row = [getattr(problem, each.name) for each in fields(problem)]
            file.write(json.dumps(_plain(row)).encode() + b"\n")
            ends.append(file.tell())
            source_ids.append(sources.setdefault(problem.source, len(sources)))
            found.append(_identity(problem))
    (folder / "sources.json").write_text(json.dumps(list(sources)), encoding="utf-8")
    for name, values in (("ends", ends), ("source_ids", source_ids), ("identities", found)):
        np.save(folder / f"{name}.npy", np.asarray(values))
