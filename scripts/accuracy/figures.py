"""The results of the runs: means and standard errors, the comparison with plain batches, and a page with the curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from accuracy.runs import RULES, Result
from jaxrl.report.charts import Chart, Curve, card
from jaxrl.report.style import document

MAX_ERRORS = 2.0  # how far a rule may lie below plain batches, in standard errors of the difference
SMOOTHED = 5  # steps


@dataclass(frozen=True, slots=True)
class Mean:
    """Over seeds, with its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


def mean(values: Sequence[float]) -> Mean:
    return Mean(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan)


def below(rule: Mean, plain: Mean) -> float:
    """How many standard errors of the difference a rule lies below plain batches; negative: above them."""
    error = math.hypot(rule.error, plain.error)
    gap = plain.value - rule.value
    return gap / error if error > 0 else math.copysign(math.inf, gap) if gap else 0.0


def of(results: Sequence[Result], rule: str) -> list[Result]:
    return [one for one in results if one.rule == rule]


def table(results: Sequence[Result], start: tuple[float, float]) -> list[list[str]]:
    """A row per rule, the head first."""
    rows = [["rule", "accuracy", "below plain", "longest quarter", "below plain", "p95 / median", "stale tokens"]]
    rows.append(["before", f"{start[0]:.3f}", "", f"{start[1]:.3f}", "", "", ""])
    plain = of(results, "plain")
    for rule in RULES:
        own = of(results, rule)
        if not own:
            continue
        row = [rule]
        for name in ("accuracy", "long_accuracy"):
            here, there = (mean([getattr(one, name) for one in each]) for each in (own, plain))
            row += [str(here), "" if rule == "plain" else f"{below(here, there):+.1f} errors"]
        spread, stale = (fmean(getattr(one, name) for one in own) for name in ("spread", "stale"))
        rows.append([*row, f"{spread:.1f}", f"{stale:.0%}"])
    return rows


def harmed(results: Sequence[Result]) -> list[str]:
    """The rules with an accuracy more than MAX_ERRORS below that of plain batches."""
    plain = mean([one.accuracy for one in of(results, "plain")])
    rules = [rule for rule in RULES if rule != "plain" and of(results, rule)]
    return [rule for rule in rules if below(mean([one.accuracy for one in of(results, rule)]), plain) > MAX_ERRORS]


def page(results: Sequence[Result], start: tuple[float, float]) -> str:
    """Curves of every rule, means over its seeds, and the table."""
    seeds = len({one.seed for one in results})
    rewards = [_curve(results, rule, "rewards", f"c{i}") for i, rule in enumerate(RULES, 1)]
    longest = [_curve(results, rule, "longest", f"c{i}") for i, rule in enumerate(RULES, 1)]
    cards = [
        card(
            Chart("Reward of the batches", f"mean of {SMOOTHED} steps and {seeds} seeds", rewards, "", from_zero=False)
        ),
        card(Chart("Longest response of a batch", f"tokens, mean of {seeds} seeds", longest, "")),
    ]
    head, *rows = table(results, start)
    cells = "".join(f"<tr><th>{row[0]}</th>{''.join(f'<td class=num>{x}</td>' for x in row[1:])}</tr>" for row in rows)
    heads = "".join(f"<th>{name}</th>" for name in head)
    return document(
        "Accuracy by rule",
        f"running sums · {seeds} seeds · held-out accuracy with its standard error",
        f"<section class=charts>{''.join(cards)}</section><h2>After training</h2>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table>",
    )


def _curve(results: Sequence[Result], rule: str, name: str, colour: str) -> Curve:
    by_seed = [getattr(one, name) for one in of(results, rule)]
    values = [fmean(step) for step in zip(*by_seed, strict=True)]
    points = [(float(i), fmean(values[max(i - SMOOTHED, 0) : i])) for i in range(SMOOTHED, len(values) + 1, SMOOTHED)]
    return Curve(rule, points, colour)
