"""What runs in the checker's process: the tests, with everything that they call in the program's process.

A name of the program's is a `Remote` here: calling it sends the arguments over, and gives the value that came back,
made of Python's own types. So assertions, expected values, tolerances and random inputs stay on this side. A program
that ends its process, prints a verdict, patches builtins or returns an object that equals everything fails the test.

A list, dict or set that the program changed in place is changed here as well, and a function that a test hands over is
called back. What a test cannot do is look into the program's code or patch it: such a test fails.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

from jaxrl.rewards.sandbox.program import CALLS
from jaxrl.rewards.sandbox.wire import Connection, WireError, pack, unpack

_MAX_WHY = 300
_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and "Iteration" not in name
}
"""What an exception of the program's may become in the tests: none that would end a loop of theirs in silence."""


class ProgramEnded(BaseException):
    """The program's process is gone, or says what is no value. No `Exception`, as tests may expect one of those."""


class Stopped(Exception):
    """A `StopIteration` of the program's. A real one would end a loop of the tests, and what that was to assert."""


class CannotCross(BaseException):
    """A test hands something over that has no plain form."""


class Link:
    """The way to the program's process."""

    def __init__(self) -> None:
        self._program = Connection(CALLS)
        self._callbacks: list[Callable[..., Any]] = []
        self._errors: dict[str, type[Exception]] = {}
        self.is_gone = False

    def loaded(self) -> None:
        """Waits until the program has been run. Raises what it raised."""
        self._reply(())

    def named(self, name: str) -> Any:
        """What the program calls by this name. Raises NameError."""
        return self.ask("name", -1, (name,), {})

    def ask(self, do: str, number: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.is_gone:
            raise ProgramEnded("the program has ended")
        message = {
            "do": do,
            "object": number,
            "arguments": [pack(argument, self._theirs) for argument in arguments],
            "named": {name: pack(value, self._theirs) for name, value in named.items()},
        }
        try:
            self._program.send(message)
        except OSError:
            self._gone("the program has ended")
        return self._reply(arguments)

    def _reply(self, arguments: tuple[Any, ...]) -> Any:
        while "callback" in (message := self._receive()):
            self._call_back(message)
        if "error" in message:
            raise self._error(message)
        try:
            value = unpack(message.get("value"), self._ours)
            after = [unpack(argument, self._ours) for argument in message.get("after", [])]
        except (WireError, TypeError) as error:
            self._gone(f"the program's process sent {error}")
        for old, new in zip(arguments, after, strict=False):
            _change(old, new)
        return value

    def _receive(self) -> dict[str, Any]:
        try:
            message = self._program.receive()
        except WireError as error:
            self._gone(f"the program's process sent {error}")
        if not isinstance(message, dict):
            self._gone("the program has ended")
        return message

    def _call_back(self, message: dict[str, Any]) -> None:
        try:
            function = self._callbacks[message["callback"]]
            arguments = [unpack(argument, self._ours) for argument in message["arguments"]]
            reply = {"returned": pack(function(*arguments), self._theirs)}
        except Exception as error:
            reply = {"raised": f"{type(error).__name__}: {error}"[:_MAX_WHY]}
        self._program.send(reply)

    def _gone(self, why: str) -> NoReturn:
        self.is_gone = True
        self._program.close()
        raise ProgramEnded(why)

    def _error(self, message: dict[str, Any]) -> Exception:
        names = [name for name in cast(list[Any], message["error"]) if isinstance(name, str)]
        kind, text = self._error_type(names), str(message.get("text", ""))[:_MAX_WHY]
        with contextlib.suppress(TypeError):
            return kind(text)
        return kind.__new__(kind)  # one that takes other arguments, as UnicodeDecodeError does

    def _error_type(self, names: list[str]) -> type[Exception]:
        """The same class for the same name: one that tests may expect."""
        name = names[0] if names else "Exception"
        if name == "StopIteration":
            return Stopped
        if name in _ERRORS:
            return _ERRORS[name]
        if name not in self._errors:
            base = self._error_type(names[1:]) if len(names) > 1 else Exception
            made = type(name, (base,), {"__init__": Exception.__init__, "__str__": Exception.__str__})
            self._errors[name] = cast(type[Exception], made)
        return self._errors[name]

    def _theirs(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["o", _number(value)]
        if callable(value):
            self._callbacks.append(value)
            return ["k", len(self._callbacks) - 1]
        with contextlib.suppress(Exception):  # LeetCode's ListNode: the prompt defines it in the program too
            kind = self.named(type(value).__name__ if type(value).__module__ == "tests" else "")
            made = Remote._ask(kind, "getattr", "__new__")(kind)
            for name, item in vars(value).items():
                setattr(made, name, item)
            return ["o", _number(made)]
        raise CannotCross(f"a test hands a {type(value).__name__} to the program, which cannot cross to its process")

    def _ours(self, message: list[Any]) -> Any:
        if message[0] == "o" and isinstance(message[1], int):
            return Remote(self, message[1])
        if message[0] == "x":
            return self._error_type([name for name in message[1] if isinstance(name, str)])
        raise WireError(f"a value of the kind {message[0]!r:.20}")


def _change(old: Any, new: Any) -> None:
    """What the program did to an argument in place."""
    if type(old) is not type(new) or isinstance(old, str | int | float) or old is None:
        return
    if isinstance(old, list | bytearray):
        if old != new or any(isinstance(item, list | dict | set) for item in old):
            old[:] = new
    elif isinstance(old, dict | set) and old != new:
        old.clear()
        old.update(new)


class Remote:
    """An object of the program's. It equals only itself, since what the program says of equality is no evidence."""

    __slots__ = ("_link", "_number")

    def __init__(self, link: Link, number: int):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def _ask(self, do: str, *arguments: Any, **named: Any) -> Any:
        return object.__getattribute__(self, "_link").ask(do, _number(self), arguments, named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return Remote._ask(self, "call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return Remote._ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        Remote._ask(self, "setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return Remote._ask(self, "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        Remote._ask(self, "setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        Remote._ask(self, "delitem", key)

    def __len__(self) -> int:
        return _as(int, Remote._ask(self, "len"))

    def __bool__(self) -> bool:
        return _as(bool, Remote._ask(self, "bool"))

    def __str__(self) -> str:
        return _as(str, Remote._ask(self, "str"))

    def __repr__(self) -> str:
        return _as(str, Remote._ask(self, "repr"))

    def __iter__(self) -> Iterator[Any]:
        iterator = Remote._ask(self, "iter")
        if not isinstance(iterator, Remote):
            raise TypeError("an object of the program's whose iterator is no iterator")
        yield from iter(lambda: Remote.__next__(iterator), object())

    def __next__(self) -> Any:
        try:
            return Remote._ask(self, "next")
        except Stopped as stopped:  # the test asked for it
            raise StopIteration from stopped

    def __contains__(self, item: Any) -> bool:
        return any(item == value for value in self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and _number(self) == _number(other)

    def __hash__(self) -> int:
        return hash(_number(self))


def _number(remote: Remote) -> int:
    return object.__getattribute__(remote, "_number")


def _as(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"an object of the program's gave a {type(value).__name__}, not {kind.__name__}")
    return value
