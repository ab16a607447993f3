"""Calls into libc, process namespaces, and who descends from whom.

Source: prctl(2), proc(5), pid_namespaces(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

from jaxrl.processes.process_tree import children, die_with_parent

NEW_MOUNTS, NEW_USERS, NEW_PROCESSES = 0x00020000, 0x10000000, 0x20000000
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)


def libc(name: str, *arguments: object) -> int:
    """Calls a function of libc. Raises OSError if it fails."""
    result = getattr(_libc, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(option: int, value: int) -> None:
    libc("prctl", option, value, 0, 0, 0)


def unshare(namespaces: int) -> None:
    """Moves this process to new namespaces, as an ordinary user in one of users with the same ids. Raises OSError."""
    user, group = os.geteuid(), os.getegid()
    libc("unshare", namespaces | (NEW_USERS if user else 0))
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def works_in_fork(attempt: Callable[[], object]) -> bool:
    """Whether a fork that ends at once can do something without an error."""
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def make_cage() -> int:
    """Has all later forks of this process born in a process namespace; returns the namespace's first process.

    That process adopts what a program leaves as an orphan. It ends with its parent, however that ends, and the kernel
    then ends all that is in the namespace. No program can signal or stop it. 0: this machine refuses.
    """
    try:
        unshare(NEW_PROCESSES)
    except OSError:
        return 0
    parents_end, own_end = os.pipe()
    first = os.fork()
    if first == 0:
        try:
            os.close(parents_end)
            die_with_parent(0)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            os.write(own_end, b".")  # fails if the parent has ended already, which getppid does not show: it is 0 here
            os.closerange(0, 1 << 20)
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.close(own_end)
    os.read(parents_end, 1)
    os.close(parents_end)
    return first


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, also those that have ended and that nobody has waited for."""
    found = [pid]
    for parent in found:
        found += children(parent)
    return found[1:]


def resident(pid: int) -> int:
    """Bytes that a process holds, what it shares among them; 0 of one that has ended."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE
    return 0


def proportional(pid: int) -> int:
    """The same with its part alone of what it shares, where that may be read. It takes the kernel milliseconds."""
    with contextlib.suppress(OSError, ValueError):
        words = Path(f"/proc/{pid}/smaps_rollup").read_bytes().split()
        return int(words[words.index(b"Pss:") + 1]) * 1024
    return resident(pid)
