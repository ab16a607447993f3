"""Pairs of numbers with something behind them: units, times of day, degrees."""

from __future__ import annotations

import random
from fractions import Fraction

from pairs.spelling import Drawn, digits, frac, one

_UNITS = (
    ("cm", "centimeters"), ("m", "meters"), ("km", "kilometers"), ("kg", "kilograms"), ("g", "grams"),
    ("s", "seconds"), ("min", "minutes"), ("ft", "feet"), ("mL", "milliliters"), ("mm", "millimeters"),
)  # fmt: skip


def units(rng: random.Random, right: bool) -> Drawn:
    if rng.random() < 0.12:
        return _time(rng, right)
    value = Fraction(rng.randint(2, 4000), rng.choice((1, 1, 2, 10)))
    text = digits(value)
    unit, word = rng.choice(_UNITS)
    reference = rng.choice(
        (rf"{text} \text{{ {unit}}}", rf"{text}\text{{ {word}}}", rf"{text}\,\mathrm{{{unit}}}", text)
    )
    if right:
        whole = f"{value.numerator:,}" if value.denominator == 1 else text
        spelled = one(
            rng,
            ("\\text", rf"{text}\text{{ {unit}}}"),
            ("mathrm", rf"{text}~\mathrm{{{unit}}}"),
            ("a word", f"{text} {word}"),
            ("a word in \\text", rf"{text}\ \text{{{word}}}"),
            ("plain", f"{whole} {unit}"),
            ("no unit", whole),
            (
                "fraction",
                rf"{frac(value)} \text{{ {word}}}" if value.denominator > 1 else rf"{text}.0\,\text{{{unit}}}",
            ),
            ("textbf", rf"\textbf{{{text} {word}}}"),
        )
        return spelled[1], reference, spelled[0]
    other = rng.choice([each for each in _UNITS if each[0] != unit])
    if reference == text:
        return rf"{digits(value + 1)} \text{{ {unit}}}", reference, "another number"
    wrong = one(
        rng,
        ("another unit", rf"{text} \text{{ {other[0]}}}"),
        ("another unit's word", f"{text} {other[1]}"),
        ("another number", rf"{digits(value + 1)} \text{{ {unit}}}"),
        ("ten times", rf"{digits(value * 10)} \text{{ {unit}}}"),
        ("a range", rf"{text} \text{{ to }} {digits(value + 1)} \text{{ {unit}}}"),
    )
    return wrong[1], reference, wrong[0]


def _time(rng: random.Random, right: bool) -> Drawn:
    hour, minute, half = rng.randint(1, 11), rng.randrange(5, 60, 5), rng.choice("ap")
    reference = rng.choice((rf"{hour}:{minute:02} \text{{ {half}.m.}}", f"{hour}:{minute:02} {half.upper()}M"))
    if right:
        spelled = one(
            rng,
            ("time", f"{hour}:{minute:02} {half.upper()}M"),
            ("time, a.m.", rf"{hour}:{minute:02}\text{{ {half}.m.}}"),
            ("time, glued", f"{hour:02}:{minute:02}{half}m"),
            ("time, \\text", rf"{hour}:{minute:02}\,\text{{{half.upper()}M}}"),
        )
        return spelled[1], reference, spelled[0]
    wrong = one(
        rng,
        ("time, half of the day", f"{hour}:{minute:02} {'P' if half == 'a' else 'A'}M"),
        ("time, minute", f"{hour}:{(minute + 5) % 60:02} {half.upper()}M"),
        ("time, hour", f"{hour % 11 + 1}:{minute:02} {half.upper()}M"),
    )
    return wrong[1], reference, wrong[0]


def degrees(rng: random.Random, right: bool) -> Drawn:
    if rng.random() < 0.4:
        return _of_an_angle(rng, right)
    degrees = rng.choice((15, 18, 30, 36, 45, 60, 72, 75, 90, 108, 120, 135, 150, 180, 225, 270, 300))
    turn = Fraction(degrees, 180)
    top = r"\pi" if turn.numerator == 1 else rf"{turn.numerator}\pi"
    radians = rf"\frac{{{top}}}{{{turn.denominator}}}" if turn.denominator > 1 else top
    reference = rng.choice((rf"{degrees}^\circ", rf"{degrees}^{{\circ}}", radians))
    if right:
        spelled = one(
            rng,
            ("circ", rf"{degrees}^\circ"),
            ("braced circ", rf"{degrees}^{{\circ}}"),
            ("sign", f"{degrees}°"),
            ("radians", radians),
            ("share of pi", rf"\frac{{{turn.numerator}}}{{{turn.denominator}}}\pi"),
            ("radians with a slash", rf"{turn.numerator}\pi/{turn.denominator}"),
            ("word", f"{degrees} degrees" if "circ" in reference else radians),
            ("\\text word", rf"{degrees}\text{{ degrees}}" if "circ" in reference else radians),
        )
        return spelled[1], reference, spelled[0]
    wrong = one(
        rng,
        ("one degree", rf"{degrees + 1}^\circ"),
        ("supplement", rf"{180 - degrees if degrees != 90 else 80}^\circ"),
        ("radians with a degree sign", rf"{radians}^\circ"),
        ("twice", rf"\frac{{{2 * turn.numerator}\pi}}{{{turn.denominator}}}"),
        ("negative", rf"-{degrees}^\circ"),
    )
    return wrong[1], reference, wrong[0]


def _of_an_angle(rng: random.Random, right: bool) -> Drawn:
    table = {
        r"\sin 30": r"\frac{1}{2}",
        r"\cos 60": r"\frac{1}{2}",
        r"\sin 45": r"\frac{\sqrt{2}}{2}",
        r"\cos 30": r"\frac{\sqrt{3}}{2}",
        r"\tan 45": "1",
        r"\tan 60": r"\sqrt{3}",
        r"\sin 90": "1",
        r"\cos 120": r"-\frac{1}{2}",
        r"\sin 15": r"\frac{\sqrt{6}-\sqrt{2}}{4}",
        r"\cos 36": r"\frac{1+\sqrt{5}}{4}",
    }
    name = rng.choice(list(table))
    function, degrees = name.split()
    spelled = rng.choice(
        (rf"{name}^\circ", rf"{name}^{{\circ}}", rf"{function}({degrees}^\circ)", rf"{function}{{{degrees}°}}")
    )
    if right:
        return spelled, table[name], "of an angle"
    others = [value for value in table.values() if value != table[name]]
    wrong = rng.choice((spelled.replace("^\\circ", "").replace("^{\\circ}", "").replace("°", ""), spelled))
    reference = table[name] if wrong != spelled else rng.choice(others)
    return wrong, reference, "of another angle" if wrong == spelled else "of an angle without its degrees"
