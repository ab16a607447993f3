"""Statistics of each step's batch, for the report: `batches.jsonl` in the run directory.

One line per step: `{"step", "groups", "prompts", "limit", "lengths"}`. `groups` are the groups' mean rewards, `prompts`
their (pass over the data, prompt), and `lengths` a histogram of the responses' tokens in `BINS` equal bins from 0 to
`limit`, the longest possible response. Where rewards failed, `errors` says why: pairs of a text and how often, of the
most frequent, with the newest at the end. `reward_failures` adds them up: its counts come from the steps' metrics,
so samples that no batch took are among them.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from jaxrl.record.files import JsonLines, read_lines
from jaxrl.record.metrics import FAILURES, read_metrics
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


@dataclass(frozen=True, slots=True)
class RewardFailures:
    """`scored` verdicts in all; `kinds`: how many failed, by kind (`metrics.FAILURES`), without zeros; `texts`: why,
    and how often; `last`: the newest text."""

    scored: int
    kinds: Mapping[str, int]
    texts: Mapping[str, int]
    last: str

    @property
    def failed(self) -> int:
        return sum(self.kinds.values())

    @property
    def share(self) -> float:
        return self.failed / max(self.scored, self.failed, 1)

    @property
    def most(self) -> str:
        return max(self.texts, key=lambda text: self.texts[text], default="")

    def summary(self) -> str:
        return f"{self.failed} of {self.scored} failed" + (f", last: {self.last}" if self.last else "")


def reward_failures(
    metrics: Sequence[Mapping[str, float]], batches: Sequence[Mapping[str, Any]]
) -> RewardFailures | None:
    def total(name: str) -> int:
        values = (line.get(f"reward/{name}", 0.0) for line in metrics)
        return int(sum(value for value in values if isfinite(value)))

    kinds = {name: count for name in FAILURES if (count := total(name)) > 0}
    if not kinds:
        return None
    errors = [(text, count) for line in batches for text, count in line.get("errors", ())]
    texts = Counter[str]()
    for text, count in errors:
        texts[text] += count
    return RewardFailures(total("num_scored"), kinds, texts, errors[-1][0] if errors else "")


def summary_of(run_dir: str | Path) -> dict[str, str]:
    """Lines by their names: the first and the last evaluation's mean reward, and rewards that failed."""
    metrics = read_metrics(run_dir)
    lines = [(int(line["step"]), line["val/reward"]) for line in metrics if "val/reward" in line]
    found = [f"{value:.3f} at step {step}" for step, value in lines if isfinite(value)]
    failures = reward_failures(metrics, read_batches(run_dir))
    out = {"held-out": "reward " + ", ".join(found if len(found) < 2 else (found[0], found[-1]))} if found else {}
    return out | ({} if failures is None else {"rewards": failures.summary()})
