"""What is compared between runs: a few figures of each, from its metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from jaxrl.record.metrics import FAILURES, ROUND_PHASES, UPDATE_PHASES, seconds_of
from jaxrl.record.numbers import duration, number
from jaxrl.report.charts import Point, finite
from jaxrl.report.curves import short, validation_names
from jaxrl.report.runs import RecordedRun

How = Literal["first", "last", "mean", "median", "sum", "end"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table.

    Attributes:
      values: one for each run; None where the run has not recorded it.
      ratio: whether runs are compared by how many times it is that of the first; otherwise by the difference.
      steps: of a value at one step, which one it is for each run; shown where they are not the same.
      upto: the last step that counts for each run: runs with different ones are not compared.
    """

    name: str
    values: tuple[float | None, ...]
    ratio: bool = False
    shown: Callable[[float], str] = number
    steps: tuple[float | None, ...] = ()
    upto: tuple[float | None, ...] = ()

    def text(self, index: int) -> str:
        """`0.25 (step 0)`: with its step where the runs' differ."""
        value = self.values[index]
        assert value is not None, self.name
        steps = {step for step in self.steps if step is not None}
        return self.shown(value) + (f" (step {self.steps[index]:g})" if len(steps) > 1 else "")

    def beside_first(self, index: int) -> str:
        """How run `index` stands to the first one: `×0.82`, `+0.13`; empty where that says nothing."""
        first, value = self.values[0], self.values[index]
        if index == 0 or first is None or value is None:
            return ""
        if self.upto and self.upto[index] != self.upto[0]:
            return ""
        if self.ratio:
            return f"×{number(value / first)}" if first > 0 else ""
        if value == first:
            return ""
        return f"{'+' if value > first else '−'}{number(abs(value - first))}"


def summed(points: Sequence[Point], how: How) -> float | None:
    """One number of a series: `first` and `last` are means of a tenth of the steps."""
    values = [value for _, value in finite(points)]
    if not values:
        return None
    tenth = max(len(values) // 10, 1)
    match how:
        case "first":
            return fmean(values[:tenth])
        case "last":
            return fmean(values[-tenth:])
        case "mean":
            return fmean(values)
        case "median":
            return median(values)
        case "sum":
            return sum(values)
        case "end":
            return values[-1]


_ROWS: tuple[tuple[str, str, How, bool], ...] = (
    ("reward, first tenth of the steps", "critic/rewards/mean", "first", False),
    ("reward, last tenth of the steps", "critic/rewards/mean", "last", False),
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
)


def figures_of(runs: Sequence[RecordedRun]) -> list[Figure]:
    def row(
        name: str, points: Callable[[RecordedRun], Sequence[Point]], how: How, ratio: bool = False, **more: Any
    ) -> Figure:
        return Figure(name, tuple(summed(points(run), how) for run in runs), ratio, **more)

    found = [row("steps", lambda run: [(line["step"], line["step"]) for line in run.metrics], "end")]
    common = min((run.metrics[-1]["step"] if run.metrics else 0 for run in runs), default=0)  # that all runs have
    if common and any(run.metrics[-1]["step"] != common for run in runs):
        since = common - max(common // 10, 1) + 1
        name = f"reward, mean of steps {since:g} to {common:g}" if since < common else f"reward at step {common:g}"

        def rewards(run: RecordedRun) -> list[Point]:
            return [point for point in run.series("critic/rewards/mean") if since <= point[0] <= common]

        found.append(row(name, rewards, "mean"))
    found += [row(name, lambda run, key=key: run.series(key), how, ratio) for name, key, how, ratio in _ROWS[:2]]
    for key in dict.fromkeys(key for run in runs for key in validation_names(run)[:2]):
        found += _held_out(f"held-out {short(key)}", [finite(run.series(key)) for run in runs])
    found += [row(name, lambda run, key=key: run.series(key), how, ratio) for name, key, how, ratio in _ROWS[2:]]
    failed = [[summed(run.series(f"reward/{kind}"), "sum") for kind in FAILURES] for run in runs]
    counts = ([count for count in each if count is not None] for each in failed)
    found.append(Figure("rewards that failed, sum", tuple(sum(each) if each else None for each in counts)))
    for name, phases in (
        ("seconds per step, median", ("step",)),
        ("rollout, seconds per step, median", ROUND_PHASES),
        ("update, seconds per step, median", UPDATE_PHASES),
    ):
        found.append(row(name, lambda run, phases=phases: seconds(run, phases), "median", ratio=True))
    whole = row("all steps together", lambda run: seconds(run, ("step",)), "sum", ratio=True, shown=duration)
    return [figure for figure in (*found, whole) if any(value is not None for value in figure.values)]


def seconds(run: RecordedRun, phases: Sequence[str]) -> list[Point]:
    return [(line["step"], seconds_of(phases, line)) for line in run.metrics if f"timing_s/{phases[-1]}" in line]


def _held_out(name: str, series: Sequence[Sequence[Point]]) -> list[Figure]:
    nothing = (None, None)
    firsts = [points[0] if points else nothing for points in series]
    lasts = [points[-1] if points else nothing for points in series]
    bests = [max(points, key=lambda point: point[1]) if points else nothing for points in series]
    found = []
    # the best ones are compared if the runs were evaluated for as long, wherever each was best
    for what, points, ends in (("first", firsts, firsts), ("last", lasts, lasts), ("best", bests, lasts)):
        steps, values = zip(*points, strict=True)
        found.append(Figure(f"{name}, {what}", values, steps=steps, upto=tuple(step for step, _ in ends)))
    return found
