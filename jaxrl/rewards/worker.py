"""What runs in a worker process of a reward pool, whichever pool it is. Free of jax, as all it imports."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading

from jaxrl.rewards.scorers import Scored, Scorer, describe, score_safely


@functools.lru_cache(maxsize=1)
def _scorer(pickled: bytes) -> Scorer:
    scorer: Scorer = pickle.loads(pickled)
    scorer.load()
    return scorer


def start_worker(pickled: bytes) -> None:
    """Runs in a new worker, before its first task. Never raises: that would take the pool down, while a scorer that
    cannot be loaded is said by `warm`, and by every score."""
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
