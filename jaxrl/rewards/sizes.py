r"""How large the numbers in an expression may become, judged from its text before anything evaluates it.

A computer algebra system takes minutes and gigabytes for `9^{9^{9}}`, `(10!)!` or `\prod_{k=1}^{10^{12}} k`, since it
computes with all digits. `digits` reads the LaTeX (or plain) text once, roughly. It bounds from above the digits of
every part that holds only numbers, and the terms of every power that would be multiplied out.

A part is a fraction p / q with at most 2^over for p and 2^under for q, both at least 1 in size; or unknown, if there
are variables in it. Constants such as `\pi` and `e` count as numbers below 4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil, comb, log2, log10

_MAX_BITS = 2.0**17  # of a number: 39,000 digits
_MAX_TERMS = 500  # of a power of a sum with variables
_MAX_DEGREE = 10_000  # of a power of one variable
_MAX_DEPTH = 40

_TOKEN = re.compile(
    r"\\[A-Za-z]+|\\.|(?P<number>\d+(?:\.\d*)?(?:[eE][-+]?\d+(?![A-Za-z]))?|\.\d+)|\*\*|[A-Za-z]|\S",
    re.DOTALL | re.ASCII,
)
_OPEN, _CLOSE = {"(", "[", "{", r"\{", r"\lfloor", r"\lceil"}, {")", "]", "}", r"\}", r"\rfloor", r"\rceil"}
_PRODUCT = {"*", r"\cdot", r"\times"}
_QUOTIENT = {"/", r"\div", ":"}
_CONSTANTS = {"e", "i", r"\pi", r"\mathrm", r"\exp", r"\cosh", r"\sinh"}
_SKIPPED = {r"\left", r"\right", r"\,", r"\;", r"\!", r"\ ", r"\displaystyle", "&", "$", "~", r"\limits"}
_RANGES = {r"\sum", r"\prod"}
_FACTORIALS = {r"\Gamma", "!"}
_PAIRS = {r"\frac", r"\dfrac", r"\tfrac", r"\cfrac", r"\binom", r"\dbinom", r"\tbinom"}


class _TooLarge(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Magnitude:
    """log2 of what p and q of a part are at most. `terms`: that a part with variables is the sum of; 0: it has no
    variables."""

    over: float = 0.0
    under: float = 0.0
    terms: int = 0

    def checked(self) -> _Magnitude:
        if self.over + self.under > _MAX_BITS or self.terms > _MAX_TERMS:
            raise _TooLarge
        return self


_ONE = _Magnitude()
_VARIABLE = _Magnitude(terms=1)


def digits(text: str) -> int | None:
    """How many digits the numbers of an expression have at most; None if evaluating it would take more than 39,000 of
    them, or sums of more than 500 terms."""
    most = 0.0
    reader = _Reader([match[0] for match in _TOKEN.finditer(text)])
    try:
        while reader.has_more:
            part = reader.sum(0)
            most = max(most, part.over + part.under)
            reader.skip()  # a bracket without its partner, a relation, a comma
    except _TooLarge:
        return None
    return ceil(most * log10(2))


class _Reader:
    def __init__(self, tokens: list[str]):
        self._tokens = [token for token in tokens if token not in _SKIPPED]
        self._at = 0

    @property
    def has_more(self) -> bool:
        return self._at < len(self._tokens)

    def skip(self) -> None:
        self._at += 1

    def _peek(self) -> str:
        return self._tokens[self._at] if self.has_more else ""

    def sum(self, depth: int) -> _Magnitude:
        """Up to a closing bracket, or to the end."""
        if depth > _MAX_DEPTH:
            raise _TooLarge
        total: _Magnitude | None = None
        term: _Magnitude | None = None
        divides = False
        while self.has_more and self._peek() not in _CLOSE:
            token = self._peek()
            if token in ("+", "-", r"\pm", r"\mp", ",", ";", "=", "<", ">", r"\cup", r"\\"):
                total, term, divides = _added(total, term), None, False
                self.skip()
            elif token in _PRODUCT or token in _QUOTIENT:
                divides = token in _QUOTIENT
                self.skip()
            else:
                factor = self._factor(depth)
                term = factor if term is None else _multiplied(term, _inverse(factor) if divides else factor)
                divides = False
        return _added(total, term) or _ONE

    def _factor(self, depth: int) -> _Magnitude:
        """One operand with the powers and factorials behind it."""
        token = self._peek()
        part = self._operand(depth)
        while self._peek() in ("^", "**", "!", "_"):
            mark = self._peek()
            self.skip()
            if mark == "!":
                part = _factorial(part)
                continue
            exponent = self._exponent(depth)
            if mark == "_":
                part = _VARIABLE if not part.terms and token not in _RANGES else part
            elif token in _RANGES:
                part = _factorial(exponent)
            else:
                part = _power(part, exponent)
        return part

    def _exponent(self, depth: int) -> _Magnitude:
        sign = self._peek() in ("-", "+")
        if sign:
            self.skip()
        part = self._operand(depth + 1)
        while self._peek() in ("^", "**", "!"):  # 9^9^9
            mark = self._peek()
            self.skip()
            part = _factorial(part) if mark == "!" else _power(part, self._exponent(depth + 1))
        return part

    def _operand(self, depth: int) -> _Magnitude:
        if depth > _MAX_DEPTH:
            raise _TooLarge
        token = self._peek()
        self.skip()
        if token in _OPEN:
            part = self.sum(depth + 1)
            self.skip()
            return part
        if token[:1].isdigit() or (token[:1] == "." and len(token) > 1):
            return _literal(token)
        if token in _PAIRS:
            first, second = self._operand(depth + 1), self._operand(depth + 1)
            return _binomial(first, second) if token.endswith("binom") else _multiplied(first, _inverse(second))
        if token in _FACTORIALS:
            return _factorial(self._operand(depth + 1))
        if token in _CONSTANTS:
            constant = _Magnitude(2.0)
            return _power(constant, self._operand(depth + 1)) if token in (r"\exp", r"\cosh", r"\sinh") else constant
        if token.startswith("\\") and len(token) > 2 and self._peek() in ("{", "("):
            return self._operand(depth + 1)  # a function whose value is no larger than its argument's
        return _VARIABLE if token[:1].isalpha() or token.startswith("\\") else _ONE


def _literal(token: str) -> _Magnitude:
    mantissa, _, exponent = token.lower().partition("e")
    whole, _, places = mantissa.partition(".")
    digits = (whole + places).lstrip("0")
    over = len(digits) * log2(10) if len(digits) > 15 else log2(int(digits or "0") + 1)
    under = len(places) * log2(10)
    if exponent:
        if len(exponent) > 6:
            raise _TooLarge
        shift = int(exponent) * log2(10)
        over, under = over + max(shift, 0.0), under + max(-shift, 0.0)
    return _Magnitude(over, under).checked()


def _added(total: _Magnitude | None, term: _Magnitude | None) -> _Magnitude | None:
    if total is None or term is None:
        return term if total is None else total
    over = max(total.over + term.under, term.over + total.under) + 1
    terms = total.terms + term.terms + bool(total.terms) * (not term.terms) + bool(term.terms) * (not total.terms)
    return _Magnitude(over, total.under + term.under, terms).checked()


def _multiplied(a: _Magnitude, b: _Magnitude) -> _Magnitude:
    terms = max(a.terms, 1) * max(b.terms, 1) if a.terms or b.terms else 0
    return _Magnitude(a.over + b.over, a.under + b.under, terms).checked()


def _inverse(a: _Magnitude) -> _Magnitude:
    return _Magnitude(a.under, a.over, a.terms)


def _power(base: _Magnitude, exponent: _Magnitude) -> _Magnitude:
    if exponent.terms:
        return _VARIABLE if not base.terms else _Magnitude(terms=base.terms)
    if exponent.over > 40:
        raise _TooLarge
    most = 2.0**exponent.over
    if base.terms:
        if most > (_MAX_DEGREE if base.terms == 1 else _MAX_TERMS):
            raise _TooLarge
        return _Magnitude(terms=comb(int(most) + base.terms - 1, base.terms - 1)).checked()
    return _Magnitude(max(base.over, base.under) * most, base.under * most).checked()


def _factorial(part: _Magnitude) -> _Magnitude:
    if part.terms:
        return _VARIABLE
    if part.over > 14:
        raise _TooLarge
    return _Magnitude(part.over * 2.0**part.over, 0.0).checked()


def _binomial(n: _Magnitude, k: _Magnitude) -> _Magnitude:
    if n.terms or k.terms:
        return _VARIABLE
    if min(n.over, k.over) > 14:
        raise _TooLarge
    return _Magnitude(min(2.0**n.over, n.over * 2.0**k.over)).checked()
