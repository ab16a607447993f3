"""How a drawn number is written."""

from __future__ import annotations

import random
from fractions import Fraction

Drawn = tuple[str, str, str]
"""An answer, a reference, and how the answer was spelled or what is wrong with it."""


def digits(value: Fraction, places: int | None = None) -> str:
    """A decimal with so many places, cut there; by default as many as the value has."""
    if places is None:
        places = next(n for n in range(40) if 10**n % value.denominator == 0)
    scaled = abs(value.numerator) * 10**places // value.denominator
    text = str(scaled).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    return sign + (f"{text[:-places]}.{text[-places:]}" if places else text)


def rounded(value: Fraction, places: int) -> str:
    return digits(Fraction(round(value * 10**places), 10**places), places)


def grouped(value: int, separator: str) -> str:
    return f"{value:,}".replace(",", separator)


def frac(value: Fraction, command: str = "frac") -> str:
    sign = "-" if value < 0 else ""
    return rf"{sign}\{command}{{{abs(value.numerator)}}}{{{value.denominator}}}"


def slash(value: Fraction) -> str:
    return f"{value.numerator}/{value.denominator}" if value.denominator > 1 else f"{value.numerator}"


def one(rng: random.Random, *choices: tuple[str, str]) -> tuple[str, str]:
    return rng.choice(choices)
