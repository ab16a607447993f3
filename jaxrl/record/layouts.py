"""The layout over each rollout round: `layouts.jsonl` in the run directory.

One line per round: `{"step", "round", "kind", "source", "points", "switches"}`. `points` are [seconds since the round
began, live requests, tp]; `switches` are those of `jaxrl.scheduling.layouts.control.Episode.to_json`; `source` says
whether the profile behind them was measured or made up ("synthetic").
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.record.files import JsonLines, read_lines

FILE_NAME = "layouts.jsonl"


class LayoutLog:
    """Appends a line per round; drops lines of steps after `last_step` when it begins."""

    def __init__(self, path: str | Path, last_step: int, *, begin: bool = True) -> None:
        self._lines = JsonLines(path, lambda step: step <= last_step, compact=True, begin=begin)

    def begin(self) -> None:
        self._lines.begin()

    def write(self, step: int, round_index: int, kind: str, source: str, picture: Mapping[str, Any]) -> None:
        self._lines.append({"step": step, "round": round_index, "kind": kind, "source": source, **picture})

    def close(self) -> None:
        self._lines.close()


def read_layouts(folder: str | Path) -> list[dict[str, Any]]:
    """The rounds of a run, in order; empty if nothing was written."""
    return read_lines(Path(folder) / FILE_NAME)
