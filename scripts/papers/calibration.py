"""The calibration file: constants of `jaxrl.sim`, fitted to published facts about the papers' baselines.

Purpose: `calibrate` solves the problems of problems.yaml in order, each with what earlier ones found; `read` returns
what a simulation needs. For every constant the file names the published facts that moved it and how far they are from
the constant's prediction. It is committed before any comparison with the gains of a paper's own method.

Source: regularised nonlinear least squares (Levenberg 1944, Marquardt 1963) on logarithms. A constant's prior is one
more residual, so facts fewer than constants still give one answer: the one nearest to the priors.

Departures: none of the papers says how a simulator was fitted. `informed` (share of a constant's prior variance that
the facts remove, linearised at the solution) says what rests on facts and what on the prior.

One machine always finds the same. Another BLAS rounds otherwise, and lengths are whole tokens, so the search may end at
another point of a flat bottom: constants then differ by a fraction of what the facts leave open (0.16 of that spread at
most, 9 % for `efficiency.launch_s` of APRIL), and predicted facts by less than 0.4 %.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.sim.cost_model import Efficiency
from papers.facts import FACTS, Fact

_STEP = 0.005  # of a logarithm, for differences: narrow for curvature, wide enough for lengths rounded to tokens
_MOVES = 0.02  # a fact counts as having moved a constant if it changes by this share of the constant's own change
_MAX_ITERATIONS = 300

Values = Mapping[str, float]
Calibration = Mapping[str, Values]
Predict = Callable[[Values], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Constant:
    """A free constant: its prior, the standard deviation of the prior's logarithm, and its bounds."""

    name: str
    unit: str
    prior: float
    spread: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Constants to find from facts.

    Attributes:
      constants: free ones.
      facts: names in `FACTS` of the roles fit and check.
      predict: constants by name (free, fixed, cited and given ones) -> facts of role fit by name.
      checks: the same for facts of role check, asked once at the solution.
      fixed: constants that no fact determines, with the value assumed for them.
      cited: constants that a paper states: name -> a fact of role input.
      given: by earlier problem, patterns of the constants that are taken over from it, where this one has none.
      assumptions: assumed where a paper is silent.
    """

    name: str
    constants: tuple[Constant, ...]
    facts: Sequence[str]
    predict: Predict
    checks: Predict = lambda _: {}
    fixed: Values = field(default_factory=dict)
    cited: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, Sequence[str]] = field(default_factory=dict)
    assumptions: Sequence[str] = ()

    def held(self, solved: Calibration) -> dict[str, dict[str, Any]]:
        """Constants that are not free, with the reason for each value."""
        held: dict[str, dict[str, Any]] = {
            name: {"value": value, "why": "assumed: no published fact determines it"}
            for name, value in self.fixed.items()
        }
        for name, source in self.cited.items():
            fact = FACTS[source]
            held[name] = {"value": fact.low, "why": f"published: {fact.paper}, {fact.where}", "fact": source}
        own = {*held, *(constant.name for constant in self.constants)}
        for other, patterns in self.given.items():
            for name, value in solved[other].items():
                if name not in own and any(fnmatch(name, pattern) for pattern in patterns):
                    held[name] = {"value": value, "why": f"from problem {other}"}
        return held


@dataclass(frozen=True, slots=True)
class Solution:
    """A solved problem: all constants by name, free ones included, and its entry in the file."""

    values: Values
    entry: dict[str, Any]


def calibrate(problems: Sequence[Problem]) -> dict[str, Solution]:
    """Solves problems in order."""
    solved: dict[str, Solution] = {}
    for problem in problems:
        solved[problem.name] = solve(problem, {name: each.values for name, each in solved.items()})
    return solved


def write(solved: Mapping[str, Solution], path: str | Path) -> None:
    """Writes the file."""
    document = {
        "version": 1,
        "what": "constants of jaxrl.sim fitted to published facts about baselines (scripts/papers)",
        "residual": "ln(predicted / nearest published value); 0 within a published range",
        "problems": {name: solution.entry for name, solution in solved.items()},
    }
    Path(path).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: str | Path) -> Calibration:
    """Reads the file: constants by problem and name.

    Raises ValueError if a published value in it is no longer the one of `FACTS`: a calibration must not outlive the
    facts that it was fitted to.
    """
    values = {}
    for name, entry in json.loads(Path(path).read_text(encoding="utf-8"))["problems"].items():
        for row in entry["facts"]:
            fact = FACTS.get(row["fact"])
            if fact is None or [fact.low, fact.high] != row["published"]:
                raise ValueError(
                    f"{path}: {name} was fitted to {row['fact']} = {row['published']}, which is not what facts.yaml "
                    "says: calibrate again"
                )
        values[name] = {key: found["value"] for key, found in (entry["held"] | entry["constants"]).items()}
    return values


def efficiency_of(values: Values) -> Efficiency:
    """`Efficiency` from the constants named `efficiency.*`; the others keep their defaults."""
    return Efficiency(**{f.name: values[key] for f in fields(Efficiency) if (key := f"efficiency.{f.name}") in values})


# ---------------------------------------------------------------- the fit


def residual(fact: Fact, predicted: float) -> float:
    """ln of predicted over the nearest value that agrees with the fact; 0 within its range."""
    return math.log(predicted / min(max(predicted, fact.low), fact.high))


def solve(problem: Problem, solved: Calibration, facts: Mapping[str, Fact] = FACTS) -> Solution:
    """Finds a problem's constants.

    Args:
      solved: constants of earlier problems, by problem.
      facts: where the facts are looked up; only those of role `fit` count.
    """
    wanted = [facts[name] for name in problem.facts]
    fitted = [fact for fact in wanted if fact.role == "fit"]
    held = problem.held(solved)

    def values_at(x: np.ndarray) -> dict[str, float]:
        known = {name: found["value"] for name, found in held.items()}
        return known | {c.name: math.exp(v) for c, v in zip(problem.constants, x, strict=True)}

    x, jacobian = _least_squares(problem.constants, fitted, lambda x: problem.predict(values_at(x)))
    values = values_at(x)
    predicted = {**problem.predict(values), **problem.checks(values)}
    cited = {fact.name: _cited(fact, predicted[fact.name]) for fact in wanted}
    informed = _informed(problem.constants, fitted, jacobian)
    constants = {
        c.name: {
            "value": _rounded(values[c.name]),
            "unit": c.unit,
            "prior": c.prior,
            "prior_log_spread": c.spread,
            "informed": round(informed[j], 3),
            "fitted_to": [cited[fact.name] for i, fact in enumerate(fitted) if abs(jacobian[i, j]) > _MOVES],
        }
        for j, c in enumerate(problem.constants)
    }
    rows = [cited[fact.name] | {"role": fact.role, "unit": fact.unit, "note": fact.note} for fact in wanted]
    kept = {name: {**found, "value": _rounded(found["value"])} for name, found in held.items()}
    assumptions = list(problem.assumptions)
    return Solution(values, {"constants": constants, "held": kept, "facts": rows, "assumptions": assumptions})


def _cited(fact: Fact, predicted: float) -> dict[str, Any]:
    return {
        "fact": fact.name,
        "source": f"{fact.paper}, {fact.where}",
        "published": [fact.low, fact.high],
        "predicted": _rounded(predicted),
        "residual": round(residual(fact, predicted), 5),
    }


def _rounded(value: float) -> float:
    """Six digits, which is more than facts determine."""
    return float(f"{value:.6g}")


def _least_squares(
    constants: Sequence[Constant], facts: Sequence[Fact], predictions: Callable[[np.ndarray], Values]
) -> tuple[np.ndarray, np.ndarray]:
    """Levenberg-Marquardt within bounds; returns logarithms of the constants and d ln(fact) / d ln(constant)."""
    prior, low, high = (np.log([getattr(c, name) for c in constants]) for name in ("prior", "low", "high"))
    spread = np.array([c.spread for c in constants])

    def residuals(x: np.ndarray) -> np.ndarray:
        predicted = predictions(x)
        rows = [residual(fact, predicted[fact.name]) / fact.tolerance for fact in facts]
        return np.concatenate([rows, (x - prior) / spread])

    def sensitivities(x: np.ndarray) -> np.ndarray:
        columns = []
        for j in range(len(x)):
            up, down = x.copy(), x.copy()
            up[j], down[j] = min(x[j] + _STEP, high[j]), max(x[j] - _STEP, low[j])
            above, below = predictions(up), predictions(down)
            columns.append([math.log(above[f.name] / below[f.name]) / (up[j] - down[j]) for f in facts])
        return np.array(columns).T

    x, damping = np.clip(prior, low, high), 1e-2
    r, jacobian = residuals(x), sensitivities(x)
    for _ in range(_MAX_ITERATIONS):
        active = np.array([bool(value) for value in r[: len(facts)]])
        scaled = np.where(active, 1 / np.array([f.tolerance for f in facts]), 0.0)[:, None] * jacobian
        full = np.concatenate([scaled, np.diag(1 / spread)])
        normal, gradient = full.T @ full, full.T @ r
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
        candidate = np.clip(x + np.clip(step, -1.0, 1.0), low, high)
        tried = residuals(candidate)
        if tried @ tried < r @ r:
            settled = r @ r - tried @ tried < 1e-4 * (r @ r) + 1e-12
            x, r, damping = candidate, tried, max(damping / 5, 1e-9)
            jacobian = sensitivities(x)
            if settled:
                return x, jacobian
        elif damping > 1e6:  # no step in any direction descends: lengths are whole tokens
            return x, jacobian
        else:
            damping *= 5
    names = ", ".join(c.name for c in constants)
    raise ValueError(f"calibration of {names}: not settled after {_MAX_ITERATIONS} steps; widen the facts' tolerance")


def _informed(constants: Sequence[Constant], facts: Sequence[Fact], jacobian: np.ndarray) -> list[float]:
    """Of each constant: the share of its prior variance that the facts remove."""
    width = np.array([f.tolerance + math.log(f.high / f.low) / 2 for f in facts])
    spread = np.array([c.spread for c in constants])
    scaled = jacobian / width[:, None]
    posterior = np.linalg.inv(scaled.T @ scaled + np.diag(1 / spread**2))
    return [float(1 - posterior[j, j] / spread[j] ** 2) for j in range(len(constants))]
