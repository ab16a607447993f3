"""The connection between the checker and the program: each side may call the other, which returns plain values.

Messages are lines of JSON. A value is taken apart on one side and rebuilt from Python's own types on the other. So
nothing of the program's reaches the checker but numbers, text and containers of these. A value of a subclass becomes
one of the type that it descends from. Any other object stays where it is, and the other side gets a `Remote` for it.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

_MAX_LINE = 16 << 20
_MAX_TEXT = 500
_BIG = 1 << 63
_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[list[Any]], Any]]] = {
    "l": (list, list, list),
    "t": (tuple, tuple, tuple),
    "s": (set, set, set),
    "z": (frozenset, frozenset, frozenset),
    "q": (deque, list, deque),
    "d": (
        dict,
        lambda v: [part for item in v.items() for part in item],
        lambda p: dict(zip(*[iter(p)] * 2, strict=True)),
    ),
    "b": (bytes, lambda v: [v.decode("latin-1")], lambda p: p[0].encode("latin-1")),
    "y": (bytearray, lambda v: [v.decode("latin-1")], lambda p: bytearray(p[0], "latin-1")),
    "i": (int, lambda v: [hex(v)], lambda p: int(p[0], 16)),
    "c": (complex, lambda v: [v.real, v.imag], lambda p: complex(*p)),
    "g": (range, lambda v: [v.start, v.stop, v.step], lambda p: range(*p)),
    "F": (Fraction, lambda v: [str(v)], lambda p: Fraction(*p)),
    "D": (Decimal, lambda v: [str(v)], lambda p: Decimal(*p)),
}
"""By tag: a type, the parts of its value, and the value of such parts."""


class WireError(Exception):
    """The message is no line of JSON, or no value."""


class Stopped(Exception):
    """A `StopIteration` of the other side. A real one would end a loop of the tests, and what that was to assert."""


def pack(value: Any, refer: Callable[[Any], list[Any]]) -> Any:
    """A value as JSON has it. `refer` makes the reference to a value that is not plain."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int) and -_BIG < value < _BIG:
        return int(value)
    for tag, (kind, parts, _) in _KINDS.items():
        if isinstance(value, kind):
            return [tag, *(pack(part, refer) for part in parts(value))]
    if type(value).__module__ == "numpy":
        return _pack_array(value, sys.modules["numpy"], refer)
    return refer(value)


def _pack_array(value: Any, numpy: Any, refer: Callable[[Any], list[Any]]) -> Any:
    if isinstance(value, numpy.generic) and value.dtype.kind in "biufcSU":
        return pack(value.item(), refer)
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return ["a", value.dtype.str, list(value.shape), value.tobytes().decode("latin-1")]
    return refer(value)


def unpack(message: Any, known: Callable[..., Any]) -> Any:
    """The value that `pack` packed. `known` resolves references. Raises WireError."""
    if isinstance(message, dict):
        raise WireError("an object, where a value is expected")
    if not isinstance(message, list):
        return message
    try:
        tag, *rest = message
        if tag in _KINDS:
            return _KINDS[tag][2]([unpack(part, known) for part in rest])
        if tag == "a":
            import numpy

            return numpy.frombuffer(rest[2].encode("latin-1"), numpy.dtype(rest[0])).reshape(rest[1]).copy()
        return known(tag, *rest)
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"no value: {type(error).__name__}") from None


class Peer:
    """One side of the connection; `caught`: its own errors that it reports to the other side."""

    caught: type[BaseException] = Exception

    def __init__(self, fd: int):
        self._sock = socket.socket(fileno=fd)
        self._lines = self._sock.makefile("rb")
        self._objects: list[Any] = []  # those that the other side has a number for
        self._errors: dict[str, type[Exception]] = {"StopIteration": Stopped}
        for name, kind in vars(builtins).items():
            if isinstance(kind, type) and issubclass(kind, Exception) and "Iteration" not in name:
                self._errors[name] = kind  # none that would end a loop of the tests in silence

    def do(self, what: str, number: int, *arguments: Any, **named: Any) -> Any:
        """Does what the other side asks, with an object of this side."""
        raise NotImplementedError

    def ended(self, why: str) -> NoReturn:
        raise NotImplementedError

    def ask(self, what: str, number: int, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        """Has the other side do something with its object of a number. Raises what that raised."""
        packed = {name: pack(value, self.refer) for name, value in named.items()}
        self._send({"do": what, "object": number, "arguments": self._packed(arguments), "named": packed})
        return self.wait(arguments)

    def wait(self, arguments: Sequence[Any] = ()) -> Any:
        """The other side's reply; it may ask for something before. What it changed in arguments is changed here too."""
        while "do" in (message := self.receive()):
            self.answer(message)
        if "error" in message:
            kind = self._error_type(message["error"])
            try:
                error = kind(str(message.get("text", ""))[:_MAX_TEXT])
            except TypeError:  # it takes other arguments, as UnicodeDecodeError does
                error = kind.__new__(kind)
            raise error
        try:
            value = unpack(message.get("value"), self._known)
            after = [unpack(argument, self._known) for argument in message.get("after", ())]
        except (WireError, TypeError) as error:
            self.ended(f"the program's process sent {error}")
        for old, new in zip(arguments, after, strict=False):
            if type(old) is type(new) and isinstance(old, list | bytearray):
                old[:] = new
            elif type(old) is type(new) and isinstance(old, dict | set) and old != new:
                old.clear()
                old.update(new)
        return value

    def answer(self, message: dict[str, Any]) -> None:
        arguments: list[Any] = []

        def work() -> Any:
            arguments.extend(unpack(argument, self._known) for argument in message["arguments"])
            named = {name: unpack(value, self._known) for name, value in message["named"].items()}
            return self.do(message["do"], message["object"], *arguments, **named)

        self.reply(work, arguments)

    def reply(self, work: Callable[[], Any], arguments: Sequence[Any] = ()) -> None:
        try:
            reply: dict[str, Any] = {"value": pack(work(), self.refer)}
            if any(isinstance(argument, list | dict | set | bytearray) for argument in arguments):
                with contextlib.suppress(Exception):  # a value that cannot be sent has not changed for the tests
                    reply["after"] = self._packed(arguments)
        except self.caught as error:
            reply = {"error": [kind.__name__ for kind in type(error).__mro__]}
            with contextlib.suppress(self.caught):
                reply["text"] = str(error)[:_MAX_TEXT]
        self._send(reply)

    def receive(self) -> dict[str, Any]:
        try:
            line = self._lines.readline(_MAX_LINE)
            message = json.loads(line) if line.endswith(b"\n") else None
        except OSError:
            message, line = None, b""
        except (ValueError, RecursionError) as error:
            self.ended(f"the program's process sent no JSON: {error}"[:_MAX_TEXT])
        if not isinstance(message, dict):
            self.ended(
                "the program has ended" if len(line) < _MAX_LINE else f"the program's process sent {len(line)} bytes"
            )
        return message

    def _send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(line) > _MAX_LINE:
            raise ValueError(f"a value of {len(line)} bytes, above {_MAX_LINE}")
        try:
            self._sock.sendall(line)
        except OSError:
            self.ended("the program has ended")

    def close(self) -> None:
        self._lines.close()
        self._sock.close()

    def _packed(self, arguments: Sequence[Any]) -> list[Any]:
        return [pack(argument, self.refer) for argument in arguments]

    def refer(self, value: Any) -> list[Any]:
        """The reference to a value that is not plain."""
        if isinstance(value, Remote):
            return ["r", _number(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["x", [kind.__name__ for kind in value.__mro__]]
        self._objects.append(value)
        return ["o", len(self._objects) - 1]

    def _known(self, kind: str, value: Any) -> Any:
        match kind:
            case "o":
                return Remote(self, int(value))
            case "r":
                return self._objects[value]
            case "x":
                return self._error_type(value)
        raise WireError(f"a value of the kind {kind!r:.20}")

    def _error_type(self, names: list[Any]) -> type[Exception]:
        """The same class for the same name: one that tests may expect."""
        name = str(names[0]) if names else "Exception"
        if name not in self._errors:
            methods = {"__init__": Exception.__init__, "__str__": Exception.__str__}
            self._errors[name] = type(name, (self._error_type(names[1:]),), methods)
        return self._errors[name]


def _does(what: str, kind: type | None = None) -> Callable[..., Any]:
    """A method that has the other side do something, and perhaps takes a value of one type alone."""

    def method(self: Remote, /, *arguments: Any, **named: Any) -> Any:
        value = object.__getattribute__(self, "_peer").ask(what, _number(self), arguments, named)
        if kind is not None and type(value) is not kind:
            raise TypeError(f"an object of the program's gave a {type(value).__name__}, not {kind.__name__}")
        return value

    return method


class Remote:
    """An object of the other side. It equals only itself, since a program's own equality is no evidence."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int):
        object.__setattr__(self, "_peer", peer)
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
