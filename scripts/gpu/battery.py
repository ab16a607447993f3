"""Runs the parts of a battery: each a process of its own with its own limit, in order, until the minutes are up.

`records.jsonl` in the battery's folder is both the result and the state. A part's process writes records as every
benchmark does, to a folder of its own; they are appended when it has ended, with `part` added, and then one record of
the part itself: how it ended, after how long. A later call reads those and leaves out what has passed. So a call that
is cut off at any moment loses the part that ran, and nothing else.

A part begins a process group. Whatever ends it (its own end, its limit, the minutes, a signal to the battery), the
whole group ends with it, so that nothing keeps memory of the device.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "over its limit", "cut off"]
"""`cut off`: the minutes were up, or the battery was stopped, before the part's own limit."""
LOG_BYTES = 60_000
"""What is kept of a part's output: its end."""
PATIENCE = 2.5
"""A part is ended after so many times its seconds."""
GRACE_S = 3.0
"""Between SIGTERM and SIGKILL to a part."""
RESERVE_S = 5.0
"""Of the minutes: to stop what runs, and for the page."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the battery.

    Attributes:
      name: unique; in records, and for `--only`.
      seconds: a guess. It is not begun with less time left, and ended after `PATIENCE` times as long.
      command: what to run; `{folder}` in it is where its records go.
      environment: added to the battery's.
    """

    name: str
    seconds: float
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Running:
    part: Part
    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str]
    began_s: float


class Battery:
    """The parts, and a folder that says what has become of them.

    Args:
      parts: in order of worth.
      out: the folder: `records.jsonl` and `log.txt` are written there.
      head: of the records of parts: date, commit, device and so on; asked whenever one has ended.
      environment: of all parts.
      at_once: how many run side by side. More than one is for trials: nothing is worth timing then.
      say: progress.
      on_end: called when a part has ended and its records are written (the page is made then).
    """

    def __init__(
        self,
        parts: Sequence[Part],
        out: Path,
        head: Callable[[str], Mapping[str, Any]],
        environment: Mapping[str, str],
        *,
        at_once: int = 1,
        say: Callable[[str], None] = print,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.parts, self.out = parts, out
        self._head, self._environment = head, environment
        self._at_once, self._say, self._on_end = at_once, say, on_end
        self._running: list[_Running] = []
        out.mkdir(parents=True, exist_ok=True)

    def records(self) -> list[dict[str, Any]]:
        """Everything recorded so far, oldest first."""
        file = self.out / "records.jsonl"
        return lines(file) if file.exists() else []

    def statuses(self) -> dict[str, Status]:
        """How each part ended that was tried, the last time."""
        return {each["part"]: each["status"] for each in self.records() if each["bench"] == "part"}

    def waiting(self, only: Sequence[str] = (), again: Sequence[str] = ()) -> list[Part]:
        """What a call runs, in order: what was never tried or was cut off, then what failed.

        Args:
          only: names; nothing else is run.
          again: names of parts that are run whatever has become of them.

        Raises:
          ValueError: a name that no part has.
        """
        names = [part.name for part in self.parts]
        for name in (*only, *again):
            if name not in names:
                raise ValueError(f"part ({name}) must be one of {', '.join(names)}")
        ended = {name: status for name, status in self.statuses().items() if name not in again and status != "cut off"}
        chosen = [part for part in self.parts if not only or part.name in only or part.name in again]
        fresh = [part for part in chosen if part.name not in ended]
        return fresh + [part for part in chosen if ended.get(part.name, "passed") != "passed"]

    def run(self, wanted: Sequence[Part], seconds: float) -> None:
        """Runs parts for that long. One that fails does not stop the others; one that does not fit any more is left
        for a later call, and a shorter one behind it may still fit."""
        end_s, waiting = time.monotonic() + seconds - RESERVE_S, list(wanted)
        try:
            while waiting or self._running:
                if waiting and len(self._running) < self._at_once:
                    self._begin(waiting.pop(0), end_s)
                    continue
                time.sleep(0.05)
                self._end_those_due(end_s)
        finally:  # a signal comes through here
            for each in self._running:
                self._finish(each, "cut off")
            self._running = []

    def _begin(self, part: Part, end_s: float) -> None:
        left = end_s - time.monotonic()
        if left < part.seconds:
            self._say(f"-- {part.name}: left for later ({max(left, 0):.0f} s left, about {part.seconds} needed)")
            return
        self._say(f"-- {part.name}")
        folder = tempfile.TemporaryDirectory(prefix="battery-", ignore_cleanup_errors=True)
        with (Path(folder.name) / "log").open("wb") as log:
            process = subprocess.Popen(
                [word.replace("{folder}", folder.name) for word in part.command],
                env={**self._environment, **part.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(_Running(part, process, folder, time.monotonic()))

    def _end_those_due(self, end_s: float) -> None:
        now = time.monotonic()
        for each in list(self._running):
            status: Status | None = None
            if (code := each.process.poll()) is not None:
                status = "failed" if code else "passed"
            elif now >= end_s:
                status = "cut off"
            elif now >= each.began_s + PATIENCE * each.part.seconds:
                status = "over its limit"
            if status is not None:
                self._running.remove(each)
                self._finish(each, status)

    def _finish(self, running: _Running, status: Status) -> None:
        end_group(running.process)
        seconds, part, folder = time.monotonic() - running.began_s, running.part, Path(running.folder.name)
        found = [record for file in sorted(folder.glob("*.jsonl")) for record in lines(file)]
        command = " ".join(Path(word).name if os.path.isabs(word) else word for word in part.command)
        code = running.process.returncode
        result = {"part": part.name, "status": status, "exit_status": code, "seconds": round(seconds, 2)}
        # one write: a battery that is killed leaves all of a part's records or none
        with (self.out / "records.jsonl").open("a", encoding="utf-8") as file:
            every = [record | {"part": part.name} for record in found] + [dict(self._head(command)) | result]
            file.write("".join(json.dumps(line) + "\n" for line in every))
        output = (folder / "log").read_bytes()[-LOG_BYTES:].decode("utf-8", errors="replace")
        with (self.out / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"\n######## {part.name}: {status} after {seconds:.0f} s\n$ {command}\n{output}")
        running.folder.cleanup()
        self._say(f"-- {part.name}: {status}, {seconds:.0f} s")
        if status in ("failed", "over its limit"):
            self._say(output[-1500:])
        self._on_end()


def lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file. A last line that a kill or a full disk has cut off is no record, and goes."""
    text = file.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        file.write_text(text, encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a group, and whatever it has left in the group."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
