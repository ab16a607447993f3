"""Messages between processes of one run: bytes over a stream socket, each message with its length in front.

A worker runs foreign code, which may write anything into its socket. So what it sends is never unpickled: a message
above its cap is refused before it is read, and its text must be a JSON object, whose fields the reader checks. What is
sent down to workers may be a pickle: that direction is trusted.
"""

from __future__ import annotations

import json
import socket
import struct
from asyncio import IncompleteReadError, StreamReader
from typing import Any

MAX_BYTES = (1 << 32) - 1
"""The longest message that a length can announce: for a sender that is trusted."""

_HEADER = struct.Struct("!I")


class BadMessage(Exception):
    """The sender has sent no message, or an unexpected one: nothing else that it sends counts."""


def framed(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload)) + payload


def send_message(sock: socket.socket, payload: bytes) -> None:
    """Writes one message, and waits until the socket has taken it."""
    sock.sendall(framed(payload))


def receive_message(sock: socket.socket, max_bytes: int = MAX_BYTES) -> bytes | None:
    """Waits for the next message; None when the sender has closed. Raises BadMessage for a length above the cap."""
    header = _read_exactly(sock, _HEADER.size)
    return None if header is None else _read_exactly(sock, _length(header, max_bytes))


async def read_message(reader: StreamReader, max_bytes: int = MAX_BYTES) -> bytes | None:
    """The same for a stream of asyncio."""
    try:
        return await reader.readexactly(_length(await reader.readexactly(_HEADER.size), max_bytes))
    except (IncompleteReadError, OSError):
        return None


def read_json(payload: bytes) -> dict[str, Any]:
    """A message's JSON object. Raises BadMessage for anything else."""
    try:
        message = json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"bytes that are no JSON ({error})"[:200]) from None
    if not isinstance(message, dict):
        raise BadMessage(f"JSON of type {type(message).__name__}, where an object is expected")
    return message


def to_json(message: dict[str, Any]) -> bytes:
    return json.dumps(message, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def _length(header: bytes, max_bytes: int) -> int:
    (length,) = _HEADER.unpack(header)
    if length > max_bytes:
        raise BadMessage(f"a message of {length} bytes, where {max_bytes} are the most")
    return length


def _read_exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(min(count - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
