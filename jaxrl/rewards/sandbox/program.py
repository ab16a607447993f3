"""The program's process: it runs the program, and answers the calls of tests.

This process is locked in when it gets here, and everything in it belongs to the program: nothing that it says is
believed beyond its value. It has no expected output and no assertion, so a program that rewrites this module, or speaks
in its place, gains no more than by returning a value.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import operator
import os
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxrl.rewards.sandbox.wire import Peer

CALLS, JOB, RESULT, READY = 3, 4, 5, 6
"""Descriptors: where calls come from, the program's text (or the tests'), where a checker's results go, and where a
process says that it is locked in."""

_COMMON = """
    typing string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys
    json
"""


def read_job() -> str:
    with open(JOB, encoding="utf-8", errors="replace") as file:
        return file.read()


def fresh_streams() -> None:
    """Standard streams over descriptors 0 to 2, in place of the fork server's."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


_BUILTINS: dict[str, Any] = {}  # made once, since an execution of a few milliseconds would notice
for _name in _COMMON.split():
    exec(f"from {_name} import *", _BUILTINS)
for _name in _COMMON.split():
    exec(f"import {_name}", _BUILTINS)
_BUILTINS |= vars(builtins)


def _enter_contest(names: dict[str, Any]) -> None:
    """Prepares a program's names as contest sites do, and LiveCodeBench's and verl's graders: they import these modules
    and all their names, and let it recurse deeply. The names are builtins here, so that none is the program's.
    """
    _BUILTINS.update(stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr)
    names["__builtins__"] = _BUILTINS
    sys.setrecursionlimit(50_000)


def run_script(text: str) -> NoReturn:
    """Runs a program as Python runs a file, and ends the process as Python ends."""
    fresh_streams()
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    _enter_contest(module.__dict__)
    sys.argv = ["program.py"]
    code = 0
    try:
        exec(compile(text, "program.py", "exec"), module.__dict__)
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        code = 1
        with contextlib.suppress(BaseException):
            traceback.print_exc(limit=-4)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  (waits for the program's threads, as at a usual end)
        atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except BaseException:
        code = code or 1
    os._exit(code & 0xFF)


def run_command(command: Sequence[str]) -> NoReturn:
    os.set_inheritable(JOB, True)
    words = [word.replace("{file}", f"/proc/self/fd/{JOB}") for word in command]
    try:
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}".encode())
    os._exit(127)


def serve_calls(text: str, *, in_contest: bool) -> NoReturn:
    """Runs a program's text once, then does with it what the checker asks, until the checker closes."""
    fresh_streams()
    module = sys.modules["solution"] = types.ModuleType("solution")
    if in_contest:
        _enter_contest(module.__dict__)
    peer = _Program(CALLS)
    peer.names = module.__dict__
    peer.reply(lambda: exec(compile(text, "solution.py", "exec"), module.__dict__))
    while True:
        peer.answer(peer.receive())


class _Program(Peer):
    caught = BaseException
    names: dict[str, Any]

    def do(self, what: str, number: int, *arguments: Any, **named: Any) -> Any:
        if what == "name":
            return self._name(*arguments)
        work = getattr(operator, what, None) or getattr(builtins, what)
        return work(self._objects[number], *arguments, **named)

    def ended(self, why: str) -> NoReturn:
        os._exit(0)

    def _name(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        solution = self.names.get("Solution")  # LeetCode's form: the function is a method of this class
        if isinstance(solution, type) and hasattr(solution, name):
            return getattr(solution(), name)
        if not name.isidentifier():  # `Solution().f`
            return eval(name, self.names)
        raise NameError(f"name {name!r} is not defined")
