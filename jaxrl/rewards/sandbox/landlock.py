"""Landlock: which files a process may read or write, and that no signal and no socket leaves it.

Source: landlock(7) and Linux's `include/uapi/linux/landlock.h`. It needs no privilege and no namespace. What ABI a
kernel has decides what is covered: 1 files, 2 renames between folders, 3 truncation, 4 TCP, 5 device calls, 6 signals
and abstract sockets. Landlock does not cover modes, owners, times and attributes of files: the seccomp filter does.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from jaxrl.rewards.sandbox import syscalls

_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_FIRST_RIGHTS, _REFER, _TRUNCATE, _IOCTL_DEV = (1 << 13) - 1, 1 << 13, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_DEVICES = (1 << 6) | (1 << 11)  # making character and block devices
SIGNALS_ABI = 6


def landlock_abi() -> int:
    """0 where the kernel has no Landlock, or it is switched off."""
    try:
        return syscalls.call("landlock_create_ruleset", None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    except OSError:
        return 0


def restrict_files(abi: int, *, read: Iterable[str], write: Iterable[str] = (), execute: bool = False) -> None:
    """From here on this process, and all that it starts, may open these files and folders alone.

    Args:
      read: folders and files to read; those that do not exist are left out.
      write: folders to do anything in, and files to write to.
      execute: whether what may be read may also be run.

    Raises OSError: the kernel refuses.
    """
    handled = _FIRST_RIGHTS | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    handled |= _IOCTL_DEV if abi >= 5 else 0
    attributes = struct.pack("=Q", handled)
    if abi >= 4:
        attributes += struct.pack("=Q", 3)  # TCP: bind and connect
    if abi >= SIGNALS_ABI:
        attributes += struct.pack("=Q", 3)  # abstract sockets and signals
    ruleset = syscalls.call("landlock_create_ruleset", attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    try:
        readable = _READ_FILE | _READ_DIR | (_EXECUTE if execute else 0)
        writable = handled & ~_DEVICES & ~(0 if execute else _EXECUTE)
        for paths, rights in ((read, readable), (write, writable)):
            for path in paths:
                _add(ruleset, path, rights & handled)
        syscalls.call("landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _add(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, fd)
        syscalls.call("landlock_add_rule", ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(fd)
