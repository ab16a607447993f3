"""The calibration file: the solution of every problem, and the facts behind each constant.

Purpose: `calibrate` solves the problems, `write` keeps them as JSON, `read` returns what a simulation needs. For every
constant the file names the published facts that moved it and how far they are from the constant's prediction. It is
committed before any comparison with the gains of a paper's own method.

Example::

    write(calibrate(), "calibration.json")
    cost = CostModel(named_shape("Qwen2.5-14B"), H800, read("calibration.json").efficiency("rollpacker"))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from papers.calibration import VERSION, Calibration
from papers.facts import FACTS, Fact
from papers.problems import PROBLEMS
from papers.solver import ExplainedFact, Problem, Solution, solve

_WHAT = "constants of jaxrl.sim fitted to published facts about baselines (scripts/papers)"


def calibrate(problems: Sequence[Problem] = PROBLEMS, facts: Mapping[str, Fact] = FACTS) -> dict[str, Solution]:
    """Solves the problems in order, each with what earlier ones found.

    One machine always finds the same. Another BLAS rounds otherwise, and lengths are whole tokens, so the search may
    end at another point of a flat bottom: constants then differ by a fraction of what the facts leave open (0.16 of
    that spread at most, 9 % for `efficiency.launch_s` of APRIL), and predicted facts by less than 0.4 %.
    """
    solved: dict[str, Solution] = {}
    for problem in problems:
        given = {name: solved[other].values[name] for name, other in problem.given.items() if other in solved}
        solved[problem.name] = solve(problem, given, facts)
    return solved


def document(solved: Mapping[str, Solution]) -> dict[str, Any]:
    """Solutions as JSON values."""
    return {
        "version": VERSION,
        "what": _WHAT,
        "residual": "ln(predicted / nearest published value); 0 within a published range",
        "problems": {name: _entry(solution) for name, solution in solved.items()},
    }


def write(solved: Mapping[str, Solution], path: str | Path) -> None:
    """Writes the file."""
    Path(path).write_text(json.dumps(document(solved), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: str | Path) -> Calibration:
    """Reads the file.

    Raises ValueError as `Calibration.read` does, and if a published value in it is no longer the one of `FACTS`: a
    calibration must not outlive the facts that it was fitted to.
    """
    calibration = Calibration.read(path)
    for name, entry in json.loads(Path(path).read_text(encoding="utf-8"))["problems"].items():
        for row in entry["facts"]:
            fact = FACTS.get(row["fact"])
            if fact is None or [fact.low, fact.high] != row["published"]:
                raise ValueError(
                    f"{path}: {name} was fitted to {row['fact']} = {row['published']}, which is not what papers.facts "
                    "says: calibrate again"
                )
    return calibration


def constant(calibration: Calibration, problem: str, name: str) -> float:
    """One constant of a calibration."""
    values = calibration.of(problem)
    if name not in values:
        raise ValueError(f"calibration: {problem!r} has no {name!r}; it has {', '.join(sorted(values))}")
    return values[name]


def _entry(solution: Solution) -> dict[str, Any]:
    """A solution as JSON."""
    problem = solution.problem
    explained = {row.fact.name: row for row in solution.facts}
    constants = {
        c.name: {
            "value": _rounded(c.value),
            "unit": c.unit,
            "prior": c.prior,
            "prior_log_spread": c.spread,
            "informed": round(c.informed, 3),
            "fitted_to": [_cited(explained[name]) for name in c.fitted_to],
        }
        for c in solution.constants
    }
    held: dict[str, Any] = {
        name: {"value": value, "why": "assumed: no published fact determines it"}
        for name, value in problem.fixed.items()
    }
    for name, source in problem.cited.items():
        fact = FACTS[source]
        held[name] = {"value": fact.low, "why": f"published: {fact.paper}, {fact.where}", "fact": source}
    for name, other in problem.given.items():
        held[name] = {"value": _rounded(solution.values[name]), "why": f"from problem {other}"}
    rows = [
        _cited(row) | {"role": row.fact.role, "unit": row.fact.unit, "note": row.fact.note} for row in solution.facts
    ]
    return {"constants": constants, "held": held, "facts": rows, "assumptions": list(problem.assumptions)}


def _cited(row: ExplainedFact) -> dict[str, Any]:
    fact = row.fact
    return {
        "fact": fact.name,
        "source": f"{fact.paper}, {fact.where}",
        "published": [fact.low, fact.high],
        "predicted": _rounded(row.predicted),
        "residual": round(row.residual, 5),
    }


def _rounded(value: float) -> float:
    """Six digits, which is more than facts determine."""
    return float(f"{value:.6g}")
