"""Batches over a store: their order, rounds that are not level, sizes, what stays, and the journal of process 0."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from jaxrl.record.journal import Journal
from jaxrl.runtime.hosts.event_stream import MAX_BATCH_BYTES, MAX_UNREAD, EventStream
from jaxrl.runtime.hosts.notices import Decided, Failed, LowWatermark, Stop


@dataclass
class PlainBoard:
    """A store in one thread: nothing comes while it is waited for."""

    process: int
    num_processes: int
    values: dict[str, bytes]
    waited: list[tuple[str, float]] = field(default_factory=list)

    def put(self, key: str, value: bytes) -> None:
        assert key not in self.values
        self.values[key] = value

    def get(self, key: str, timeout_s: float) -> bytes | None:
        if timeout_s:
            self.waited.append((key, timeout_s))
        return self.values.get(key)

    def folder(self, prefix: str) -> list[tuple[str, bytes]]:
        return sorted((key, value) for key, value in self.values.items() if key.startswith(f"{prefix}/"))

    def delete(self, key_or_prefix: str) -> None:
        del self.values[key_or_prefix]


def build(count: int = 3) -> tuple[list[EventStream], list[PlainBoard]]:
    values: dict[str, bytes] = {}
    stores = [PlainBoard(process, count, values) for process in range(count)]
    streams = [EventStream(store, "s") for store in stores]
    for stream in streams:
        stream.begin()
    return streams, stores


def ticks(stream: EventStream) -> list[int]:
    """Of the low watermarks that have come."""
    found: list[int] = []
    stream.pump()
    while (item := stream.next_item()) is not None:
        assert isinstance(item, LowWatermark)
        found.append(item.tick)
    return found


def test_all_read_one_stream_and_process_0_all_notices():
    (first, second, third), stores = build()
    for tick in (3, 5):
        first.publish(LowWatermark(tick))
    first.pump()
    first.publish(LowWatermark(9))
    assert [ticks(second), ticks(third)] == [[3, 5], [3, 5]]
    third.send(Stop("third"))
    second.send(Stop("one"))
    second.pump()
    second.send(Stop("two"))
    third.pump()
    second.pump()
    first.pump()
    assert first.notices() == [(1, Stop("one")), (1, Stop("two")), (2, Stop("third"))]
    assert first.notices() == []
    assert [ticks(second), ticks(third)] == [[9], [9]]
    second.wait(2.0)
    first.wait(3.0, 2)
    assert stores[1].waited == [("s/items/000000000002", 2.0)]
    assert stores[0].waited == [("s/notices/00002/000000000001", 3.0)]


def test_a_process_may_be_a_round_ahead_and_what_was_dropped_is_left_out():
    (first, second, _), _ = build()
    second.send(Stop("of this round"))
    second.pump()
    second.begin()
    second.send(Stop("of the next"))
    second.pump()
    first.pump()
    assert first.notices() == [(1, Stop("of this round"))]
    first.publish(LowWatermark(1))
    first.begin()
    assert first.notices() == [(1, Stop("of the next"))]
    first.publish(LowWatermark(2))
    first.pump()
    assert ticks(second) == [2], "the other is of a round that is over"


def test_large_batches_are_cut_and_a_large_notice_goes_alone():
    (first, second, _), stores = build()
    sizes = [MAX_BATCH_BYTES // 3, MAX_BATCH_BYTES // 3, MAX_BATCH_BYTES // 2, MAX_BATCH_BYTES * 2, 10]
    for size in sizes:
        second.send(Stop("x" * size))
    second.pump()
    written = [len(value) for _, value in stores[0].folder("s/notices")]
    assert len(written) == 4
    assert sum(size < MAX_BATCH_BYTES for size in written) == 3
    first.pump()
    assert [len(notice.why) for _, notice in first.notices() if isinstance(notice, Stop)] == sizes


def test_nothing_stays_that_all_have_read():
    """Two hundred rounds of ten batches: what lies on the store at once does not grow."""
    (first, second, third), stores = build()
    most: list[int] = []
    for number in range(200):
        for tick in range(10):
            first.publish(LowWatermark(10 * number + tick))
            first.pump()
            second.send(Stop())
            second.pump()
            assert ticks(third) == [10 * number + tick], "it has nothing to send, and says how far it has read"
            while second.next_item() is not None:
                pass
        first.pump()
        assert len(first.notices()) == 10
        most.append(len(stores[0].values))
        for stream in (first, second, third):
            stream.begin()
    assert max(most) <= MAX_UNREAD + 12
    assert most[-1] <= max(most[:20])
    assert not first._notices
    assert not third._items


def test_what_has_come_is_not_waited_for():
    """The last pump before a wait may bring the very notice that is to be waited for."""
    (first, second, _), stores = build()
    second.send(Stop("full"))
    second.pump()
    first.pump()
    first.wait(5.0, 1)
    assert stores[0].waited == []
    assert first.notices() == [(1, Stop("full"))]
    first.wait(5.0, 1)
    assert stores[0].waited == [("s/notices/00001/000000000001", 5.0)]


def test_a_notice_of_a_later_round_is_no_reason_not_to_wait():
    (first, second, _), stores = build()
    second.begin()
    second.send(Stop("early"))
    second.pump()
    first.pump()
    first.wait(5.0, 2)
    assert stores[0].waited == [("s/notices/00002/000000000000", 5.0)]


def test_a_failure_is_heard_whatever_the_round():
    (first, second, third), _ = build()
    third.begin()
    third.begin()
    third.fail("RuntimeError: out of memory")
    first.pump()
    assert first.notices() == [(2, Failed(2, "RuntimeError: out of memory"))]
    first.begin()
    first.begin()
    first.begin()
    first.fail("as well")
    second.pump()
    assert second.next_item() == Failed(0, "as well")


def test_metrics():
    (first, second, _), _ = build()
    first.publish(LowWatermark(1))
    first.pump()
    second.wait(0.5)
    measured = first.take_metrics()
    assert (measured["hosts/stream_batches"], measured["hosts/slowest"]) == (1.0, 0.0)
    assert measured["hosts/stream_bytes"] == len(b'[1,1,0,[["f",1]]]')
    assert measured["hosts/stream_s"] > 0
    assert "hosts/slowest" not in second.take_metrics()
    assert first.take_metrics()["hosts/stream_bytes"] == 0


def test_a_journal_elsewhere_reads_the_file_and_tells_process_0(tmp_path: Path):
    (first, second, _), _ = build()
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, 4)
    journal.append(5, "layout", (0, 3), {"switch": None})
    journal.append(4, "layout", (0, 1), {"switch": 1})
    other = Journal(path, 4, begin=False, tell=second.decided)
    assert other.find(5, "layout", (0, 3)) == {"step": 5, "kind": "layout", "key": [0, 3], "switch": None}
    assert other.find(4, "layout", (0, 1)) is None, "a checkpoint has it"
    before = path.read_text()
    other.append(6, "layout", (0, 9), {"switch": 2})
    assert [entry["switch"] for entry in other.entries(6, "layout")] == [2]
    assert path.read_text() == before, "process 0 writes"
    second.pump()
    first.pump()
    assert first.notices() == [(1, Decided(6, "layout", (0, 9), {"switch": 2}))]
    other.cut(6)
    assert other.entries(6, "layout") == []
    assert path.read_text() == before
    other.close()
    journal.close()
    assert len([json.loads(line) for line in before.splitlines()]) == 3
    missing = Journal(tmp_path / "none.jsonl", 0, begin=False, tell=second.decided)
    assert missing.find(1, "layout", ()) is None
    assert not (tmp_path / "none.jsonl").exists()
