r"""How large the numbers in an expression may become, judged from its tree before anything evaluates it.

A computer algebra system takes minutes and gigabytes for `9^{9^{9}}`, `(10!)!` or `\prod_{k=1}^{10^{12}} k`, since it
computes with all digits. `digits` bounds from above the digits of every part that holds only numbers, and the terms of
every power that would be multiplied out.

A part is a fraction p / q with at most 2^over for p and 2^under for q, both at least 1 in size; or unknown, if there
are variables in it. Constants such as `\pi` and `e` count as numbers below 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import ceil, comb, log2, log10
from typing import Any

_MAX_BITS = 2.0**17  # of a number: 39,000 digits
_MAX_TERMS = 500  # of a power of a sum with variables
_MAX_DEGREE = 10_000  # of a power of one variable


class TooLarge(Exception):
    """To evaluate the expression would take numbers of more than 39,000 digits, or sums of more than 500 terms."""


@dataclass(frozen=True, slots=True)
class _Magnitude:
    """log2 of what p and q of a part are at most. `terms`: that a part with variables is the sum of; 0: it has no
    variables."""

    over: float = 0.0
    under: float = 0.0
    terms: int = 0

    def __post_init__(self) -> None:
        if self.over + self.under > _MAX_BITS or self.terms > _MAX_TERMS:
            raise TooLarge


_VARIABLE = _Magnitude(terms=1)


def digits(expression: Any) -> int:
    """How many digits the numbers of an expression of sympy's have at most. Raises TooLarge."""
    part = _of(expression)
    return ceil((part.over + part.under) * log10(2))


def _of(node: Any) -> _Magnitude:
    import sympy
    from sympy.functions.combinatorial.factorials import CombinatorialFunction

    match node:
        case sympy.Rational():
            return _Magnitude(log2(max(abs(int(node.p)), 1)), log2(int(node.q)))
        case sympy.Pow() if node.exp.could_extract_minus_sign():
            return _inverse(_of(sympy.Pow(node.base, -node.exp, evaluate=False)))
    parts = [_of(each) for each in (node if isinstance(node, sympy.MatrixBase) else getattr(node, "args", ()))]
    if not parts:
        return _Magnitude(2.0) if getattr(node, "is_number", False) else _VARIABLE
    match node:
        case sympy.Add():
            return reduce(_added, parts)
        case sympy.Mul():
            return reduce(_multiplied, parts)
        case sympy.Pow():
            return _power(*parts)
        case sympy.exp() | sympy.cosh() | sympy.sinh():
            return _power(_Magnitude(2.0), parts[0])
        case sympy.binomial():
            return _binomial(*parts)
        case CombinatorialFunction() | sympy.gamma():
            return _factorial(parts[0])
        case sympy.Sum() | sympy.Product():
            return reduce(_multiplied, [_factorial(_of(limits[-1])) for limits in node.limits], parts[0])
    # a list, a relation, or a function whose value is no larger than its argument's
    return _Magnitude(*(max(getattr(part, name) for part in parts) for name in ("over", "under", "terms")))


def _added(a: _Magnitude, b: _Magnitude) -> _Magnitude:
    terms = a.terms + b.terms + (bool(a.terms) is not bool(b.terms))  # numbers beside variables are a term
    return _Magnitude(max(a.over + b.under, b.over + a.under) + 1, a.under + b.under, terms)


def _multiplied(a: _Magnitude, b: _Magnitude) -> _Magnitude:
    terms = max(a.terms, 1) * max(b.terms, 1) if a.terms or b.terms else 0
    return _Magnitude(a.over + b.over, a.under + b.under, terms)


def _inverse(a: _Magnitude) -> _Magnitude:
    return _Magnitude(a.under, a.over, a.terms)


def _power(base: _Magnitude, exponent: _Magnitude) -> _Magnitude:
    if exponent.terms:
        return _Magnitude(terms=max(base.terms, 1))
    if exponent.over > 40:
        raise TooLarge
    most = round(2.0**exponent.over)
    if base.terms:
        if most > (_MAX_DEGREE if base.terms == 1 else _MAX_TERMS):
            raise TooLarge
        return _Magnitude(terms=comb(most + base.terms - 1, base.terms - 1))
    return _Magnitude(max(base.over, base.under) * most, base.under * most)


def _factorial(part: _Magnitude) -> _Magnitude:
    if part.terms:
        return _VARIABLE
    if part.over > 14:
        raise TooLarge
    return _Magnitude(part.over * 2.0**part.over)


def _binomial(n: _Magnitude, k: _Magnitude) -> _Magnitude:
    if n.terms or k.terms:
        return _VARIABLE
    if min(n.over, k.over) > 14:
        raise TooLarge
    return _Magnitude(min(2.0**n.over, n.over * 2.0**k.over))
