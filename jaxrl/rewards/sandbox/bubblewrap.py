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
from typing import Any, NoReturn

from jaxrl.rewards.sandbox.locks import Limits, Means, environment, readable, scratch_folder, take_user
from jaxrl.rewards.sandbox.roles import Entry, enter

SETUP = 7
"""The descriptor that holds how a process is to lock itself in."""
_PACKAGE = Path(__file__).resolve().parents[2]
_BOOT = (
    "import json, os, sys; setup = json.loads(open(7, 'rb').read()); "
    "sys.path.insert(0, setup['path']); from jaxrl.rewards.sandbox.bubblewrap import inside; sys.path.pop(0); "
    "inside(setup)"
)


def become(entry: Entry, user: int) -> NoReturn:
    """Turns this process into bubblewrap, which starts an interpreter inside."""
    means = replace(entry.means, bubblewrap="", namespaces=False, cgroup="", user_ids=())
    setup = asdict(replace(entry, means=means)) | {"path": str(_PACKAGE.parent)}
    fd = os.memfd_create("setup")
    os.write(fd, json.dumps(setup).encode())
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, SETUP)
    os.set_inheritable(SETUP, True)  # which dup2 leaves as it is where both are one
    if user:
        take_user(user)
    bwrap = entry.means.bubblewrap
    command = [bwrap, *arguments(entry.limits.file_mib, entry.limits.execute), "--"]
    os.execve(bwrap, [*command, sys.executable, "-s", "-P", "-c", _BOOT], environment())


def arguments(file_mib: int, execute: bool) -> list[str]:
    """Bubblewrap's options: nothing of the machine but what may be read."""
    scratch = scratch_folder()
    words = ["--unshare-all", "--die-with-parent"]
    paths = dict.fromkeys((*readable(), os.path.realpath(sys.executable), sys.executable, str(_PACKAGE)))
    if execute:
        paths |= dict.fromkeys(path for path in ("/usr", "/bin", "/sbin", "/opt", "/etc/alternatives"))
    for path in paths:
        if not path.startswith("/dev/") and os.path.exists(path):
            words += ["--ro-bind", path, path]
    words += ["--dev", "/dev", "--proc", "/proc"]
    words += ["--size", str(max(file_mib, 1) << 20), "--tmpfs", scratch]
    return [*words, "--chdir", scratch]


def inside(setup: dict[str, Any]) -> NoReturn:
    entry = Entry(Means(**setup["means"]), Limits(**setup["limits"]), setup["role"], setup["command"], setup["mapped"])
    enter(entry, 0, os.getppid())
