"""What the last lines of a run say of its record.

Purpose: `summary_of(folder)` reads the run's files once it has ended.
"""

from __future__ import annotations

from math import isfinite
from pathlib import Path

from jaxrl.record.failures import failures_of
from jaxrl.record.metrics import read_metrics


def summary_of(run_dir: str | Path) -> dict[str, str]:
    """Lines by their names: the first and the last evaluation's mean reward, and rewards that failed; either may be
    missing."""
    lines = [(int(line["step"]), line["val/reward"]) for line in read_metrics(run_dir) if "val/reward" in line]
    found = [f"{value:.3f} at step {step}" for step, value in lines if isfinite(value)]
    failures = failures_of(run_dir)
    out = {"held-out": "reward " + ", ".join(found if len(found) < 2 else (found[0], found[-1]))} if found else {}
    return out | ({} if failures is None else {"rewards": failures.summary()})
