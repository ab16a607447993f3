"""The fork server in bubblewrap's namespaces: no processes, network, files or names of the machine are there at all.

Source: bwrap(1), https://github.com/containers/bubblewrap. Inside, each program is locked in as it is outside, so what
namespaces leave open is closed.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from jaxrl.rewards.sandbox.locks import TOOLS, python_is_closed, readable, scratch_folder

_PACKAGE = str(Path(__file__).resolve().parents[2])


def wrapping() -> list[str]:
    """The beginning of a command line that runs in namespaces.

    Raises ValueError: it cannot be had here; one sentence.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ValueError("reward.code.sandbox=bubblewrap: there is no bwrap on PATH")
    if os.geteuid() == 0 and python_is_closed():
        raise ValueError(
            f"reward.code.sandbox=bubblewrap: as root, programs get a user of their own, to whom {sys.base_prefix} "
            "is closed; use reward.code.sandbox=fork, or a Python that others may read"
        )
    words = [bwrap, "--unshare-all", "--die-with-parent", "--dev", "/dev", "--proc", "/proc"]
    words += ["--tmpfs", scratch_folder(), "--chdir", scratch_folder()]
    paths = (*readable(), *TOOLS, os.path.realpath(sys.executable), sys.executable, _PACKAGE)
    for path in dict.fromkeys(path for path in paths if not path.startswith("/dev/")):
        words += ["--ro-bind-try", path, path]
    return [*words, "--"]
