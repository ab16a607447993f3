"""What runs in a worker process of either reward pool. Neither this module nor what it imports uses jax."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from jaxrl.rewards.scorers import Scored, Scorer, describe, score_safely

EXIT_ZERO = 256
"""What a worker that ended with exit code 0 reports instead: no worker should end, and its pool would ignore a 0."""


class _NeverZero:
    @property
    def exitcode(self) -> int | None:
        code: int | None = super().exitcode  # pyright: ignore[reportAttributeAccessIssue]
        return EXIT_ZERO if code == 0 else code


if sys.platform == "linux":

    class _Worker(_NeverZero, multiprocessing.context.ForkServerProcess): ...

    class _Context(multiprocessing.context.ForkServerContext):
        Process = _Worker  # pyright: ignore[reportAssignmentType]

else:

    class _Worker(_NeverZero, multiprocessing.context.SpawnProcess): ...

    class _Context(multiprocessing.context.SpawnContext):
        Process = _Worker  # pyright: ignore[reportAssignmentType]


def worker_context(preload: Sequence[str]) -> Any:
    """How worker processes are made; `preload`: modules that a fork server imports for all of them."""
    context = _Context()
    if sys.platform == "linux":
        context.set_forkserver_preload(list(preload))  # instead of the main module, which is the default
    return context


@functools.lru_cache(maxsize=1)
def _scorer(pickled: bytes) -> Scorer:
    scorer: Scorer = pickle.loads(pickled)
    scorer.load()
    return scorer


def start_worker(pickled: bytes) -> None:
    """Runs in a new worker, before its first task. Never raises, which would break the pool; that a scorer cannot be
    loaded is reported by `warm`, and by every score."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    look_around(pickled)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(0)


def look_around(pickled: bytes) -> tuple[str, bool]:
    """(why the scorer cannot be loaded, or nothing; whether jax is here)."""
    try:
        _scorer(pickled)
    except (Exception, SystemExit) as error:
        return describe(error), "jax" in sys.modules
    return "", "jax" in sys.modules


def score(pickled: bytes, request: bytes) -> Scored:
    return score_safely(functools.partial(_scorer, pickled), request)
