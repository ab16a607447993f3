"""Pairs of several numbers: sets, intervals, tuples."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

from pairs.spelling import Drawn, digits, frac, one, rounded, slash


def _values(rng: random.Random, count: int) -> list[Fraction]:
    found: list[Fraction] = []
    while len(found) < count:
        value = Fraction(rng.randint(-30, 400), rng.choice((1, 1, 1, 2, 3, 4)))
        if value not in found:
            found.append(value)
    return found


def _spell(rng: random.Random, value: Fraction) -> str:
    if value.denominator == 1:
        return rng.choice((f"{value}", f"{value}", f"{value}.0", f"{{{value}}}"))
    choices = [frac(value), slash(value), frac(value, "dfrac")]
    if value.denominator in (2, 4):
        choices.append(digits(value))
    return rng.choice(choices)


def _listed(values: Sequence[Fraction]) -> str:
    return ", ".join(frac(value) if value.denominator > 1 else f"{value}" for value in values)


def _nearly(rng: random.Random, values: Sequence[Fraction]) -> list[Fraction]:
    """One of the values is another."""
    changed, i = list(values), rng.randrange(len(values))
    other = rng.choice((changed[i] + 1, -changed[i] if changed[i] else Fraction(1), changed[i] + Fraction(1, 10**7)))
    changed[i] = other if other not in values else changed[i] + 1000
    return changed


def _decimal_or_fraction(value: Fraction) -> str:
    return f"{value}" if value.denominator == 1 else frac(value) if value.denominator < 10**6 else rounded(value, 12)


def sets(rng: random.Random, right: bool) -> Drawn:
    if rng.random() < 0.08:
        empty = (r"\emptyset", r"\varnothing", r"\{\}", "∅", r"\{ \}")
        answer, reference = rng.choice(empty), rng.choice(empty)
        return (answer, reference, "empty") if right else (rng.choice((r"\{0\}", "0")), reference, "empty")
    values = _values(rng, rng.randint(2, 4))
    reference = rf"\{{{_listed(values)}\}}"
    if right:
        mixed = rng.sample(values, len(values))
        parts = [_spell(rng, value) for value in mixed]
        spelled = one(
            rng,
            ("another order", r"\{" + ", ".join(parts) + r"\}"),
            ("no spaces", r"\{" + ",".join(parts) + r"\}"),
            ("\\left", r"\left\{ " + ", ".join(parts) + r" \right\}"),
            ("no braces", ", ".join(parts)),
            ("lbrace", r"\lbrace " + ", ".join(parts) + r" \rbrace"),
            ("and", ", ".join(parts[:-1]) + rf" \text{{ and }} {parts[-1]}"),
            ("x in", r"x \in \{" + ", ".join(parts) + r"\}"),
            ("x = or", r" \text{ or } ".join(f"x = {part}" for part in parts)),
        )
        return spelled[1], reference, spelled[0]
    i = rng.randrange(len(values))
    others = [("one changed", _nearly(rng, values)), ("one missing", values[:i] + values[i + 1 :])]
    others.append(("one more", [*values, max(values) + 1]))
    how, other = rng.choice(others)
    return r"\{" + ", ".join(map(_decimal_or_fraction, other)) + r"\}", reference, how


def intervals(rng: random.Random, right: bool) -> Drawn:
    low, high = sorted(_values(rng, 2))
    opening, closing = rng.choice("(["), rng.choice(")]")
    left, right_end = _spell(rng, low), _spell(rng, high)
    shape = rng.choice(("both", "both", "below", "above", "union"))
    if shape == "union":
        return _union(rng, right, low, high)
    ends = [frac(low) if low.denominator > 1 else f"{low}", frac(high) if high.denominator > 1 else f"{high}"]
    if shape == "below":
        opening, left, ends[0] = "(", r"-\infty", r"-\infty"
    elif shape == "above":
        closing, right_end, ends[1] = ")", rng.choice((r"\infty", r"+\infty")), r"\infty"
    reference = f"{opening}{ends[0]}, {ends[1]}{closing}"
    if right:
        below, above = (r"\le" if opening == "[" else "<"), (r"\leq" if closing == "]" else "<")
        lower, upper = f"{left} {below} x" if shape != "below" else "x", f" {above} {right_end}"
        spelled = one(
            rng,
            ("no spaces", f"{opening}{left},{right_end}{closing}"),
            ("\\left", rf"\left{opening} {left}, {right_end} \right{closing}"),
            ("x in", rf"x \in {opening}{left}, {right_end}{closing}"),
            (
                "inequality",
                lower + (upper if shape != "above" else "") if lower != "x" or shape != "above" else reference,
            ),
            ("semicolon", f"{opening}{left}; {right_end}{closing}"),
        )
        return spelled[1], reference, spelled[0]
    swap = {"(": "[", "[": "(", ")": "]", "]": ")"}
    wrong = [
        ("end", f"{opening}{ends[0]}, {_decimal_or_fraction(high + 1)}{closing}"),
        ("start", f"{opening}{_decimal_or_fraction(low - 1)}, {ends[1]}{closing}"),
        ("a set", rf"\{{{ends[0]}, {ends[1]}\}}"),
        ("start alone", ends[0]),
    ]
    if shape != "below":
        wrong.append(("bracket", f"{swap[opening]}{ends[0]}, {ends[1]}{closing}"))
    if shape != "above":
        wrong.append(("bracket", f"{opening}{ends[0]}, {ends[1]}{swap[closing]}"))
    how, answer = rng.choice(wrong)
    return answer, reference, how


def _union(rng: random.Random, right: bool, low: Fraction, high: Fraction) -> Drawn:
    a, b = _decimal_or_fraction(low), _decimal_or_fraction(high)
    reference = rf"(-\infty, {a}) \cup [{b}, \infty)"
    if right:
        spelled = one(
            rng,
            ("union, no spaces", rf"(-\infty,{a})\cup[{b},\infty)"),
            ("union, other order", rf"[{b}, \infty) \cup (-\infty, {a})"),
            ("union, ∪", rf"(-∞, {a}) ∪ [{b}, +∞)"),
            (
                "union, \\left",
                rf"\left(-\infty, {_spell(rng, low)}\right) \cup \left[{_spell(rng, high)}, \infty\right)",
            ),
        )
        return spelled[1], reference, spelled[0]
    wrong = one(
        rng,
        ("union, bracket", rf"(-\infty, {a}] \cup [{b}, \infty)"),
        ("union, end", rf"(-\infty, {a}) \cup [{_decimal_or_fraction(high + 1)}, \infty)"),
        ("union, one part", rf"(-\infty, {a})"),
        ("intersection", rf"(-\infty, {a}) \cap [{b}, \infty)"),
    )
    return wrong[1], reference, wrong[0]


def tuples(rng: random.Random, right: bool) -> Drawn:
    values = _values(rng, rng.randint(2, 4))
    reference = f"({_listed(values)})"
    parts = [_spell(rng, value) for value in values]
    if right:
        named = dict(zip("xyzw", parts, strict=False))
        spelled = one(
            rng,
            ("no spaces", f"({','.join(parts)})"),
            ("\\left", rf"\left({', '.join(parts)}\right)"),
            ("\\bigl", rf"\bigl( {', '.join(parts)} \bigr)"),
            ("thin spaces", "(" + r",\,".join(parts) + ")"),
            ("x = , y =", ", ".join(f"{name} = {part}" for name, part in named.items())),
            ("(x, y) =", f"({', '.join(named)}) = ({', '.join(parts)})"),
        )
        return spelled[1], reference, spelled[0]
    i = rng.randrange(len(values))
    others = [
        ("one changed", _nearly(rng, values)),
        ("one missing", values[:i] + values[i + 1 :]),
        ("swapped", values[::-1]),
        ("one more", [*values, Fraction(0)]),
    ]
    how, other = rng.choice(others)
    opening, closing = "()"
    if rng.random() < 0.15 and len(values) == 2:
        how, other, opening, closing = "an interval", values, "[", ")"
    return opening + ", ".join(map(_decimal_or_fraction, other)) + closing, reference, how
