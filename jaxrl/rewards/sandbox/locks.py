"""How a process is locked in before it sees what a model wrote: limits, identity, file system, system calls.

The order matters: what needs rights comes first, and the filter that takes the rest last. A step that fails ends the
process, and the execution is reported as one that the sandbox could not run, never as one that ran unlocked.

- Resource limits: memory, seconds of CPU, sizes of files, descriptors, processes, and more.
- As root: a user and a group id that nothing else has, and no groups. If the running Python is in a folder of root's,
  the program keeps the right to read any file, which Landlock limits to Python's.
- As an ordinary user: a user namespace where there is one. In it, as for a dedicated id, the limit of processes counts
  this program alone; else it is added to the user's tasks.
- Where a mount namespace can be made: a tmpfs of limited size over `/tmp`. Nothing else can be written.
- Landlock: Python's own folders and libraries can be read, and nothing else be opened. Where the kernel has none, the
  filter lets no file be opened at all: such a program has the modules that the fork server has imported.
- The filter of `seccomp`.
"""

from __future__ import annotations

import functools
import math
import os
import resource
import stat
import struct
import sys
from pathlib import Path

from jaxrl.processes.process_tree import die_with_parent
from jaxrl.rewards.sandbox.landlock import SIGNALS_ABI, restrict_files
from jaxrl.rewards.sandbox.orders import Means, Order
from jaxrl.rewards.sandbox.processes import NEW_MOUNTS, libc, prctl, unshare
from jaxrl.rewards.sandbox.seccomp import Filter

MIB = 1 << 20
TOOLS = ("/bin", "/sbin", "/usr", "/opt", "/etc/alternatives", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
"""Further folders that a command may read and run from."""
_SCRATCH = ("/tmp", "/var/tmp", "/mnt", "/media", "/srv")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random")
_PRIVATE, _NO_SETUID_NO_DEVICES = (1 << 18) | (1 << 14), 2 | 4  # mount's flags
_KEEP_CAPABILITIES, _NO_NEW_PRIVILEGES = 8, 38  # prctl's options
_CAPABILITY_VERSION, _READ_ALL = 0x20080522, 1 << 2


@functools.cache
def readable() -> tuple[str, ...]:
    """Folders and files that a program may read: Python's own, and the libraries of the system."""
    homes = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    folders = [f"{home}/{lib}" for home in sorted(homes) for lib in ("lib", "lib64")]
    return tuple(path for path in dict.fromkeys((*folders, *_LIBRARIES, *_FILES)) if os.path.exists(path))


@functools.cache
def python_is_closed() -> bool:
    """Whether other users cannot read this Python, as in root's home folder."""
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
    """The complete environment of a program, without the run's variables."""
    scratch, threads = scratch_folder(), {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    names = {"HOME": scratch, "TMPDIR": scratch, "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    return {**names, **threads, "PYTHONHASHSEED": "0"}


@functools.cache
def make_filter(means: Means, *, has_scratch: bool, execute: bool) -> Filter:
    """Raises OSError: this machine has no libseccomp."""
    files, signals = means.landlock > 0, means.landlock >= SIGNALS_ABI or bool(means.user_ids)
    # Landlock lets a process that may write do so in the scratch folder alone
    return Filter(files=files, write=files and has_scratch and means.namespaces, execute=execute, signals=signals)


def lock_in(order: Order, *, user_id: int, parent: int, mapped: int) -> None:
    """Locks this process in; it has one thread, and is the first of its process group.

    Args:
      user_id: the id that it takes; 0: it keeps its own.
      parent: the process at whose end it ends; 0: one outside of its namespace.
      mapped: bytes that are mapped before the program has begun.

    Raises OSError: a lock cannot be set.
    """
    means, execute, file_mib = order.means, bool(order.command), order.limits.file_mib
    scratch = [make_scratch(file_mib)] if means.namespaces and file_mib else []
    _set_limits(order, mapped, is_alone=bool(user_id or scratch))
    reads_all = user_id > 0 and means.landlock > 0 and python_is_closed()
    if user_id:
        prctl(_KEEP_CAPABILITIES, reads_all)
        take_user(user_id)
    if means.seccomp:  # these capabilities and no others: not those of a user namespace either
        bits = _READ_ALL if reads_all else 0
        libc("capset", struct.pack("=Ii", _CAPABILITY_VERSION, 0), struct.pack("=6I", bits, bits, 0, 0, 0, 0))
    die_with_parent(parent)
    if not means.seccomp:
        return
    prctl(_NO_NEW_PRIVILEGES, 1)
    if means.landlock:
        read = readable() + TOOLS * execute
        restrict_files(means.landlock, read=read, write=["/dev/null", *scratch], execute=execute)
    make_filter(means, has_scratch=file_mib > 0, execute=execute).load()


def _set_limits(order: Order, mapped: int, *, is_alone: bool) -> None:
    limits, others = order.limits, 0 if is_alone else _count_tasks(os.getuid())
    for kind, most in (
        (resource.RLIMIT_AS, mapped + limits.memory_mib * MIB),
        (resource.RLIMIT_CPU, math.ceil(sum(order.limits_s) + order.default_limit_s) + 1),
        (resource.RLIMIT_FSIZE, limits.file_mib * MIB),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, limits.processes + others),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, 64 * MIB),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _count_tasks(user: int) -> int:
    """Threads of a user, as the limit of processes counts them."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = os.stat(f"/proc/{name}/task")
        except OSError:
            continue
        count += max(status.st_nlink - 2, 1) * (status.st_uid == user)
    return count


def make_scratch(size_mib: int) -> str:
    """Mounts an empty folder of limited size that only this process and what it starts can see; returns its path."""
    scratch = scratch_folder()
    unshare(NEW_MOUNTS)
    libc("mount", b"none", b"/", None, _PRIVATE, None)
    options = f"size={size_mib}m,nr_inodes=1024,mode=1777".encode()
    libc("mount", b"tmpfs", scratch.encode(), b"tmpfs", _NO_SETUID_NO_DEVICES, options)
    os.chdir(scratch)
    return scratch


def take_user(user: int) -> None:
    """Takes a user and a group id, and leaves all groups. Raises OSError."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
