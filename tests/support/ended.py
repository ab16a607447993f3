"""Whether processes have ended."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def have_ended(pids: Iterable[int], within_s: float = 10.0) -> bool:
    """Whether none of them lives, or will a moment later; where no process reaps orphans, one stays as a zombie."""
    until, living = time.monotonic() + within_s, list(pids)
    while (living := [pid for pid in living if _is_living(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    return not living


def _is_living(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
