"""What a run does before its first step, said where it takes long.

Purpose: reading data, loading weights, comparing a checkpoint may each take minutes, in which a user wants to know that
the run is alive. `Stages` says the name of a stage that has gone on for `patience_s`; short ones are passed over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

PATIENCE_S = 10.0


class Stages:
    """Says what goes on; a stage ends when the next one begins. May be closed twice.

    Args:
      say: shows a line; called from a thread of its own.
      patience_s: how long a stage may last without a word.
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
