"""What crosses the sockets between trainer, wardens and workers: frames of bytes, each with its length in front.

A worker runs foreign code, which may write anything into its socket. So what it sends is never unpickled: a frame above
its cap is refused before it is read, and the text in it must be JSON with the fields of a verdict and values in their
bounds (`read_scored`). What the trainer sends down may be a pickle: that direction is trusted.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:  # numpy comes with it, and what only carries frames has no use for that
    from jaxrl.rewards.scorers import Scored

MAX_VERDICT_BYTES = 1 << 20
"""The longest verdict, as JSON text: its info may hold a long judgement, and no data."""
TASK_ID_BYTES = 16

_TASK = struct.Struct(f"!{TASK_ID_BYTES}sd")
_HEADER = struct.Struct("!I")
_READ_BYTES = 1 << 16
_READS = 16  # per look, so that a flood from one socket does not keep its reader from the others


class BadFrame(Exception):
    """What came is no frame, or no verdict: the sender is not to be listened to any more."""


class Channel:
    """Frames over one stream socket, without ever waiting.

    Attributes:
      ended: whether the other side has closed, or is gone.
    """

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
        """Queues a frame, and writes what the socket takes now; `flush` writes the rest."""
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
        """The whole frames that have come; raises BadFrame for a length above the cap."""
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
                raise BadFrame(f"a message of {length} bytes, where {self._max_bytes} are the most")
            if len(self._in) < _HEADER.size + length:
                break
            payload = bytes(self._in[_HEADER.size : _HEADER.size + length])
            del self._in[: _HEADER.size + length]
            yield payload

    def close(self) -> None:
        self.ended = True
        with contextlib.suppress(OSError):
            self.sock.close()


def read_frame(sock: socket.socket) -> bytes | None:
    """Waits for the next frame of a trusted sender; None when it has closed."""
    header = _read_exactly(sock, _HEADER.size)
    return None if header is None else _read_exactly(sock, _HEADER.unpack(header)[0])


def _read_exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def write_frame(sock: socket.socket, payload: bytes) -> None:
    """Writes one frame, and waits until the socket has taken it."""
    sock.sendall(_HEADER.pack(len(payload)) + payload)


def task_frame(task_id: str, limit_s: float, request: bytes) -> bytes:
    """A sample for a keeper and its worker: the task's id, its time limit (0: none), and the pickled request."""
    return _TASK.pack(task_id.encode(), limit_s) + request


def read_task(frame: bytes) -> tuple[str, float, bytes]:
    """The reverse of `task_frame`."""
    task_id, limit_s = _TASK.unpack_from(frame)
    return task_id.decode(), limit_s, frame[_TASK.size :]


def read_message(payload: bytes) -> dict[str, Any]:
    """A frame's JSON object. Raises BadFrame for anything else."""
    try:
        message = json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"bytes that are no JSON ({error})"[:200]) from None
    if not isinstance(message, dict):
        raise BadFrame(f"JSON of type {type(message).__name__}, where an object is expected")
    return message


def read_scored(message: dict[str, Any]) -> Scored:
    """The verdict in a message, with every value in its bounds. Raises BadFrame for anything else."""
    status, reward = message.get("status"), message.get("reward")
    info, duration_s = message.get("info"), message.get("duration_s")
    if status not in ("ok", "error", "timeout", "crash"):
        raise BadFrame(f"a verdict with the status {status!r:.100}")
    if not _is_finite(reward) or not _is_finite(duration_s) or cast(float, duration_s) < 0:
        raise BadFrame(f"a verdict with the reward {reward!r:.100} after {duration_s!r:.100} s")
    if not isinstance(info, dict):
        raise BadFrame(f"a verdict with info of type {type(info).__name__}")
    try:  # neither infinite numbers (`1e999`) nor halves of surrogate pairs: no file of the run could hold them
        json.dumps(info, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a verdict with info that cannot be recorded ({error})"[:200]) from None
    return status, float(cast(float, reward)), info, float(cast(float, duration_s))


def message_of(scored: Scored, task_id: str) -> dict[str, Any]:
    status, reward, info, duration_s = scored
    return {"task": task_id, "status": status, "reward": reward, "info": info, "duration_s": duration_s}


def to_bytes(message: dict[str, Any]) -> bytes:
    return json.dumps(message, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300 and isfinite(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
