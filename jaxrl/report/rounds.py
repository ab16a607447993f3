"""A round's rows over time, read back from a run's timeline. Only the end of the file is read: it may be large."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.record.timeline import ROW

_TAIL_BYTES = 8 << 20
_WANTED = (f'"cat":"{ROW}"'.encode(), b'"name":"step"', b'"name":"testing"')


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """A request in a row: seconds since the round's first one, why it left the row, and its tokens if it ended
    there."""

    name: str
    start_s: float
    end_s: float
    end: str
    tokens: int | None


@dataclass(frozen=True, slots=True)
class RoundRows:
    """The rows of a round, each with its requests in order; `end_s`: when the last one ended."""

    step: float
    rows: dict[str, list[RequestSpan]]
    end_s: float


def read_round(file: Path) -> RoundRows | None:
    """The last round without evaluations; None where no rows were drawn. Damaged lines are left out."""
    if not file.is_file():
        return None
    spans: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    tests: list[dict[str, Any]] = []
    for event in _events(file):
        kind = spans if event.get("cat") == ROW else steps if event["name"] == "step" else tests
        kind.append(event)
    spans = [each for each in spans if not any(_holds(test, each) for test in tests)]
    for step in reversed(steps):
        if inside := [each for each in spans if _holds(step, each)]:
            return _round(step, inside)
    return None


def _events(file: Path) -> Iterator[dict[str, Any]]:
    with open(file, "rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(size - _TAIL_BYTES, 0))
        for line in opened:
            if not any(wanted in line for wanted in _WANTED):
                continue
            try:
                event = json.loads(line.rstrip(b",\r\n"))
            except ValueError:
                continue  # what a crash has cut, or where the tail begins
            if event.get("ph") == "X" and all(isinstance(event.get(key), int | float) for key in ("ts", "dur", "pid")):
                yield event


def _holds(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    """Whether a span ends inside another one of the same start."""
    end = inner["ts"] + inner["dur"]
    return outer["pid"] == inner["pid"] and outer["ts"] <= end <= outer["ts"] + outer["dur"] + 1


def _round(step: dict[str, Any], inside: list[dict[str, Any]]) -> RoundRows:
    began = min(each["ts"] for each in inside)
    rows: dict[str, list[RequestSpan]] = {}
    for each in sorted(inside, key=lambda event: event["ts"]):
        args = each.get("args", {})
        start, end = ((each["ts"] - began) / 1e6, (each["ts"] + each["dur"] - began) / 1e6)
        span = RequestSpan(str(each["name"]), start, end, str(args.get("end")), args.get("tokens"))
        rows.setdefault(str(args.get("row")), []).append(span)
    rows = {row: found for row, found in rows.items() if all(part.isdigit() for part in row.split("."))}
    last = max((span.end_s for found in rows.values() for span in found), default=0.0)
    return RoundRows(step.get("args", {}).get("step", 0), rows, last)
