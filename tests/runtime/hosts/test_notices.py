"""The messages between processes, as they are written."""

from __future__ import annotations

import json
import math

import pytest

from jaxrl.runtime.hosts.notices import (
    Batch,
    Counted,
    Decided,
    Failed,
    Item,
    LowWatermark,
    Notice,
    Scored,
    Stop,
    decode,
    encode,
    joined,
    shortened,
)
from jaxrl.runtime.verdicts import MAX_VALUE_CHARS, Arrival
from jaxrl.scheduling.rounds.events import Verdict
from jaxrl.scheduling.tokens.event_merger import AbortResult, Completion, SortKey, WorkerProgress
from jaxrl.types import SampleKey

KEY = SampleKey(1, 7, 2, 3)
END = Completion(12, SortKey(4096, 3, 5, 1, 6), 777, "length")
MESSAGES: list[Notice | Item] = [
    WorkerProgress(3, 2, 8192, (END, Completion(13, SortKey(5000, 3, 6, 0, 0), 1, "stop"))),
    WorkerProgress(0, 0, 1),
    END,
    AbortResult(12, 345, "abort", 9),
    Scored(
        4, Arrival(Verdict(0.0, KEY, 0.5, "ok", {"acc": 1, "case_s": [0.25, 2.0]}, 1.5, outside=True), (2.0, 3.5), True)
    ),
    Scored(5, Arrival(Verdict(0.0, KEY, -1.0, "timeout", {"error": "no verdict after 3 s"}))),
    Decided(7, "layout", (0, 12, 3, 4), {"schema": 1, "switch": None}),
    Stop(),
    Stop("the disk is full"),
    LowWatermark(123456789),
    Counted([{"workers": [[1, 2]], "recompiles": 0}, {}], stops=True),
    Failed(3, "RuntimeError: out of memory"),
]


def written(*messages: Notice | Item) -> bytes:
    batch = Batch(6, 17, messages)
    return joined(batch, encode(batch))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_written_is_read(message: Notice | Item):
    assert decode(written(message)) == Batch(6, 17, (message,))


def test_a_batch_is_small():
    ends = tuple(Completion(i, SortKey(123_456, 7, 40 + i, 3, i), 1000 + i, "stop") for i in range(4))
    assert len(written(WorkerProgress(7, 1, 123_456, ends))) < 250
    batch = decode(written(*MESSAGES))
    assert batch.messages == tuple(MESSAGES)


def test_of_a_verdict_what_the_journal_would_keep_goes_through():
    info = {"long": "x" * (MAX_VALUE_CHARS + 1), "pair": (1, 2), "acc": 1.0}
    arrival = Arrival(Verdict(9.0, KEY, math.inf, "ok", info, 0.25))
    (found,) = decode(written(Scored(0, arrival))).messages
    assert isinstance(found, Scored)
    verdict = found.arrival.verdict
    assert (verdict.reward, dict(verdict.info)) == (math.inf, {"pair": [1, 2], "acc": 1.0})
    assert shortened(arrival) == found.arrival, "process 0 hears the same of its own"


def test_another_version_is_refused():
    value = json.dumps([2, 0, 0, []]).encode()
    with pytest.raises(ValueError, match="a batch of version 2 from another process: this one reads version 1"):
        decode(value)
    with pytest.raises(ValueError, match="a notice of kind 'q'"):
        decode(b'[1,0,0,[["q"]]]')
