"""A result as a markdown page: ours beside theirs, over seeds.

Purpose: `page`. This module and those of the papers' pages are the only ones that read the results of the papers' own
methods (`reported.REPORTED`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from papers import april_page, rollpacker_page
from papers.cases import APRIL_SETUPS, PAT_DEGREES, PAT_SERIES, PAT_START, ROLLPACKER_SETUPS
from papers.facts import FACTS
from papers.reported import REPORTED
from papers.runs import Steps
from papers.tables import BESIDE, Runs, beside, shown, table
from papers.what_if import APRIL_VARIANTS, TAIL_VARIANTS


def page(header: Mapping[str, Any], runs: Sequence[Steps]) -> str:
    """The whole page."""
    found = Runs(runs)
    match header["paper"]:
        case "rollpacker":
            sections = rollpacker_page.sections(found, header["what_if"])
        case "april":
            sections = april_page.sections(found, header["what_if"])
        case _:
            sections = [_pat(found), _pat_breakdown(found)]
    parts = [_top(header, runs), *sections]
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
    variants = APRIL_VARIANTS if april else TAIL_VARIANTS
    shown_here = [variant.name for variant in variants if not variant.dapo and variant.name in header["what_if"]]
    rows = [[name, *(shown(values) for values in header["what_if"][name])] for name in shown_here]
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


# ---------------------------------------------------------------- PAT


def _capped(runs: Sequence[Steps], name: str) -> float:
    """The mean over the steps in which a response reaches the limit, as PAT takes it (§5.1)."""
    values = [
        value
        for r in runs
        for value, longest in zip(getattr(r, name), r.longest, strict=True)
        if longest >= r.case.max_tokens
    ]
    return float(np.mean(values)) if values else math.nan


def _pat_point(runs: Runs, setup: str, devices: int, tokens: int) -> tuple[list[Steps], list[Steps], list[Steps]]:
    """(static at PAT_START, the static degree with the shortest step, adaptive)."""
    static = {tp: runs.pat(setup, devices, tokens, "plain", tp) for tp in PAT_DEGREES}
    best = min(static.values(), key=lambda found: _capped(found, "step_s"))
    return static[PAT_START], best, runs.pat(setup, devices, tokens, "adaptive", PAT_START)


_PAT_PUBLISHED = {
    ("Fig. 10a", 16384): ("PAT §5.2, A40, largest speed-up", "Llama-3.1-8B, 8 devices"),
    ("Fig. 10b", 16384): ("PAT §5.2, A40, largest speed-up", "16 devices"),
    ("Fig. 10c", 16384): ("PAT §5.2, A40, largest speed-up", "Qwen3-14B, 16"),
    ("Fig. 11a", 24576): ("PAT §5.2-5.3, H100, speed-up of an iteration", "Llama-3.1-8B/24K"),
    ("Fig. 11b", 16384): ("PAT §5.2-5.3, H100, speed-up of an iteration", "Qwen3-14B/16K"),
}
"""By figure and longest response: what the text says in numbers."""


def _pat(runs: Runs) -> str:
    rows = []
    for figure, (model, setup, devices, longest) in PAT_SERIES.items():
        for tokens in longest:
            found = _pat_point(runs, setup, devices, tokens)
            low, best, adaptive = (_capped(each, "drawn_tokens") / _capped(each, "step_s") for each in found)
            known = _PAT_PUBLISHED.get((figure, tokens))
            gain = adaptive / low
            held = beside(gain, REPORTED[known[0]][known[1]]) if known else [f"{gain:.2f}", *[""] * 4]
            rows.append(
                [
                    figure,
                    model,
                    f"{devices} x {found[0][0].case.of.hardware}",
                    f"{tokens:,}",
                    *(f"{value:,.0f}" for value in (low, adaptive)),
                    f"{_capped(found[2], 'switches'):.1f}",
                    *held,
                    f"{found[1][0].case.degree}",
                    f"{adaptive / best:.2f}",
                ]
            )
    head = [
        "figure",
        "model",
        "devices",
        "longest",
        f"static tp {PAT_START}, tokens/s",
        "adaptive",
        "switches",
        *BESIDE,
    ]
    return f"""## PAT Fig. 10 and 11: tokens of a step over its seconds

{table([*head, "best static tp", "speed-up over that"], rows)}

Steps count whose longest response reaches the limit, as in the paper. Adaptive rounds start at tp {PAT_START} and may
go up to a host's eight devices. The paper's static TP is tuned and not named; the calibration reads it as
{PAT_START}. It prints numbers at the largest lengths only (on the A40 as "up to"), and says that the gain grows with
the length, from 1.05."""


def _pat_breakdown(runs: Runs) -> str:
    rows = []
    for model, setup, devices, longest in (PAT_SERIES["Fig. 11a"], PAT_SERIES["Fig. 11b"]):
        low, best, adaptive = _pat_point(runs, setup, devices, longest[-1])
        name = f"{model}/{longest[-1] // 1024}K"
        short = "8b" if "8B" in model else "14b"
        before = f"{FACTS[f'pat.h100.{short}_generation'].low:.1f}"
        after = f"{REPORTED['PAT §5.3, H100, generation with PAT in s'][name]:.1f}"
        shown = [(f"static tp {PAT_START}", low, before), ("adaptive", adaptive, after)]
        shown.append((f"static tp {best[0].case.degree}, the best", best, ""))
        for kind, found, published in shown:
            seconds = [f"{_capped(found, each):.1f}" for each in ("gen_s", "train_s", "step_s")]
            rows.append([name, kind, *seconds, published])
    return f"""## PAT Fig. 11c: where a step's time goes

{table(["model", "layout", "generation, s", "training, s", "step, s", "generation in the paper, s"], rows)}"""
