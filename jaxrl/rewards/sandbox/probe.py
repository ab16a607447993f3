"""What this machine can lock programs in with, found out by doing it in a fork that ends at once.

The fork server looks, not the scorer's process: that may have threads, which do not survive a fork.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from dataclasses import replace

from jaxrl.processes.process_tree import works_in_fork
from jaxrl.rewards.sandbox import filters, groups, landlock, locks, syscalls
from jaxrl.rewards.sandbox.locks import Means

_FIRST_ID, _LAST_ID = 1 << 30, (1 << 31) - 2  # where neither people, services nor containers have theirs
_FEW_IDS = 1024


def find_means() -> Means:
    """What there is. Bubblewrap and control groups are there only where they are asked for (`choose_means`)."""
    if sys.platform != "linux":
        return Means()
    user_ids = _unused_ids() if os.geteuid() == 0 else ()
    means = Means(
        landlock=landlock.landlock_abi(),
        seccomp=works_in_fork(_try_filter),
        user_ids=user_ids if user_ids and works_in_fork(lambda: locks.take_user(user_ids[1])) else (),
    )
    return replace(means, namespaces=works_in_fork(lambda: locks.make_scratch(1)))


def choose_means(sandbox: str, there: Means, *, needs_files: bool = False) -> Means:
    """What `reward.code.sandbox` comes to on this machine.

    Args:
      there: what this machine has (`find_means`).
      needs_files: whether programs are run by a command, which must read its own files.

    Raises ValueError: it cannot be had here; one sentence.
    """
    if sandbox == "none":
        return Means()
    if sandbox == "bubblewrap":
        command = shutil.which("bwrap")
        if command is None:
            raise ValueError("reward.code.sandbox=bubblewrap: there is no bwrap on PATH")
        if there.user_ids and locks.python_is_closed():
            raise ValueError(
                f"reward.code.sandbox=bubblewrap: as root, programs get a user of their own, to whom {sys.base_prefix} "
                "is closed; use reward.code.sandbox=fork, or a Python that others may read"
            )
        return replace(there, bubblewrap=command, cgroup=groups.writable_group())
    if not there.seccomp:
        raise ValueError(
            f"reward.code.sandbox={sandbox}: this machine ({sys.platform}, {syscalls.machine()}) has no seccomp filter "
            "for programs, so nothing would lock them in; reward.code.sandbox=none runs them all the same"
        )
    if needs_files and not there.landlock:
        raise ValueError(
            f"reward.code.command with reward.code.sandbox={sandbox}: this kernel has no Landlock, so a command could "
            "read nothing or everything; use bubblewrap or none"
        )
    return there


def _try_filter() -> None:
    syscalls.prctl(38, 1)
    filters.install_filter(
        filters.build_filter(
            os.getpid(), machine=syscalls.machine(), files=True, write=False, execute=False, signals=False
        )
    )


def _unused_ids() -> tuple[int, ...]:
    """A range of ids that this process may take and that nothing has; empty if it can only be what it is."""
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    with open("/proc/self/uid_map") as file:
        ranges = [(int(first), int(count)) for first, _, count in map(str.split, file)]
    for first, count in sorted(ranges, key=lambda r: -r[1]):
        low, high = max(first, _FIRST_ID), min(first + count - 1, _LAST_ID)
        if high - low < _FEW_IDS:  # a container with some ten thousands of ids: the upper half of them
            low, high = first + count // 2, min(first + count, 65534) - 2
        if high - low >= _FEW_IDS and not any(low <= user <= high for user in taken):
            return low, high
    return ()
