"""Rewards on a run's page: how long scoring took, by domain, how much of it the rollout hid, what failed, and of what
parts a reward is made (`jaxrl.rewards.reward_metrics` names the metrics)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from statistics import median

from jaxrl.record.metrics import FAILURES, hidden_scoring_shares, number
from jaxrl.report.charts import Chart, Curve, breakable, card, finite
from jaxrl.report.curves import curves_of, ever
from jaxrl.report.runs import RecordedRun

MAX_DOMAINS = 6
"""With a chart of their own, those with most samples."""
COLOURS = {"timeouts": "c2", "crashes": "c3", "errors": "c5"}
TIMEOUTS = {
    "case": ("test cases, adaptive limit", "c1"),
    "case_max": ("test cases, largest limit", "c2"),
    "program": ("programs", "c6"),
    "sample": ("samples", "c3"),
    "endpoint": ("requests to the endpoint", "c4"),
    "watchdog": ("silent workers", "c5"),
}
"""Kinds of limits (`jaxrl.rewards.reward_metrics`), with labels and colours."""
COLUMNS = ("Domain", "Samples", "p50", "p95", "Max", "Time-outs", "Crashes", "Errors")


def rewards_section(run: RecordedRun, span: tuple[float, float] | None) -> str:
    """Empty for a run without any of these metrics. `span`: the steps that axes cover."""
    names = domains(run.metrics)
    charts: list[Chart] = []
    for name in names[:MAX_DOMAINS]:
        of = f"reward/{name}"
        lines = ("median", f"{of}/p50_s", "c1"), ("95 %", f"{of}/p95_s", "c2"), ("longest", f"{of}/max_s", "c3")
        charts.append(Chart(f"Scoring of {name}", "seconds", curves_of(run, *lines), "What one response takes."))
    if shares := hidden_scoring_shares(run.metrics):
        curves = [Curve("of its seconds", shares)]
        charts.append(
            Chart("Scoring hidden under the rollout", "share", curves, "How much of it ran beside the rollout.", top=1)
        )
    failed = [(FAILURES[kind][1], f"reward/{kind}", colour) for kind, colour in COLOURS.items()]
    failed += [("scored again", "reward/retries", "c4"), ("test cases cut off", "reward/code/cut_off", "c6")]
    charts += ever(Chart("Rewards that failed", "samples per step", curves_of(run, *failed), "They count as 0."))
    limits = [(label, f"reward/timeouts/{kind}", colour) for kind, (label, colour) in TIMEOUTS.items()]
    charts += ever(Chart("Time-outs by kind", "per step", curves_of(run, *limits), "Which limit ended the scoring."))
    anchors = ("median", "reward/code/anchor_s/median", "c1"), ("longest", "reward/code/anchor_s/max", "c3")
    if curves := curves_of(run, *anchors):
        charts.append(Chart("Longest correct test case", "seconds", curves, "Limits follow from it."))
    charts += _parts(run)
    if not charts:
        return ""
    figures = "".join(card(replace(chart, span=span)) for chart in charts)
    return f"<h2>Rewards</h2><section class=charts>{figures}</section>{_table(run, names) if names else ''}"


def domains(lines: Sequence[Mapping[str, float]]) -> list[str]:
    """The domains, by falling number of samples."""
    counts: dict[str, float] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("reward/") and name.endswith("/num_scored") and name != "reward/num_scored":
                domain = name.removeprefix("reward/").removesuffix("/num_scored")
                counts[domain] = counts.get(domain, 0.0) + value
    return sorted(counts, key=lambda domain: (-counts[domain], domain))


def _parts(run: RecordedRun) -> list[Chart]:
    names = sorted({name for line in run.metrics for name in line if name.startswith("reward/part/")})
    overlong = [(step, -lost) for step, lost in run.series("reward/overlong_penalty/mean")]
    if not names and not overlong:
        return []
    colours = ("c2", "c3", "c4", "c5", "c6", "c7", "c8", "c10", "c11")
    parts = [
        (name.removeprefix("reward/part/").removesuffix("/mean"), name, colours[i % len(colours)])
        for i, name in enumerate(names)
    ]
    curves = curves_of(run, ("scorer", "reward/own/mean", "c1"), *parts)
    curves += [Curve("overlong", overlong, "c9")] if overlong else []
    return [Chart("Parts of the reward", "mean, before weights", curves, "What is added up.", legend=True)]


def _table(run: RecordedRun, names: Sequence[str]) -> str:
    """Each domain over the whole run."""
    rows = []
    for name in names:

        def values(key: str, name: str = name) -> list[float]:
            return [value for _, value in finite(run.series(f"reward/{name}/{key}"))]

        seconds = [median(found) if (found := values(key)) else None for key in ("p50_s", "p95_s")]
        seconds.append(max(values("max_s"), default=None))
        cells = [breakable(name), number(sum(values("num_scored")))]
        cells += ["–" if value is None else f"{number(value)} s" for value in seconds]
        cells += [number(sum(values(kind))) for kind in FAILURES]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    note = "<p class=sub style='margin-top:14px'>Counts of the whole run; p50 and p95 are medians over its steps.</p>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"{note}<div style='overflow-x:auto'>{table}</div>"
