"""Calls into libc, and the memory of processes (proc(5))."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)


def libc(name: str, *arguments: object) -> int:
    """Calls a function of libc. Raises OSError if it fails."""
    result = getattr(_libc, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


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
