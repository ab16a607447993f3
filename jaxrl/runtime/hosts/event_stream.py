"""How processes exchange what happened in a round: notices to process 0, and one stream of events from it to all.

Purpose: `EventStream` carries the notices and items of `jaxrl.runtime.hosts.notices` over a store of small
values that all processes can read (`jax.distributed` has one). What is sent between two pumps goes as one value.
Reading never waits, but for `wait`, which is woken by the very value that is needed next.

Keys: ``<name>/notices/<process>/<number>`` and ``<name>/items/<number>``. Process 0 removes a notice once it has read
it, and a batch of the stream once all others have said that they have. So the store does not grow with the run.

Rounds are counted by every process for itself. A process may be a round ahead of process 0, which keeps its notices
until it is there; notices and items of a round that was dropped are left out.

Source: docs/architecture.md (measured: a value of 1 KB is read and acknowledged by all within 0.6 ms in 2 processes and
13 ms in 12; very large values keep heartbeats waiting, hence `MAX_BATCH_BYTES`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxrl.runtime.hosts.notices import Batch, Decided, Failed, Item, Notice, decode, encode, joined

MAX_BATCH_BYTES = 128 * 1024
"""A batch is cut where it would be larger; one notice may be, with a verdict of many words."""
MAX_UNREAD = 16
"""Batches of the stream after which a process that has nothing to send says how far it has read."""


class StreamStore(Protocol):
    """What the stream needs of `jaxrl.runtime.hosts.key_value_store.KeyValueStore`."""

    process: int
    num_processes: int

    def put(self, key: str, value: bytes, /) -> None: ...

    def get(self, key: str, timeout_s: float, /) -> bytes | None: ...

    def folder(self, prefix: str, /) -> list[tuple[str, bytes]]: ...

    def delete(self, key_or_prefix: str, /) -> None: ...


class EventStream:
    """Messages between the processes of a run; process 0 leads.

    Args:
      store: of all processes.
      name: what its keys begin with; the same in all processes, and new in each world.
      clock: seconds from any origin.
      stalls_s, stalled: what is called with (process, seconds) once nothing that was waited for has come from that
        process for so many seconds.
      waited: called after each wait.

    Attributes:
      process, num_processes: of the store.
    """

    def __init__(
        self,
        store: StreamStore,
        name: str = "stream",
        clock: Callable[[], float] = time.perf_counter,
        stalls_s: float = math.inf,
        stalled: Callable[[int, float], None] = lambda process, seconds: None,
        waited: Callable[[], None] = lambda: None,
    ) -> None:
        self.process, self.num_processes = store.process, store.num_processes
        self._store, self._name, self._clock = store, name, clock
        self._stalls_s, self._stalled, self._waited = stalls_s, stalled, waited
        self._waits: tuple[int, float] | None = None  # for whom, and since when nothing has come
        self._round = 0
        self._outgoing: list[Notice | Item] = []  # since the last pump
        self._num_written = 0  # batches, of this process
        self._notices: deque[tuple[int, int, Notice]] = deque()  # (round, process, notice)
        self._items: deque[tuple[int, Item]] = deque()  # (round, item)
        self._num_read = [0] * self.num_processes  # process 0: notices of each; others: in [0], batches of the stream
        self._num_acknowledged = 0
        self._read_by = [0] * self.num_processes  # batches of the stream that each process says it has read
        self._num_removed = 0
        self._bytes, self._batches, self._pump_s = 0, 0, 0.0
        self._waited_s = [0.0] * self.num_processes

    @property
    def _leads(self) -> bool:
        return self.process == 0

    def begin(self) -> None:
        """A round begins: what is sent from here on belongs to it."""
        self.pump()
        self._round += 1

    def send(self, notice: Notice) -> None:
        """Sends a notice to process 0; of a process other than it."""
        assert not self._leads, "process 0 sends itself nothing"
        self._outgoing.append(notice)

    def decided(self, step: int, kind: str, key: tuple[int, ...], decision: Mapping[str, Any]) -> None:
        """Sends process 0 what a clock has decided here (`jaxrl.record.journal.Tell`). It takes effect here at once:
        process 0 reads notices in their order, so it is on its disk before it receives anything that followed."""
        self.send(Decided(step, kind, key, decision))

    def publish(self, item: Item) -> None:
        """Sends an item to all others; of process 0."""
        assert self._leads, "only process 0 publishes"
        self._outgoing.append(item)

    def fail(self, why: str) -> None:
        """This process fails, and leaves; the others see it where they next look."""
        self._outgoing.append(Failed(self.process, why))
        self.pump()

    def pump(self) -> None:
        """Writes what was sent or published, and receives what has come; never waits."""
        began = self._clock()
        self._flush()
        if self._leads:
            self._receive_notices()
            self._remove_read()
        else:
            while self._receive_item(0.0):
                pass
            if self._num_read[0] - self._num_acknowledged >= MAX_UNREAD:
                self._write([])
        self._pump_s += self._clock() - began

    def wait(self, timeout_s: float, process: int | None = None) -> None:
        """The same; waits for something to come: in process 0, from that process, unless something that came before has
        not been taken (`notices`)."""
        self._flush()
        if any(at == self._round for at, _, _ in self._notices):
            self._waits = None
            return
        began, awaited, before = self._clock(), 0, list(self._num_read)
        if self._leads:
            assert process, "process 0 waits for another process"
            awaited = process
            self._store.get(self._notice_key(process, self._num_read[process]), timeout_s)
        elif not self._items:
            self._receive_item(timeout_s)
        self._waited_s[awaited] += self._clock() - began
        self._waited()
        self.pump()
        if self._num_read[awaited] > before[awaited] or self._waits is None or self._waits[0] != awaited:
            self._waits = awaited, self._clock()
        elif self._clock() - self._waits[1] > self._stalls_s:
            self._stalled(awaited, self._clock() - self._waits[1])

    def notices(self) -> list[tuple[int, Notice]]:
        """Of this round, what has come to process 0, with the process that sent it; they are forgotten here."""
        found = [(process, notice) for at, process, notice in self._notices if at == self._round]
        self._notices = deque(each for each in self._notices if each[0] > self._round)
        return found

    def next_item(self) -> Item | None:
        """The next item of the stream that has come; of a process other than 0."""
        while self._items:
            at, item = self._items.popleft()
            if at == self._round or isinstance(item, Failed):
                return item
            assert at < self._round, f"round {self._round}, and the stream is in round {at}"
        return None

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: `hosts/stream_batches` and `hosts/stream_bytes` that this process has written,
        `hosts/stream_s`, the seconds that writing and reading took, `hosts/waited_s`, those in which it has waited for
        others, and of process 0 `hosts/slowest`, the process that it has waited for longest."""
        found = {
            "hosts/stream_batches": float(self._batches),
            "hosts/stream_bytes": float(self._bytes),
            "hosts/stream_s": self._pump_s,
            "hosts/waited_s": sum(self._waited_s),
        }
        if self._leads:
            found["hosts/slowest"] = float(max(range(self.num_processes), key=self._waited_s.__getitem__))
        self._bytes, self._batches, self._pump_s = 0, 0, 0.0
        self._waited_s = [0.0] * self.num_processes
        return found

    # -- inside ------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Writes what was sent, in as few batches as their size allows."""
        messages, self._outgoing = self._outgoing, []
        parts: list[str] = []
        size = 0
        for part in encode(Batch(self._round, 0, messages)):
            if parts and size + len(part) > MAX_BATCH_BYTES:
                self._write(parts)
                parts, size = [], 0
            parts.append(part)
            size += len(part)
        if parts:
            self._write(parts)

    def _write(self, parts: list[str]) -> None:
        value = joined(Batch(self._round, self._num_read[0]), parts)
        self._num_acknowledged = self._num_read[0]
        number, self._num_written = self._num_written, self._num_written + 1
        self._store.put(self._item_key(number) if self._leads else self._notice_key(self.process, number), value)
        self._batches += 1
        self._bytes += len(value)

    def _receive_notices(self) -> None:
        for key, value in self._store.folder(f"{self._name}/notices"):
            process, number = map(int, key.split("/")[-2:])
            assert number == self._num_read[process], f"{key}: notice {self._num_read[process]} of it is due"
            self._num_read[process] += 1
            self._store.delete(key)
            batch = decode(value)
            self._read_by[process] = batch.read
            for notice in batch.messages:
                at = self._round if isinstance(notice, Failed) else batch.round
                self._notices.append((at, process, notice))  # type: ignore[arg-type]

    def _remove_read(self) -> None:
        """Removes the batches of the stream that all others have read."""
        for number in range(self._num_removed, min(self._read_by[1:], default=self._num_written)):
            self._store.delete(self._item_key(number))
            self._num_removed = number + 1

    def _receive_item(self, timeout_s: float) -> bool:
        value = self._store.get(self._item_key(self._num_read[0]), timeout_s)
        if value is None:
            return False
        self._num_read[0] += 1
        batch = decode(value)
        self._items.extend((batch.round, item) for item in batch.messages)  # type: ignore[misc]
        return True

    def _notice_key(self, process: int, number: int) -> str:
        return f"{self._name}/notices/{process:05d}/{number:012d}"

    def _item_key(self, number: int) -> str:
        return f"{self._name}/items/{number:012d}"
