"""A result as a markdown page: ours beside theirs, over seeds.

Purpose: `page`. This module and those of the papers' pages are the only ones that read the results of the papers' own
methods (`reported.REPORTED`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papers import april_page, pat_page, rewards_page, rhymerl_page, rollpacker_page, stream_page
from papers.cases import APRIL_SETUPS, ROLLPACKER_SETUPS
from papers.reported import REPORTED
from papers.runs import Steps
from papers.tables import Runs, shown, table
from papers.what_if import APRIL_VARIANTS, TAIL_VARIANTS


def page(header: Mapping[str, Any], runs: Sequence[Steps]) -> str:
    """The whole page."""
    found = Runs(runs)
    match header["paper"]:
        case "rollpacker":
            sections = rollpacker_page.sections(found, header["what_if"])
        case "april":
            sections = april_page.sections(found, header["what_if"])
        case "rollpacker-rewards":
            sections = rewards_page.sections(found)
        case "rollpacker-whole":
            sections = [stream_page.whole_table2(found)]
        case "rhymerl":
            sections = rhymerl_page.sections(found, header["what_if"])
        case _:
            sections = pat_page.sections(found, header["what_if"])
    parts = [_top(header, runs), *sections]
    if header["what_if"] and header["paper"] in ("rollpacker", "april"):
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
