"""Which rewards of a run failed, over all its steps, and the lines about its record that are shown at its end.

Counts come from the steps' metrics, so samples that no batch took are among them; texts come from the batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from jaxrl.record.batches import read_batches
from jaxrl.record.metrics import FAILURES, read_metrics


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
