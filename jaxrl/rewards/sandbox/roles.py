"""What a process of the sandbox becomes, once it is locked in: a script, what answers calls, or what makes them."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from jaxrl.rewards.sandbox import program, suites
from jaxrl.rewards.sandbox.locks import Limits, Means, lock_in

LOCKED_IN = b"locked in"
"""What a process says on `program.READY` before it sees any text of a model's; anything else is why it could not."""


@dataclass(frozen=True)
class Entry:
    """How a process is locked in, and what it then is.

    Attributes:
      role: "script": a program with standard streams; "calls": a program that is called; "names": one whose names a
        test program uses; "tests": what calls either.
      command: what runs a script, in place of Python.
      mapped: bytes that are mapped before the program has begun.
    """

    means: Means
    limits: Limits
    role: str
    command: Sequence[str]
    mapped: int


def enter(entry: Entry, user: int, parent: int) -> NoReturn:
    """Locks this process in, and becomes its role.

    Args:
      user: the user id that it takes; 0: it keeps its own.
      parent: the process at whose end it ends; 0: one outside of its cage.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # of which the server ignores some
        signal.signal(number, signal.SIG_DFL)
    try:
        listener = lock_in(entry.means, entry.limits, user_id=user, parent=parent, mapped=entry.mapped)
    except BaseException as error:
        os.write(program.READY, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    with socket.socket(fileno=program.READY) as ready:
        socket.send_fds(ready, [LOCKED_IN], [listener] if listener >= 0 else [])
    if listener >= 0:
        os.close(listener)
    match entry.role:
        case "script" if entry.command:
            program.run_command(entry.command)
        case "script":
            program.run_script(program.read_job().decode("utf-8", "replace"))
        case "calls" | "names" as role:
            program.serve_calls(program.read_job().decode("utf-8", "replace"), in_contest=role == "calls")
        case _:
            suites.run_tests(json.loads(program.read_job()))
