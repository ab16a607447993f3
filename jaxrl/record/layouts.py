"""The layout over each rollout round: `layouts.jsonl` in the run directory.

One line per round (and `worker`, where there are several): `{"step", "round", "kind", "source", "points", "switches"}`.
`points` are [seconds since the round began, live requests, tp]; `switches` the changes, as the mechanism describes
them; `source` says whether the profile behind them was measured or made up ("synthetic").
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl.record.files import JsonLines, read_lines

FILE_NAME = "layouts.jsonl"
_log = logging.getLogger(__name__)


class LayoutLog(JsonLines):
    def __init__(self, path: str | Path, last_step: int) -> None:
        super().__init__(path, last_step, compact=True)

    def write(self, step: int, round_index: int, kind: str, source: str, picture: Mapping[str, Any]) -> None:
        self.append({"step": step, "round": round_index, "kind": kind, "source": source, **picture})


def read_layouts(folder: str | Path, note: Callable[[str], None] = _log.warning) -> list[dict[str, Any]]:
    """The rounds of a run, in order; `note` is called for damaged lines."""
    return read_lines(Path(folder) / FILE_NAME, _parse, note)


def _parse(line: bytes) -> dict[str, Any]:
    """A number that is not finite comes back as None."""
    entry = json.loads(line)
    for name in ("step", "kind", "source", "points", "switches"):
        entry[name]  # a KeyError names what is missing
    if not all(len(point) == 3 and all(isinstance(x, int | float) for x in point) for point in entry["points"]):
        raise ValueError("a point must be three numbers")
    for switch in entry["switches"]:
        for name in ("from_tp", "to_tp", "how", "failed", "num_live", "num_moved"):
            switch[name]
        for name in ("predicted_cost_s", "cost_s", "predicted_step_s", "step_s"):
            switch[name] = switch[name] if isinstance(switch[name], int | float) else None
    return entry
