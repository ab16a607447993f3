"""What every store must do, for the one in memory and the one of jax.distributed; and hosts that are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.runtime.hosts.key_value_store import PIECE_BYTES, KeyTaken, KeyValueStore, MemoryStore, MissingHosts
from jaxrl.runtime.hosts.liveness import PhaseBarrier


def check_store(store: KeyValueStore) -> None:
    """Run by all processes of a world at once."""
    me, num = store.process, store.num_processes
    other = (me + 1) % num
    store.barrier("begin", 20)
    assert store.get(f"none/{me}", 0) is None
    began_s = time.monotonic()
    assert store.get(f"none/{me}", 0.3) is None
    assert 0.2 < time.monotonic() - began_s < 5
    values = [b"", b"\0\1\xff", b"a" * (PIECE_BYTES - 1), b"b" * PIECE_BYTES, bytes(range(256)) * 4096]
    for i, value in enumerate(values):
        store.put(f"value/{i}/{me}", value)
    for i, value in enumerate(values):
        assert store.get(f"value/{i}/{other}", 20) == value
    taken = False
    try:
        store.put(f"value/0/{me}", b"again")
    except KeyTaken:
        taken = True
    assert taken
    store.barrier("all have written", 20)
    assert store.folder("value/0") == [(f"value/0/{each}", b"") for each in range(num)]
    assert [(key, len(value)) for key, value in store.folder("value/4")] == [
        (f"value/4/{each}", 2**20) for each in range(num)
    ]
    assert store.folder("value/0/") == store.folder("value/0")
    assert store.folder("val") == []
    store.replace(f"place/{me}", b"1")
    store.replace(f"place/{me}", b"2")
    assert store.get(f"place/{me}", 0) == b"2"
    store.barrier("all have read", 20)
    if me == 0:
        store.put("value/00", b"stays")
        store.delete("value/0")
        store.delete("value/4/0")
        store.delete("nothing")
    store.barrier("some are removed", 20)
    assert store.folder("value/0") == []
    assert store.get("value/00", 0) == b"stays"
    assert store.get(f"value/1/{other}", 0) == values[1]
    assert store.get("value/4/0", 0) is None
    store.barrier("all have looked", 20)
    if me == 0:
        store.put("value/4/0", values[4])  # a key that was removed can be written again, pieces and all
    assert store.get("value/4/0", 20) == values[4]
    if num > 1:
        check_barriers(store)


def check_barriers(store: KeyValueStore) -> None:
    me, num = store.process, store.num_processes
    missing: tuple[int, ...] = ()
    began_s = time.monotonic()
    if me != num - 1:
        try:
            store.barrier("without the last", 0.5)
        except MissingHosts as error:
            missing = error.processes
        assert missing == (num - 1,)
        assert 0.4 < time.monotonic() - began_s < 10
    store.barrier("the world lives on", 20)


@dataclass
class Ended:
    """How a thread that stands for a process ended."""

    sentence: str
    status: int
    at_s: float


@dataclass
class Hosts:
    """Gates of several threads, named `host-a`, `host-b`, ...; `ends` has how each process ended."""

    num: int = 2
    heartbeat_s: float = 20.0
    stall_timeout_s: float = 10.0
    later_s: float = 3.0
    wrap: Callable[[MemoryStore], Any] = lambda store: store
    wishes: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ends: dict[int, Ended] = {}
        self.stores = [self.wrap(store) for store in MemoryStore.of(self.num)]
        self.barriers = [self._barrier(i) for i in range(self.num)]

    def _barrier(self, i: int) -> PhaseBarrier:
        def end(sentence: str, status: int) -> None:
            self.ends.setdefault(i, Ended(sentence, status, time.monotonic()))
            threading.Event().wait()  # the thread goes no further, as in a process that has ended

        host = f"host-{chr(ord('a') + i)}"
        return PhaseBarrier(
            self.stores[i],
            host,
            self.heartbeat_s,
            self.stall_timeout_s,
            lambda: i in self.wishes,
            end,
            later_s=self.later_s,
        )

    def run(self, does: Callable[[PhaseBarrier], Any] | Sequence[Callable[[PhaseBarrier], Any]]) -> dict[int, Any]:
        """What each process's function returned, for those that did not end; waits until each has done either."""
        functions = [does] * self.num if callable(does) else does
        returned: dict[int, Any] = {}
        errors: list[BaseException] = []

        def body(i: int) -> None:
            try:
                returned[i] = functions[i](self.barriers[i])
            except BaseException as error:
                errors.append(error)

        for i in range(self.num):
            threading.Thread(target=body, args=(i,), daemon=True).start()
        until_s = time.monotonic() + 60
        while not errors and len(returned.keys() | self.ends.keys()) < self.num:
            assert time.monotonic() < until_s, f"returned {returned}, ended {self.ends}"
            time.sleep(0.005)
        if errors:
            raise errors[0]
        return returned

    def close(self) -> None:
        """All threads of the barriers end, but for those in which a process has ended."""
        if not self.ends:
            self.run(PhaseBarrier.close)
        for barrier in self.barriers:
            barrier._closed.set()
            barrier._failures._closed.set()

    def all_ended(self) -> Ended:
        """Waits until every process has ended; they must have ended alike."""
        until_s = time.monotonic() + 30
        while len(self.ends) < self.num:
            assert time.monotonic() < until_s, f"ended: {self.ends}"
            time.sleep(0.005)
        said = {(each.sentence, each.status) for each in self.ends.values()}
        assert len(said) == 1, said
        return self.ends[0]
