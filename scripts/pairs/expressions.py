"""Pairs of formulas in x, and of complex and irrational numbers.

Formulas come as families of spellings, each with what Python's `cmath` computes for it.
"""

from __future__ import annotations

import cmath
import random
from collections.abc import Callable
from math import pi

from pairs.spelling import Drawn

Formula = tuple[str, Callable[[float], complex]]
_POINTS = (0.37, 1.9)


def expressions(rng: random.Random, right: bool) -> Drawn:
    """Two spellings of a family of formulas in x. What is right is asked of the functions beside them."""
    while True:
        how, family = rng.choice(_FAMILIES)
        a, b = rng.randint(2, 7), rng.randint(2, 9)
        spelled = family(a, b)
        others = family(*rng.choice(((a + 1, b), (a, b + 1), (a, -b), (a + 1, b - 1))))
        answer, reference = rng.choice(spelled if right else others), rng.choice(spelled)
        same = all(cmath.isclose(answer[1](x), reference[1](x), rel_tol=1e-9, abs_tol=1e-12) for x in _POINTS)
        if same == right and answer[0] != reference[0]:
            return answer[0], reference[0], how


def _signed(n: int) -> str:
    return f"+{n}" if n >= 0 else f"{n}"


def _square(a: int, b: int) -> list[Formula]:
    return [
        (f"({a}x{_signed(b)})^2", lambda x: (a * x + b) ** 2),
        (f"{a * a}x^2{_signed(2 * a * b)}x{_signed(b * b)}", lambda x: a * a * x * x + 2 * a * b * x + b * b),
        (f"{b * b}{_signed(2 * a * b)}x+{a * a}x^{{2}}", lambda x: b * b + 2 * a * b * x + a * a * x**2),
        (f"(x\\cdot {a}{_signed(b)})({b}+{a}x)" if b > 0 else f"({b}+{a}x)^2", lambda x: (a * x + b) ** 2),
    ]


def _factors(a: int, b: int) -> list[Formula]:
    return [
        (f"(x-{a})(x{_signed(b)})", lambda x: (x - a) * (x + b)),
        (f"x^2{_signed(b - a)}x{_signed(-a * b)}", lambda x: x * x + (b - a) * x - a * b),
        (rf"\left(x{_signed(b)}\right)\left(x-{a}\right)", lambda x: (x + b) * (x - a)),
        (f"y = (x-{a})(x{_signed(b)})", lambda x: (x - a) * (x + b)),
    ]


def _quotient(a: int, b: int) -> list[Formula]:
    return [
        (rf"\frac{{{a}}}{{x}}{_signed(b)}", lambda x: a / x + b),
        (rf"\frac{{{a}{_signed(b)}x}}{{x}}", lambda x: (a + b * x) / x),
        (f"{a}x^{{-1}}{_signed(b)}", lambda x: a / x + b),
        (f"{b}+{a}/x", lambda x: b + a / x),
    ]


def _complex(a: int, b: int) -> list[Formula]:
    return [
        (f"({a}{_signed(b)}i)^2", lambda x: complex(a, b) ** 2),
        (f"{a * a - b * b}{_signed(2 * a * b)}i", lambda x: complex(a * a - b * b, 2 * a * b)),
        (f"{2 * a * b}i{_signed(a * a - b * b)}", lambda x: complex(a * a - b * b, 2 * a * b)),
    ]


def _complex_quotient(a: int, b: int) -> list[Formula]:
    size = a * a + b * b
    return [
        (rf"\frac{{1}}{{{a}{_signed(b)}i}}", lambda x: 1 / complex(a, b)),
        (rf"\frac{{{a}{_signed(-b)}i}}{{{size}}}", lambda x: 1 / complex(a, b)),
        (rf"\frac{{{a}}}{{{size}}}{'-' if b > 0 else '+'}\frac{{{abs(b)}}}{{{size}}}i", lambda x: 1 / complex(a, b)),
    ]


def _logarithm(a: int, b: int) -> list[Formula]:
    b = abs(b)
    return [
        (rf"\ln {a} + {b}\ln x", lambda x: cmath.log(a) + b * cmath.log(x)),
        (rf"\ln({a}) + {b} \ln(x)", lambda x: cmath.log(a) + b * cmath.log(x)),
        (rf"{b}\ln x + \ln {a}", lambda x: b * cmath.log(x) + cmath.log(a)),
        (rf"\ln{{{a}}}+{b}\ln{{x}}", lambda x: cmath.log(a) + b * cmath.log(x)),
    ]


def _pi(a: int, b: int) -> list[Formula]:
    b = abs(b)
    return [
        (rf"\frac{{{a}\pi}}{{{b}}}", lambda x: a * pi / b),
        (rf"\frac{{{a}}}{{{b}}}\pi", lambda x: a * pi / b),
        (rf"{a}\pi/{b}", lambda x: a * pi / b),
        (rf"\pi\cdot\frac{{{a}}}{{{b}}}", lambda x: a * pi / b),
        (f"{a}π/{b}", lambda x: a * pi / b),
    ]


def _exponential(a: int, b: int) -> list[Formula]:
    return [
        (rf"{a}e^{{{b}x}}", lambda x: a * cmath.exp(b * x)),
        (rf"{a} \cdot e^{{{b}x}}", lambda x: a * cmath.exp(b * x)),
        (rf"{a}\exp({b}x)", lambda x: a * cmath.exp(b * x)),
        (rf"\frac{{{a}}}{{e^{{{-b}x}}}}", lambda x: a * cmath.exp(b * x)),
    ]


def _sine(a: int, b: int) -> list[Formula]:
    return [
        (rf"{a}\sin^2 x{_signed(b)}", lambda x: a * cmath.sin(x) ** 2 + b),
        (rf"{a + b}-{a}\cos^2 x", lambda x: a + b - a * cmath.cos(x) ** 2),
        (rf"{a}(\sin x)^2{_signed(b)}", lambda x: a * cmath.sin(x) ** 2 + b),
        (rf"{b}+{a}\sin^{{2}}(x)", lambda x: b + a * cmath.sin(x) ** 2),
    ]


def _surd(a: int, b: int) -> list[Formula]:
    b = abs(b)
    return [
        (rf"{a}+\sqrt{{{b}}}", lambda x: a + b**0.5),
        (rf"\sqrt{{{b}}}+{a}", lambda x: a + b**0.5),
        (rf"\frac{{{2 * a}+2\sqrt{{{b}}}}}{{2}}", lambda x: a + b**0.5),
        (rf"\frac{{{a * a - b}}}{{{a}-\sqrt{{{b}}}}}" if a * a != b else f"{a}+{a}", lambda x: a + b**0.5),
    ]


_FAMILIES: tuple[tuple[str, Callable[[int, int], list[Formula]]], ...] = (
    ("square", _square), ("factors", _factors), ("quotient", _quotient), ("complex", _complex),
    ("complex quotient", _complex_quotient), ("logarithm", _logarithm), ("pi", _pi), ("exponential", _exponential),
    ("sine", _sine), ("surd", _surd),
)  # fmt: skip
