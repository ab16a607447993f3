"""What the pages share: runs by case, numbers over seeds with their spread, and ours beside theirs.

A number over several seeds is their mean ± their standard deviation (of a single run, n - 1 below the line).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from papers.runs import Steps
from papers.setups import TASKS, Case

BAR = 0.25  # of (speed-up - 1)
NONE = (1.0, 1.0)  # factors of a run that verifies on nothing


class Runs:
    """Runs by case."""

    def __init__(self, runs: Iterable[Steps]) -> None:
        self._runs = list(runs)

    def of(
        self,
        setup: str,
        rule: str,
        factors: tuple[float, float] = NONE,
        tasks: Sequence[str] = TASKS,
        score_when: str = "rollout",
    ) -> list[Steps]:
        """Every seed of a case with one worker; none where it was not run."""
        wanted = (setup, rule, *factors, tuple(tasks), score_when, 1)
        return [r for r in self._runs if _identity(r) == wanted]

    def like(self, case: Case) -> list[Steps]:
        """Every seed of a case, over however many steps."""
        return [r for r in self._runs if _alike(r.case) == _alike(case)]

    def with_pipeline(self, case: Case) -> list[Steps]:
        """Every seed of a case of RhymeRL, with however many workers."""
        wanted = (case.setup, case.pipeline, case.speculation)
        return [each for each in self._runs if (each.case.setup, each.case.pipeline, each.case.speculation) == wanted]

    def pat(self, setup: str, devices: int, tokens: int, rule: str, tp: int, degrees: tuple[int, ...]) -> list[Steps]:
        """Every seed of a case of PAT."""
        wanted = (setup, devices, tokens, rule, tp, degrees)
        return [each for each in self._runs if _pat_identity(each) == wanted]

    def __bool__(self) -> bool:
        return bool(self._runs)


def _identity(steps: Steps) -> tuple[Any, ...]:
    case = steps.case
    return (case.setup, case.rule, case.prompt_factor, case.response_factor, case.tasks, case.score_when, case.workers)


def _alike(case: Case) -> Case:
    """Without what all cases of a result have in common, and without the number of steps."""
    return replace(case, seed=0, steps=0, decode_steps=0, scale=1)


def _pat_identity(steps: Steps) -> tuple[Any, ...]:
    case = steps.case
    return (case.setup, case.devices, case.tokens, case.rule, case.tp, case.degrees)


def mean(runs: Sequence[Steps], name: str, long: bool | None = None, skip: int = 0) -> float:
    """Over the steps of all seeds; of one kind of rounds where `long` is given."""
    values = [value for each in runs for value in _values(each, name, long, skip)]
    return float(np.mean(values)) if values else math.nan


def by_seed(runs: Sequence[Steps], name: str, long: bool | None = None, skip: int = 0) -> list[float]:
    """The mean of each seed, in the order of seeds."""
    ordered = sorted(runs, key=lambda each: each.case.seed)
    return [float(np.mean(_values(each, name, long, skip) or [math.nan])) for each in ordered]


def _values(steps: Steps, name: str, long: bool | None, skip: int) -> list[float]:
    pairs = list(zip(getattr(steps, name), steps.long, strict=True))[skip:]
    return [value for value, is_long in pairs if long is None or is_long == long]


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Seed by seed."""
    return [a / b for a, b in zip(above, below, strict=True)]


def sums(*terms: Sequence[float]) -> list[float]:
    """Seed by seed."""
    return [math.fsum(each) for each in zip(*terms, strict=True)]


def shown(values: Sequence[float], form: Callable[[float], str] = "{:.2f}".format) -> str:
    """The mean over seeds ± their standard deviation; one seed has none, and says so."""
    if len(values) < 2:
        return f"{form(values[0])} (one seed)"
    return f"{form(float(np.mean(values)))} ± {form(float(np.std(values, ddof=1))).removeprefix('+')}"


def seconds(values: Sequence[float]) -> str:
    return shown(values, "{:.0f}".format)


def share(values: Sequence[float]) -> str:
    return shown(values, "{:.0%}".format)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def error_of(ours: float, theirs: float) -> float:
    """Of (speed-up - 1)."""
    return (ours - 1) / (theirs - 1) - 1


def verdict(error: float) -> str:
    return "yes" if abs(error) <= BAR else "**no**"


def over_seeds(ours: Sequence[float], closed: Sequence[float], theirs: float) -> list[str]:
    """Speed-ups over seeds: ours, in closed form, theirs, the errors of (speed-up - 1) of both, and whether ours is
    within the bar. An error's spread is that of the seeds."""
    errors = [[error_of(each, theirs) for each in values] for values in (ours, closed)]
    held = verdict(float(np.mean(errors[0])))
    return [shown(ours), shown(closed), f"{theirs:.2f}", *(shown(each, "{:+.0%}".format) for each in errors), held]


OVER_SEEDS = (
    "speed-up",
    "in closed form",
    "paper",
    "error of (speed-up − 1)",
    "of the closed form",
    "within 25 %",
)
