"""Rewards on a run's page: what scoring took, by domain, what of it the rollout hid, what failed, and of what parts a
reward is made.

Purpose: `rewards_section` turns a run's metrics (`jaxrl.rewards.router` names them) into charts and a table of domains;
empty for a run without any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from statistics import median

from jaxrl.record.metrics import hidden_scoring_shares
from jaxrl.report.charts import Chart, Curve, Point, breakable, card, finite, number

Lines = Sequence[Mapping[str, float]]
MAX_DOMAINS = 6
"""With a chart of their own, those with most samples."""
FAILURES = (("timeouts", "time-outs", "c2"), ("crashes", "crashes", "c3"), ("errors", "errors", "c5"))
TIMEOUTS = (
    ("case", "test cases, adaptive limit", "c1"),
    ("case_max", "test cases, largest limit", "c2"),
    ("program", "programs", "c6"),
    ("sample", "samples", "c3"),
    ("endpoint", "requests to the endpoint", "c4"),
    ("watchdog", "silent workers", "c5"),
)
"""Kinds of limits (`jaxrl.rewards.reward_metrics`)."""
_OF_DOMAIN = "/num_scored"
COLUMNS = ("Domain", "Samples", "p50", "p95", "Max", "Time-outs", "Crashes", "Errors")


def rewards_section(lines: Lines, span: tuple[float, float] | None) -> str:
    """HTML of a run's metrics, a mapping for each step; `span`: the steps that axes cover."""
    names = domains(lines)
    charts = [
        *_times(lines, names),
        *_hidden(lines),
        *_failed(lines),
        *_timeouts(lines),
        *_anchors(lines),
        *_parts(lines),
    ]
    if not charts:
        return ""
    figures = "".join(card(replace(chart, span=span)) for chart in charts)
    return f"<h2>Rewards</h2><section class=charts>{figures}</section>{_table(lines, names) if names else ''}"


def domains(lines: Lines) -> list[str]:
    """Names of domains, those with most samples first."""
    counts: dict[str, float] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("reward/") and name.endswith(_OF_DOMAIN) and name != "reward/num_scored":
                domain = name.removeprefix("reward/").removesuffix(_OF_DOMAIN)
                counts[domain] = counts.get(domain, 0.0) + value
    return sorted(counts, key=lambda domain: (-counts[domain], domain))


def series(lines: Lines, name: str) -> list[Point]:
    """(step, value) where the metric was recorded."""
    return [(line["step"], line[name]) for line in lines if name in line]


def _times(lines: Lines, names: Sequence[str]) -> list[Chart]:
    """Seconds of scoring, a chart for each domain."""
    found: list[Chart] = []
    for name in names[:MAX_DOMAINS]:
        curves = [
            Curve(label, points, colour)
            for label, key, colour in (("median", "p50_s", "c1"), ("95 %", "p95_s", "c2"), ("longest", "max_s", "c3"))
            if (points := series(lines, f"reward/{name}/{key}"))
        ]
        found.append(Chart(f"Scoring of {name}", "seconds", curves, f"reward/{name}/p50_s"))
    return found


def _hidden(lines: Lines) -> list[Chart]:
    shares = hidden_scoring_shares(lines)
    if not shares:
        return []
    return [Chart("Scoring hidden under the rollout", "share", [Curve("of its seconds", shares)], "", top=1)]


def _failed(lines: Lines) -> list[Chart]:
    """How many rewards failed in a step, by kind, and how many samples were scored again; none where none was."""
    kinds = (
        *((f"reward/{key}", label, colour) for key, label, colour in FAILURES),
        ("reward/retries", "scored again", "c4"),
        ("reward/code/cut_off", "test cases cut off", "c6"),
    )
    curves = [Curve(label, series(lines, name), colour) for name, label, colour in kinds]
    curves = [curve for curve in curves if any(value for _, value in curve.points)]
    return [Chart("Rewards that failed", "samples per step", curves, "")] if curves else []


def _timeouts(lines: Lines) -> list[Chart]:
    """What limits ended, by their kind; none where none ended anything."""
    curves = [Curve(label, series(lines, f"reward/timeouts/{kind}"), colour) for kind, label, colour in TIMEOUTS]
    curves = [curve for curve in curves if any(value for _, value in curve.points)]
    return [Chart("Time-outs by kind", "per step", curves, "")] if curves else []


def _anchors(lines: Lines) -> list[Chart]:
    """The longest time of a correct response, of all test cases that have one."""
    curves = [
        Curve(label, points, colour)
        for label, key, colour in (("median", "median", "c1"), ("longest", "max", "c3"))
        if (points := series(lines, f"reward/code/anchor_s/{key}"))
    ]
    return [Chart("Longest correct test case", "seconds", curves, "")] if curves else []


def _parts(lines: Lines) -> list[Chart]:
    """Means of what rewards are made of, before weights."""
    names = sorted({name for line in lines for name in line if name.startswith("reward/part/")})
    overlong = [(step, -lost) for step, lost in series(lines, "reward/overlong_penalty/mean")]
    if not names and not overlong:
        return []
    colours = ("c2", "c3", "c4", "c5", "c6", "c7", "c8", "c10", "c11")
    curves = [Curve("scorer", points)] if (points := series(lines, "reward/own/mean")) else []
    curves += [
        Curve(name.removeprefix("reward/part/").removesuffix("/mean"), series(lines, name), colours[i % len(colours)])
        for i, name in enumerate(names)
    ]
    curves += [Curve("overlong", overlong, "c9")] if overlong else []
    return [Chart("Parts of the reward", "mean, before weights", curves, "", legend=True)]


def _table(lines: Lines, names: Sequence[str]) -> str:
    """Each domain over the whole run: counts, and medians over steps of the times, but the longest of all."""
    rows = []
    for name in names:

        def values(key: str, name: str = name) -> list[float]:
            return [value for _, value in finite(series(lines, f"reward/{name}/{key}"))]

        seconds = [median(found) if (found := values(key)) else None for key in ("p50_s", "p95_s")]
        seconds.append(max(values("max_s"), default=None))
        cells = [breakable(name), number(sum(values("num_scored")))]
        cells += ["–" if value is None else f"{number(value)} s" for value in seconds]
        cells += [number(sum(values(key))) for key, *_ in FAILURES]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    note = "<p class=sub style='margin-top:14px'>Counts of the whole run; p50 and p95 are medians over its steps.</p>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"{note}<div style='overflow-x:auto'>{table}</div>"
