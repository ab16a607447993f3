"""A result as a markdown page: ours beside theirs, over seeds.

Purpose: `page` fills a template of `pages/` (Jinja) in. A template has the prose and the tables of an experiment: for
each a head, and a line of cells for every `Row`. A further row or column is a line there. Pages alone read what the
papers' own methods reached (reported.yaml).

A number over several seeds is their mean ± their standard deviation (of a single run, n - 1 below the line). A speed-up
is met where the error of (speed-up - 1) is at most `BAR`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from papers.cases import EPOCH_STEPS, EXPERIMENTS, RANKING_GROUPS, RESERVED_SHARE, case_of
from papers.facts import FACTS, HERE, Fact
from papers.problems import TASKS
from papers.runs import Steps
from papers.what_if import APRIL_VARIANTS, AS_CALIBRATED, STALE, WARM_UP

BAR = 0.25
FIRST = 10  # steps that a table shows one by one
REPORTED: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "reported.yaml").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- runs


class Found:
    """The runs of a case, over all seeds."""

    def __init__(self, runs: Iterable[Steps]) -> None:
        self.runs = sorted(runs, key=lambda each: each.case.seed)
        self.case = self.runs[0].case
        self.steps = len(self.runs[0].values["step_s"])
        self.preemptions = sum(each.preemptions for each in self.runs)

    def __call__(self, name: str, long: bool | None = None, every: int = 1) -> np.ndarray:
        """The mean of each seed over the steps that count, [seeds]; of one kind of rounds where `long` is given."""
        first, last = self.case.epoch_steps, None
        if self.case.paper == "april":
            first = WARM_UP
        if self.case.paper == "rhymerl":  # from the second epoch on; the last step has no rollout beside it
            first, last = EPOCH_STEPS + every - 1, -1
        means = []
        for each in self.runs:
            values, kinds = (each.values[key][first:last:every] for key in (name, "long"))
            counted = [value for value, kind in zip(values, kinds, strict=True) if long is None or kind == long]
            means.append(np.mean(counted or [np.nan]))
        return np.array(means)

    def rollout_of(self, long: bool | None) -> np.ndarray:
        """Seconds of rollouts of one kind, with waking the engines and sending weights."""
        return self("gen_s", long) + self("start_s", long)

    @property
    def rollout_s(self) -> np.ndarray:
        return self.rollout_of(None)

    @property
    def longest_s(self) -> np.ndarray:
        """A period's mean rollout, of the longest short one and the longest long one (RollPacker's Fig. 12)."""
        found = []
        for each in self.runs:
            seconds = np.add(each.values["gen_s"], each.values["start_s"])
            long = np.array(each.values["long"])
            kinds = [kind for kind in (long, ~long) if kind.any()]
            found.append(sum(seconds[kind].max() * kind.mean() for kind in kinds))
        return np.array(found)

    def scored_s(self, long: bool | None) -> np.ndarray:
        """Seconds of rollout and rewards, as RollPacker's Fig. 14c adds them up."""
        return self.rollout_of(long) + self("reward_s", long)

    @property
    def stages(self) -> list[str]:
        """Cells below `STAGES`."""
        return [seconds(self(name)) for name in ("gen_s", "reward_s", "train_s", "step_s")]

    def first(self, name: str, count: int = FIRST) -> str:
        """The first steps of the first seed."""
        return ", ".join(f"{value:.0f}" for value in self.runs[0].values[name][: min(count, FIRST)])

    def last(self, name: str, long: bool) -> str:
        """The last round of a kind, of the first seed."""
        values = self.runs[0].values
        return f"{[value for value, kind in zip(values[name], values['long'], strict=True) if kind == long][-1]:g}"


class Result:
    """A result: its header, and its runs by row and column of the experiment."""

    def __init__(self, header: Mapping[str, Any], runs: Sequence[Steps]) -> None:
        self.experiment, self.readings = EXPERIMENTS[header["paper"]], header["what_if"]
        self.columns = list(next(iter(self.experiment.values())))
        self._runs: dict[Any, list[Steps]] = {}
        for each in runs:
            self._runs.setdefault(each.case.alike, []).append(each)

    def found(self, row: str, column: str) -> Found:
        return Found(self._runs[case_of(self.experiment[row][column]).alike])

    def rows(self, columns: Iterable[str], rows: Iterable[str] = ("",)) -> list[Row]:
        """A row of a table for each of these rows of the experiment in each of these columns."""
        chosen = list(rows)
        return [Row(self, column, row) for column in columns for row in chosen]


class Row:
    """A row of a table, of one column of the experiment; `row(name)` has the runs of its row of that name."""

    def __init__(self, result: Result, column: str, row: str) -> None:
        self.result, self.column, self.row = result, column, row

    def __call__(self, name: str = "") -> Found:
        return self.result.found(name or self.row, self.column)

    def gain(self, before: str, after: str = "") -> np.ndarray:
        """The speed-up of a step by one row of the experiment over another, seed by seed."""
        return self(before)("step_s") / self(after)("step_s")

    def fastest(self, rows: Iterable[str]) -> str:
        """Of these rows of the experiment the one with the shortest step: what a gain has to be held against."""
        return min(rows, key=lambda name: np.mean(self(name)("step_s")))

    def theirs(self, source: str) -> float:
        return REPORTED[source][self.column]

    def fact(self, name: str) -> Fact:
        return FACTS[f"{next(iter(self.result.experiment.values()))[self.column]['setup']}.{name}"]

    def closed(self, name: str) -> np.ndarray:
        """A reading in closed form, [seeds]."""
        return np.array(self.result.readings[name][self.result.columns.index(self.column)])

    @property
    def point(self) -> list[str]:
        """Cells below `POINT`."""
        case = next(iter(self.result.experiment.values()))[self.column]
        found = self(next(iter(self.result.experiment))).case
        devices = f"{found.devices} x {found.of.hardware}"
        return [self.column.split(", ")[0], found.of.model, devices, f"{case['tokens']:,}"]


# ---------------------------------------------------------------- cells


def head(*cells: Any) -> str:
    return f"{line(*cells)}\n{line(['---'] * len(_flat(cells)))}"


def line(*cells: Any) -> str:
    """A line of a table; a list has several cells."""
    return f"| {' | '.join(_flat(cells))} |"


def _flat(cells: Any) -> list[str]:
    return [str(cells)] if not isinstance(cells, list | tuple) else [each for cell in cells for each in _flat(cell)]


def shown(values: Sequence[float] | np.ndarray, form: str = ".2f") -> str:
    """The mean over seeds ± their standard deviation; one seed has none, and says so."""
    if len(values) < 2:
        return f"{values[0]:{form}} (one seed)"
    return f"{np.mean(values):{form}} ± {np.std(values, ddof=1):{form.removeprefix('+')}}"


def seconds(values: np.ndarray) -> str:
    return shown(values, ".0f")


def change(after: Found, before: Found, name: str, long: bool | None = None) -> str:
    return shown(after(name, long) - before(name, long), "+.1f")


def error_of(ours: np.ndarray, theirs: float) -> np.ndarray:
    """Of (speed-up - 1)."""
    return (ours - 1) / (theirs - 1) - 1


def held(ours: np.ndarray, theirs: float, spread: bool = True) -> list[str]:
    """Cells below `HELD`; an error's spread is that of the seeds."""
    errors = error_of(ours, theirs)
    within = "yes" if abs(np.mean(errors)) <= BAR else "**no**"
    return [f"{theirs:.2f}", shown(errors, "+.0%") if spread else f"{np.mean(errors):+.0%}", within]


def beside(ours: np.ndarray, closed: np.ndarray, theirs: float) -> list[str]:
    """Cells below `BESIDE`: a speed-up simulated, in closed form and in the paper."""
    paper, error, within = held(ours, theirs)
    return [shown(ours), shown(closed), paper, error, shown(error_of(closed, theirs), "+.0%"), within]


def is_ascending(rows: Iterable[Row], after: str) -> bool:
    """Whether the speed-ups of a row of the experiment grow from column to column."""
    gains = [np.mean(row.gain("plain", after)) for row in rows]
    return gains == sorted(gains)


_KNOWN = {
    **{function.__name__: function for function in (head, line, shown, seconds, change, held, beside, is_ascending)},
    "f": lambda form, value: f"{value:{form}}",
    "mean": np.mean,
    "share": lambda values: shown(values, ".0%"),
    "tenths": lambda values: shown(values, ".1f"),
    "HELD": ("paper", "error of (speed-up − 1)", "within 25 %"),
    "BESIDE": ("speed-up", "in closed form", "paper", "error of (speed-up − 1)", "of the closed form", "within 25 %"),
    "STAGES": ("rollout", "reward", "training", "s a step"),
    "POINT": ("figure", "model", "devices", "longest"),
    "MODELS": ("7B/8k", "14B/16k", "32B/32k"),
    "TABLE2": ("+ tail batching", "+ reward scheduler", "+ parallelism planner", "+ stream trainer"),
    "VARIANTS": [name for name, each in APRIL_VARIANTS.items() if not each.dapo],
    "AS_CALIBRATED": AS_CALIBRATED,
    "FACTS": FACTS,
    "RANKING_GROUPS": RANKING_GROUPS,
    "REPORTED": REPORTED,
    "RESERVED_SHARE": RESERVED_SHARE,
    "STALE": STALE,
    "TASKS": TASKS,
    "WARM_UP": WARM_UP,
}


def page(header: Mapping[str, Any], runs: Sequence[Steps]) -> str:
    """The whole page."""
    result = Result(header, runs)
    own = {"result": result, "rows": result.rows, "columns": result.columns, "readings": result.readings}
    seeds = ", ".join(map(str, sorted({each.case.seed for each in runs})))
    about = {"header": header, "seeds": seeds, "decode_steps": runs[0].case.decode_steps}
    return render("page.md", **own, **about)


def render(template: str, **given: Any) -> str:
    """A template of `pages/`, filled in."""
    templates = Environment(
        loader=FileSystemLoader(HERE / "pages"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    templates.filters |= {
        "shown": shown,
        "f": lambda value, form: f"{value:{form}}",
        "seconds_of": lambda name, row: float(np.mean(row(name)("gen_s"))),
        "preempted": lambda name, row: row(name).preemptions,
    }
    return templates.get_template(template).render(**_KNOWN, **given)
