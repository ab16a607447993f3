"""The fork server in bubblewrap's namespaces: no processes, network, files or names of the machine are there at all.

Source: bwrap(1), https://github.com/containers/bubblewrap. Inside, each program is locked in as it is outside.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from jaxrl.rewards.sandbox.locks import TOOLS, python_is_closed, readable, scratch_folder
from jaxrl.rewards.sandbox.probe import UNUSED_IDS


def bubblewrap() -> tuple[list[str], int | None]:
    """The beginning of a command line that runs in namespaces, and the user id to run it with; None: one's own.

    Raises ValueError: it cannot be had here; one sentence.
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
