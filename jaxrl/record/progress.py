"""The progress of a command that has nothing to show yet.

Purpose: reading data, loading weights and checking a checkpoint may take minutes each. `StartupProgress` prints the
name of a stage that takes longer than `patience_s`. `ProgressCounter` prints how many of a known number are done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

PATIENCE_S = 10.0


class StartupProgress:
    """Names the stages of a start that take long; a stage ends when the next one begins. May be closed twice.

    Args:
      say: shows a line; called from a thread of its own.
      patience_s: how long a stage lasts before it is named.
    """

    def __init__(self, say: Callable[[str], None], patience_s: float = PATIENCE_S) -> None:
        self._say, self._patience_s = say, patience_s
        self._timer: threading.Timer | None = None

    def begin(self, name: str) -> None:
        """A stage begins."""
        self.close()
        self._timer = threading.Timer(self._patience_s, self._tell, [f"{name} ..."])
        self._timer.daemon = True
        self._timer.start()

    def _tell(self, line: str) -> None:
        with suppress(OSError, ValueError):  # a closed pipe or file: the run goes on
            self._say(line)

    def close(self) -> None:
        """The last stage is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None


class ProgressCounter:
    """How many of a known number are done: on a terminal one line that changes, in a log a line now and then.

    Args:
      what: is counted, as "responses".
      every_s: between two lines of a log.
      clock: seconds from any origin.
    """

    def __init__(
        self, what: str, stream: TextIO, every_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._stream, self._every_s, self._clock = what, stream, every_s, clock
        self._said_at, self._has_line = clock(), False

    def show(self, done: int, total: int | None = None) -> None:
        """`done` of `total` are; None: nobody knows of how many."""
        said = f"{done} {self._what}" if total is None else f"{done} of {total} {self._what}"
        with suppress(OSError, ValueError):
            if self._stream.isatty():
                self._has_line = True
                print(f"\r{said}", end="", file=self._stream, flush=True)
            elif self._clock() - self._said_at >= self._every_s:
                self._said_at = self._clock()
                print(said, file=self._stream, flush=True)

    def close(self) -> None:
        """What follows on a terminal begins in a line of its own."""
        if self._has_line:
            self._has_line = False
            with suppress(OSError, ValueError):
                print(file=self._stream, flush=True)
