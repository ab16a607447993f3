"""What crosses between the checker and the program: lines of JSON that hold plain values.

A value is taken apart on one side and built anew from Python's own types on the other, so nothing of the program's
reaches the checker but numbers, text and containers of these. A value of a subclass becomes one of the type that it
descends from. An object of the program's own class stays where it is, and the other side gets a number for it.
"""

from __future__ import annotations

import json
import socket
import sys
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_MAX_LINE = 16 << 20
_BIG = 1 << 63
_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[list[Any]], Any]]] = {
    "l": (list, list, list),
    "t": (tuple, tuple, tuple),
    "s": (set, set, set),
    "z": (frozenset, frozenset, frozenset),
    "q": (deque, list, deque),
    "d": (dict, lambda v: [part for item in v.items() for part in item], lambda p: dict(zip(p[::2], p[1::2]))),
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
    """What came is no line of JSON, or no value."""


class Connection:
    def __init__(self, fd: int):
        self._sock = socket.socket(fileno=fd)
        self._lines = self._sock.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(line) > _MAX_LINE:
            raise ValueError(f"a value of {len(line)} bytes, above {_MAX_LINE}")
        self._sock.sendall(line)

    def receive(self) -> Any:
        """The next message; None when the other side has closed. Raises WireError for what is no message."""
        try:
            line = self._lines.readline(_MAX_LINE)
            if len(line) == _MAX_LINE:
                raise WireError(f"more than {_MAX_LINE} bytes")
            return json.loads(line) if line.endswith(b"\n") else None
        except OSError:
            return None
        except (ValueError, RecursionError) as error:
            raise WireError(f"no JSON: {error}"[:200]) from None

    def close(self) -> None:
        self._lines.close()
        self._sock.close()


def pack(value: Any, other: Callable[[Any], list[Any]]) -> Any:
    """A value as JSON has it. `other` makes what stands for a value that is not plain."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int) and -_BIG < value < _BIG:
        return int(value)
    for tag, (kind, parts, _) in _KINDS.items():
        if isinstance(value, kind):
            return [tag, *(pack(part, other) for part in parts(value))]
    if type(value).__module__ == "numpy":
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.generic) and value.dtype.kind in "biufcSU":
            return pack(value.item(), other)
        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
            return ["a", value.dtype.str, list(value.shape), value.tobytes().decode("latin-1")]
    return other(value)


def unpack(message: Any, other: Callable[[list[Any]], Any]) -> Any:
    """The value that `pack` packed. `other` makes what stands for a value that is not plain. Raises WireError."""
    if not isinstance(message, list | dict):
        return message
    try:
        tag, *rest = message
        if tag in _KINDS:
            return _KINDS[tag][2]([unpack(part, other) for part in rest])
        if tag == "a":
            import numpy

            return numpy.frombuffer(rest[2].encode("latin-1"), numpy.dtype(rest[0])).reshape(rest[1]).copy()
        return other(message)
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"no value: {type(error).__name__}") from None
