"""What crosses between processes of the sandbox.

Between the checker and the program: lines of JSON that hold plain values. A value is taken apart on one side and built
anew from Python's own types on the other, so nothing of the program's reaches the checker but numbers, text and
containers of these. A value of a subclass becomes one of the type that it descends from. An object of the program's own
class stays where it is, and the other side gets a number for it.

Between the client and the server, which trust each other: files without a name, so that the server passes a program's
text and its tests on, and never reads them.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

from jaxrl.rewards.sandbox.locks import Limits, Means

MAX_LINE = 16 << 20
_MAX_DEPTH = 100
_BIG = 1 << 63
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class WireError(Exception):
    """What came is no line of JSON, or no value."""


class Connection:
    def __init__(self, fd: int):
        self._sock = socket.socket(fileno=fd)
        self._lines = self._sock.makefile("rb")

    def send(self, message: Any) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE:
            raise ValueError(f"a value of {len(line)} bytes, above {MAX_LINE}")
        self._sock.sendall(line)

    def receive(self) -> Any:
        """The next message; None when the other side has closed. Raises WireError for what is no message."""
        try:
            line = self._lines.readline(MAX_LINE)
            if not line.endswith(b"\n") and len(line) == MAX_LINE:
                raise WireError(f"more than {MAX_LINE} bytes")
            return json.loads(line) if line.endswith(b"\n") else None
        except OSError:
            return None
        except (ValueError, RecursionError) as error:
            raise WireError(f"no JSON: {error}"[:200]) from None

    def close(self) -> None:
        self._lines.close()
        self._sock.close()


_CONTAINERS: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset, "q": deque}
_OTHERS: dict[str, Any] = {"c": complex, "g": range, "F": Fraction, "D": Decimal}


def pack(value: Any, other: Callable[[Any], list[Any]], depth: int = 0) -> Any:
    """A value as JSON has it: containers and rare types as a list of a tag and their parts.

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
        return float.__float__(value)
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).decode("latin-1"), isinstance(value, bytearray)]
    if isinstance(value, dict):
        items = dict.items(value)
        return ["d", [[pack(k, other, depth + 1), pack(v, other, depth + 1)] for k, v in items]]
    for tag, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return [tag, [pack(item, other, depth + 1) for item in kind.__iter__(value)]]
    if isinstance(value, complex):
        return ["c", [value.real, value.imag]]
    if isinstance(value, range):
        return ["g", [pack(part, other) for part in (value.start, value.stop, value.step)]]
    if isinstance(value, Fraction | Decimal):
        return ["F" if isinstance(value, Fraction) else "D", [str(value)]]
    if type(value).__module__ == "numpy":
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
    if isinstance(message, dict):
        raise WireError("an object, where a value is expected")
    if not isinstance(message, list):
        return message
    try:
        tag, *rest = message
        if tag in _CONTAINERS:
            return _CONTAINERS[tag](unpack(item, other) for item in rest[0])
        if tag in _OTHERS:
            return _OTHERS[tag](*(unpack(part, other) for part in rest[0]))
        match tag:
            case "i":
                return int(rest[0], 16)
            case "b":
                data = rest[0].encode("latin-1")
                return bytearray(data) if rest[1] else data
            case "d":
                return {unpack(key, other): unpack(value, other) for key, value in rest[0]}
            case "a":
                import numpy

                return numpy.frombuffer(rest[2].encode("latin-1"), numpy.dtype(rest[0])).reshape(rest[1]).copy()
        return other(message)
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"no value: {type(error).__name__}") from None


@dataclass(frozen=True)
class Order:
    """What is to be executed.

    Attributes:
      role: "script": the program reads and writes the standard streams; "calls": a checker calls a function of it;
        "names": a test program of the checker's uses its names.
      limits_s: of each case; of a script, the first.
      default_limit_s: of loading, and of all cases where there are none of those; else the last is of cases beyond.
      command: what runs the program's text, in place of Python.
    """

    role: str
    limits_s: Sequence[float]
    default_limit_s: float
    means: Means
    limits: Limits
    command: Sequence[str] = ()

    def limit_s(self, case: int) -> float:
        return self.limits_s[min(case, len(self.limits_s) - 1)] if self.limits_s else self.default_limit_s


@dataclass
class Execution:
    """What running one program came to.

    Attributes:
      end: exit; time, output or memory: a limit ended it. code: its exit code, where end is exit.
      seconds: that a script ran, and of tests, that the last case which began did.
      output, errors: what it wrote; of errors the last part.
      cases: how many its tests have; None of a script, or if the tests did not begin.
      results: (case, whether it was right, seconds, why not) of each that ended. running: one that did not.
      loaded: whether the tested program was run to its end, so that it could be called.
      done: whether all cases were run. broken: why the tests are no Python.
    """

    end: str = ""
    code: int = 0
    seconds: float = 0.0
    output: str = ""
    errors: str = ""
    cases: int | None = None
    results: list[tuple[int, bool, float, str]] = field(default_factory=list)
    running: int | None = None
    loaded: bool = False
    done: bool = False
    broken: str = ""


def send_files(sock: socket.socket, *payloads: bytes) -> None:
    """Sends each payload as a file in memory that can be read and not written. Raises OSError."""
    fds: list[int] = []
    try:
        for payload in payloads:
            fds.append(os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            with open(fds[-1], "wb", closefd=False) as file:
                file.write(payload)
            fcntl.fcntl(fds[-1], fcntl.F_ADD_SEALS, _SEALS)
            os.lseek(fds[-1], 0, os.SEEK_SET)
        socket.send_fds(sock, [b"f"], fds)
    finally:
        for fd in fds:
            os.close(fd)


def receive_files(sock: socket.socket) -> list[int]:
    """The descriptors of the next files. Raises OSError: the other side is gone."""
    _, fds, _, _ = socket.recv_fds(sock, 1, 3)
    if not fds:
        raise OSError("it has ended")
    return list(fds)


def read_file(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()
