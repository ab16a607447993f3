"""What runs in the checker's process: the tests, with everything that they call in the program's process.

A name of the program's is a `Remote` here: calling it sends the arguments over, and gives the value that came back,
made of Python's own types. So assertions, expected values, tolerances and random inputs stay on this side. A program
that ends its process, prints a verdict, patches builtins or returns an object that equals everything fails the test.

A list, dict or set that the program changed in place is changed here as well, and the program may call a function that
a test passed to it. A test that looks into the program's code, or patches it, fails.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from jaxrl.rewards.sandbox.program import CALLS
from jaxrl.rewards.sandbox.wire import Connection, WireError, pack, unpack

_MAX_WHY = 300


class ProgramEnded(BaseException):
    """The program's process is gone, or says what is no value. No `Exception`, as tests may expect one of those."""


class Stopped(Exception):
    """A `StopIteration` of the program's. A real one would end a loop of the tests, and what that was to assert."""


class CannotCross(BaseException):
    """A test passes something on that has no plain form."""


class Link:
    """The way to the program's process."""

    def __init__(self) -> None:
        self._program = Connection(CALLS)
        self._callbacks: list[Callable[..., Any]] = []
        self._errors: dict[str, type[Exception]] = {"StopIteration": Stopped}
        for name, kind in vars(builtins).items():
            if isinstance(kind, type) and issubclass(kind, Exception) and "Iteration" not in name:
                self._errors[name] = kind  # none that would end a loop of the tests in silence
        self.is_gone = False

    def loaded(self) -> None:
        """Waits until the program has been run. Raises what it raised."""
        self._reply(())

    def named(self, name: str) -> Any:
        """What the program calls by this name. Raises NameError."""
        return self.ask("name", -1, (name,), {})

    def ask(self, do: str, number: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Has the program do something with its object of a number."""
        if self.is_gone:
            raise ProgramEnded("the program has ended")
        message = {"do": do, "object": number, "arguments": [pack(argument, self._theirs) for argument in arguments]}
        message["named"] = {name: pack(value, self._theirs) for name, value in named.items()}
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
            after = [unpack(argument, self._ours) for argument in message.get("after", ())]
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
        kind = self._error_type(message["error"])
        with contextlib.suppress(TypeError):
            return kind(str(message.get("text", ""))[:_MAX_WHY])
        return kind.__new__(kind)  # one that takes other arguments, as UnicodeDecodeError does

    def _error_type(self, names: list[str]) -> type[Exception]:
        """The same class for the same name: one that tests may expect."""
        name = str(names[0]) if names else "Exception"
        if name not in self._errors:
            methods = {"__init__": Exception.__init__, "__str__": Exception.__str__}
            self._errors[name] = type(name, (self._error_type(names[1:]),), methods)
        return self._errors[name]

    def _theirs(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["o", _number(value)]
        if callable(value):
            self._callbacks.append(value)
            return ["k", len(self._callbacks) - 1]
        with contextlib.suppress(Exception):  # LeetCode's ListNode: the prompt defines it in the program too
            kind = self.named(type(value).__name__ if type(value).__module__ == "tests" else "")
            made = Remote.__getattr__(kind, "__new__")(kind)
            for name, item in vars(value).items():
                setattr(made, name, item)
            return ["o", _number(made)]
        raise CannotCross(f"a test hands a {type(value).__name__} to the program, which cannot cross to its process")

    def _ours(self, message: list[Any]) -> Any:
        kind, value = message
        return Remote(self, int(value)) if kind == "o" else self._error_type(value)


def _change(old: Any, new: Any) -> None:
    """What the program did to an argument in place."""
    if type(old) is type(new) and isinstance(old, list | bytearray):
        if old != new or any(isinstance(item, list | dict | set) for item in old):
            old[:] = new
    elif type(old) is type(new) and isinstance(old, dict | set) and old != new:
        old.clear()
        old.update(new)


def _does(do: str, kind: type | None = None) -> Callable[..., Any]:
    """A method that has the program do something, and perhaps takes a value of one type alone."""

    def method(self: Remote, /, *arguments: Any, **named: Any) -> Any:
        value = object.__getattribute__(self, "_link").ask(do, _number(self), arguments, named)
        if kind is not None and type(value) is not kind:
            raise TypeError(f"an object of the program's gave a {type(value).__name__}, not {kind.__name__}")
        return value

    return method


class Remote:
    """An object of the program's. It equals only itself, since what the program says of equality is no evidence."""

    __slots__ = ("_link", "_number")

    def __init__(self, link: Link, number: int):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    __call__, __getattr__, __setattr__ = _does("call"), _does("getattr"), _does("setattr")
    __getitem__, __setitem__, __delitem__ = _does("getitem"), _does("setitem"), _does("delitem")
    __len__, __bool__, __str__, __repr__ = _does("len", int), _does("bool", bool), _does("str", str), _does("repr", str)

    def __iter__(self) -> Iterator[Any]:
        iterator = _does("iter")(self)
        if not isinstance(iterator, Remote):
            raise TypeError("an object of the program's whose iterator is no iterator")
        yield from iter(lambda: Remote.__next__(iterator), object())

    def __next__(self) -> Any:
        try:
            return _does("next")(self)
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
