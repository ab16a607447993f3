"""The layout over each rollout round: `layouts.jsonl` in the run directory.

One line per round: `{"step", "round", "kind", "source", "points", "switches"}`. `points` are [seconds since the round
began, live requests, tp]; `switches` are those of `jaxrl.scheduling.layouts.control.Episode.to_json`; `source` says
whether the profile behind them was measured or made up ("synthetic").
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE_NAME = "layouts.jsonl"


class LayoutLog:
    """Appends a line per round; drops lines of steps after `last_step` when it is made."""

    def __init__(self, path: str | Path, last_step: int) -> None:
        path = Path(path)
        if path.exists():
            draft = path.with_suffix(".draft")
            draft.write_bytes(b"".join(_line(entry) for entry in _read(path) if entry["step"] <= last_step))
            os.replace(draft, path)
        self._path = path

    def write(self, step: int, round_index: int, kind: str, source: str, picture: Mapping[str, Any]) -> None:
        with open(self._path, "ab") as file:
            file.write(_line({"step": step, "round": round_index, "kind": kind, "source": source, **picture}))


def read_layouts(folder: str | Path) -> list[dict[str, Any]]:
    """The rounds of a run, in order; none where nothing was written."""
    path = Path(folder) / FILE_NAME
    return _read(path) if path.exists() else []


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]  # what follows was cut off
