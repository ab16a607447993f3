"""What runs in the program's process: the program itself, and for tests that call it, the answers to those calls.

This process is locked in when it gets here, and everything in it belongs to the program: nothing that it says is
believed beyond its value. It has no expected output and no assertion, so a program that rewrites this module, or speaks
in its place, gains no more than by returning a value.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib
import operator
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jaxrl.rewards.sandbox.wire import Connection, pack, unpack

CALLS, JOB, RESULT, READY = 3, 4, 5, 6
"""Descriptors: where calls come from, the program's text (or the tests'), where a checker's results go, and where a
process says that it is locked in."""

_COMMON = "typing string re datetime collections heapq bisect copy math random statistics itertools functools operator"
_MAX_ERROR = 500


def read_job() -> str:
    with open(JOB, encoding="utf-8", errors="replace") as file:
        return file.read()


def fresh_streams() -> None:
    """Standard streams over descriptors 0 to 2, in place of those of the fork server."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _contest_names() -> dict[str, Any]:
    modules = {name: importlib.import_module(name) for name in f"{_COMMON} io sys json".split()}
    names: dict[str, Any] = {}
    for module in modules.values():
        names |= {name: vars(module)[name] for name in getattr(module, "__all__", vars(module)) if name[0] != "_"}
    return names | modules | vars(builtins)


_BUILTINS = _contest_names()  # made once, since an execution of a few milliseconds would notice


def _enter_contest(names: dict[str, Any]) -> None:
    """What contest sites do before a program, and LiveCodeBench's and verl's graders with them: they import these
    modules and all their names, and let it recurse deeply. The names are builtins here, so that none is the program's.
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
    """Runs a program's text once, then calls into it as the checker asks, until the checker closes."""
    fresh_streams()
    module = sys.modules["solution"] = types.ModuleType("solution")
    if in_contest:
        _enter_contest(module.__dict__)
    server = _Server(module.__dict__)
    server.reply(lambda: exec(compile(text, "solution.py", "exec"), module.__dict__), [])
    server.serve()
    os._exit(0)


class _Server:
    def __init__(self, names: dict[str, Any]):
        self._checker = Connection(CALLS)
        self._names = names
        self._objects: list[Any] = []

    def serve(self) -> dict[str, Any] | None:
        """Answers what the checker asks, until it says what a function of the tests returned or raised, or closes."""
        while (message := self._checker.receive()) is not None and "do" in message:
            arguments: list[Any] = []
            self.reply(lambda m=message, a=arguments: self._work(m, a), arguments)
        return message

    def reply(self, work: Callable[[], Any], arguments: list[Any]) -> None:
        try:
            reply = {"value": pack(work(), self._ours)}
            if any(isinstance(argument, list | dict | set | bytearray) for argument in arguments):
                with contextlib.suppress(Exception):  # a value that cannot be sent has not changed for the tests
                    reply["after"] = [pack(argument, self._ours) for argument in arguments]
        except BaseException as error:
            reply = {"error": [kind.__name__ for kind in type(error).__mro__], "text": ""}
            with contextlib.suppress(BaseException):
                reply["text"] = str(error)[:_MAX_ERROR]
        self._checker.send(reply)

    def _work(self, message: dict[str, Any], arguments: list[Any]) -> Any:
        arguments += [unpack(argument, self._theirs) for argument in message["arguments"]]
        named = {name: unpack(value, self._theirs) for name, value in message["named"].items()}
        if message["do"] == "name":
            return self._name(*arguments)
        work = getattr(operator, message["do"], None) or getattr(builtins, message["do"])
        return work(self._objects[message["object"]], *arguments, **named)

    def _name(self, name: str) -> Any:
        if name in self._names:
            return self._names[name]
        solution = self._names.get("Solution")  # LeetCode's form: the function is a method of this class
        if isinstance(solution, type) and hasattr(solution, name):
            return getattr(solution(), name)
        if not name.isidentifier():  # `Solution().f`
            return eval(name, self._names)
        raise NameError(f"name {name!r} is not defined")

    def _ours(self, value: Any) -> list[Any]:
        """What stands for an object of the program's, there."""
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["x", [kind.__name__ for kind in value.__mro__]]
        self._objects.append(value)
        return ["o", len(self._objects) - 1]

    def _theirs(self, message: list[Any]) -> Any:
        """An argument that is not plain: an object of the program's that comes back, or a function of the tests."""
        kind, number = message
        return self._objects[number] if kind == "o" else lambda *arguments: self._call_back(number, arguments)

    def _call_back(self, number: int, arguments: tuple[Any, ...]) -> Any:
        self._checker.send({"callback": number, "arguments": [pack(argument, self._ours) for argument in arguments]})
        message = self.serve()
        if message is None:
            os._exit(0)
        if "raised" in message:
            raise RuntimeError(message["raised"])
        return unpack(message["returned"], self._theirs)
