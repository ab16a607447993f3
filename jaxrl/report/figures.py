"""Figures that are compared between runs, from their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from jaxrl.record.metrics import FAILURES, ROUND_PHASES, UPDATE_PHASES, duration, number, seconds_of
from jaxrl.report.charts import Point, finite
from jaxrl.report.curves import short, validation_names
from jaxrl.report.runs import RecordedRun

How = Literal["first", "last", "mean", "median", "sum", "begin", "end", "most", "least"]
_HOWS: Mapping[How, Callable[[Sequence[float]], float]] = {
    "first": lambda values: fmean(values[: max(len(values) // 10, 1)]),
    "last": lambda values: fmean(values[-max(len(values) // 10, 1) :]),
    "mean": fmean,
    "median": median,
    "sum": sum,
    "begin": lambda values: values[0],
    "end": lambda values: values[-1],
    "most": max,
    "least": min,
}
"""`first` and `last` are means of a tenth of the steps, `begin` and `end` single ones."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table.

    Attributes:
      values: one for each run; None where the run has not recorded it.
      ratio: whether runs are compared by how many times it is that of the first; otherwise by the difference.
    """

    name: str
    values: tuple[float | None, ...]
    ratio: bool = False
    shown: Callable[[float], str] = number

    def beside_first(self, index: int) -> str:
        """How run `index` compares with the first one: `×0.82`, `+0.13`; empty where there is nothing to compare."""
        first, value = self.values[0], self.values[index]
        if index == 0 or first is None or value is None:
            return ""
        if self.ratio:
            return f"×{number(value / first)}" if first > 0 else ""
        if value == first:
            return ""
        return f"{'+' if value > first else '−'}{number(abs(value - first))}"


def summed(points: Sequence[Point], how: How) -> float | None:
    """One number of a series; None: it has none."""
    values = [value for _, value in finite(points)]
    return _HOWS[how](values) if values else None


_ROWS: tuple[tuple[str, str | tuple[str, ...], How, bool], ...] = (
    ("response length, mean, tokens", "response_length/mean", "mean", True),
    ("longest response, mean, tokens", "response_length/max", "mean", True),
    ("responses cut at the limit, mean share", "response_length/clip_ratio", "mean", False),
    ("groups with mixed rewards, mean share", "critic/mixed_reward_groups", "mean", False),
    ("entropy, last tenth, nats", "actor/entropy", "last", False),
    ("gradient norm, median", "actor/grad_norm", "median", True),
    ("clipped tokens, mean share", "actor/pg_clipfrac", "mean", False),
    ("rollout against trainer, mean k3 KL", "rollout_corr/k3_kl", "mean", False),
    ("tokens of earlier weights, mean share", "training/off_policy/share", "mean", False),
    ("skipped updates, sum", "actor/skipped_updates", "sum", False),
    ("idle row-slots, median share", "rollout/bubble_ratio", "median", False),
    ("tokens/s/device, median", "perf/throughput", "median", True),
    ("tokens, sum", "perf/total_num_tokens", "sum", True),
    ("seconds per step, median", ("step",), "median", True),
    ("rollout, seconds per step, median", ROUND_PHASES, "median", True),
    ("update, seconds per step, median", UPDATE_PHASES, "median", True),
)
"""Name, metric or phases, how they are summed, and whether runs are compared by ratio."""


def figures_of(runs: Sequence[RecordedRun]) -> list[Figure]:
    def row(name: str, of: str | tuple[str, ...], how: How, ratio: bool = False, upto: float = 0) -> Figure:
        series = [run.series(of) if isinstance(of, str) else seconds(run, of) for run in runs]
        if upto:
            series = [[point for point in points if point[0] <= upto] for points in series]
        return Figure(name, tuple(summed(points, how) for points in series), ratio)

    reward = "critic/rewards/mean"
    found = [row("steps", "step", "end")]
    last = [run.metrics[-1]["step"] if run.metrics else 0 for run in runs]
    if len(set(last)) > 1 and min(last):
        found.append(row(f"reward, last tenth of the first {min(last):g} steps", reward, "last", upto=min(last)))
    found += [row(f"reward, {which} tenth of the steps", reward, which) for which in ("first", "last")]
    for key in dict.fromkeys(key for run in runs for key in validation_names(run)[:2]):
        best: How = "least" if key.endswith("loss") else "most"
        hows: tuple[tuple[str, How], ...] = (("first", "begin"), ("last", "end"), ("best", best))
        found += [row(f"held-out {short(key)}, {which}", key, how) for which, how in hows]
    found += [row(*each) for each in _ROWS]
    kinds = [row(kind, f"reward/{kind}", "sum").values for kind in FAILURES]
    failed = [[count for count in each if count is not None] for each in zip(*kinds, strict=True)]
    found.append(Figure("rewards that failed, sum", tuple(sum(each) if each else None for each in failed)))
    found.append(Figure("all steps together", row("", ("step",), "sum").values, ratio=True, shown=duration))
    return [figure for figure in found if any(value is not None for value in figure.values)]


def seconds(run: RecordedRun, phases: Sequence[str]) -> list[Point]:
    return [(line["step"], seconds_of(phases, line)) for line in run.metrics if f"timing_s/{phases[-1]}" in line]
