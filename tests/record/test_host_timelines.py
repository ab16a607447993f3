"""Several hosts' timelines as one: each with its own tracks, at the times of the first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxrl.record import timeline as timelines
from jaxrl.record.host_timelines import merge_timelines
from jaxrl.record.timeline import Timeline

NOON_S = 1_000_000.0


def write(path: Path, host: int, unix_s: float, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A start at a time of day, with a span of a second for each name: each process counts time from its own origin."""
    now = 77.0 * host
    monkeypatch.setattr(timelines.time, "time", lambda: unix_s)
    with Timeline(path, host=host, clock=lambda: now) as timeline:
        for name in names:
            with timeline.span("engine", name):
                now += 1.0


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


def test_events_lie_at_the_same_time_of_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = tmp_path / "timeline.json", tmp_path / "hosts" / "1" / "timeline.json"
    write(first, 0, NOON_S, ["a", "b"], monkeypatch)
    assert merge_timelines(tmp_path) is None, "one host has one timeline"
    write(second, 1, NOON_S + 0.25, ["a"], monkeypatch)
    write(first, 0, NOON_S + 3600, ["c"], monkeypatch)  # resumed: the pause takes no room
    write(second, 1, NOON_S + 3600.5, ["c"], monkeypatch)
    with open(second, "a") as file:
        file.write('{"name": "cut')
    merged = merge_timelines(tmp_path)
    assert merged == tmp_path / "hosts" / "timeline.json"
    spans = {(e["name"], e["pid"] >> 16): e for e in events(merged) if e["ph"] == "X"}
    assert len(spans) == 5
    assert spans["a", 1]["ts"] - spans["a", 0]["ts"] == pytest.approx(0.25e6)
    assert spans["b", 0]["ts"] - spans["a", 0]["ts"] == pytest.approx(1e6)
    assert spans["c", 1]["ts"] - spans["c", 0]["ts"] == pytest.approx(0.5e6)
    own = {e["name"]: e["ts"] for e in events(first) if e["ph"] == "X"}
    assert {name: spans[name, 0]["ts"] for name in "abc"} == own, "the first one's times are as they were"
    named = [e["args"]["name"] for e in events(merged) if e["name"] == "process_name"]
    assert [name.rpartition(",")[0] for name in named] == [
        "host 0, start 1",
        "host 0, start 2",
        "host 1, start 1",
        "host 1, start 2",
    ]
