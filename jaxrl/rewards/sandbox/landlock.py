"""Landlock: which files a process may read or write, and that no signal and no socket leaves it.

Source: landlock(7), Linux's `include/uapi/linux/landlock.h`. It needs no privilege and no namespace. The kernel's ABI
says what is covered: 1 files, 2 renames between folders, 3 truncation, 4 TCP, 5 device calls, 6 signals and abstract
sockets. Modes, owners, times and attributes of files are left to the seccomp filter.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable

from jaxrl.rewards.sandbox.processes import libc

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the system calls, on every processor
_VERSION = _PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_FIRST_RIGHTS, _REFER, _TRUNCATE, _DEVICE_CALLS = (1 << 13) - 1, 1 << 13, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE_CALLS
_MAKE_DEVICES = (1 << 6) | (1 << 11)
_TCP = _SIGNALS_AND_SOCKETS = 3
SIGNALS_ABI = 6


def landlock_abi() -> int:
    """0 where the kernel has no Landlock, or it is switched off."""
    with contextlib.suppress(OSError):
        return libc("syscall", _CREATE, None, 0, _VERSION)
    return 0


def restrict_files(abi: int, *, read: Iterable[str], write: Iterable[str], execute: bool) -> None:
    """From here on this process, and all that it starts, may open nothing but what is in these files and folders.

    `execute`: whether what may be read may also be run. Raises OSError: the kernel refuses.
    """
    handled = _FIRST_RIGHTS | _REFER * (abi >= 2) | _TRUNCATE * (abi >= 3) | _DEVICE_CALLS * (abi >= 5)
    words = [handled, *[_TCP] * (abi >= 4), *[_SIGNALS_AND_SOCKETS] * (abi >= SIGNALS_ABI)]
    rules = libc("syscall", _CREATE, struct.pack(f"={len(words)}Q", *words), 8 * len(words), 0)
    readable, writable = _READ_FILE | _READ_FOLDER, handled & ~_MAKE_DEVICES & ~_EXECUTE
    for paths, rights in ((read, readable | _EXECUTE * execute), (write, writable | _EXECUTE * execute)):
        for path in filter(os.path.exists, paths):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights & handled & (handled if os.path.isdir(path) else _OF_FILES)
            libc("syscall", _ADD, rules, _PATH_BENEATH, struct.pack("=Qi", allowed, fd), 0)
            os.close(fd)
    libc("syscall", _RESTRICT, rules, 0)
    os.close(rules)
