"""PAT's page: static degrees and adaptive layouts side by side, over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from papers.cases import PAT_ADAPTIVE, PAT_DEGREES, PAT_SERIES
from papers.facts import FACTS
from papers.reported import REPORTED
from papers.runs import Steps
from papers.tables import Runs, by_seed, error_of, ratios, seconds, shown, table, verdict

_BASE = 2  # the static degree that the paper's baseline is read as
_SMALL, _ALL, _FROM_BASE = PAT_ADAPTIVE

_PUBLISHED = {
    ("Fig. 10a", 16384): ("PAT §5.2, A40, largest speed-up", "Llama-3.1-8B, 8 devices"),
    ("Fig. 10b", 16384): ("PAT §5.2, A40, largest speed-up", "16 devices"),
    ("Fig. 10c", 16384): ("PAT §5.2, A40, largest speed-up", "Qwen3-14B, 16"),
    ("Fig. 11a", 24576): ("PAT §5.2-5.3, H100, speed-up of an iteration", "Llama-3.1-8B/24K"),
    ("Fig. 11b", 16384): ("PAT §5.2-5.3, H100, speed-up of an iteration", "Qwen3-14B/16K"),
}
"""By figure and longest response: what the text says in numbers."""


class _Point:
    """The runs of one bar of a figure: every static degree, and every adaptive layout; each of all seeds."""

    def __init__(self, runs: Runs, figure: str, tokens: int) -> None:
        model, setup, devices, _ = PAT_SERIES[figure]
        self.figure, self.tokens = figure, tokens
        self.static = {tp: runs.pat(setup, devices, tokens, "plain", tp, ()) for tp in PAT_DEGREES}
        self.adaptive = {
            name: runs.pat(setup, devices, tokens, "adaptive", tp, degrees)
            for name, (tp, degrees) in PAT_ADAPTIVE.items()
        }
        hardware = self.static[_BASE][0].case.of.hardware
        self.names = [figure, model, f"{devices} x {hardware}", f"{tokens:,}"]

    @property
    def best(self) -> int:
        """The static degree with the shortest step."""
        return min(self.static, key=lambda tp: float(np.mean(by_seed(self.static[tp], "step_s"))))

    def over(self, tp: int, adaptive: str) -> list[float]:
        """Speed-ups of an iteration over a static degree, by seed: both generate the same tokens."""
        return ratios(by_seed(self.static[tp], "step_s"), by_seed(self.adaptive[adaptive], "step_s"))

    @property
    def published(self) -> float | None:
        known = _PUBLISHED.get((self.figure, self.tokens))
        return None if known is None else REPORTED[known[0]][known[1]]


def sections(runs: Runs, readings: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    points = [_Point(runs, figure, tokens) for figure, (*_, longest) in PAT_SERIES.items() for tokens in longest]
    return [_speedups(points), _steps(points), _breakdown(points), *([_readings(readings)] if readings else [])]


def _speedups(points: Sequence[_Point]) -> str:
    rows = []
    for point in points:
        gains, theirs = point.over(_BASE, _FROM_BASE), point.published
        errors = [] if theirs is None else [error_of(gain, theirs) for gain in gains]
        held = ["", "", ""]
        if theirs is not None:
            held = [f"{theirs:.2f}", shown(errors, "{:+.0%}".format), verdict(float(np.mean(errors)))]
        over_best = [shown(point.over(point.best, name)) for name in (_ALL, _FROM_BASE)]
        switches = float(np.mean(by_seed(point.adaptive[_FROM_BASE], "switches")))
        small = [shown(point.over(tp, _SMALL)) for tp in (1, 2)]
        rows.append([*point.names, shown(gains), *held, f"{switches:.1f}", f"{point.best}", *over_best, *small])
    head = [
        *("figure", "model", "devices", "longest"),
        *(f"{_FROM_BASE}, over static {_BASE}", "paper", "error of (speed-up − 1)", "within 25 %", "switches"),
        *("best static tp", f"{_ALL}, over the best", f"{_FROM_BASE}, over the best"),
        *(f"{_SMALL}, over static 1", f"{_SMALL}, over static 2"),
    ]
    return f"""## PAT Fig. 10 and 11: speed-ups of an iteration

{table(head, rows)}

Mean over seeds ± their standard deviation. In braces the degrees that an adaptive layout may use, and the one that its
rounds start in; within a round tp only grows. In every step one response reaches the limit, and all runs of a seed
generate the same tokens, so a speed-up of seconds is one of tokens per second. The paper's static TP is tuned and not
named; it is read as {_BASE}. The text has numbers at the largest lengths only (on the A40 as "up to"), and says that
the gain grows with the length, from 1.05. On 16 devices all groups switch at once here, and node by node in the
paper: until the last row is alone, a node whose rows end early could switch before the other."""


def _steps(points: Sequence[_Point]) -> str:
    rows = [
        [
            *point.names,
            *(seconds(by_seed(point.static[tp], "step_s")) for tp in PAT_DEGREES),
            *(seconds(by_seed(found, "step_s")) for found in point.adaptive.values()),
        ]
        for point in points
    ]
    head = ["figure", "model", "devices", "longest", *(f"static {tp}" for tp in PAT_DEGREES), *PAT_ADAPTIVE]
    return f"""## Seconds of a step

{table(head, rows)}"""


def _breakdown(points: Sequence[_Point]) -> str:
    rows = []
    for point in points:
        if point.published is None or not point.figure.startswith("Fig. 11"):
            continue
        name = f"{point.names[1]}/{point.tokens // 1024}K"
        before = FACTS[f"pat.h100.{'8b' if '8B' in name else '14b'}_generation"].low
        after = REPORTED["PAT §5.3, H100, generation with PAT in s"][name]
        kinds: list[tuple[str, list[Steps], str]] = [
            (f"static {tp}", found, f"{before:.1f}" if tp == _BASE else "") for tp, found in point.static.items()
        ]
        kinds += [(name, found, f"{after:.1f}" if name == _FROM_BASE else "") for name, found in point.adaptive.items()]
        for kind, found, published in kinds:
            parts = [shown(by_seed(found, each), "{:.1f}".format) for each in ("gen_s", "train_s", "step_s")]
            rows.append([name, kind, *parts, published])
    return f"""## PAT Fig. 11c: where a step's time goes

{table(["model", "layout", "generation, s", "training, s", "step, s", "generation in the paper, s"], rows)}"""


def _readings(readings: Mapping[str, Sequence[Sequence[float]]]) -> str:
    rows = [[name, *(f"{each[0]:.2f}" for each in values)] for name, values in readings.items()]
    rows.append(["paper", *(f"{REPORTED[paper][name]:.2f}" for paper, name in _PUBLISHED.values())])
    head = ["one switch", *(f"{figure}, {tokens // 1024}K" for figure, tokens in _PUBLISHED)]
    return f"""## What one switch is worth

Speed-ups of an iteration in closed form, dp groups at a pace of their own and no rule (`scripts/papers/pat_closed.py`):
the generation starts in one degree and goes to another when so many rows are left, beside one that stays in the first.
Evidence, not results.

{table(head, rows)}"""
