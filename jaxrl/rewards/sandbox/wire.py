"""What crosses between the checker and the program: frames of JSON text that hold plain values.

A value is taken apart on one side and built anew from Python's own types on the other, so nothing of the program's
reaches the checker but numbers, text and containers of these. A value of a subclass becomes one of the type that it
descends from. An object of the program's own class stays where it is, and the other side gets a number for it.
"""

from __future__ import annotations

import json
import math
import socket
import sys
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from jaxrl.processes.messages import BadMessage, receive_message, send_message

MAX_FRAME = 16 << 20
_MAX_DEPTH = 100
_BIG = 1 << 63


class WireError(Exception):
    """What came is no frame, or no value."""


def send(sock: socket.socket, message: Any) -> None:
    payload = json.dumps(message, separators=(",", ":")).encode()
    if len(payload) > MAX_FRAME:
        raise ValueError(f"a value of {len(payload)} bytes, above {MAX_FRAME}")
    send_message(sock, payload)


def receive(sock: socket.socket) -> Any:
    """The next message; None when the other side has closed. Raises WireError for what is no message."""
    try:
        payload = receive_message(sock, MAX_FRAME)
        return None if payload is None else json.loads(payload)
    except OSError:
        return None
    except BadMessage as bad:
        raise WireError(str(bad)) from None
    except (ValueError, RecursionError) as error:
        raise WireError(f"no JSON: {error}"[:200]) from None


def pack(value: Any, other: Callable[[Any], list[Any]], depth: int = 0) -> Any:
    """A value as JSON has it.

    Args:
      other: what stands for a value that is not plain.

    Raises ValueError: it is nested too deeply.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"a value that is nested deeper than {_MAX_DEPTH} levels")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -_BIG < number < _BIG else ["i", hex(number)]
    if isinstance(value, float):
        number = float.__float__(value)
        return number if math.isfinite(number) else ["f", repr(number)]
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).decode("latin-1"), isinstance(value, bytearray)]
    if isinstance(value, dict):
        items = dict.items(value)
        return ["d", [[pack(k, other, depth + 1), pack(v, other, depth + 1)] for k, v in items]]
    for kind, tag in _CONTAINERS.items():
        if isinstance(value, kind):
            return [tag, [pack(item, other, depth + 1) for item in kind.__iter__(value)]]
    if isinstance(value, complex):
        return ["c", pack(value.real, other), pack(value.imag, other)]
    if isinstance(value, Fraction | Decimal):
        return ["n", "Fraction" if isinstance(value, Fraction) else "Decimal", str(value)]
    if isinstance(value, range):
        return ["g", *(pack(part, other) for part in (value.start, value.stop, value.step))]
    if type(value).__module__ == "numpy":
        return _pack_array(value, other)
    return other(value)


_CONTAINERS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z", deque: "q"}
_MAKERS: dict[str, Callable[..., Any]] = {tag: kind for kind, tag in _CONTAINERS.items()}


def _pack_array(value: Any, other: Callable[[Any], list[Any]]) -> Any:
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.generic) and value.dtype.kind in "biufcSU":
        return pack(value.item(), other)
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return ["a", value.dtype.str, list(value.shape), value.tobytes().decode("latin-1")]
    return other(value)


def unpack(message: Any, other: Callable[[list[Any]], Any]) -> Any:
    """The value that `pack` packed.

    Args:
      other: makes what stands for a value that is not plain.

    Raises WireError: nothing that `pack` makes.
    """
    if not isinstance(message, list):
        if isinstance(message, dict):
            raise WireError("an object, where a value is expected")
        return message
    try:
        tag, *rest = message
        if tag in _MAKERS:
            return _MAKERS[tag](unpack(item, other) for item in rest[0])
        match tag:
            case "i":
                return int(rest[0], 16)
            case "f":
                return float(rest[0])
            case "b":
                data = rest[0].encode("latin-1")
                return bytearray(data) if rest[1] else data
            case "d":
                return {unpack(key, other): unpack(value, other) for key, value in rest[0]}
            case "c":
                return complex(unpack(rest[0], other), unpack(rest[1], other))
            case "n":
                return Fraction(rest[1]) if rest[0] == "Fraction" else Decimal(rest[1])
            case "g":
                return range(*(unpack(part, other) for part in rest))
            case "a":
                import numpy

                return numpy.frombuffer(rest[2].encode("latin-1"), numpy.dtype(rest[0])).reshape(rest[1]).copy()
            case _:
                return other(message)
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"no value: {type(error).__name__}") from None
