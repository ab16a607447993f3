"""The sections of RhymeRL's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from papers.cases import RHYMERL_TASKS, rhymerl_rows
from papers.reported import REPORTED
from papers.runs import Steps
from papers.setups import EPOCH_STEPS, RANKING_GROUPS
from papers.tables import Runs, error_of, ratios, seconds, share, shown, table, verdict

NAMES = {"math": "Math-14B", "code": "Code-14B"}


def sections(found: Runs, closed: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    """All of them."""
    return [_figure_14(found), _groups(found), _drafts(found), *([_closed(closed)] if closed else [])]


def _measured(steps: Steps, name: str) -> list[float]:
    """From the second epoch on; the last step has no rollout beside it."""
    return getattr(steps, name)[EPOCH_STEPS:-1]


def _by_seed(runs: Sequence[Steps], name: str) -> list[float]:
    ordered = sorted(runs, key=lambda each: each.case.seed)
    return [float(np.mean(_measured(each, name))) for each in ordered]


def _figure_14(found: Runs) -> str:
    rows = []
    for task in RHYMERL_TASKS:
        before: list[float] | None = None
        for name, case in rhymerl_rows(task).items():
            runs = found.with_pipeline(case)
            step_s = _by_seed(runs, "step_s")
            cells = [NAMES[task], name, seconds(step_s)]
            if before is None:
                cells += [""] * 4
            else:
                gains = ratios(before, step_s)
                theirs = REPORTED[f"RhymeRL Fig. 14, {NAMES[task]}"][name]
                error = float(np.mean([error_of(gain, theirs) for gain in gains]))
                cells += [shown(gains), f"{theirs:.2f}", f"{error:+.0%}", verdict(error)]
            rows.append(cells)
            before = step_s
    head = ("model", "row", "s a step", "over the row before", "paper", "error of (speed-up − 1)", "within 25 %")
    return f"""## RhymeRL Fig. 14

Steps from the second epoch on. Every step has as many samples, so speed-ups are those of throughput.

{table(head, rows)}"""


def _groups(found: Runs) -> str:
    rows = []
    for task in RHYMERL_TASKS:
        theirs = REPORTED["RhymeRL Fig. 18, share of samples that move"]
        for name, case in rhymerl_rows(task).items():
            if case.pipeline == "off":
                continue
            runs = found.with_pipeline(case)
            even = [float(np.mean(_of_even_steps(each, "idle"))) for each in sorted(runs, key=lambda r: r.case.seed)]
            paper = f"{theirs[task]:.1%} to {theirs[f'{task}, most']:.1%}"
            moved = shown(_by_seed(runs, "moved"), "{:.1%}".format)
            groups = str(RANKING_GROUPS[task])
            rows.append([NAMES[task], name, groups, moved, paper, share(_by_seed(runs, "idle")), share(even)])
    head = ("model", "row", "groups", "moved", "Fig. 18", "workers idle", "of even steps")
    return f"""## RhymeRL Fig. 18: responses that move, and workers with nothing to do

{table(head, rows)}"""


def _of_even_steps(steps: Steps, name: str) -> list[float]:
    values = getattr(steps, name)
    return [values[step - 1] for step in range(EPOCH_STEPS + 1, len(values)) if step % 2 == 0]


def _drafts(found: Runs) -> str:
    rows = []
    for task in RHYMERL_TASKS:
        runs = found.with_pipeline(rhymerl_rows(task)["+ speculation"])
        rates = [share(_by_seed(runs, name)) for name in ("accepted", "drafted")]
        rows.append([NAMES[task], *rates, shown(_by_seed(runs, "per_step"))])
    head = (
        "model",
        "drafted tokens that were accepted (paper: 65 to 79 %)",
        "tokens from drafts",
        "tokens a row and step",
    )
    return f"""## RhymeRL Fig. 17: drafts

{table(head, rows)}"""


def _closed(closed: Mapping[str, Sequence[Sequence[float]]]) -> str:
    rows = [[name, *(shown(values) for values in columns)] for name, columns in closed.items()]
    return f"""## In closed form, without speculation

From lengths and costs alone (`scripts/papers/rhymerl_closed.py`): no response moves, and rows wait for nothing. *No
outliers*: prompts decide of all responses as of most. Evidence, not results.

{table(("", "+ ranking groups", "+ two tiers"), rows)}"""
