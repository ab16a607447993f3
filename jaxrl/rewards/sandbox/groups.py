"""The memory of a program's processes together: watched, and held by a control group where one can be made.

Source: cgroups(7), proc(5). `RLIMIT_AS` bounds each process alone, so a program with many could take many times its
share. The sum is looked at every few milliseconds; a control group holds it at every instant. Shared memory without a
file is counted as it is granted (`filters.decide`), as a process may give up its pages and keep the memory.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxrl.rewards.sandbox.locks import MIB, Limits

_PAGE = os.sysconf("SC_PAGE_SIZE")
_REMOVE_S = 1.0  # until the kernel lets go of a group whose processes are gone


def memory_of(pids: Iterable[int], shared: int, enough: int) -> int:
    """Bytes that these processes hold; pages that they share are counted once if the sum is above `enough`.

    0 for fewer than two without shared memory: one process keeps its limit by itself. `shared`: bytes of shared memory
    that they were granted.
    """
    pids = list(pids)
    if len(pids) < 2 and not shared:
        return 0
    total = shared + sum(_field(f"/proc/{pid}/statm", 1) for pid in pids) * _PAGE
    return total if total <= enough else shared + sum(_once(pid) for pid in pids)


def _field(path: str, index: int) -> int:
    try:
        with open(path, "rb") as file:
            return int(file.read().split()[index])
    except (OSError, IndexError):
        return 0  # it has ended


def _once(pid: int) -> int:
    """Its own pages and its part of those that others have as well, without shared memory."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return _field(f"/proc/{pid}/statm", 1) * _PAGE
    sizes = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return (sizes.get(b"Pss:", 0) - sizes.get(b"Pss_Shmem:", 0)) * 1024


@dataclass(frozen=True)
class ControlGroup:
    folder: str

    def enter(self) -> None:
        Path(self.folder, "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def group(parent: str, limits: Limits) -> Iterator[ControlGroup | None]:
    """A group below `parent` that holds a program's memory and processes; None without a parent. Gone afterwards."""
    if not parent:
        yield None
        return
    folder = Path(parent, f"jaxrl-{os.getpid()}")
    folder.mkdir()
    try:
        for name, most in (
            ("memory.max", limits.memory_mib * MIB),
            ("memory.swap.max", 0),
            ("pids.max", limits.processes + 2),  # bubblewrap's own
        ):
            if (folder / name).exists():
                (folder / name).write_text(str(most))
        yield ControlGroup(str(folder))
    finally:
        deadline = time.monotonic() + _REMOVE_S
        while True:
            try:
                folder.rmdir()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.001)


def writable_group() -> str:
    """A folder in which groups with limits of memory and processes can be made (version 2); empty if there is none."""
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        try:
            controllers = Path(root, "cgroup.subtree_control").read_text().split()
        except OSError:
            continue
        if {"memory", "pids"} <= set(controllers) and os.access(root, os.W_OK):
            return root
    return ""
