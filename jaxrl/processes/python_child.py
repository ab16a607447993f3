"""A child that is a new interpreter: how it is started, and the last line that it wrote.

Not a fork: threads of jax or Ray do not survive one. The main module is not run again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from MODULE import main; main()"
_TAIL_BYTES = 4096


def start_python(
    module: str,
    arguments: Sequence[str],
    fds: Sequence[int],
    *,
    stdout: int | None = subprocess.DEVNULL,
    stderr: IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts `main()` of a module in a new session, which a terminal's Ctrl-C does not reach.

    Args:
      arguments: its `sys.argv[2:]`; the one before is used up by the start.
      fds: file descriptors of this process that it gets, under the same numbers.
    """
    # -P: before the path is set, nothing comes from the working folder, such as a json.py of the user's
    path = [os.getcwd() if entry == "" else entry for entry in sys.path]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT.replace("MODULE", module), json.dumps(path), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=None if env is None else dict(env),
        pass_fds=tuple(fds),
        start_new_session=True,
    )


def wait_or_kill(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Returns when a process that is to end by itself has; kills it where it does not."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_line(output: IO[Any]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(size - _TAIL_BYTES, 0))
    lines = output.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
