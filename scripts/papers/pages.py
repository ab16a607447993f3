"""A result as a markdown page: ours beside theirs, with the ratio.

Purpose: `page`. The only place that reads the results of the papers' own methods (`reported.REPORTED`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from papers import pat_page, tables
from papers.cases import (
    APRIL_SETUPS,
    APRIL_WARM_UP,
    FACTORS,
    JOINT,
    ROLLPACKER_SETUPS,
)
from papers.facts import FACTS
from papers.reported import REPORTED
from papers.runs import Steps
from papers.setups import TASKS

BAR = 0.25  # of (speed-up - 1)
NONE = (1.0, 1.0)  # factors of a run that speculates on nothing
FIRST = 10  # steps that a table shows one by one


class Runs:
    """Runs by case."""

    def __init__(self, runs: Iterable[Steps]) -> None:
        self._runs = list(runs)

    def of(
        self, setup: str, rule: str, factors: tuple[float, float] = NONE, tasks: Sequence[str] = TASKS
    ) -> list[Steps]:
        """Every seed of a case; none where it was not run."""
        wanted = (setup, rule, *factors, tuple(tasks))
        return [r for r in self._runs if _identity(r) == wanted]

    def __bool__(self) -> bool:
        return bool(self._runs)


def _identity(steps: Steps) -> tuple[Any, ...]:
    case = steps.case
    return (case.setup, case.rule, case.prompt_factor, case.response_factor, case.tasks)


def mean(runs: Sequence[Steps], name: str, long: bool | None = None, skip: int = 0) -> float:
    """Over the steps of all seeds; of one kind of rounds where `long` is given."""
    values = [
        value
        for r in runs
        for value, is_long in list(zip(getattr(r, name), r.long, strict=True))[skip:]
        if long is None or is_long == long
    ]
    return float(np.mean(values)) if values else math.nan


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def page(header: Mapping[str, Any], runs: Sequence[Steps]) -> str:
    """The whole page."""
    if header["paper"] == "pat":
        sections = pat_page.sections(tables.Runs(runs), header["what_if"])
        return "\n\n".join([_top(header, runs), *sections]) + "\n"
    found = Runs(runs)
    sections = {
        "rollpacker": (_table2, _baselines, _figure4, _figure10, _figure11, _figure12),
        "april": (_april,),
    }
    parts = [_top(header, runs), *(section(found) for section in sections[header["paper"]])]
    if header["what_if"]:
        parts.append(_what_if(header))
    return "\n\n".join(parts) + "\n"


def _top(header: Mapping[str, Any], runs: Sequence[Steps]) -> str:
    committed = header["calibration"]["committed"] or "not committed as it stands: these figures do not count"
    file = header["calibration"]["file"]
    seeds = ", ".join(map(str, sorted({r.case.seed for r in runs})))
    note = "\n\n**Tried out at a tiny size: no figure below means anything.**" if header["tiny"] else ""
    return f"""# {header["paper"]} on modelled devices, {header["date"][:10]}

All seconds are simulated ones. What they rest on, and what to make of them: [README.md](README.md).

- Command: `{header["command"]}`
- Date: {header["date"]}
- Commit: {header["commit"]}
- Calibration: [{file}]({file}), last changed in commit {committed}
- Plans of at most {runs[0].case.decode_steps} decode steps; seeds: {seeds}{note}"""


def _what_if(header: Mapping[str, Any]) -> str:
    april = header["paper"] == "april"
    rows = [[name, *(f"{value:.2f}" for value in values)] for name, values in header["what_if"].items()]
    if april:
        reported = [1 + gain for gain in REPORTED["APRIL Table 1, GRPO, mean improvement"].values()]
    else:
        reported = list(REPORTED["RollPacker Table 2, + tail batching"].values())
    rows.append(["paper", *(f"{value:.2f}" for value in reported)])
    names = list(APRIL_SETUPS if april else ROLLPACKER_SETUPS)
    return f"""## What other readings would change

Speed-ups from lengths and costs alone, every dp group an engine of its own (`scripts/papers/what_if.py`): a check of
the simulator in the first row, then one assumption changed at a time. Evidence, not results: none of these is the
stated calibration.

{table(["", *names], rows)}"""


def beside(ours: float, theirs: float) -> list[str]:
    """Speed-ups: ours, theirs, ours / theirs, the error of (speed-up - 1), and whether it is within the bar."""
    error = (ours - 1) / (theirs - 1) - 1
    verdict = "yes" if abs(error) <= BAR else "**no**"
    return [f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}", f"{error:+.0%}", verdict]


BESIDE = ("speed-up", "paper", "ours / paper", "error of (speed-up − 1)", "within 25 %")


def _table2(runs: Runs) -> str:
    reported = REPORTED["RollPacker Table 2, + tail batching"]
    rows, ours = [], []
    for name, setup in ROLLPACKER_SETUPS.items():
        plain, tail = (mean(each, "step_s") for each in _pair(runs, setup))
        ours.append(plain / tail)
        rows.append([name, f"{plain:.0f}", f"{tail:.0f}", *beside(plain / tail, reported[name])])
    order = "the same as" if ours == sorted(ours) else "**not** that of"
    return f"""## RollPacker Table 2, the row of tail batching

{table(["model", "plain, s a step", "tail batching, s a step", *BESIDE], rows)}

The order over models is {order} the paper's. Rewards are scored after the rollout in both columns, as in the paper's
rows above *reward scheduler*. Not here yet: the rows reward scheduler, parallelism planner and stream trainer."""


def _pair(runs: Runs, setup: str, tasks: Sequence[str] = TASKS) -> tuple[list[Steps], list[Steps]]:
    """Plain, and tail batching at the default factors."""
    return runs.of(setup, "plain", tasks=tasks), runs.of(setup, "tail", JOINT, tasks)


def _baselines(runs: Runs) -> str:
    rows = []
    for task in TASKS:
        found = runs.of("rollpacker.14b", "plain", tasks=(task,))
        step = mean(found, "step_s")
        row = [task, f"{step:.0f}"]
        for stage, name in (("rollout", "gen_s"), ("reward", "reward_s"), ("train", "train_s")):
            theirs = FACTS[f"rollpacker.{task}.{stage}_share"].low
            row += [f"{mean(found, name) / step:.0%}", f"{theirs:.0%}"]
        rows.append(row)
    head = ["task (14B/16k)", "s a step", "rollout", "Table 1", "reward", "Table 1", "training", "Table 1"]
    return f"""## The plain step against what it was fitted to

Not a result: how far the simulated step is from the closed form that the calibration uses.

{table(head, rows)}"""


def _per_step(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values[:FIRST])


def _figure4(runs: Runs) -> str:
    plain, tail = _pair(runs, "rollpacker.14b", ("code",))
    period = tail[0].case.period
    ratios = [
        mean(plain, "longest") / value for value, long in zip(tail[0].longest, tail[0].long, strict=True) if not long
    ]
    rows = []
    for name, found in (("plain", plain), ("tail batching", tail)):
        step = mean(found, "step_s")
        shares = [f"{mean(found, each) / step:.0%}" for each in ("gen_s", "reward_s", "train_s")]
        rows.append([name, _per_step(found[0].longest[:period]), f"{step * period:.0f}", *shares])
    head = ["", "longest response of each step", "seconds of a period", "rollout", "reward", "training"]
    speedup = mean(plain, "step_s") / mean(tail, "step_s")
    return f"""## RollPacker Fig. 4: one period of the 14B model on code

{table(head, rows)}

Short rounds cut the longest response by up to {max(ratios):.1f} times (paper: up to 8.9). Speed-up {speedup:.2f}
(paper, §3: 1.48)."""


def _figure10(runs: Runs) -> str:
    rows = []
    for name, setup in ROLLPACKER_SETUPS.items():
        plain, tail = _pair(runs, setup)
        short, long = (mean(tail, "step_s", kind) for kind in (False, True))
        gain = mean(plain, "step_s") / short
        each = [_per_step(found[0].step_s) for found in (plain, tail)]
        rows.append([name, *each, f"{short:.0f}", f"{long:.0f}", f"{gain:.2f}"])
    head = ["model", "plain: s of the first steps", "tail batching: the same", "short", "long", "plain / short"]
    return f"""## RollPacker Fig. 10: step times

{table(head, rows)}

The paper's 2.1 to 3.6 for short rounds is of the whole system; this is tail batching alone."""


def _figure11(runs: Runs) -> str:
    plain, tail = _pair(runs, ROLLPACKER_SETUPS["32B/32k"])
    rows = [
        [name, _per_step(found[0].longest), _per_step(found[0].gen_s)]
        for name, found in (("plain", plain), ("tail batching", tail))
    ]
    gain = mean(plain, "gen_s") / mean(tail, "gen_s", False)
    loss = mean(tail, "gen_s", True) / mean(plain, "gen_s")
    breakdown = []
    for name, each in ROLLPACKER_SETUPS.items():
        found = runs.of(each, "tail", JOINT)
        whole = mean(found, "step_s", True)
        for kind, long in (("short", False), ("long", True)):
            parts = [f"{mean(found, part, long) / whole:.2f}" for part in ("gen_s", "reward_s", "train_s")]
            breakdown.append([name, kind, *parts, f"{mean(found, 'step_s', long):.0f}"])
    return f"""## RollPacker Fig. 11: where a step's time goes

The first steps of 32B/32k:

{table(["", "longest response", "rollout, s"], rows)}

A short round's rollout is {gain:.1f} times as fast as a plain one's on average (paper: up to 7.8, of the whole system).
A long round's takes {loss:.2f} times as long (paper: comparable). All models, as shares of a long round's step time:

{table(["model", "round", "rollout", "reward", "training", "s a step"], breakdown)}"""


def _figure12(runs: Runs) -> str:
    rows = []
    for name, setup in ROLLPACKER_SETUPS.items():
        plain = mean(runs.of(setup, "plain"), "gen_s")
        shares = [mean(runs.of(setup, "tail", factors), "gen_s") / plain for factors in FACTORS.values()]
        rows.append([name, f"{plain:.0f}", *(f"{share:.2f}" for share in shares), f"{1 / shares[0]:.1f}"])
    return f"""## RollPacker Fig. 12: rollout time over whole periods, as a share of the plain one's

{table(["model", "plain, s", *FACTORS, "joint: times as fast"], rows)}

The paper: joint speculation is up to 3.9 times as fast, and up to 1.5 and 1.6 times as fast as speculation over
responses or prompts alone; responses alone gain much at 1.5 only; at 32k, P 1.5 is slower than P 1.25."""


def _april(runs: Runs) -> str:
    rows = []
    for name, setup in APRIL_SETUPS.items():
        plain = runs.of(setup, "plain", tasks=("math",))
        partial = runs.of(setup, "partial", (2.0, 1.0), ("math",))
        ours = [
            mean(found, "drawn_tokens", skip=APRIL_WARM_UP) / mean(found, "gen_s", skip=APRIL_WARM_UP)
            for found in (plain, partial)
        ]
        before = FACTS[f"{setup}.throughput"]
        after = REPORTED[f"APRIL Table 1, GRPO, tokens/s with APRIL, {name}"].values()
        gain = REPORTED["APRIL Table 1, GRPO, mean improvement"][name]
        stale = mean(partial, "stale_share", skip=APRIL_WARM_UP)
        rows.append(
            [
                name,
                f"{ours[0]:,.0f}",
                f"{before.low:,.0f} to {before.high:,.0f}",
                f"{ours[1]:,.0f}",
                f"{min(after):,.0f} to {max(after):,.0f}",
                *beside(ours[1] / ours[0], 1 + gain),
                f"{stale:.0%}",
            ]
        )
    head = ["model", "plain, tokens/s", "paper", "APRIL, tokens/s", "paper", *BESIDE, "stale tokens"]
    return f"""## APRIL Table 1, GRPO

{table(head, rows)}

Tokens that the engine generates over seconds of rollout, without the first {APRIL_WARM_UP} steps, in which the buffer
fills; the paper's gain is its mean over three data sets. It finds about 40 % of a step's tokens carried over
(§3.2.3)."""
