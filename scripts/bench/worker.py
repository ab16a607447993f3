"""Cases in processes of their own, one repetition on request: they take turns and never run at once.

A case that lives in its own process has its own peak memory, its own thread pools, and its own libraries. The parent
asks over a pipe; in between, the worker sleeps in `recv`.

Peak memory of a process is `VmHWM` of /proc/self/status where there is one. `ru_maxrss` of getrusage, which serves
elsewhere, is not the process's own on Linux: a child inherits the high-water mark of the parent that started it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Request = dict[str, Any]
Ask = Callable[[dict[str, Any]], Request | None]
"""Sends what the last repetition measured (at first: what the case says of itself); waits for the next request. None:
no more are wanted."""

Work = Callable[[Any, Ask], None]
"""A case: `work(spec, ask)` builds itself, then repeats
`while (request := ask(values)) is not None: values = repetition(request)`."""

RSS_BYTES = 1 if sys.platform == "darwin" else 1024  # a unit of `ru_maxrss`
_STATUS = Path("/proc/self/status")


class Worker:
    """A case in a process of its own. Leaving the `with` ends it.

    Args:
      name: for messages.
      work: a function that can be imported by its name.
      spec: its first argument; must survive pickling.
    """

    def __init__(self, name: str, work: Work, spec: Any) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, work, spec), name=name, daemon=False)
        self._process.start()
        theirs.close()
        try:
            self.info = self._receive()
        except BaseException:
            self.close()
            raise

    def __call__(self, **request: Any) -> dict[str, Any]:
        """One repetition."""
        self._pipe.send(request)
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        try:
            kind, content = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"{self.name}: its process died with status {self._process.exitcode} (for want of memory, perhaps)"
            ) from None
        if kind == "refused":
            raise ValueError(content)
        if kind == "failed":
            raise RuntimeError(f"{self.name} failed in its process:\n{content}")
        return content

    def close(self) -> None:
        """Lets the process end after the current repetition, and waits for it."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(timeout=60)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def once(name: str, work: Work, spec: Any) -> dict[str, Any]:
    """Runs `work` once in a process of its own and returns what it reports."""
    with Worker(name, work, spec) as worker:
        return worker.info


def _serve(pipe: Connection, work: Work, spec: Any) -> None:
    def ask(values: dict[str, Any]) -> Request | None:
        pipe.send(("values", values))
        try:
            return pipe.recv()
        except EOFError:  # the parent is gone
            return None

    try:
        work(spec, ask)
    except BrokenPipeError:
        return  # the parent is gone, so there is no process to report to
    except ValueError as error:
        pipe.send(("refused", str(error)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


@contextlib.contextmanager
def foreign_imports() -> Any:
    """Imports of other people's packages, without this repository's root on the path.

    transformers probes for a package called `kernels`, and would find our folder of that name there.
    """
    root = Path(__file__).resolve().parents[2]
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if Path(entry or ".").resolve() != root]
    try:
        yield
    finally:
        sys.path[:] = before


def resident_bytes() -> int:
    """What this process holds now; where /proc does not say, its peak so far."""
    return _status("VmRSS") or _max_rss()


def peak_bytes() -> int:
    """The most that this process has ever held."""
    return _status("VmHWM") or _max_rss()


def _status(key: str) -> int:
    if not _STATUS.exists():
        return 0
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def _max_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_BYTES
