"""Cases in processes of their own, which start once and work when they are asked to.

So two frameworks never share a process, a case's peak memory is its own, and cases can still take turns.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
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
            status = self._process.exitcode
            raise RuntimeError(f"{self.name}: its process died with status {status} (no memory, perhaps)") from None
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


def memory(pid: int | str = "self") -> tuple[int, int]:
    """Bytes that a process holds, and the most that it has held (Linux; else nothing).

    `ru_maxrss` of getrusage will not do: a child inherits the high-water mark of the parent that started it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+)", status, re.MULTILINE))
    return 1024 * int(found.get("VmRSS", 0)), 1024 * int(found.get("VmHWM", 0))
