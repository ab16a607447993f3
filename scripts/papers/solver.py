"""Constants from facts: the calibration's least squares.

Source: regularised nonlinear least squares (Levenberg 1944, Marquardt 1963) on logarithms. A constant's prior is one
more residual, so facts fewer than constants still give one answer: the one nearest to the priors.

Departures: none of the papers says how a simulator was fitted. `informed` (share of a constant's prior variance that
the facts remove, linearised at the solution) says what rests on facts and what on the prior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from papers.facts import FACTS, Fact

_STEP = 0.005  # of a logarithm, for differences: narrow for curvature, wide enough for lengths rounded to tokens
_MOVES = 0.02  # a fact counts as having moved a constant if it changes by this share of the constant's own change
_MAX_ITERATIONS = 300

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Constant:
    """A free constant: its prior and how far from it a fit may go.

    `spread` is the prior's standard deviation of the logarithm; the constant stays within [low, high].
    """

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
      name: unique.
      constants: free ones.
      facts: names in `facts.FACTS` that `predict` computes, of the roles fit and check.
      predict: constants by name (free, fixed, cited and given ones) -> facts of role fit by name.
      predict_checks: the same for facts of role check, asked once at the solution.
      fixed: constants that no fact determines, with the value assumed for them.
      cited: constants that a paper states: name -> a fact of role input.
      given: constants taken over from an earlier problem: name -> that problem's name (same name there).
      assumptions: assumed where a paper is silent.
    """

    name: str
    constants: tuple[Constant, ...]
    facts: tuple[str, ...]
    predict: Callable[[Values], Mapping[str, float]]
    predict_checks: Callable[[Values], Mapping[str, float]] | None = None
    fixed: Mapping[str, float] = field(default_factory=dict)
    cited: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FittedConstant:
    """A fitted constant: its prior, the share of it that rests on facts (0..1), and those facts."""

    name: str
    unit: str
    value: float
    prior: float
    spread: float
    informed: float
    fitted_to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExplainedFact:
    """A fact and its prediction from the constants; `residual` is ln(predicted / nearest published value)."""

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
            "papers.facts"
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
