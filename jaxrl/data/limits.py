"""Limits of the operating system that a process sets itself, before it runs what others wrote.

Imports nothing of jaxrl: small processes use it.
"""

from __future__ import annotations

import contextlib
import resource


def limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Sets one of `resource`'s limits, as far as the system allows it: a lower one that is there already stays, and
    macOS takes none below what is mapped."""
    there = resource.getrlimit(kind)[1]
    most = soft if hard is None else hard
    if there != resource.RLIM_INFINITY:
        soft, most = min(soft, there), min(most, there)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (soft, most))
