"""The layout over each rollout round: `layouts.jsonl` in the run directory.

One line per round: `{"step", "round", "kind", "source", "points", "switches"}`; one per round and worker where there
are several, with `"worker"`. `points` are [seconds since the round began, live requests, tp]; `switches` the changes,
as the mechanism describes them; `source` says whether the profile behind them was measured or made up ("synthetic").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.record.files import JsonLines, read_lines

FILE_NAME = "layouts.jsonl"


class LayoutLog(JsonLines):
    """Appends a line per round; drops lines of steps after `last_step` when it begins."""

    def __init__(self, path: str | Path, last_step: int, *, begin: bool = True) -> None:
        super().__init__(path, lambda step: step <= last_step, compact=True, begin=begin)

    def write(self, step: int, round_index: int, kind: str, source: str, picture: Mapping[str, Any]) -> None:
        self.append({"step": step, "round": round_index, "kind": kind, "source": source, **picture})


def read_layouts(folder: str | Path) -> list[dict[str, Any]]:
    """The rounds of a run, in order; empty if nothing was written. Raises ValueError if a line is damaged."""
    return read_lines(Path(folder) / FILE_NAME, _parse)


_SWITCH = ("from_tp", "to_tp", "how", "failed", "num_live", "num_moved")
_SECONDS = ("predicted_cost_s", "cost_s", "predicted_step_s", "step_s")


def _parse(line: bytes) -> dict[str, Any]:
    """A line as `LayoutLog` writes it; a number that is not finite comes back as None, as one that is not known."""
    entry = json.loads(line)
    for name in ("step", "kind", "source", "points", "switches"):
        entry[name]  # a KeyError names what is missing
    if not all(len(point) == 3 and all(isinstance(x, int | float) for x in point) for point in entry["points"]):
        raise ValueError("a point must be three numbers")
    return {**entry, "switches": [_switch(switch) for switch in entry["switches"]]}


def _switch(switch: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: switch[name] for name in _SECONDS}
    for name in _SWITCH:
        switch[name]
    return {**switch} | {name: value if isinstance(value, int | float) else None for name, value in found.items()}
