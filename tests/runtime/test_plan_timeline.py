"""Rows on the timeline: who had which row, from when to when, and why it ended there."""

from __future__ import annotations

from typing import Any

from checking import make_engine, make_request

from jaxrl.runtime.plan_timeline import RowTracks
from jaxrl.scheduling.tokens.batcher import BatcherConfig


class Picture:
    """Counts a second for each look at the clock, and keeps what is drawn."""

    def __init__(self) -> None:
        self.drawn: list[dict[str, Any]] = []
        self.seconds = 0.0

    @property
    def now_s(self) -> float:
        self.seconds += 1.0
        return self.seconds

    def row(self, row: str, order: int, name: str, start_s: float, end_s: float, /, **args: Any) -> None:
        self.drawn.append({"row": row, "order": order, "name": name, "start": start_s, "stop": end_s, **args})


def test_preempted_requests_come_back():
    requests = [make_request(i, prompt=i, max_tokens=12) for i in range(3)]
    engine, _ = make_engine(dict.fromkeys((r.key for r in requests), 12), BatcherConfig(decode_steps=2), num_blocks=7)
    picture = Picture()
    RowTracks([engine], picture)
    engine.generate(requests)
    ends = [each["end"] for each in picture.drawn]
    assert ends.count("preempted") == engine.counters.preemptions > 0
    assert ends.count("length") == 3


def test_an_aborted_request_ends_when_it_is_looked_for_or_its_row_is_given_away():
    requests = [make_request(i, prompt=i) for i in range(12)]
    engine, executor = make_engine({r.key: 30 for r in requests})
    picture = Picture()
    tracks = RowTracks([engine], picture)
    rows = executor.num_groups * executor.num_slots
    for request in requests[:rows]:
        engine.add(request)
    engine.step()
    engine.abort([requests[0].request_id])
    assert not picture.drawn
    tracks.follow(0)
    assert [(each["name"], each["end"]) for each in picture.drawn] == [("0.0.0", "abort")]
    engine.abort([requests[1].request_id])
    engine.add(requests[rows])
    engine.add(requests[rows + 1])
    engine.drain()
    engine.step()
    assert [(each["name"], each["end"]) for each in picture.drawn[1:]] == [("0.1.0", "abort")]
    engine.abort(engine.unfinished())
    engine.drain()
    tracks.follow(0)
    assert len(picture.drawn) == rows + 2
    tracks.follow(0)
    assert len(picture.drawn) == rows + 2
