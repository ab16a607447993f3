"""The facts that must be equal on all hosts of a run, as texts by name, and the folder that they must share.

The controller compares these facts before anything compiles, so a run does not end in numbers that differ, or in a
collective that never ends. It sends options, data and environment variables; compared are versions, the source of
jaxrl, the files of the models, and the kind of devices, which are a host's own.

Files count by content. Of a large one, only the size, its head and its tail are read: that finds another model, another
training step of it, and a file that was cut off.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jaxrl
from jaxrl.config import Config, ConfigError
from jaxrl.models.loading import RANDOM, resolve_path
from jaxrl.record.files import reason, refuse_folder, takes_files
from jaxrl.record.run_dir import remove_empty, versions
from jaxrl.sharding.mesh import platform_of

_HEAD_BYTES, _TAIL_BYTES = 2**23, 2**20
_SEEN_WITHIN_S = 5.0  # a file of another host; network file systems keep what a folder held for some seconds


@cache
def software() -> dict[str, str]:
    """The versions and the source that this process runs, as of the first call."""
    found = versions() | {"jaxrl": jaxrl.__version__, "python": ".".join(platform.python_version_tuple()[:2])}
    source = {"the source of jaxrl": _digest_of_folder(Path(jaxrl.__file__).parent, ".py")}
    return {f"the version of {name}": version for name, version in found.items()} | source


def facts(config: Config, devices: Sequence[Any]) -> dict[str, str]:
    """The facts of this host by name, first those that explain others. `devices`: of this host."""
    found = dict(software())
    for option, path in (("model.path", config.model.path), ("algorithm.teacher.path", config.algorithm.teacher.path)):
        if path:
            random_init = config.model.random_init and option == "model.path"
            folder = Path(resolve_path(path, option, weights=not random_init).removeprefix(RANDOM))
            found[f"the content of {option}"] = _digest_of_folder(folder)
    found["the kind of devices"] = f"{platform_of(devices[0])} {devices[0].device_kind}"
    found["the platform's version"] = " ".join(devices[0].client.platform_version.split())
    return found


def _digest_of_folder(root: Path, suffix: str = "") -> str:
    """The digest of a file, or of a folder's files and their names, without hidden ones."""
    files = [root] if root.is_file() else []
    for parent, folders, names in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
    files.sort(key=lambda file: file.relative_to(root).parts)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(_digest, files)
    digest = hashlib.sha256()
    for file, own in zip(files, digests, strict=True):
        digest.update(f"{file.relative_to(root).as_posix()}\0{own}\0".encode())
    return f"{digest.hexdigest()[:16]} ({len(files)} files)"


def _digest(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8))
    with open(file, "rb") as opened:
        digest.update(opened.read(_HEAD_BYTES))
        if size > _HEAD_BYTES:
            opened.seek(max(size - _TAIL_BYTES, _HEAD_BYTES))
            digest.update(opened.read())
    return digest.hexdigest()


def disagreement(facts: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    """A sentence about the first fact that is not the same for all that have it; empty: all agree."""
    for fact in dict.fromkeys(fact for own in facts for fact in own):
        values = [(own[fact], name) for own, name in zip(facts, names, strict=True) if fact in own]
        for value, name in values:
            if value != values[0][0]:
                return f"the hosts must agree on {fact}: {values[0][0]} on {values[0][1]}, {value} on {name}"
    return ""


@contextmanager
def mark_in(folder: str) -> Iterator[str]:
    """A file in `folder`, whose name is given, for others to see; it goes away afterwards, and so does the folder if it
    was made for it."""
    path = refuse_folder(folder, "trainer.run_dir")
    made = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    file = path / f".jaxrl-hosts-{secrets.token_hex(8)}"
    try:
        file.write_text(file.name, encoding="utf-8")
        yield file.name
    except OSError as error:
        raise ConfigError(f"trainer.run_dir: {path}: {reason(error)}") from None
    finally:
        file.unlink(missing_ok=True)
        remove_empty(made)


def folder_problem(folder: str, mark: str) -> str:
    """The problem with the run directory here; empty: the controller's mark is seen, and files can be written."""
    path = Path(os.path.expanduser(folder))
    until_s = time.monotonic() + _SEEN_WITHIN_S
    while not (path / mark).is_file():
        if time.monotonic() > until_s:
            return f"{path} does not show what the controller has written there"
        time.sleep(0.1)
    return "" if takes_files(path) else f"{path} may not be changed by this user"
