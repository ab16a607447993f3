"""The key-value store: small values that the processes of a run write for each other, and barriers.

`KeyValueStore` is what the rest sees. `CoordinationStore` keeps it in the key-value store of `jax.distributed`, which
lives in process 0; its client is a private part of jax, and no other file imports it. `MemoryStore` is for a run of one
process, and for several threads that stand for processes.

Departures from the store: a value of more than `PIECE_BYTES` is written in pieces, because one call with a very large
value keeps the connection from heartbeats until the world is given up. Nothing waits without end: `get` and `barrier`
have a time of their own; a call that has none (`put`, `folder`, `delete`) hangs where process 0 is suspended, until a
heartbeat is missed and the process ends (`jaxrl.runtime.hosts.liveness` before that, with a sentence).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from jaxrl.config import ConfigError
from jaxrl.types import RunFailed

T = TypeVar("T")

PIECE_BYTES = 2**18  # written in 6 to 12 ms; a heartbeat waits that long at the most
_WHOLE, _SPLIT = b"\0", b"\1"  # before a value: all of it; how many pieces it has
_OURS = "jaxrl/"  # jax and Orbax write in the same store
_PIECES = "/ pieces/"  # behind a key: below it, so that they go with it in one call
_TRANSIENT = ("UNAVAILABLE", "ABORTED", "RESOURCE_EXHAUSTED")
_RETRY_AFTER_S = (0.05, 0.2, 0.8)
_MISSING = re.compile(r"task names:\n(.*?)(?:\n\n|\Z)", re.DOTALL)


class StoreFailed(RunFailed):
    """The store cannot be read or written: process 0, which keeps it, has gone or does not answer."""


class KeyTaken(Exception):
    """A key has been written before."""


class MissingHosts(RunFailed):
    """Not all processes came to a barrier in time.

    Attributes:
      processes: who did not come, ascending; it may be a part of them, and empty where it is not known.
      timeout_s: for how long they were waited for.
    """

    def __init__(self, name: str, processes: Sequence[int], timeout_s: float) -> None:
        self.processes, self.timeout_s = tuple(sorted(processes)), timeout_s
        who = ", ".join(map(str, self.processes)) or "some"
        super().__init__(f"process {who} did not come to {name} within {timeout_s:g} s")


class Disagreement(ConfigError):
    """What the hosts were given does not go together. Each process raises it, with the same sentence."""


class KeyValueStore(Protocol):
    """What the processes of a run write for each other.

    Attributes:
      process: the number of this one.
      num_processes: how many there are.
    """

    process: int
    num_processes: int

    def put(self, key: str, value: bytes) -> None:
        """Writes a key, once. Raises KeyTaken if it is there."""
        ...

    def replace(self, key: str, value: bytes) -> None:
        """Writes a key, in place of what is there. The value has at most `PIECE_BYTES`."""
        ...

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value of a key, as soon as it is there; None: not in time. With 0 s nothing is waited for."""
        ...

    def folder(self, prefix: str) -> list[tuple[str, bytes]]:
        """The keys below `prefix/` with their values, sorted, as they are now."""
        ...

    def delete(self, key_or_prefix: str) -> None:
        """Removes a key, and all keys below it."""
        ...

    def barrier(self, name: str, timeout_s: float) -> None:
        """Returns when all processes have called it with this name, which is used once; raises MissingHosts."""
        ...


class CoordinationStore:
    """The store of the world that `jax.distributed` has opened (the client's calls are those of jax 0.10 and 0.11)."""

    def __init__(self) -> None:
        from jax._src import distributed

        state = distributed.global_state
        assert state.client is not None, "jax.distributed is not initialized"
        self.process, self.num_processes = state.process_id, state.num_processes
        self._client: Any = state.client

    def put(self, key: str, value: bytes) -> None:
        if len(value) < PIECE_BYTES:
            self._write(f"{_OURS}{key}", _WHOLE + value)
            return
        pieces = [value[i : i + PIECE_BYTES] for i in range(0, len(value), PIECE_BYTES)]
        for i, piece in enumerate(pieces):
            self._write(f"{_OURS}{key}{_PIECES}{i}", piece)
        self._write(f"{_OURS}{key}", _SPLIT + len(pieces).to_bytes(4))

    def replace(self, key: str, value: bytes) -> None:
        assert len(value) <= PIECE_BYTES, f"{key}: {len(value)} bytes"
        name = f"{_OURS}{key}"
        self._call(f"writing {key}", lambda: self._client.key_value_set_bytes(name, _WHOLE + value, True))

    def get(self, key: str, timeout_s: float) -> bytes | None:
        found = self._read(f"{_OURS}{key}", timeout_s)
        return None if found is None else self._joined(key, found)

    def folder(self, prefix: str) -> list[tuple[str, bytes]]:
        name = f"{_OURS}{prefix.rstrip('/')}/"
        found = self._call(f"reading {name}", lambda: self._client.key_value_dir_get_bytes(name)) or []
        ours = [(key.removeprefix(_OURS), value) for key, value in found if _PIECES not in key]
        return sorted((key, self._joined(key, value)) for key, value in ours)

    def delete(self, key_or_prefix: str) -> None:
        name = f"{_OURS}{key_or_prefix.rstrip('/')}"
        self._call(f"removing {name}", lambda: self._client.key_value_delete(name))

    def barrier(self, name: str, timeout_s: float) -> None:
        try:
            self._client.wait_at_barrier(f"{_OURS}{name}", _ms(timeout_s))
        except Exception as error:
            code, text = _said(error)
            if code != "DEADLINE_EXCEEDED":
                raise StoreFailed(f"the barrier {name} failed: {_short(text)}") from error
            raise MissingHosts(name, _missing_processes(text), timeout_s) from None

    def _write(self, key: str, value: bytes) -> None:
        """One call. Where an earlier try of ours was heard though its answer was lost, the key is there already."""
        tries = 0

        def write() -> None:
            nonlocal tries
            tries += 1
            self._client.key_value_set_bytes(key, value)

        try:
            self._call(f"writing {key}", write)
        except KeyTaken:
            if tries == 1 or self._read(key, 0) != value:
                raise

    def _read(self, key: str, timeout_s: float) -> bytes | None:
        def read() -> bytes:
            if timeout_s > 0:
                return self._client.blocking_key_value_get_bytes(key, _ms(timeout_s))
            return self._client.key_value_try_get_bytes(key)

        # a wait is not begun again: where the store has gone, whoever listens must hear it before jax aborts
        return self._call(f"reading {key}", read, tries=1 if timeout_s > 0 else 4)

    def _joined(self, key: str, found: bytes) -> bytes:
        if found[:1] == _WHOLE:
            return found[1:]
        pieces = [self._read(f"{_OURS}{key}{_PIECES}{i}", 0) for i in range(int.from_bytes(found[1:]))]
        if any(piece is None for piece in pieces):
            raise StoreFailed(f"reading {key}: it was removed meanwhile")
        return b"".join(piece for piece in pieces if piece is not None)

    def _call(self, what: str, call: Callable[[], T], tries: int = 4) -> T | None:
        """What `call` returns; None where the key is not there, or not in time."""
        for wait_s in (*_RETRY_AFTER_S[: tries - 1], None):
            try:
                return call()
            except Exception as error:
                code, text = _said(error)
                if code in ("DEADLINE_EXCEEDED", "NOT_FOUND"):
                    return None
                if code == "ALREADY_EXISTS":
                    raise KeyTaken(what) from None
                if code not in _TRANSIENT or wait_s is None:
                    raise StoreFailed(f"process 0 does not answer ({what}: {_short(text)})") from error
                time.sleep(wait_s)
        raise AssertionError


def _ms(timeout_s: float) -> int:
    return max(1, round(timeout_s * 1000))


def _said(error: Exception) -> tuple[str, str]:
    """The code and the text of an error of the client's. Anything else is a bug, and raised again."""
    text = str(error)
    code = text.partition(":")[0]
    if not isinstance(error, RuntimeError) or not code.isupper():
        raise error
    return code, text


def _short(text: str) -> str:
    return text.partition("\n")[0].partition(" [type.googleapis")[0]


def _missing_processes(text: str) -> list[int]:
    """Who the store says has not come, in an error such as `... Some timed out task names:` and a number per line; in
    some versions names end in `task:1`."""
    found = _MISSING.search(text)
    return [int(number) for number in re.findall(r"(\d+)\s*$", found[1], re.MULTILINE)] if found else []


class MemoryStore:
    """A store in memory, for threads of this process; `MemoryStore.of(4)` makes one for each of four."""

    def __init__(self, process: int = 0, num_processes: int = 1, shared: _Shared | None = None) -> None:
        self.process, self.num_processes = process, num_processes
        self._shared = shared or _Shared()

    @staticmethod
    def of(num_processes: int) -> list[MemoryStore]:
        shared = _Shared()
        return [MemoryStore(i, num_processes, shared) for i in range(num_processes)]

    def put(self, key: str, value: bytes) -> None:
        with self._shared.changed:
            if key in self._shared.values:
                raise KeyTaken(key)
            self._shared.values[key] = value
            self._shared.changed.notify_all()

    def replace(self, key: str, value: bytes) -> None:
        assert len(value) <= PIECE_BYTES, f"{key}: {len(value)} bytes"
        with self._shared.changed:
            self._shared.values[key] = value
            self._shared.changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes | None:
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: key in self._shared.values, timeout_s)
            return self._shared.values.get(key)

    def folder(self, prefix: str) -> list[tuple[str, bytes]]:
        below = f"{prefix.rstrip('/')}/"
        with self._shared.changed:
            return sorted((key, value) for key, value in self._shared.values.items() if key.startswith(below))

    def delete(self, key_or_prefix: str) -> None:
        name = key_or_prefix.rstrip("/")
        with self._shared.changed:
            values = self._shared.values
            for key in [key for key in values if key == name or key.startswith(f"{name}/")]:
                del values[key]

    def barrier(self, name: str, timeout_s: float) -> None:
        with self._shared.changed:
            here = self._shared.barriers.setdefault(name, set())
            here.add(self.process)
            self._shared.changed.notify_all()
            done = self._shared.changed.wait_for(
                lambda: len(here) == self.num_processes or name in self._shared.broken, timeout_s
            )
            if not done:
                self._shared.broken[name] = tuple(sorted(set(range(self.num_processes)) - here))
                self._shared.changed.notify_all()
            if name in self._shared.broken:  # who comes later finds it broken, as in the store
                raise MissingHosts(name, self._shared.broken[name], timeout_s)


class _Shared:
    """What the stores of one `MemoryStore.of` have in common."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: dict[str, bytes] = {}
        self.barriers: dict[str, set[int]] = {}
        self.broken: dict[str, tuple[int, ...]] = {}
