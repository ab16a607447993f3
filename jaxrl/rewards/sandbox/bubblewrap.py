"""A program in bubblewrap's namespaces: no processes, network, files or names of the machine are there at all.

Source: bwrap(1), https://github.com/containers/bubblewrap. Each process is a fresh interpreter there, which costs some
milliseconds more than a fork. Inside it locks itself in as it does in a fork, so what namespaces leave open is closed.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jaxrl.rewards.sandbox.locks import ENVIRONMENT, SCRATCH, Means, readable

if TYPE_CHECKING:
    from jaxrl.rewards.sandbox.supervisor import Order

SETUP = 6
"""The descriptor that holds how a process is to lock itself in."""
_PACKAGE = Path(__file__).resolve().parents[2]
_BOOT = (
    "import json, os, sys; setup = json.loads(open(6, 'rb').read()); os.closerange(6, 7); "
    "sys.path.insert(0, setup['path']); from jaxrl.rewards.sandbox.bubblewrap import inside; sys.path.pop(0); "
    "inside(setup)"
)


def become(means: Means, order: Order, role: str, user: int, mapped: int) -> NoReturn:
    """Turns this process into bubblewrap, which starts an interpreter inside."""
    setup = {
        "path": str(_PACKAGE.parent),
        "means": replace(means, bubblewrap="", namespaces=False, cgroup="", user_ids=()).as_dict(),
        "limits": asdict(order.limits),
        "role": role,
        "command": list(order.command),
        "mapped": mapped,
    }
    fd = os.memfd_create("setup")
    os.write(fd, json.dumps(setup).encode())
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, SETUP, inheritable=True)
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    command = [means.bubblewrap, *arguments(order.limits.file_mib, order.limits.execute), "--"]
    os.execve(means.bubblewrap, [*command, sys.executable, "-s", "-P", "-c", _BOOT], ENVIRONMENT)


def arguments(file_mib: int, execute: bool) -> list[str]:
    """Bubblewrap's options: nothing of the machine but what may be read."""
    words = ["--unshare-all", "--die-with-parent"]
    paths = dict.fromkeys((*readable(), os.path.realpath(sys.executable), sys.executable, str(_PACKAGE)))
    if execute:
        paths |= dict.fromkeys(path for path in ("/usr", "/bin", "/sbin", "/opt", "/etc/alternatives"))
    for path in paths:
        if not path.startswith("/dev/") and os.path.exists(path):
            words += ["--ro-bind", path, path]
    words += ["--dev", "/dev", "--proc", "/proc"]
    words += ["--size", str(max(file_mib, 1) << 20), "--tmpfs", SCRATCH]
    return [*words, "--chdir", SCRATCH]


def inside(setup: dict) -> NoReturn:
    """What the interpreter in the namespaces does."""
    from jaxrl.rewards.sandbox.locks import Limits
    from jaxrl.rewards.sandbox.supervisor import enter

    means = {**setup["means"], "user_ids": ()}
    enter(
        Means(**means),
        Limits(**setup["limits"]),
        setup["role"],
        setup["command"],
        0,
        os.getppid(),
        setup["mapped"],
    )
