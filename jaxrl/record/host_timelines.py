"""The timelines of all hosts of a run as one: `hosts/timeline.json`, which Perfetto opens as it does each of them.

Purpose: every process writes its own timeline, so that no event waits for another host. This merges them. Each host is
a process of the trace with its own tracks. Every file has the time of day at the beginning of each start; by it, the
other hosts' events are moved onto process 0's time axis, as exactly as the machines' clocks agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.record.files import to_json, writing_whole
from jaxrl.record.run_dir import HOSTS
from jaxrl.record.timeline import END, ORIGIN, UNIX_US

_STARTS = 1 << 16  # of one host, at most: a host's starts are numbered from a multiple of it


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a start of a host lies in its trace, and what time of day it was then; both in microseconds."""

    at_us: float
    unix_us: float


def merge_timelines(folder: str | Path) -> Path | None:
    """Writes the timelines of a run's hosts as one; returns the file, or None where there is one host.

    A line that is damaged or only half written is left out, and so are events of a start whose begin is missing.
    """
    folder = Path(folder)
    files = {0: folder / "timeline.json"}
    files |= {
        int(path.parent.name): path for path in folder.glob(f"{HOSTS}/*/timeline.json") if path.parent.name.isdigit()
    }
    if len(files) == 1 or not files[0].is_file():
        return None
    leading = _starts(files[0])
    target = folder / HOSTS / "timeline.json"
    with writing_whole(target) as out:
        out.write(b"[\n")
        for host, path in sorted(files.items()):
            shifts = {pid: _shift(start, leading) for pid, start in _starts(path).items()}
            for event in _events(path):
                if (shift := shifts.get(event["pid"])) is None:
                    continue
                moved = {"ts": round(event["ts"] + (shift if host else 0.0), 1)} if "ts" in event else {}
                line = to_json(event | moved | {"pid": host * _STARTS + event["pid"]}, separators=(",", ":"))
                out.write(line.encode() + b",\n")
        last = {"name": END, "ph": "M", "pid": 1, "tid": 0, "args": {}}
        out.write(to_json(last, separators=(",", ":")).encode() + b"\n]\n")
    return target


def _starts(path: Path) -> dict[int, _Start]:
    """By their number in a file."""
    return {
        event["pid"]: _Start(event["ts"], event["args"][UNIX_US])
        for event in _events(path)
        if event["name"] == ORIGIN and "ts" in event
    }


def _shift(start: _Start, leading: dict[int, _Start]) -> float:
    """What is to be added to the times of a start to make them process 0's, by the start of it that was nearest."""
    if not leading:
        return 0.0
    nearest = min(leading.values(), key=lambda each: abs(each.unix_us - start.unix_us))
    return nearest.at_us + (start.unix_us - nearest.unix_us) - start.at_us


def _events(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        for line in file:
            try:
                event = json.loads(line.rstrip(b",\r\n"))
            except ValueError:
                continue  # the bracket at the beginning, or what a crash has cut
            if isinstance(event, dict) and isinstance(event.get("pid"), int) and event.get("name", END) != END:
                yield event
