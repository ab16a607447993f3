"""Statistics of each step's batch, for the report: `batches.jsonl` in the run directory.

One line per step: `{"step", "groups", "prompts", "limit", "lengths"}`. `groups` are the groups' mean rewards, `prompts`
their (pass over the data, prompt), and `lengths` a histogram of the responses' tokens in `BINS` equal bins from 0 to
`limit`, the longest possible response. Where rewards failed, `errors` says why: pairs of a text and how often, of the
most frequent, with the newest at the end.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any

from jaxrl.record.files import JsonLines, read_lines
from jaxrl.types import Group

FILE_NAME = "batches.jsonl"
BINS = 32
MOST_ERRORS = 5
_MAX_ERROR = 500  # characters
_MOST_GROUPS = 4096  # beyond, every second, third and so on is kept
_log = logging.getLogger(__name__)


class BatchLog(JsonLines):
    """Appends a line per step. `limit`: tokens of the longest response."""

    def __init__(self, path: str | Path, last_step: int, limit: int) -> None:
        super().__init__(path, last_step, compact=True)
        self._limit = limit

    def write(self, step: int, groups: Sequence[Group]) -> None:
        some = [group for group in groups if group.samples]
        some = some[:: -(-len(some) // _MOST_GROUPS) or 1]
        rewards = [float(f"{fmean(sample.reward or 0.0 for sample in group.samples):.4g}") for group in some]
        prompts = [(group.prompt.epoch, group.prompt.index) for group in some]
        lengths = [0] * BINS
        for group in groups:
            for sample in group.samples:
                lengths[min(len(sample) * BINS // self._limit, BINS - 1)] += 1
        line = {"step": step, "groups": rewards, "prompts": prompts, "limit": self._limit, "lengths": lengths}
        errors = _errors(groups)
        self.append({**line, "errors": errors} if errors else line)


def _errors(groups: Sequence[Group]) -> list[tuple[str, int]]:
    """In the order in which each text came last."""
    counts: dict[str, int] = {}
    for sample in (sample for group in groups for sample in group.samples):
        if error := sample.failure[:_MAX_ERROR]:
            counts[error] = counts.pop(error, 0) + 1
    most = sorted(counts, key=lambda text: -counts[text])[:MOST_ERRORS]
    newest = [*counts][-1:]
    return [(text, count) for text, count in counts.items() if text in most or text in newest]


def read_batches(folder: str | Path, note: Callable[[str], None] = _log.warning) -> list[dict[str, Any]]:
    """The steps of a run, in order; `note` is called for damaged lines."""
    return read_lines(Path(folder) / FILE_NAME, _parse, note)


def _parse(line: bytes) -> dict[str, Any]:
    """A line as `BatchLog` writes it; a group whose reward is not finite (text) is left out."""
    entry = json.loads(line)
    finite = [isinstance(value, int | float) for value in entry["groups"]]
    return entry | {name: [*compress(entry[name], finite)] for name in ("groups", "prompts") if name in entry}
