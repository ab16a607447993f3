"""SIGINT and SIGTERM from the program's first line to its last.

At first, one signal ends the process at once: nothing is worth saving yet. Once a training run calls `save_first`, the
first signal asks for a stop (the run saves its state and ends), and the second one ends the process at once.

No exception is raised in the code that runs: jax calls back into Python from places where an exception is printed and
forgotten, and an import that is cut short leaves broken modules. The interpreter's own handler in C writes a byte for
each signal into a pipe, and a thread reads it. So a main thread that waits in native code, or hangs, stops nothing.
Only native code that holds the interpreter's lock does; that is the watchdog's business (`jaxrl.record.watchdog`).

Imports nothing heavy, so that it is in place before anything else is.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
"""The name of an end by a signal in the last line on stderr. The exit status is 128 plus its number: 130 or 143."""

_FLUSH_S = 1.0  # a reader of our output that has stopped reading does not hold the end up
_SHOW_CURSOR = b"\x1b[?25h"  # the live view hides it


class Stop:
    """Handles the two signals once `watch` has taken them over, or SIGINT inside `watching`; without these it never
    requests a stop. `asked`: whether a signal, `number`, has asked for one; `end`: ends the process, with a sentence
    and a status; `written`: the file or folder that is the command's result, whose temporary one goes with the process.
    """

    def __init__(self, end: Callable[[str, int], object] | None = None) -> None:
        self.asked = False
        self.number: signal.Signals | None = None
        self._say: Callable[[str], None] | None = None
        self._held, self.written = 0, ""
        self._waiting: signal.Signals | None = None  # came while held
        self._end = end
        self._lock = threading.Lock()

    def __call__(self) -> bool:
        return self.asked

    def watch(self) -> None:
        """Takes the two signals over for the rest of this process, from its main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), name="stop", daemon=True).start()
        for number in WORDS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as a shell ignores SIGINT for what it starts with `&`
                signal.signal(number, _nothing)
        os.register_at_fork(after_in_child=_forget)
        # multiprocessing has a process that cleans up after one that was ended at once; it need not warn of that
        ours = "ignore:resource_tracker:UserWarning"
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), ours)))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Takes SIGINT over for the block, in a process that outlives it, such as a notebook's. The first one after
        `save_first` asks for a stop; any other does what it did before, and raises KeyboardInterrupt as a rule."""
        earlier = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(earlier):
            yield
            return

        def take(number: int, frame: FrameType | None) -> None:  # without the lock, which this thread may hold
            if not self._asks(signal.Signals(number)):
                earlier(number, frame)

        signal.signal(signal.SIGINT, take)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, earlier)

    def save_first(self, say: Callable[[str], None]) -> None:
        """From now on the first signal only asks for a stop; `say` tells what that means."""
        with self._lock:
            self._say = say

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal inside ends the process after the block, and not between two files that belong together."""
        with self._lock:
            self._held += 1
        try:
            yield
        finally:
            with self._lock:
                self._held -= 1
                waiting = self._waiting if not self._held else None
            if waiting is not None:
                self._end_by(waiting)

    def _listen(self, reader: int) -> None:
        while True:
            number = os.read(reader, 1)[0]
            if number in WORDS:
                self._take(signal.Signals(number))

    def _take(self, number: signal.Signals) -> None:
        with self._lock:
            if self._asks(number):
                return
            if self._held and self._waiting is None:
                self._waiting = number
                return
            try:
                for temporary in _temporaries_of(self.written):
                    if os.path.isdir(temporary):
                        import shutil  # slow to import, and it is there already where a folder is written

                        shutil.rmtree(temporary, ignore_errors=True)
                    else:
                        with suppress(OSError):
                            os.unlink(temporary)
            finally:
                self._end_by(number)

    def _asks(self, number: signal.Signals) -> bool:
        """Whether a signal asks for a stop: the first one after `save_first` does."""
        if self._say is None or self.asked:
            return False
        self.asked, self.number = True, number
        text = f"{WORDS[number]}: the run saves its state and ends; a second signal ends it at once"
        # in a separate thread: the view may be busy, and the second signal must take effect
        if not _start(threading.Thread(target=self._say, args=(text,), daemon=True)):
            _tell(text)
        return True

    def _end_by(self, number: signal.Signals) -> None:
        (self._end or end)(WORDS[number], 128 + number)


def _temporaries_of(file: str) -> list[str]:
    """As `jaxrl.record.files.temporary_path` names them."""
    folder, name = os.path.split(os.path.realpath(os.path.expanduser(file)))
    with suppress(OSError):
        return [each.path for each in os.scandir(folder) if each.name.startswith(f".jaxrl-{name}-{os.getpid():06x}")]
    return []


def _forget() -> None:
    """In a forked child: its signals are its own, and not bytes in the pipe that it shares with us."""
    signal.set_wakeup_fd(-1)
    for number in WORDS:
        if signal.getsignal(number) == _nothing:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def ignored_by_children() -> Iterator[None]:
    """Processes that are started inside never see the SIGINT that a terminal sends to all of a command's processes."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def end_with_parent() -> None:
    """For the start of a process of multiprocessing's: it ends when its parent does, however that ends."""
    import multiprocessing.connection

    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def end(sentence: str, status: int) -> None:
    """Ends this process and its children at once, in any state of its threads; says why on stderr."""
    try:
        flush = threading.Thread(target=_flush, daemon=True)
        if _start(flush):
            flush.join(_FLUSH_S)
        with suppress(Exception):  # other threads may be at work on the list of children; the rest still has to be done
            for child in getattr(sys.modules.get("multiprocessing"), "active_children", list)():  # or half imported
                child.kill()
        with suppress(OSError):  # the terminal may be gone
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)
        _tell(sentence)
    finally:
        os._exit(status)


def _start(thread: threading.Thread) -> bool:
    """Starts a thread; False where the system allows no more of them."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def _tell(sentence: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"jaxrl: {sentence}\n".encode())


def _flush() -> None:
    with suppress(OSError, ValueError):  # closed
        sys.stdout.flush()


def _nothing(number: int, frame: object) -> None:
    """The handler in Python: the thread has the byte already."""
