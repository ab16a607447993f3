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


class Battery:
    """The parts, and a folder that says what has become of them.

    Args:
      parts: in order of worth.
      out: the folder: `records.jsonl` and `log.txt` are written there.
      head: of the records of parts: date, commit, device and so on; asked whenever one has ended.
      environment: of all parts.
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
        say: Callable[[str], None] = print,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.parts, self.out = parts, out
        self._head, self._environment = head, environment
        self._say, self._on_end = say, on_end
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
        end_s = time.monotonic() + seconds - RESERVE_S
        for part in wanted:
            left = end_s - time.monotonic()
            if left < part.seconds:
                self._say(f"-- {part.name}: left for later ({max(left, 0):.0f} s left, about {part.seconds} needed)")
                continue
            self._say(f"-- {part.name}")
            with tempfile.TemporaryDirectory(prefix="battery-", ignore_cleanup_errors=True) as folder:
                self._run(part, Path(folder), left)
            self._on_end()

    def _run(self, part: Part, folder: Path, left: float) -> None:
        began, limit = time.monotonic(), PATIENCE * part.seconds
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [word.replace("{folder}", str(folder)) for word in part.command],
                env={**self._environment, **part.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        status: Status = "cut off"
        try:
            status = "failed" if process.wait(min(left, limit)) else "passed"
        except subprocess.TimeoutExpired:
            status = "over its limit" if limit < left else "cut off"
        finally:  # a signal comes through here
            end_group(process)
            self._finish(part, folder, status, process.returncode, time.monotonic() - began)

    def _finish(self, part: Part, folder: Path, status: Status, code: int, seconds: float) -> None:
        found = [record for file in sorted(folder.glob("*.jsonl")) for record in lines(file)]
        command = " ".join(Path(word).name if os.path.isabs(word) else word for word in part.command)
        result = {"part": part.name, "status": status, "exit_status": code, "seconds": round(seconds, 2)}
        # one write: a battery that is killed leaves all of a part's records or none
        with (self.out / "records.jsonl").open("a", encoding="utf-8") as file:
            every = [record | {"part": part.name} for record in found] + [dict(self._head(command)) | result]
            file.write("".join(json.dumps(line) + "\n" for line in every))
        output = (folder / "log").read_bytes()[-LOG_BYTES:].decode("utf-8", errors="replace")
        with (self.out / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"\n######## {part.name}: {status} after {seconds:.0f} s\n$ {command}\n{output}")
        self._say(f"-- {part.name}: {status}, {seconds:.0f} s")
        if status in ("failed", "over its limit"):
            self._say(output[-1500:])


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
