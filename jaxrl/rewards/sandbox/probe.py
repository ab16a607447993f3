"""Finds the means to lock programs in on this machine, by trying them in a fork that ends at once; and bubblewrap.

The fork server looks, not the scorer's process: that may have threads, which do not survive a fork.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

from jaxrl.rewards.sandbox.landlock import landlock_abi
from jaxrl.rewards.sandbox.locks import (
    TOOLS,
    make_filter,
    make_scratch,
    python_is_closed,
    readable,
    scratch_folder,
    take_user,
)
from jaxrl.rewards.sandbox.orders import Means
from jaxrl.rewards.sandbox.processes import works_in_fork

UNUSED_IDS = ((2_001_000_000, 2_147_483_646), (50_000, 59_999))
"""Ids that neither people, services, domains nor containers have; the second where a container has 65,536 in all."""


def find_means() -> Means:
    """The means on this machine."""
    if sys.platform != "linux":
        return Means()
    ids = UNUSED_IDS if os.geteuid() == 0 else ()
    return Means(
        landlock=landlock_abi(),
        seccomp=works_in_fork(lambda: make_filter(Means(), has_scratch=False, execute=False).load()),
        user_ids=next((pair for pair in ids if works_in_fork(lambda p=pair: take_user(p[0]))), ()),
        namespaces=works_in_fork(lambda: make_scratch(1)),
    )


def choose_means(sandbox: str, there: Means, *, needs_files: bool = False) -> Means:
    """The means that `reward.code.sandbox` selects on this machine.

    Args:
      there: what this machine has (`find_means`).
      needs_files: whether programs are run by a command, which must read its own files.

    Raises ValueError, with one sentence, if this machine does not support it.
    """
    if sandbox == "none":
        return Means()
    if not there.seccomp:
        raise ValueError(
            f"reward.code.sandbox={sandbox}: this machine ({sys.platform}, {platform.machine()}) has no seccomp filter "
            "for programs, so nothing would lock them in: install libseccomp.so.2 (Debian's libseccomp2, Fedora's "
            "libseccomp) if it is missing; reward.code.sandbox=none runs them all the same"
        )
    if needs_files and not there.landlock:
        raise ValueError(
            f"reward.code.command with reward.code.sandbox={sandbox}: this kernel has no Landlock, so a command could "
            "read nothing or everything; reward.code.sandbox=none lets it read everything"
        )
    return there


def bubblewrap() -> tuple[list[str], int | None]:
    """The beginning of a command line that runs in namespaces, and the user id to run it with; None: one's own.

    No process, network, file or name of the machine is there at all. Source: bwrap(1),
    https://github.com/containers/bubblewrap.

    Raises ValueError, with one sentence, if this machine does not support it.
    """
    bwrap, is_root = shutil.which("bwrap"), os.geteuid() == 0
    if bwrap is None:
        raise ValueError("reward.code.sandbox=bubblewrap: there is no bwrap on PATH")
    if is_root and python_is_closed():
        raise ValueError(
            f"reward.code.sandbox=bubblewrap: as root, programs get a user of their own, to whom {sys.base_prefix} "
            "is closed; use reward.code.sandbox=fork, or a Python that others may read"
        )
    words = [bwrap, "--unshare-all", "--die-with-parent", "--dev", "/dev", "--proc", "/proc"]
    words += ["--tmpfs", scratch_folder(), "--chdir", scratch_folder()]
    package = str(Path(__file__).resolve().parents[2])
    for path in dict.fromkeys((*readable(), *TOOLS, os.path.realpath(sys.executable), sys.executable, package)):
        words += [] if path.startswith("/dev/") else ["--ro-bind-try", path, path]
    return [*words, "--"], UNUSED_IDS[0][0] if is_root else None
