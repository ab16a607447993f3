"""The progress of a command that has nothing to show yet: reading data or loading weights may take minutes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

PATIENCE_S, _EVERY_S = 10.0, 30.0


class StartupProgress:
    """Names the long stages of a start. `say` is called from a separate thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._timer: threading.Timer | None = None

    def begin(self, name: str) -> None:
        def show() -> None:
            with suppress(OSError, ValueError):  # a closed pipe or file does not end the run
                self._say(f"{name} ...")

        self.close()
        self._timer = threading.Timer(PATIENCE_S, show)
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None


class ProgressCounter:
    """How many `what` are done: on a terminal one line that changes, in a log a line every half minute."""

    def __init__(self, what: str, stream: TextIO) -> None:
        self._what, self._stream = what, stream
        self._said_at, self._has_line = time.monotonic(), False

    def show(self, done: int, total: int | None = None) -> None:
        said = f"{done} {self._what}" if total is None else f"{done} of {total} {self._what}"
        with suppress(OSError, ValueError):
            if self._stream.isatty():
                self._has_line = True
                print(f"\r{said}", end="", file=self._stream, flush=True)
            elif time.monotonic() - self._said_at >= _EVERY_S:
                self._said_at = time.monotonic()
                print(said, file=self._stream, flush=True)

    def close(self) -> None:
        if self._has_line:
            self._has_line = False
            with suppress(OSError, ValueError):
                print(file=self._stream, flush=True)
