"""What a checkpoint's folder must hold: the name, size and SHA-256 of every file, in a file beside them.

`write` writes it last, before a checkpoint gets its name; `read` and `check` compare a folder with it. The manifest
vouches for itself as well: it holds the digest of its own content, and is compared byte by byte with what `write` makes
of that content. So every changed, cut, missing, renamed or added file of a checkpoint is found.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FILE_NAME = "manifest.json"
_CHUNK_BYTES = 1 << 20
_THREADS = min(8, os.cpu_count() or 1)  # hashing lets go of the interpreter; one thread does about 1 GB/s


class Damaged(Exception):
    """A checkpoint is not as it was written. The text says in what, as the end of a sentence."""


def write(folder: Path, schema_version: int, step: int, progress: Callable[[], None] = lambda: None) -> None:
    """Writes the manifest of a folder's files. Everything is on the disk when it returns.

    Args:
      schema_version: of the checkpoint.
      step: that the checkpoint is of: a folder that is renamed to another step is found.
      progress: called after each MiB, by several threads.
    """
    names = sorted(_names(folder))
    with ThreadPoolExecutor(_THREADS) as threads:
        files = dict(
            zip(names, threads.map(lambda name: _described(folder / name, progress, sync=True), names), strict=True)
        )
    with open(folder / FILE_NAME, "wb") as file:
        file.write(_encoded({"schema_version": schema_version, "step": step, "files": files}))
        file.flush()
        os.fsync(file.fileno())
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(inner)


def read(folder: Path, step: int | None) -> Mapping[str, Any]:
    """The manifest of a checkpoint's folder: schema_version, step, files.

    Args:
      step: that the folder's name stands for; None: it stands for none.

    Raises:
      Damaged: it is missing, damaged, or that of another step.
      PermissionError: it may not be read, which says nothing about what is in it.
    """
    file = folder / FILE_NAME
    if not file.is_file():
        raise Damaged(f"{FILE_NAME} is missing")
    try:
        written = file.read_bytes()
        content = json.loads(written)["content"]
        whole = written == _encoded(content)
    except PermissionError:
        raise
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        whole, content = False, {}
    if not whole:
        raise Damaged(f"{FILE_NAME} has changed since it was written")
    if step not in (None, content["step"]):
        raise Damaged(f"its {FILE_NAME} is that of step {content['step']}")
    return content


def check(folder: Path, content: Mapping[str, Any], progress: Callable[[], None] = lambda: None) -> None:
    """Compares a checkpoint's files with the manifest that `read` returned; `progress` as in `write`.

    Raises:
      Damaged: a file is missing, has changed, or was not there when the checkpoint was written.
      PermissionError: as in `read`.
    """
    files, names = content["files"], set(_names(folder))
    if missing := sorted(files.keys() - names):
        raise Damaged(f"{missing[0]} is missing" + _others(missing))
    if extra := sorted(names - files.keys()):
        raise Damaged(f"{extra[0]} does not belong to it" + _others(extra))
    with ThreadPoolExecutor(_THREADS) as threads:
        for fault in threads.map(lambda name: _fault(folder / name, name, files[name], progress), sorted(files)):
            if fault is not None:
                raise Damaged(fault)


def sync_folder(folder: Path) -> None:
    """Puts a folder's names on the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _encoded(content: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({"content": content, "sha256": digest}, indent=1) + "\n").encode()


def _names(folder: Path) -> Iterator[str]:
    """All but folders and the manifest itself, relative to the folder."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if name != FILE_NAME and not path.is_dir():
            yield name


def _described(path: Path, progress: Callable[[], None], *, sync: bool = False) -> dict[str, Any]:
    digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
            progress()
        return {"size": os.fstat(file.fileno()).st_size, "sha256": digest.hexdigest()}


def _fault(path: Path, name: str, expected: Mapping[str, Any], progress: Callable[[], None]) -> str | None:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for its other end
            return f"{name} is not a file"
        if found.st_size != expected["size"]:
            return f"{name} has {found.st_size} bytes and must have {expected['size']}"
        if _described(path, progress) != expected:
            return f"{name} has changed since it was written"
    except PermissionError:
        raise
    except OSError as error:
        return f"{name} cannot be read ({(error.strerror or str(error)).lower()})"
    return None


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
