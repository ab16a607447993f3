"""SIGINT and SIGTERM from the program's first line to its last.

Purpose: `Stop` decides what a signal does. At first, one signal ends the process at once: nothing is worth saving yet.
Once a training run calls `save_first`, the first signal asks for a stop (the run saves its state and ends), and the
second one, of either kind, ends the process at once.

No exception is raised in the code that runs: jax calls back into Python from places where an exception is printed and
forgotten, and an import that is cut short leaves broken modules. The interpreter's own handler in C writes a byte for
each signal into a pipe, and a thread reads it. So a main thread that waits in native code, or that hangs, stops
nothing. Only native code that holds the interpreter's lock does; that is the watchdog's business
(`jaxrl.record.watchdog`).

Imports nothing heavy, so that it is in place before anything else is.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
"""What the last line on stderr calls the end by a signal. The exit status is 128 plus its number: 130 or 143."""

_FLUSH_S = 1.0  # a reader of our output that has stopped reading does not hold the end up
_SHOW_CURSOR = b"\x1b[?25h"  # the live view hides it


class Stop:
    """Takes the two signals over inside its `with`; outside, it was simply never asked."""

    def __init__(self) -> None:
        self.asked = False
        self._say: Callable[[str], None] | None = None
        self._held = 0
        self._waiting: signal.Signals | None = None  # came while held
        self._lock = threading.Lock()
        self._earlier: dict[signal.Signals, Any] = {}
        self._pipe = (-1, -1)
        self._earlier_fd = -1

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> Stop:
        self._pipe = reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._earlier_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), name="stop", daemon=True).start()
        for number in WORDS:
            self._earlier[number] = signal.signal(number, _nothing)
        os.register_at_fork(after_in_child=self._forget)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier.clear()
        signal.set_wakeup_fd(self._earlier_fd)
        os.close(self._pipe[1])  # the thread reads the end of the pipe

    def save_first(self, say: Callable[[str], None]) -> None:
        """From now on the first signal only asks for a stop; `say` tells what that means."""
        with self._lock:
            self._say = say

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal inside ends the process when the block is over, and not between two files that belong together."""
        with self._lock:
            self._held += 1
        try:
            yield
        finally:
            with self._lock:
                self._held -= 1
                waiting = self._waiting if not self._held else None
            if waiting is not None:
                _end_by(waiting)

    def _listen(self, reader: int) -> None:
        while received := os.read(reader, 1):
            if received[0] in WORDS:
                self._take(signal.Signals(received[0]))
        os.close(reader)

    def _take(self, number: signal.Signals) -> None:
        with self._lock:
            if self._say is not None and not self.asked:
                self.asked = True
                text = f"{WORDS[number]}: the run saves its state and ends; a second signal ends it at once"
                # in a thread of its own: the view may be busy, and the second signal must be heard
                threading.Thread(target=self._say, args=(text,), daemon=True).start()
                return
            if self._held and self._waiting is None:
                self._waiting = number
                return
        _end_by(number)

    def _forget(self) -> None:
        """In a forked child: its signals are its own, and not bytes in the pipe that it shares with us."""
        if self._earlier:
            signal.set_wakeup_fd(-1)
            for number in WORDS:
                signal.signal(number, signal.SIG_DFL)


def _end_by(number: signal.Signals) -> None:
    end(WORDS[number], 128 + number)


def end(sentence: str, status: int) -> None:
    """Ends this process and its children at once, whatever any thread is doing; says why on stderr."""
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(_FLUSH_S)
    if "multiprocessing" in sys.modules:
        for child in sys.modules["multiprocessing"].active_children():
            child.kill()
    with suppress(OSError):  # the terminal may be gone
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR)
        os.write(2, f"jaxrl: {sentence}\n".encode())
    os._exit(status)


def _flush() -> None:
    with suppress(OSError, ValueError):  # closed
        sys.stdout.flush()


def _nothing(number: int, frame: object) -> None:
    """The handler in Python: the thread has the byte already."""
