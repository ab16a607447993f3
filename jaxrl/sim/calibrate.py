"""Constants of the simulator from published facts about baselines, and the file that keeps them.

Purpose: `calibrate()` solves every `Problem` of `jaxrl.sim.baselines` and returns a `Calibration`; `Calibration.write`
and `read` keep it as JSON. The file says of every constant which published facts moved it and how far these are from
what the constant predicts; it is committed before anything is compared with what a paper's own method gained.

Source: regularised nonlinear least squares (Levenberg 1944, Marquardt 1963) on logarithms. A constant's prior is one
more residual, so facts fewer than constants still give one answer: the one nearest to the priors.

Departures: none of the papers says how a simulator was fitted. `informed` (share of a constant's prior variance that
the facts remove, linearised at the solution) says what rests on facts and what on the prior.

Example::

    calibration = calibrate()
    calibration.write("calibration.json")
    cost = RooflineCost(MODELS["Qwen2.5-14B"], H800, calibration.efficiency("rollpacker"))
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.sim.baselines import PROBLEMS, Constant, Problem, efficiency_of, lengths_of
from jaxrl.sim.cost_model import Efficiency
from jaxrl.sim.published import FACTS, Fact
from jaxrl.sim.workload import LengthDistribution

VERSION = 1
_STEP = 0.005  # of a logarithm, for differences: narrow for curvature, wide enough for lengths rounded to tokens
_MOVES = 0.02  # a fact counts as having moved a constant if it changes by this share of the constant's own change
_MAX_ITERATIONS = 300


@dataclass(frozen=True, slots=True)
class FittedConstant:
    """A constant as found: its prior, how much of it rests on facts (0..1), and which ones."""

    name: str
    unit: str
    value: float
    prior: float
    spread: float
    informed: float
    fitted_to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExplainedFact:
    """A fact and what the constants make of it; `residual` is ln(predicted / nearest published value)."""

    fact: Fact
    predicted: float
    residual: float


@dataclass(frozen=True, slots=True)
class Solution:
    """A solved problem. `values` holds free, fixed and given constants, by name."""

    problem: Problem
    constants: tuple[FittedConstant, ...]
    facts: tuple[ExplainedFact, ...]
    values: Mapping[str, float]


def residual(fact: Fact, predicted: float) -> float:
    """ln of predicted over the nearest value that agrees with the fact; 0 within its range."""
    if not predicted > 0:
        raise ValueError(f"{fact.name}: predicted {predicted!r} must be > 0; its problem's bounds let it go astray")
    if predicted < fact.low:
        return math.log(predicted / fact.low)
    return math.log(predicted / fact.high) if predicted > fact.high else 0.0


def solve(problem: Problem, given: Mapping[str, float], facts: Mapping[str, Fact] = FACTS) -> Solution:
    """Finds a problem's constants.

    Args:
      given: values of the constants that `problem.given` names.
      facts: where the facts are looked up; only those of role `fit` count.

    Raises ValueError if a fact is unknown or has another role, if a given constant is missing, or if no fact has the
    role `fit`.
    """
    wanted = [_fact(problem, name, facts) for name in problem.facts]
    fitted = [fact for fact in wanted if fact.role == "fit"]
    if not fitted:
        raise ValueError(f"calibration problem {problem.name!r}: facts {problem.facts} must hold one of role 'fit'")
    if missing := sorted(set(problem.given) - set(given)):
        raise ValueError(f"calibration problem {problem.name!r}: given constants {missing} must be solved before it")
    cited = {name: _fact(problem, source, facts, ("input",)).low for name, source in problem.cited.items()}
    held = {**problem.fixed, **cited, **{name: given[name] for name in problem.given}}

    def values_at(x: np.ndarray) -> dict[str, float]:
        return held | {c.name: math.exp(v) for c, v in zip(problem.constants, x, strict=True)}

    def predictions(x: np.ndarray) -> Mapping[str, float]:
        return problem.predict(values_at(x))

    x, jacobian = _least_squares(problem.constants, fitted, predictions)
    predicted = dict(predictions(x))
    if problem.predict_checks is not None:
        predicted |= problem.predict_checks(values_at(x))
    constants = tuple(
        FittedConstant(c.name, c.unit, math.exp(x[j]), c.prior, c.spread, informed, moved)
        for j, (c, informed, moved) in enumerate(_rests_on(problem.constants, fitted, jacobian))
    )
    explained = tuple(ExplainedFact(f, predicted[f.name], residual(f, predicted[f.name])) for f in wanted)
    return Solution(problem, constants, explained, values_at(x))


def _fact(problem: Problem, name: str, facts: Mapping[str, Fact], roles: Sequence[str] = ("fit", "check")) -> Fact:
    fact = facts.get(name)
    if fact is None or fact.role not in roles:
        role = "not published" if fact is None else f"of role {fact.role!r}"
        raise ValueError(
            f"calibration problem {problem.name!r}: fact {name!r} is {role} and must be of {' or '.join(roles)}; see "
            "jaxrl.sim.published"
        )
    return fact


def _least_squares(constants: Sequence[Constant], facts: Sequence[Fact], predictions) -> tuple[np.ndarray, np.ndarray]:
    """Levenberg-Marquardt within bounds; returns logarithms of the constants and d ln(fact) / d ln(constant)."""
    prior = np.log([c.prior for c in constants])
    spread = np.array([c.spread for c in constants])
    low, high = (np.log([getattr(c, side) for c in constants]) for side in ("low", "high"))

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
    r = residuals(x)
    jacobian = sensitivities(x)
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


def _rests_on(
    constants: Sequence[Constant], facts: Sequence[Fact], jacobian: np.ndarray
) -> list[tuple[Constant, float, tuple[str, ...]]]:
    """Of each constant: the share of its prior variance that the facts remove, and the facts that it moves."""
    width = np.array([f.tolerance + math.log(f.high / f.low) / 2 for f in facts])
    spread = np.array([c.spread for c in constants])
    scaled = jacobian / width[:, None]
    posterior = np.linalg.inv(scaled.T @ scaled + np.diag(1 / spread**2))
    found = []
    for j, constant in enumerate(constants):
        moved = tuple(fact.name for i, fact in enumerate(facts) if abs(jacobian[i, j]) > _MOVES)
        found.append((constant, float(1 - posterior[j, j] / spread[j] ** 2), moved))
    return found


# ---------------------------------------------------------------- all problems, and the file


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants of every problem: `values[problem][constant]`, and the document that explains them."""

    values: Mapping[str, Mapping[str, float]]
    document: Mapping[str, Any]

    def efficiency(self, problem: str) -> Efficiency:
        """The efficiency factors of a problem's machine; those that it does not determine keep their defaults."""
        return efficiency_of(self._of(problem))

    def lengths(self, problem: str, cap: int) -> LengthDistribution:
        """The response lengths of a problem's workload, with another cap."""
        return lengths_of(self._of(problem), cap)

    def value(self, problem: str, constant: str) -> float:
        """One constant."""
        values = self._of(problem)
        if constant not in values:
            raise ValueError(f"calibration: {problem!r} has no {constant!r}; it has {', '.join(sorted(values))}")
        return values[constant]

    def _of(self, problem: str) -> Mapping[str, float]:
        if problem not in self.values:
            raise ValueError(f"calibration: no problem {problem!r}; there are {', '.join(sorted(self.values))}")
        return self.values[problem]

    def write(self, path: str | Path) -> None:
        """Writes the document as JSON."""
        Path(path).write_text(json.dumps(self.document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Calibration:
        """Reads what `write` wrote.

        Raises ValueError for another version, or if a published value in it is no longer the one of `published.FACTS`:
        a calibration must not outlive the facts that it was fitted to.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{path}: no such calibration file; `calibrate().write(path)` makes one") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from None
        version = document.get("version") if isinstance(document, dict) else None
        if version != VERSION:
            raise ValueError(f"{path}: calibration version {version!r} must be {VERSION}: calibrate again")
        values = {}
        for name, entry in document["problems"].items():
            for row in entry["facts"]:
                fact = FACTS.get(row["fact"])
                if fact is None or [fact.low, fact.high] != row["published"]:
                    raise ValueError(
                        f"{path}: {name} was fitted to {row['fact']} = {row['published']}, which is not what "
                        "jaxrl.sim.published says: calibrate again"
                    )
            free = {constant: found["value"] for constant, found in entry["constants"].items()}
            held = {constant: found["value"] for constant, found in entry["held"].items()}
            values[name] = held | free
        return cls(values, document)


def calibrate(problems: Sequence[Problem] = PROBLEMS, facts: Mapping[str, Fact] = FACTS) -> Calibration:
    """Solves the problems in order, each with what earlier ones found. The same result whenever it is run."""
    solved: dict[str, Solution] = {}
    for problem in problems:
        given = {name: solved[other].values[name] for name, other in problem.given.items() if other in solved}
        solved[problem.name] = solve(problem, given, facts)
    document = {
        "version": VERSION,
        "what": "constants of jaxrl.sim fitted to published facts about baselines (jaxrl.sim.calibrate)",
        "residual": "ln(predicted / nearest published value); 0 within a published range",
        "problems": {name: _entry(solution) for name, solution in solved.items()},
    }
    return Calibration({name: dict(solution.values) for name, solution in solved.items()}, document)


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
    """Six digits: enough for a constant, and the same text from every machine's last bits."""
    return float(f"{value:.6g}")
