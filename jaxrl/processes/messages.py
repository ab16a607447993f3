"""What crosses the sockets between processes of one run: messages of bytes, each with its length in front.

A worker runs foreign code, which may write anything into its socket. So what it sends is never unpickled: a message
above its cap is refused before it is read, and its text must be a JSON object, whose fields the reader checks. What is
sent down to workers may be a pickle: that direction is trusted.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

MAX_ANSWER_BYTES = 1 << 20
"""The longest answer of a worker, as JSON text: it may hold a scorer's long text, and no data."""
HEADROOM_BYTES = 4096
"""What comes around an answer in a message."""
MAX_REQUEST_BYTES = (1 << 32) - 1
"""The longest that a length can say: for a sender that is trusted."""
TASK_ID_BYTES = 16

_TASK = struct.Struct(f"!{TASK_ID_BYTES}sd")
_HEADER = struct.Struct("!I")
_READ_BYTES = 1 << 16
_READS = 16  # per look, so that a flood from one socket does not keep its reader from the others


class BadMessage(Exception):
    """What came is no message, or not one that is expected: the sender is not to be listened to any more."""


def _above(length: int, most: int) -> BadMessage:
    return BadMessage(f"a message of {length} bytes, where {most} are the most")


class Channel:
    """Messages over one stream socket, without ever waiting. `ended`: whether the other side has closed, or is gone."""

    def __init__(self, sock: socket.socket, max_bytes: int):
        sock.setblocking(False)
        self.sock = sock
        self.ended = False
        self._max_bytes = max_bytes
        self._in = bytearray()
        self._out = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._out)

    def send(self, payload: bytes) -> None:
        """Queues a message, and writes what the socket takes now; `flush` writes the rest."""
        self._out += _HEADER.pack(len(payload)) + payload
        self.flush()

    def flush(self) -> None:
        try:
            while self._out:
                del self._out[: self.sock.send(memoryview(self._out)[: 1 << 20])]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.ended = True
            self._out.clear()

    def receive(self) -> Iterator[bytes]:
        """The whole messages that have come; raises BadMessage for a length above the cap."""
        for _ in range(_READS):
            try:
                data = self.sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                self.ended = True
                break
            self._in += data
            if len(data) < _READ_BYTES:
                break
        while len(self._in) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._in)
            if length > self._max_bytes:
                raise _above(length, self._max_bytes)
            if len(self._in) < _HEADER.size + length:
                break
            payload = bytes(self._in[_HEADER.size : _HEADER.size + length])
            del self._in[: _HEADER.size + length]
            yield payload

    def close(self) -> None:
        self.ended = True
        with contextlib.suppress(OSError):
            self.sock.close()


def receive_message(sock: socket.socket, max_bytes: int = MAX_REQUEST_BYTES) -> bytes | None:
    """Waits for the next message; None when the sender has closed. Raises BadMessage for a length above the cap."""
    header = _read_exactly(sock, _HEADER.size)
    if header is None:
        return None
    (length,) = _HEADER.unpack(header)
    if length > max_bytes:
        raise _above(length, max_bytes)
    return _read_exactly(sock, length)


def _read_exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(min(count - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def send_message(sock: socket.socket, payload: bytes) -> None:
    """Writes one message, and waits until the socket has taken it."""
    sock.sendall(_HEADER.pack(len(payload)) + payload)


def task_message(task_id: str, limit_s: float, request: bytes) -> bytes:
    """A task for a supervisor and its worker: its id, its time limit (0: none), and the pickled request."""
    return _TASK.pack(task_id.encode(), limit_s) + request


def read_task(payload: bytes) -> tuple[str, float, bytes]:
    task_id, limit_s = _TASK.unpack_from(payload)
    return task_id.decode(), limit_s, payload[_TASK.size :]


def read_message(payload: bytes) -> dict[str, Any]:
    """A message's JSON object. Raises BadMessage for anything else."""
    try:
        message = json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"bytes that are no JSON ({error})"[:200]) from None
    if not isinstance(message, dict):
        raise BadMessage(f"JSON of type {type(message).__name__}, where an object is expected")
    return message


def to_bytes(message: dict[str, Any]) -> bytes:
    return json.dumps(message, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
