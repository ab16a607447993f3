"""A checkpoint's manifest: the name, size and SHA-256 of every file, in a file beside them.

It is written last, before a checkpoint gets its name. It also holds a digest of its content, and must equal byte for
byte what `write` makes of that content. So every changed, cut, missing or renamed file is found.

A missing or unreadable file is damage. Transient errors of the system (a server that does not answer, no memory, too
many open files) say nothing about the checkpoint: they are raised, and another try may succeed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxrl.config.inputs import reading

FILE_NAME = "manifest.json"
_CHUNK_BYTES = 1 << 20
_THREADS = min(8, os.cpu_count() or 1)  # hashing releases the interpreter's lock; one thread does about 1 GB/s
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO}
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP}


class Damaged(Exception):
    """A checkpoint is not as it was written. The text says how, as the end of a sentence."""


def is_damage(error: OSError) -> bool:
    """Whether a read error is about the stored data, and not about the system at this moment."""
    return error.errno in _DAMAGE


def write(folder: Path, schema_version: int, step: int, progress: Callable[[], None] = lambda: None) -> None:
    """Writes the manifest of a folder's files. Everything is on the disk when it returns. `step`: the checkpoint's, so
    that a folder that is renamed to another step is found. Threads call `progress` after each MiB."""
    names = sorted(_names(folder))
    with ThreadPoolExecutor(_THREADS) as threads:
        files = dict(zip(names, threads.map(lambda name: _synced(folder / name, progress), names), strict=True))
    with open(folder / FILE_NAME, "wb") as file:
        file.write(_encoded({"schema_version": schema_version, "step": step, "files": files}))
        file.flush()
        os.fsync(file.fileno())
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(inner)


def read(folder: Path, step: int | None) -> Mapping[str, Any]:
    """The manifest of a checkpoint's folder: schema_version, step, files. `step`: the one in the folder's name, if any.
    Raises Damaged if it is missing, damaged, or that of another step; OSError if it cannot be read now."""
    file = folder / FILE_NAME
    if not file.is_file():
        raise Damaged(f"{FILE_NAME} is missing")
    written = b""
    try:
        with reading(file):
            written = file.read_bytes()
    except OSError as error:
        if not is_damage(error):
            raise
    try:
        content = json.loads(written)["content"]
        whole = written == _encoded(content)
    except (ValueError, LookupError, TypeError, RecursionError):
        whole, content = False, {}
    if not whole:
        raise Damaged(f"{FILE_NAME} has changed since it was written")
    if step not in (None, content["step"]):
        raise Damaged(f"its {FILE_NAME} is that of step {content['step']}")
    return content


def check(folder: Path, content: Mapping[str, Any], progress: Callable[[], None] = lambda: None) -> None:
    """Compares a checkpoint's files with the manifest that `read` returned; `progress` as in `write`. Raises as
    `read`."""
    files = content["files"]
    _check_names(folder, files.keys())
    with ThreadPoolExecutor(_THREADS) as threads:
        for fault in threads.map(lambda name: _fault(folder / name, name, files[name], progress), sorted(files)):
            if fault is not None:
                raise Damaged(fault)


def _check_names(folder: Path, names: Collection[str]) -> None:
    try:
        found = set(_names(folder))
    except OSError as error:
        if not is_damage(error):
            raise
        raise Damaged(f"{error.filename} cannot be read ({(error.strerror or str(error)).lower()})") from None
    if missing := sorted(set(names) - found):
        raise Damaged(f"{missing[0]} is missing" + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""))


def sync_folder(folder: Path) -> None:
    """Syncs a folder's entries to the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as error:
        # some mounts (FUSE, SMB) sync files but know no sync of a folder; there is nothing else to be done there
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(number)


def _encoded(content: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({"content": content, "sha256": digest}, indent=1) + "\n").encode()


def _names(folder: Path) -> Iterator[str]:
    """All files but the manifest, relative to the folder."""

    def fail(error: OSError) -> None:
        raise error

    for place, _, names in os.walk(folder, onerror=fail):  # `rglob` passes over folders that it may not read
        for name in names:
            if (path := Path(place, name).relative_to(folder).as_posix()) != FILE_NAME:
                yield path


def _synced(path: Path, progress: Callable[[], None]) -> dict[str, Any]:
    with reading(path), open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())
    return _described(path, progress)


def _described(path: Path, progress: Callable[[], None]) -> dict[str, Any]:
    digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with reading(path), open(path, "rb", buffering=0) as file:
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
    except OSError as error:
        if not is_damage(error):
            raise
        return f"{name} cannot be read ({(error.strerror or str(error)).lower()})"
    return None
