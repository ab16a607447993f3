"""A watchdog that names the phase that hangs.

It only reports and never ends the run, because it cannot tell a slow step from a dead one. The report goes to a
callable with the open spans of the timeline, and the stacks of all threads go to stderr.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable

from jaxrl.record.timeline import Timeline


class Watchdog:
    """Calls `report(text)` when no `beat` came for `timeout_s` seconds; once per silence. 0 turns it off."""

    def __init__(self, timeline: Timeline, timeout_s: float, report: Callable[[str], None]) -> None:
        self._timeline = timeline
        self._timeout_s = timeout_s
        self._report = report
        self._beat = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if timeout_s > 0:
            self._thread.start()

    def beat(self) -> None:
        """The run has made progress."""
        self._beat.set()

    def close(self) -> None:
        self._closed = True
        self._beat.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        silent = False
        while not self._closed:
            if self._beat.wait(self._timeout_s):
                self._beat.clear()
                silent = False
            elif not silent:
                silent = True
                spans = self._timeline.open_spans()
                where = " > ".join(f"{name} ({seconds:.0f} s)" for _, name, seconds in spans) or "outside any phase"
                self._report(f"no progress for {self._timeout_s:g} s; in {where}; the threads' stacks are on stderr")
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
