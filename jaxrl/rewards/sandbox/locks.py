"""How a process is locked in before it sees what a model wrote: limits, identity, file system, system calls.

The order matters: what needs rights comes first, and the filter that takes the rest last. A step that fails ends the
process, and the execution is reported as one that the sandbox could not run, never as one that ran unlocked.

- `RLIMIT_AS`, `CPU`, `FSIZE`, `NOFILE`, `NPROC`, `CORE`, `STACK`, `MEMLOCK`, `MSGQUEUE`.
- As root: a user and a group id that nothing else has, and no groups. `RLIMIT_NPROC` then counts this program alone.
  Where the Python that runs stands in a folder of root's, the program keeps the right to read any file, of which
  Landlock leaves Python's.
- As an ordinary user: a user namespace where there is one, in which the limit counts alone as well; else the limit is
  the user's tasks when the program starts, and those that it may have.
- Where a mount namespace can be made: a tmpfs of limited size over `/tmp`, which ends with its last process. Nothing
  else can be written.
- Landlock: Python's own folders and libraries can be read, and nothing else be opened. Where the kernel has none, the
  filter lets no file be opened at all: such a program has the modules that the fork server has imported.
- seccomp: the calls in `syscalls`.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import resource
import stat
import struct
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxrl.processes.process_tree import die_with_parent
from jaxrl.rewards.sandbox import filters, landlock, syscalls

MIB = 1 << 20
_SCRATCH = ("/tmp", "/var/tmp", "/mnt", "/media", "/srv")

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_PRIVATE, _NOSUID_NODEV = (1 << 18) | (1 << 14), 2 | 4  # MS_PRIVATE | MS_REC
_NO_NEW_PRIVS = 38
_KEEP_CAPABILITIES = 8
_CAPABILITY_VERSION, _READ_ALL = 0x20080522, 1 << 2
_STACK = 64 * MIB
_OPEN_FILES = 64
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random")
_TOOLS = ("/bin", "/sbin", "/usr", "/opt", "/etc/alternatives", "/etc/ld.so.conf", "/etc/ld.so.conf.d")


@functools.cache
def python_is_closed() -> bool:
    """Whether other users cannot read this Python, as when it stands in root's home folder."""
    paths = [Path(os.path.realpath(prefix)) for prefix in (sys.prefix, sys.base_prefix)]
    return any(not folder.stat().st_mode & stat.S_IXOTH for path in paths for folder in (path, *path.parents))


@functools.cache
def scratch_folder() -> str:
    """Where a program may write, if it may: a folder that a mount can cover without covering Python."""
    kept = readable()
    return next(
        folder for folder in _SCRATCH if os.path.isdir(folder) and not any(p.startswith(f"{folder}/") for p in kept)
    )


def environment() -> dict[str, str]:
    """All that a program has for an environment: nothing of the run's."""
    scratch = scratch_folder()
    return {
        "HOME": scratch,
        "TMPDIR": scratch,
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }


@dataclass(frozen=True)
class Means:
    """What locks a program in on this machine (`jaxrl.rewards.sandbox.probe`).

    Attributes:
      landlock: its ABI; 0: none.
      seccomp: whether there is a filter.
      user_ids: the first and last of the ids that nothing has, for root; empty: the program keeps the user's.
      namespaces: whether a mount namespace can be made, as an ordinary user one of users, too. Then programs run in a
        process namespace as well, where one can be had (`jaxrl.rewards.sandbox.cage`).
      bubblewrap: its command; empty: not used.
      cgroup: folder in which a group per program limits memory and processes; empty: none.
    """

    landlock: int = 0
    seccomp: bool = False
    user_ids: tuple[int, ...] = ()
    namespaces: bool = False
    bubblewrap: str = ""
    cgroup: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Limits:
    """What one program may take.

    Attributes:
      memory_mib: beyond what the fork server has mapped.
      processes: it may have at once, threads counted.
      file_mib: it may write to a scratch folder; 0: it has none.
      output_kib: of output.
      execute: whether it may run other programs.
      cpu_s: of each of its processes.
    """

    memory_mib: int
    processes: int
    file_mib: int
    output_kib: int
    execute: bool = False
    cpu_s: float = 60.0


@functools.cache
def readable() -> tuple[str, ...]:
    """Folders and files that a program may read: Python's own, and the libraries of the system."""
    homes = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    folders = [f"{home}/{lib}" for home in sorted(homes) for lib in ("lib", "lib64")]
    return tuple(path for path in dict.fromkeys((*folders, *_LIBRARIES, *_FILES)) if os.path.exists(path))


def lock_in(means: Means, limits: Limits, *, user_id: int, parent: int, mapped: int) -> int:
    """Locks this process in; it has one thread, and is the first of its process group.

    Args:
      user_id: the id that it takes; 0: it keeps its own.
      parent: the process at whose end it ends; 0: one outside of its cage.
      mapped: bytes that are mapped before the program has begun.

    Returns:
      Where it asks for shared memory (`filters.decide`); -1: nowhere.

    Raises:
      OSError: a lock cannot be set.
    """
    scratch = make_scratch(limits.file_mib) if means.namespaces and limits.file_mib else ""
    _set_limits(limits, mapped, alone=bool(user_id or scratch))
    if user_id:
        _become(user_id, reads_all=python_is_closed() and means.landlock > 0)
    elif means.seccomp:
        _set_capabilities(0)
    die_with_parent(parent)
    if not means.seccomp:
        return -1
    syscalls.prctl(_NO_NEW_PRIVS, 1)
    writable = ("/dev/null", *((scratch,) if scratch else ()))
    if means.landlock:
        read = readable() + (_TOOLS if limits.execute else ())
        landlock.restrict_files(means.landlock, read=read, write=writable, execute=limits.execute)
    program = filters.build_filter(
        os.getpid(),
        machine=syscalls.machine(),
        files=means.landlock > 0,
        write=bool(scratch) and means.landlock > 0,  # which says that the scratch folder is meant, and no other
        execute=limits.execute,
        signals=means.landlock >= landlock.SIGNALS_ABI or user_id > 0,
    )
    return filters.install_filter(program)


def _set_limits(limits: Limits, mapped: int, *, alone: bool) -> None:
    processes = limits.processes if alone else limits.processes + _count_tasks(os.getuid())
    for kind, most in (
        (resource.RLIMIT_AS, mapped + limits.memory_mib * MIB),
        (resource.RLIMIT_CPU, math.ceil(limits.cpu_s) + 1),
        (resource.RLIMIT_FSIZE, limits.file_mib * MIB),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, _STACK),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _count_tasks(user: int) -> int:
    """Threads of a user, as `RLIMIT_NPROC` counts them."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                status = os.stat(f"/proc/{name}/task")
            except OSError:
                continue
            if status.st_uid == user:
                count += max(status.st_nlink - 2, 1)
    return count


def unshare(namespaces: int) -> None:
    """Moves this process to new namespaces, as an ordinary user in one of users with the same ids. Raises OSError."""
    user, group = os.geteuid(), os.getegid()
    syscalls.libc("unshare", namespaces | (_NEWUSER if user else 0))
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def make_scratch(size_mib: int) -> str:
    """Mounts an empty folder of limited size that only this process and what it starts can see; returns its path."""
    scratch = scratch_folder()
    unshare(_NEWNS)
    syscalls.libc("mount", b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None)
    options = f"size={size_mib}m,nr_inodes=1024,mode=1777".encode()
    syscalls.libc("mount", b"tmpfs", scratch.encode(), b"tmpfs", ctypes.c_ulong(_NOSUID_NODEV), options)
    os.chdir(scratch)
    return scratch


def take_user(user: int) -> None:
    """Takes a user and a group id, and leaves all groups. Raises OSError."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _become(user: int, *, reads_all: bool) -> None:
    """Takes a user id, and loses all rights but, perhaps, that to read what Landlock lets it open."""
    if reads_all:
        syscalls.prctl(_KEEP_CAPABILITIES, 1)
    take_user(user)
    _set_capabilities(_READ_ALL if reads_all else 0)


def _set_capabilities(bits: int) -> None:
    """These and no others: not those of a user namespace either."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    syscalls.call("capset", header, struct.pack("=6I", bits, bits, 0, 0, 0, 0))
