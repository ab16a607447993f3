"""The timeline of a run: a Chrome/Perfetto trace (https://ui.perfetto.dev), and the seconds of its phases from the same
spans.

Source: the Trace Event Format's JSON array form, in which the closing bracket may be missing: every event is one line
with a comma, and lines are written completely, so viewers open the file at any moment, also after a crash. `close` ends
it with a last event and the bracket. A resumed run removes those two lines and appends, as another process of the
trace, whose clock continues where the file ended.

The file is kept small: adjacent short spans of one name on a track are merged (`count` says how many); counters are
sampled; a step draws at most `MAX_EVENTS` events, and as many of the rollout's rows; the share of steps that are drawn
halves after each `MAX_BYTES` written. Phases are always summed. Spans on one track must nest: threads that work at the
same time use different tracks.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from jaxrl.config.inputs import reading
from jaxrl.record.files import to_json, write_all

_SHORT_S = 0.005  # spans below this are merged ...
_GAP_S = 0.001  # ... when no longer than this apart
_COUNTER_EVERY_S = 0.02
_FLUSH_EVERY_S = 1.0
_FLUSH_LINES = 256
_TAIL_BYTES = 1 << 16
MAX_BYTES = 32 << 20
"""After which the share of drawn steps halves."""
MAX_EVENTS = 4000
"""The most events of a step; rows have as many."""
END = "jaxrl_end"
"""The last event of a file that was closed; it has no comma."""
ROW = "row"
"""The category of a row's spans, whose `args` name the row."""
_FIRST_ROW = 1 << 20  # tracks of rows come after all others
_PAUSE_US = 1_000_000  # between the last event of a run and the first of the run that resumes it


@dataclass(slots=True)
class _Span:
    track: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, Any]
    is_phase: bool = False  # it is never merged with others
    count: int = 1


class Timeline:
    """A trace file that can be opened at any moment; all methods may be called from any thread. Without `begin` events
    wait for that method."""

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Callable[[], float] = time.perf_counter,
        begin: bool = True,
    ) -> None:
        self._clock = clock
        self._path = Path(path)
        self._rows: dict[str, int] = {}
        self._row_events = 0
        self._lock = threading.RLock()
        whole_bytes, self._pid, self._origin_us = _end_of(self._path)
        self._bytes = whole_bytes
        self._file: FileIO | None = None
        self._lines: list[str] = []
        self._started_s, self._flushed_s = clock(), time.perf_counter()
        self._tracks: dict[str, int] = {}
        self._pending: dict[str, _Span] = {}
        self._counters: dict[str, float] = {}
        self._open: dict[int, _Span] = {}
        self._phases: dict[str, float] = {}
        self._num_steps = self._events = self._left_out = 0
        self._drawing = True
        if not self._bytes:
            self._lines.append("[\n")
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        self._metadata("process_name", 0, name=f"start {self._pid}, {started}")
        if begin:
            self.begin()

    def begin(self) -> None:
        """Drops a half-written last line; from here on, events go to the file."""
        with self._lock:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run lasts
            self._file.truncate(self._bytes)
            self._flush()

    def span(self, track: str, name: str, **args: Any) -> AbstractContextManager[None]:
        """Draws the time inside the `with` as a bar on `track`, also when it is left by an exception."""
        return self._spanned(track, name, args, is_phase=False)

    def phase(self, name: str, track: str = "loop", **args: Any) -> AbstractContextManager[None]:
        """A span that also counts towards `timing_s/<name>`; the phase "step" begins a step."""
        if name == "step":
            self.begin_step()
        return self._spanned(track, name, args, is_phase=True)

    @contextmanager
    def _spanned(self, track: str, name: str, args: dict[str, Any], *, is_phase: bool) -> Iterator[None]:
        now = self._clock()
        span = _Span(track, name, now, now, args, is_phase)
        with self._lock:
            self._open[id(span)] = span
        try:
            yield
        finally:
            span.end_s = self._clock()
            with self._lock:
                del self._open[id(span)]
                self._add(span)
                if is_phase:
                    key = f"timing_s/{name}"
                    self._phases[key] = self._phases.get(key, 0.0) + span.end_s - span.start_s

    def take_phases(self, *names: str) -> dict[str, float]:
        """Seconds of the phases that ended since they were last taken, as `timing_s/<name>`: of `names`, or of all."""
        with self._lock:
            keys = [f"timing_s/{name}" for name in names] or list(self._phases)
            return {key: self._phases.pop(key) for key in keys if key in self._phases}

    def open_spans(self) -> list[tuple[str, str, float]]:
        """(track, name, seconds so far), the longest first: what a watchdog reports."""
        now = self._clock()
        with self._lock:
            spans = [(span.track, span.name, now - span.start_s) for span in self._open.values()]
        return sorted(spans, key=lambda item: -item[2])

    def complete(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        with self._lock:
            self._add(_Span(track, name, start_s, end_s, args))

    @property
    def now_s(self) -> float:
        return self._clock()

    def row(self, row: str, order: int, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Draws the response in the `order`-th row of the rollout from `start_s` to `end_s`, on a separate track behind
        all others. An evaluation puts "val " before `name`: held-out prompts are counted from 0 too."""
        with self._lock:
            if not self._drawing:
                return
            if any(span.name == "testing" for span in self._open.values()):
                name = f"val {name}"
            if self._row_events >= MAX_EVENTS:
                self._left_out += 1
                return
            if row not in self._rows:
                self._rows[row] = _FIRST_ROW + len(self._rows)
                self._new_track(self._rows[row], f"row {row}", _FIRST_ROW + order)
            start, end = self._us(start_s), self._us(end_s)
            event = {"name": name, "cat": ROW, "ph": "X", "tid": self._rows[row], "ts": start}
            self._row_events += 1
            self._events -= 1  # counted by itself
            self._event(event | {"dur": round(end - start, 1), "args": {"row": row, **args}})

    def counter(self, track: str, **values: float) -> None:
        """Draws values at this moment, as curves under `track`."""
        now = self._clock()
        with self._lock:
            if now - self._counters.get(track, float("-inf")) < _COUNTER_EVERY_S:
                return
            self._counters[track] = now
            if self._has_room():
                self._event({"name": track, "ph": "C", "tid": 0, "ts": self._us(now), "args": values})

    def flush(self) -> None:
        """Writes all spans that have ended."""
        with self._lock:
            self._settle()
            self._flush()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._end_step()
                end = {"name": END, "ph": "M", "pid": self._pid, "tid": 0, "args": {}}
                self._lines.append(_line(end).replace(",\n", "\n]\n"))
                try:
                    self._flush()
                finally:
                    self._file.close()
                    self._file = None

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin_step(self) -> None:
        """Begins a step: later events belong to it. For callers that do not use the phase "step"."""
        with self._lock:
            self._end_step()
            self._num_steps += 1
            # halved for every MAX_BYTES written: the file grows with the logarithm of the number of steps
            stride = 1 << min(self._bytes // MAX_BYTES, 30)
            self._drawing = self._num_steps % stride == 0

    def _end_step(self) -> None:
        self._settle()
        if self._left_out:
            args = {"events": self._left_out}
            now_us = self._us(self._clock())
            self._event({"name": "left out", "ph": "i", "s": "p", "tid": 0, "ts": now_us, "args": args})
        self._events = self._row_events = self._left_out = 0

    def _has_room(self) -> bool:
        """Counts the event if it is left out."""
        if self._drawing and self._events >= MAX_EVENTS:
            self._left_out += 1
        return self._drawing and self._events < MAX_EVENTS

    def _add(self, span: _Span) -> None:
        last = self._pending.get(span.track)
        if (
            last is not None
            and not span.is_phase
            and not last.is_phase
            and last.name == span.name
            and 0 <= span.start_s - last.end_s <= _GAP_S
            and span.end_s - span.start_s < _SHORT_S
            and last.end_s - last.start_s < _SHORT_S * last.count
        ):
            last.end_s, last.count, last.args = span.end_s, last.count + 1, {}
            return
        if last is not None:
            self._write_span(last)
        self._pending[span.track] = span

    def _write_span(self, span: _Span) -> None:
        if not self._has_room():
            return
        if (tid := self._tracks.get(span.track)) is None:
            tid = self._tracks[span.track] = len(self._tracks) + 1
            self._new_track(tid, span.track, tid)
        args = span.args if span.count == 1 else {"count": span.count}
        start, end = self._us(span.start_s), self._us(span.end_s)
        self._event({"name": span.name, "ph": "X", "tid": tid, "ts": start, "dur": round(end - start, 1), "args": args})

    def _settle(self) -> None:
        for span in self._pending.values():
            self._write_span(span)
        self._pending.clear()

    def _new_track(self, tid: int, name: str, order: int) -> None:
        self._metadata("thread_name", tid, name=name)
        self._metadata("thread_sort_index", tid, sort_index=order)

    def _metadata(self, kind: str, tid: int, **args: Any) -> None:
        self._lines.append(_line({"name": kind, "ph": "M", "pid": self._pid, "tid": tid, "args": args}))

    def _event(self, event: dict[str, Any]) -> None:
        self._events += 1
        self._lines.append(_line({"pid": self._pid, **event}))
        now = time.perf_counter()
        if len(self._lines) >= _FLUSH_LINES or now - self._flushed_s >= _FLUSH_EVERY_S:
            self._flush()

    def _flush(self) -> None:
        self._flushed_s = time.perf_counter()
        if self._lines and self._file is not None:
            data = "".join(self._lines).encode()
            self._lines.clear()
            with reading(self._path):
                write_all(self._file, data)
            self._bytes += len(data)

    def _us(self, at_s: float) -> float:
        return round(self._origin_us + (at_s - self._started_s) * 1e6, 1)


def _line(event: dict[str, Any]) -> str:
    # default=str: an argument that JSON does not know must not end a run
    return to_json(event, separators=(",", ":"), default=str) + ",\n"


def _end_of(path: Path) -> tuple[int, int, float]:
    """Bytes of the file up to the end of its last whole event, this run's process number in the trace, and where its
    clock starts. What follows was cut off, or is what `close` wrote."""
    if not os.path.lexists(path):
        return 0, 1, 0.0
    with reading(path), open(path, "rb") as file:
        start = max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0)
        file.seek(start)
        tail = file.read()
    end = tail.rfind(b"},\n") + 3
    if end < 3:
        return 0, 1, 0.0
    events = []
    for line in tail[:end].splitlines():
        with suppress(ValueError):  # the opening bracket, or the line that the tail cuts
            events.append(json.loads(line.rstrip(b",")))
    pid = max((event["pid"] for event in events), default=0)
    last_us = max((event.get("ts", 0.0) + event.get("dur", 0.0) for event in events), default=0.0)
    return start + end, pid + 1, last_us + _PAUSE_US
