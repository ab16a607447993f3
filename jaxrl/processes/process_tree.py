"""Processes below this one, and their end: who descends from whom, and killing all of them.

Source: prctl(2) (`PR_SET_CHILD_SUBREAPER`, `PR_SET_PDEATHSIG`), proc(5) (`/proc/<pid>/task/<tid>/children`).

On Linux a process that calls `adopt_orphans` becomes the parent of every descendant whose own parent ends, so none can
leave its sight: neither by a new session nor by a double fork. Other systems have neither call nor `/proc`. There a
worker's process group is all that can be killed: what leaves the group (`setsid`) outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection

IS_LINUX = sys.platform == "linux"
PATIENCE_S = 5.0
"""For killed processes to be gone; one that waits for a disk or a driver may take longer, and is met again later."""

DEATH_SIGNAL, _ADOPT_ORPHANS = 1, 36  # prctl's options
_libc = ctypes.CDLL(None, use_errno=True) if IS_LINUX else None


def adopt_orphans() -> None:
    """From here on this process is the parent of its descendants whose parents end."""
    prctl(_ADOPT_ORPHANS, 1)


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when `parent` ends; at once if it has ended already."""
    prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def prctl(option: int, value: int) -> None:
    if _libc is not None and _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def close_all_but(kept: Collection[int]) -> None:
    for fd in map(int, os.listdir("/dev/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(fd)


def descendants(pid: int, apart_from: Collection[int] = ()) -> list[int]:
    """Living processes below `pid`, without those in `apart_from` and what is below them; none where there is no
    `/proc`."""
    found: list[int] = []
    pending = [pid]
    while pending:
        for child in children(pending.pop()):
            if child not in apart_from:
                pending.append(child)
                if not _is_zombie(child):
                    found.append(child)
    return found


def children(pid: int) -> list[int]:
    """The children of all its threads, also ended ones that nobody has waited for."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def _is_zombie(pid: int) -> bool:
    """A process whose first thread is a zombie lives as long as others of its threads do."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0] in (b"Z", b"X") and int(fields[17]) < 2
    except (OSError, IndexError):
        return True


def kill(pid: int, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)


def kill_descendants(apart_from: Collection[int] = ()) -> None:
    """Kills what is below this process, until nothing is left. `apart_from`: processes that live on, with all that is
    below them."""
    deadline = time.monotonic() + PATIENCE_S
    while kill_once(apart_from) and time.monotonic() < deadline:
        time.sleep(0.0005)


def kill_once(apart_from: Collection[int]) -> bool:
    """One round of `kill_descendants`; whether there was anything to kill."""
    found = descendants(os.getpid(), apart_from)
    for pid in found:
        kill(pid)
    for pid in children(os.getpid()):  # also those that had ended before: nobody else waits for orphans
        if pid not in apart_from:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return bool(found)


def kill_marked(mark: str) -> None:
    """Kills all processes that were started with a variable (`NAME=value`) in their environment, until a scan finds
    none: one that starts during a scan, or is in the middle of exec, is missed by it."""
    deadline = time.monotonic() + PATIENCE_S
    while _kill_marked_once(mark.encode()) and time.monotonic() < deadline:
        time.sleep(0.005)


def _kill_marked_once(mark: bytes) -> bool:
    is_found = False
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(name)}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    kill(int(name))
                    is_found = True
    return is_found
