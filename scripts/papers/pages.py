"""A result as a markdown page: ours beside theirs, over seeds.

Purpose: `page`. The prose is in `pages/`, with a name in braces for each table or figure in it; `_PAGES` says what they
are. A table is a list of columns, each a head and a function of a `Row`; a further column or row is one more line. This
module alone reads what the papers' own methods reached (reported.yaml).

A number over several seeds is their mean ± their standard deviation (of a single run, n - 1 below the line). A speed-up
is met where the error of (speed-up - 1) is at most `BAR`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import yaml

from papers.cases import EPOCH_STEPS, EXPERIMENTS, RANKING_GROUPS, RESERVED_SHARE, Case, case_of
from papers.facts import FACTS, HERE, Fact
from papers.problems import TASKS
from papers.runs import Steps
from papers.what_if import APRIL_VARIANTS, AS_CALIBRATED, FACTORS, PERIOD, STALE, TAIL_VARIANTS, WARM_UP

BAR = 0.25
FIRST = 10  # steps that a table shows one by one
REPORTED: dict[str, dict[str, float]] = yaml.safe_load((HERE / "reported.yaml").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- what tables are made of


class Found:
    """The runs of a case, over all seeds."""

    def __init__(self, runs: Iterable[Steps]) -> None:
        self.runs = sorted(runs, key=lambda each: each.case.seed)
        self.case = self.runs[0].case

    def __call__(self, name: str, long: bool | None = None, every: int = 1) -> np.ndarray:
        """The mean of each seed over the steps that count, [seeds]; of one kind of rounds where `long` is given."""
        return np.array([self._mean(each.values, name, long, every) for each in self.runs])

    def _mean(self, values: Mapping[str, Sequence[Any]], name: str, long: bool | None, every: int) -> float:
        if self.case.paper == "rhymerl":  # from the second epoch on; the last step has no rollout beside it
            counted = slice(EPOCH_STEPS + every - 1, -1, every)
        else:
            counted = slice(WARM_UP if self.case.paper == "april" else self.case.epoch_steps, None, every)
        pairs = zip(values[name][counted], values["long"][counted], strict=True)
        return float(np.mean([value for value, kind in pairs if long is None or kind == long] or [np.nan]))

    @property
    def rollout_s(self) -> np.ndarray:
        """With waking the engines and sending weights."""
        return self("gen_s") + self("start_s")

    def first(self, name: str, count: int = FIRST) -> str:
        """The first steps of the first seed."""
        return ", ".join(f"{value:.0f}" for value in self.runs[0].values[name][:count])


class Result:
    """A result: its header, and its runs by row and column of the experiment."""

    def __init__(self, header: Mapping[str, Any], runs: Sequence[Steps]) -> None:
        self.header, self._runs = header, {}
        for each in runs:
            self._runs.setdefault(each.case.alike, []).append(each)

    def found(self, row: str, column: str) -> Found:
        return Found(self._runs[case_of(EXPERIMENTS[self.header["paper"]][row][column]).alike])

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

    @property
    def case(self) -> Case:
        return self().case

    def gain(self, before: str, after: str = "", name: str = "step_s") -> np.ndarray:
        """The speed-up of one row of the experiment over another, seed by seed."""
        return self(before)(name) / self(after)(name)

    def theirs(self, source: str) -> float:
        return REPORTED[source][self.column]

    def fact(self, name: str) -> Fact:
        case = next(iter(EXPERIMENTS[self.result.header["paper"]].values()))[self.column]
        return FACTS[f"{case['setup']}.{name}"]

    def closed(self, name: str) -> np.ndarray:
        """A reading in closed form, [seeds]."""
        paper = EXPERIMENTS[self.result.header["paper"]]
        return np.array(self.result.header["what_if"][name][list(next(iter(paper.values()))).index(self.column)])


Columns = Sequence[tuple[str, Callable[[Row], str]]]


def table(columns: Columns, rows: Iterable[Row]) -> str:
    return markdown([head for head, _ in columns], [[cell(row) for _, cell in columns] for row in rows])


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def shown(values: Sequence[float] | np.ndarray, form: str = ".2f") -> str:
    """The mean over seeds ± their standard deviation; one seed has none, and says so."""
    if len(values) < 2:
        return f"{values[0]:{form}} (one seed)"
    return f"{np.mean(values):{form}} ± {np.std(values, ddof=1):{form.removeprefix('+')}}"


def seconds(values: np.ndarray) -> str:
    return shown(values, ".0f")


def share(values: np.ndarray) -> str:
    return shown(values, ".0%")


def error_of(ours: Any, theirs: float) -> Any:
    """Of (speed-up - 1)."""
    return (ours - 1) / (theirs - 1) - 1


def verdict(error: float) -> str:
    return "yes" if abs(error) <= BAR else "**no**"


def held(ours: Callable[[Row], Any], theirs: Callable[[Row], float], form: Callable[[Any], str]) -> Columns:
    """The paper's speed-up, the error of ours, whose spread is that of the seeds, and whether it is within the bar."""
    return (
        ("paper", lambda r: f"{theirs(r):.2f}"),
        ("error of (speed-up − 1)", lambda r: form(error_of(ours(r), theirs(r)))),
        ("within 25 %", lambda r: verdict(float(np.mean(error_of(ours(r), theirs(r)))))),
    )


def beside_closed(ours: Callable[[Row], np.ndarray], theirs: Callable[[Row], float]) -> Columns:
    """A speed-up simulated, in closed form and in the paper."""
    paper, error, within = held(ours, theirs, lambda errors: shown(errors, "+.0%"))
    return (
        ("speed-up", lambda r: shown(ours(r))),
        ("in closed form", lambda r: shown(r.closed(AS_CALIBRATED))),
        paper,
        error,
        ("of the closed form", lambda r: shown(error_of(r.closed(AS_CALIBRATED), theirs(r)), "+.0%")),
        within,
    )


def blank(when: Callable[[Row], bool], columns: Columns) -> Columns:
    """Columns that say nothing in some rows."""

    def unless(cell: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda r: "" if when(r) else cell(r)

    return [(head, unless(cell)) for head, cell in columns]


# ---------------------------------------------------------------- RollPacker

MODELS = ("7B/8k", "14B/16k", "32B/32k")
PLAIN, TAIL = "plain", "+ tail batching"
TABLE2 = (TAIL, "+ reward scheduler", "+ parallelism planner", "+ stream trainer")
TABLE3 = ("w/o", "Adpt.", "20%", "30%", "40%")
FETCHES = [f"{when}, {most}" for when in ("as *Adpt.*", "at that share") for most in ("20%", "30%", "40%", "50%")]


def _row_of_table2(r: Row) -> float:
    return r.theirs(f"RollPacker Table 2, {r.row}")


def _over_the_row_before(r: Row) -> float:
    before = TABLE2[TABLE2.index(r.row) - 1] if r.row != TAIL else PLAIN
    return float(np.mean(r.gain(PLAIN))) / float(np.mean(r.gain(PLAIN, before)))


def _changed(without: Found, streamed: Found, long: bool | None, names: Sequence[str]) -> list[str]:
    """Seconds of rollout, training or the step: what streaming adds, in long rounds or in all."""
    return [shown(streamed(name, long) - without(name, long), "+.1f") for name in names]


def _last_degrees(found: Found) -> str:
    """That rounds ended in, the last short and the last long one of the first seed."""
    pairs = list(zip(found.runs[0].values["degrees"], found.runs[0].values["long"], strict=True))
    return ", ".join(f"{[degree for degree, kind in pairs if kind == long][-1]:g}" for long in (False, True))


def _table2(result: Result) -> dict[str, Any]:
    """Each mechanism on top of those before it."""
    rows: Columns = (
        ("model", lambda r: r.column),
        ("row", lambda r: r.row),
        ("steps", lambda r: str(len(r().runs[0].values["step_s"]))),
        ("s a step", lambda r: seconds(r()("step_s"))),
        ("speed-up over plain", lambda r: shown(r.gain(PLAIN))),
        ("paper", lambda r: f"{_row_of_table2(r):.2f}"),
        ("over the row before", lambda r: f"{_over_the_row_before(r):.2f}"),
    )
    head = ("model", "tp, short and long rounds", "preempted", "freed at", "streamed", "rollout", "training", "step")
    details = []
    for model in MODELS:
        planned, streamed = (result.found(row, model) for row in TABLE2[2:])
        preempted = str(sum(each.preemptions for each in planned.runs))
        shares = [share(streamed(name, True)) for name in ("freed_at", "streamed")]
        changed = _changed(planned, streamed, True, ("gen_s", "train_s", "step_s"))
        details.append([model, _last_degrees(planned), preempted, *shares, *changed])
    return {"rows": table(rows, result.rows(MODELS, TABLE2)), "details": markdown(head, details)}


def _stream_tables(result: Result) -> dict[str, Any]:
    """Table 3, when devices are freed, and Table 4, a single fetch."""
    theirs3, theirs4 = (REPORTED[f"RollPacker {name}, s a step"] for name in ("Table 3", "Table 4"))
    (base,), without = result.rows(MODELS[:1], ["w/o"]), result.found("w/o", MODELS[0])
    table3: Columns = (
        ("freed", lambda r: r.row),
        ("s a step", lambda r: shown(r()("step_s"), ".1f")),
        ("paper", lambda r: f"{theirs3[r.row]:.1f}"),
        ("speed-up", lambda r: shown(r.gain("w/o"))),
        ("paper", lambda r: f"{theirs3['w/o'] / theirs3[r.row]:.2f}"),
        *blank(
            lambda r: r.row == "w/o",
            (
                ("freed at", lambda r: share(r()("freed_at"))),
                ("streamed", lambda r: share(r()("streamed"))),
                ("rollout, s", lambda r: _changed(without, r(), None, ("gen_s",))[0]),
                ("training, s", lambda r: _changed(without, r(), None, ("train_s",))[0]),
            ),
        ),
    )

    def fetched(r: Row) -> tuple[str, str]:
        return (r.row.split(", ")[0], r.row.split(", ")[1]) if r.row != "Adpt." else ("*Adpt.*", "")

    table4: Columns = (
        ("freed", lambda r: fetched(r)[0]),
        ("groups fetched", lambda r: f"once, {fetched(r)[1]} at most" if fetched(r)[1] else "as they end"),
        ("s a step", lambda r: shown(r()("step_s"), ".1f")),
        ("paper", lambda r: f"{theirs4[fetched(r)[1]] if fetched(r)[1] else theirs3['Adpt.']:.1f}"),
        *blank(
            lambda r: r.row == "Adpt.",
            (
                ("over the first row", lambda r: shown(r.gain("Adpt."))),
                ("paper", lambda r: f"{theirs3['Adpt.'] / theirs4[fetched(r)[1]]:.2f}"),
                ("streamed", lambda r: share(r()("streamed"))),
            ),
        ),
    )
    return {
        "table3": table(table3, result.rows(MODELS[:1], TABLE3)),
        "table4": table(table4, result.rows(MODELS[:1], ["Adpt.", *FETCHES])),
        "start": {name: shown(base()(name), ".1f") for name in ("gen_s", "reward_s", "train_s", "start_s")},
        "without": shown(without("step_s"), ".1f"),
        "theirs": f"{theirs3['w/o']:.1f}",
    }


def _rollpacker(result: Result) -> dict[str, Any]:
    models = result.rows(MODELS)
    table2: Columns = (
        ("model", lambda r: r.column),
        ("plain, s a step", lambda r: seconds(r(PLAIN)("step_s"))),
        ("veRL's (fitted to)", lambda r: f"{r.fact('step_s').low:.0f}"),
        ("tail batching, s a step", lambda r: seconds(r(TAIL)("step_s"))),
        *beside_closed(lambda r: r.gain(PLAIN, TAIL), lambda r: r.theirs("RollPacker Table 2, + tail batching")),
    )
    gains = [float(np.mean(r.gain(PLAIN, TAIL))) for r in models]
    baselines: list[tuple[str, Callable[[Row], str]]] = [
        ("task (14B/16k)", lambda r: r.row),
        ("s a step", lambda r: seconds(r()("step_s"))),
    ]
    for name, stage, measured in _STAGES:
        baselines.append((name, lambda r, measured=measured: share(measured(r()) / r()("step_s"))))
        baselines.append(
            ("Table 1", lambda r, stage=stage: f"{FACTS[f'rollpacker.{r.row}.{stage}_share'].low:.0%}"),
        )
    figure10: Columns = (
        ("model", lambda r: r.column),
        ("plain: s of the first steps (first seed)", lambda r: r(PLAIN).first("step_s")),
        ("tail batching: the same", lambda r: r(TAIL).first("step_s")),
        ("short", lambda r: seconds(r(TAIL)("step_s", False))),
        ("long", lambda r: seconds(r(TAIL)("step_s", True))),
        ("plain / short", lambda r: shown(r(PLAIN)("step_s") / r(TAIL)("step_s", False))),
    )
    return {
        **_table2(result),
        **_stream_tables(result),
        **_figure4(result),
        **_figure11(result),
        **_figure12(models),
        "table2": table(table2, models),
        "order": "the same as" if gains == sorted(gains) else "**not** that of",
        "baselines": table(baselines, result.rows(MODELS[1:2], TASKS)),
        "figure10": table(figure10, models),
        "what_if": _what_if(result, TAIL_VARIANTS, [r.theirs("RollPacker Table 2, + tail batching") for r in models]),
    }


_STAGES: tuple[tuple[str, str, Callable[[Found], np.ndarray]], ...] = (
    ("rollout", "rollout", lambda found: found.rollout_s),
    ("reward", "reward", lambda found: found("reward_s")),
    ("training", "train", lambda found: found("train_s")),
)


def _figure4(result: Result) -> dict[str, str]:
    (plain, tail), names = result.rows(MODELS[1:2], ("code", "code, + tail batching")), ("plain", "tail batching")
    period = tail.case.period
    rows = [
        [
            name,
            r().first("longest", min(period, FIRST)),
            seconds(r()("step_s") * period),
            *(share(measured(r()) / r()("step_s")) for _, _, measured in _STAGES),
        ]
        for name, r in zip(names, (plain, tail), strict=True)
    ]
    head = ["", "longest response of each step (first seed)", "seconds of a period", "rollout", "reward", "training"]
    cut = plain()("longest") / tail()("longest", False)
    return {"figure4": markdown(head, rows), "cut": shown(cut, ".1f"), "speedup": shown(tail.gain("code"))}


def _figure11(result: Result) -> dict[str, str]:
    plain, tail = (result.found(row, MODELS[2]) for row in (PLAIN, TAIL))
    rows = [
        [name, found.first("longest"), found.first("gen_s")]
        for name, found in (("plain", plain), ("tail batching", tail))
    ]
    parts = []
    for model in MODELS:
        found = result.found(TAIL, model)
        whole = float(np.mean(found("step_s", True)))
        for kind, long in (("short", False), ("long", True)):
            shares = [shown(found(part, long) / whole) for part in ("start_s", "gen_s", "reward_s", "train_s")]
            parts.append([model, kind, *shares, seconds(found("step_s", long))])
    head = ("model", "round", "weights, waking", "rollout", "reward", "training", "s a step")
    return {
        "figure11": markdown(["", "longest response", "rollout, s"], rows),
        "gain": shown(plain("gen_s") / tail("gen_s", False), ".1f"),
        "loss": shown(tail("gen_s", True) / plain("gen_s")),
        "parts": markdown(head, parts),
    }


def _figure12(models: Sequence[Row]) -> dict[str, str]:
    rows, implied = [], []
    for r in models:
        plain, bars = r.closed(PERIOD + PLAIN), list(FACTORS)[1:]
        theirs = {factors: r.theirs(f"RollPacker Fig. 12, s of a rollout, {factors}") for factors in FACTORS}
        ratios = {factors: theirs[factors] / theirs["plain"] for factors in bars}
        cells = [f"{shown(r.closed(PERIOD + factors) / plain)} ({ratios[factors]:.2f})" for factors in bars]
        rollout, step = r.fact("rollout_s").low, r.fact("step_s").low
        rows.append([r.column, f"{seconds(plain)} ({rollout:.0f})", *cells])
        saved = rollout * (1 - ratios["P and R 1.25"])
        table2 = r.theirs("RollPacker Table 2, + tail batching")
        before, needed = f"{step:.0f}, of it {rollout:.0f}", step * (1 - 1 / table2)
        numbers = (f"{saved:.0f}", f"{step / (step - saved):.2f}", f"{table2:.2f}", f"{needed:.0f}")
        implied.append([r.column, before, *numbers])
    head = ["model", "plain step and rollout, s", "saved, s", "speed-up", "Table 2", "s to save for that"]
    figure12 = markdown(["model", "plain, s", *list(FACTORS)[1:]], rows)
    return {"figure12": figure12, "implied": markdown(head, implied)}


def _what_if(result: Result, variants: Mapping[str, Any], theirs: Sequence[float]) -> str:
    readings = result.header["what_if"]
    names = [name for name, variant in variants.items() if not variant.dapo and name in readings]
    rows = [[name, *(shown(values) for values in readings[name])] for name in names]
    columns = next(iter(EXPERIMENTS[result.header["paper"]].values()))
    return markdown(["", *columns], [*rows, ["paper", *(f"{value:.2f}" for value in theirs)]])


TIMEOUTS = {
    "a column, for every row": "fixed",
    "learnt as the first epoch goes": "fixed",
    "learnt in the first epoch, second": "fixed, second",
    "the same, no prompt much harder": "fixed, second",
}
"""Fig. 14c: adaptive time-outs by where anchors come from, and the fixed ones beside them."""

JUDGES = (
    "a quarter of the devices for itself",
    "on all devices, which it takes for each verdict",
    "beside all devices, on a third as many more",
)
REWARDS = (TAIL, "+ rewards beside the rollout", "+ adaptive time-outs, anchors learnt", "+ adaptive time-outs")


def _rewards(result: Result) -> dict[str, Any]:
    """RollPacker's reward scheduler: adaptive time-outs, and where the judge runs."""

    def combined(found: Found, long: bool | None) -> np.ndarray:
        """Seconds of rollout and rewards, as Fig. 14c adds them up."""
        return found("gen_s", long) + found("reward_s", long)

    figure14c: list[tuple[str, Callable[[Row], str]]] = [("set-up", lambda r: r.column), ("anchors", lambda r: r.row)]
    for kind, long in (("short", False), ("long", True), ("all", None)):
        pair = lambda r, long=long: (combined(r(TIMEOUTS[r.row]), long), combined(r(), long))  # noqa: E731
        figure14c += [
            (f"{kind}, fixed", lambda r, pair=pair: seconds(pair(r)[0])),
            (f"{kind}, adaptive", lambda r, pair=pair: seconds(pair(r)[1])),
            (f"{kind}, ratio", lambda r, pair=pair: shown(pair(r)[0] / pair(r)[1])),
        ]
    figure14c += [
        ("scoring, fixed", lambda r: seconds(r(TIMEOUTS[r.row])("scoring_s"))),
        ("adaptive", lambda r: seconds(r()("scoring_s"))),
    ]

    def theirs(r: Row) -> str:
        above, own = (r.theirs(f"RollPacker Table 2, + {row}") for row in ("tail batching", "reward scheduler"))
        beside = r.theirs("RollPacker §6.5, asynchronous reward computation")
        known = {"+ rewards beside the rollout": beside, "+ adaptive time-outs": own / above}.get(r.row)
        return "" if known is None else f"{known:.2f}"

    stages: Columns = (
        ("rollout", lambda r: seconds(r()("gen_s"))),
        ("reward", lambda r: seconds(r()("reward_s"))),
        ("training", lambda r: seconds(r()("train_s"))),
        ("s a step", lambda r: seconds(r()("step_s"))),
    )
    over: Columns = (("over tail batching", lambda r: shown(r.gain(TAIL))), ("paper", theirs))
    table2: Columns = (("model", lambda r: r.column), ("row", lambda r: r.row), *stages, *over)
    judge: Columns = (
        ("the judge is", lambda r: r.row),
        *stages,
        ("over the first row", lambda r: shown(r.gain(JUDGES[0]))),
    )
    return {
        "figure14c": table(figure14c, result.rows(("authors' configuration", "paper's set-up"), TIMEOUTS)),
        "table2": table(table2, result.rows(MODELS, REWARDS)),
        "judge": table(judge, result.rows(MODELS[:1], JUDGES)),
        "timeouts": f"{REPORTED['RollPacker §6.5, adaptive over fixed time-outs']['7B/8k']:g}",
        "mps": f"{REPORTED['RollPacker §6.5, judge and actor with MPS over without, at most']['7B/8k']:g}",
        "reserved": f"{RESERVED_SHARE:.0%}",
    }


# ---------------------------------------------------------------- APRIL

DAPO = {
    "0.2": "DAPO's row, 0.2 dropped; fitted anew",
    "0.35 (the calibration)": "DAPO's row of Table 1",
    "0.5": "DAPO's row, 0.5 dropped; fitted anew",
}
"""By share of dropped groups: names of readings."""


def _april(result: Result) -> dict[str, Any]:
    models = result.rows(("Qwen3-4B", "Qwen3-8B"))
    readings = result.header["what_if"]

    def rate(r: Row, row: str) -> np.ndarray:
        return r(row)("drawn_tokens") / r(row)("gen_s")

    def after(r: Row) -> str:
        reached = REPORTED[f"APRIL Table 1, GRPO, tokens/s with APRIL, {r.column}"].values()
        return f"{min(reached):,.0f} to {max(reached):,.0f}"

    def improved(r: Row, method: str = "GRPO") -> float:
        return 1 + r.theirs(f"APRIL Table 1, {method}, mean improvement")

    grpo: Columns = (
        ("model", lambda r: r.column),
        ("plain, tokens/s", lambda r: shown(rate(r, "plain"), ",.0f")),
        ("paper (fitted to)", lambda r: f"{r.fact('throughput').low:,.0f} to {r.fact('throughput').high:,.0f}"),
        ("APRIL, tokens/s", lambda r: shown(rate(r, "APRIL"), ",.0f")),
        ("paper", after),
        *beside_closed(lambda r: rate(r, "APRIL") / rate(r, "plain"), improved),
    )
    dapo = [
        [dropped, *(cell for r in models for cell in (shown(r.closed(name)), f"{improved(r, 'DAPO'):.2f}"))]
        for dropped, name in DAPO.items()
        if name in readings  # not at a tiny size
    ]
    stale: Columns = (
        ("model", lambda r: r.column),
        ("last segments of resumed requests (closed form)", lambda r: share(r.closed(STALE[0]))),
        ("of trained tokens", lambda r: share(r("APRIL")("stale_share"))),
        ("in closed form", lambda r: share(r.closed(STALE[1]))),
        ("of trained responses", lambda r: share(r("APRIL")("stale_samples"))),
        ("in closed form", lambda r: share(r.closed(STALE[2]))),
    )
    head = ["groups that DAPO drops", *(each for r in models for each in (r.column, "paper"))]
    return {
        "grpo": table(grpo, models),
        "dapo": markdown(head, dapo),
        "stale": table(stale, models),
        "what_if": _what_if(result, APRIL_VARIANTS, [improved(r) for r in models]),
        "warm_up": WARM_UP,
    }


# ---------------------------------------------------------------- PAT

DEGREES = (1, 2, 4, 8)
BASE = "static 2"  # that the paper's baseline is read as
ADAPTIVE = ("{1, 2} from 1", "{1, 2, 4, 8} from 1", "{1, 2, 4, 8} from 2")
SMALL, ALL, FROM_BASE = ADAPTIVE
PAT_MODELS = {"pat.a40.8b": "Llama-3.1-8B", "pat.a40.14b": "Qwen3-14B", "pat.h100.8b": "Llama-3.1-8B"}
PAT_MODELS["pat.h100.14b"] = "Qwen3-14B"

PUBLISHED = {
    "Fig. 10a, 16384": ("PAT §5.2, A40, largest speed-up", "Llama-3.1-8B, 8 devices"),
    "Fig. 10b, 16384": ("PAT §5.2, A40, largest speed-up", "16 devices"),
    "Fig. 10c, 16384": ("PAT §5.2, A40, largest speed-up", "Qwen3-14B, 16"),
    "Fig. 11a, 24576": ("PAT §5.2-5.3, H100, speed-up of an iteration", "Llama-3.1-8B/24K"),
    "Fig. 11b, 16384": ("PAT §5.2-5.3, H100, speed-up of an iteration", "Qwen3-14B/16K"),
}
"""By column of the experiment: what the text says in numbers."""


def best_static(r: Row) -> str:
    """The static degree with the shortest step: what an adaptive layout has to beat."""
    return min((f"static {tp}" for tp in DEGREES), key=lambda name: float(np.mean(r(name)("step_s"))))


def _pat(result: Result) -> dict[str, Any]:
    points: Columns = (
        ("figure", lambda r: r.column.split(", ")[0]),
        ("model", lambda r: PAT_MODELS[r(BASE).case.setup]),
        ("devices", lambda r: f"{r(BASE).case.devices} x {r(BASE).case.of.hardware}"),
        ("longest", lambda r: f"{r(BASE).case.tokens:,}"),
    )
    speedups: Columns = (
        *points,
        (f"{FROM_BASE}, over {BASE}", lambda r: shown(r.gain(BASE, FROM_BASE))),
        *blank(
            lambda r: r.column not in PUBLISHED,
            held(
                lambda r: r.gain(BASE, FROM_BASE),
                lambda r: REPORTED[PUBLISHED[r.column][0]][PUBLISHED[r.column][1]],
                lambda errors: shown(errors, "+.0%"),
            ),
        ),
        ("switches", lambda r: f"{np.mean(r(FROM_BASE)('switches')):.1f}"),
        ("best static tp", lambda r: best_static(r).removeprefix("static ")),
        (f"{ALL}, over the best", lambda r: shown(r.gain(best_static(r), ALL))),
        (f"{FROM_BASE}, over the best", lambda r: shown(r.gain(best_static(r), FROM_BASE))),
        (f"{SMALL}, over static 1", lambda r: shown(r.gain("static 1", SMALL))),
        (f"{SMALL}, over static 2", lambda r: shown(r.gain("static 2", SMALL))),
    )
    layouts = (*(f"static {tp}" for tp in DEGREES), *ADAPTIVE)
    steps: Columns = (*points, *((name, lambda r, name=name: seconds(r(name)("step_s"))) for name in layouts))

    def published(r: Row) -> str:
        size = "8b" if r.case.setup.endswith("8b") else "14b"
        after = REPORTED["PAT §5.3, H100, generation with PAT in s"][PUBLISHED[r.column][1]]
        known = {BASE: FACTS[f"pat.h100.{size}_generation"].low, FROM_BASE: after}.get(r.row)
        return "" if known is None else f"{known:.1f}"

    breakdown: Columns = (
        ("model", lambda r: PUBLISHED[r.column][1]),
        ("layout", lambda r: r.row),
        ("generation, s", lambda r: shown(r()("gen_s"), ".1f")),
        ("training, s", lambda r: shown(r()("train_s"), ".1f")),
        ("step, s", lambda r: shown(r()("step_s"), ".1f")),
        ("generation in the paper, s", published),
    )
    columns = EXPERIMENTS["pat"][BASE]
    readings = [[name, *(f"{each[0]:.2f}" for each in values)] for name, values in result.header["what_if"].items()]
    readings.append(["paper", *(f"{REPORTED[source][name]:.2f}" for source, name in PUBLISHED.values())])
    places = [f"{figure}, {int(tokens) // 1024}K" for figure, tokens in (name.split(", ") for name in PUBLISHED)]
    return {
        "speedups": table(speedups, result.rows(columns)),
        "steps": table(steps, result.rows(columns)),
        "breakdown": table(breakdown, result.rows([name for name in PUBLISHED if "Fig. 11" in name], layouts)),
        "readings": markdown(["one switch", *places], readings),
        "base": BASE.removeprefix("static "),
    }


# ---------------------------------------------------------------- RhymeRL

RHYMERL = tuple(EXPERIMENTS["rhymerl"])


def _rhymerl(result: Result) -> dict[str, Any]:
    before = {after: row for row, after in pairwise(RHYMERL)}
    tasks = ("Math-14B", "Code-14B")

    def gain(r: Row) -> np.ndarray:
        return r.gain(before[r.row])

    figure14: Columns = (
        ("model", lambda r: r.column),
        ("row", lambda r: r.row),
        ("s a step", lambda r: seconds(r()("step_s"))),
        *blank(
            lambda r: r.row == PLAIN,
            (
                ("over the row before", lambda r: shown(gain(r))),
                *held(
                    gain,
                    lambda r: REPORTED[f"RhymeRL Fig. 14, {r.column}"][r.row],
                    lambda errors: f"{np.mean(errors):+.0%}",
                ),
            ),
        ),
    )

    def moved_there(r: Row) -> str:
        (task,), theirs = r.case.tasks, REPORTED["RhymeRL Fig. 18, share of samples that move"]
        return f"{theirs[task]:.1%} to {theirs[f'{task}, most']:.1%}"

    moved: Columns = (
        ("model", lambda r: r.column),
        ("row", lambda r: r.row),
        ("groups", lambda r: str(RANKING_GROUPS[r.case.tasks[0]])),
        ("moved", lambda r: shown(r()("moved"), ".1%")),
        ("Fig. 18", moved_there),
        ("workers idle", lambda r: share(r()("idle"))),
        ("of even steps", lambda r: share(r()("idle", every=2))),
    )
    drafts: Columns = (
        ("model", lambda r: r.column),
        ("drafted tokens that were accepted (paper: 65 to 79 %)", lambda r: share(r()("accepted"))),
        ("tokens from drafts", lambda r: share(r()("drafted"))),
        ("tokens a row and step", lambda r: shown(r()("per_step"))),
    )
    closed = [[name, *map(shown, columns)] for name, columns in result.header["what_if"].items()]
    return {
        "figure14": table(figure14, result.rows(tasks, RHYMERL)),
        "moved": table(moved, result.rows(tasks, RHYMERL[1:])),
        "drafts": table(drafts, result.rows(tasks, RHYMERL[-1:])),
        "closed": markdown(("", *RHYMERL[1:3]), closed),
    }


# ---------------------------------------------------------------- the page

_PAGES: dict[str, Callable[[Result], dict[str, Any]]] = {
    "rollpacker": _rollpacker,
    "rollpacker-whole": _table2,
    "rollpacker-rewards": _rewards,
    "april": _april,
    "pat": _pat,
    "rhymerl": _rhymerl,
}


def page(header: Mapping[str, Any], runs: Sequence[Steps]) -> str:
    """The whole page."""
    committed = header["calibration"]["committed"] or "not committed as it stands: these figures do not count"
    file = header["calibration"]["file"]
    seeds = ", ".join(map(str, sorted({r.case.seed for r in runs})))
    note = "\n\n**Tried out at a tiny size: no figure below means anything.**" if header["tiny"] else ""
    prose = (HERE / "pages" / f"{header['paper']}.md").read_text(encoding="utf-8")
    sections = prose.format_map(_PAGES[header["paper"]](Result(header, runs)))
    return f"""# {header["paper"]} on modelled devices, {header["date"][:10]}

All seconds are simulated ones. What they rest on, and what to make of them: [README.md](README.md).

- Command: `{header["command"]}`
- Date: {header["date"]}
- Commit: {header["commit"]}
- Calibration: [{file}]({file}), last changed in commit {committed}
- Plans of at most {runs[0].case.decode_steps} decode steps; seeds: {seeds}{note}

{sections}"""
