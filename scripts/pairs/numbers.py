"""Pairs of single numbers: integers, decimals, fractions, percentages, powers, roots, scientific notation.

Each function draws an answer for a reference: the same number in another spelling, or one that is nearly it.
"""

from __future__ import annotations

import random
from fractions import Fraction
from math import gcd, isqrt

from pairs.spelling import Drawn, digits, frac, grouped, one, rounded, slash


def integers(rng: random.Random, right: bool) -> Drawn:
    n = rng.randrange(1000, 10 ** rng.randint(4, 10)) * rng.choice((1, 1, -1))
    spelled = one(
        rng,
        ("plain", f"{n}"),
        ("commas", grouped(n, ",")),
        ("braced commas", grouped(n, "{,}")),
        ("commas and \\!", grouped(n, r",\!")),
        ("thin spaces", grouped(n, r"\,")),
        ("spaces", grouped(n, " ")),
        ("a place of zero", f"{n}.0"),
        ("dollars", f"${grouped(n, ',')}$"),
        ("a space behind", f"{n}\\ "),
        ("\\text", rf"\text{{{n}}}"),
        ("= x", f"{n} = x"),
        ("x =", f"x = {n}"),
        ("a product", f"{n // 2} \\cdot 2" if n % 2 == 0 else f"{2 * n}/2"),
    )
    if right:
        return spelled[1], rng.choice((f"{n}", grouped(n, ","))), spelled[0]
    text = f"{abs(n)}"
    i = next((i for i in range(len(text) - 1) if text[i] != text[i + 1]), 0)
    swapped = text[:i] + text[i + 1] + text[i] + text[i + 2 :]
    wrong = one(
        rng,
        ("next number", f"{n + 1}"),
        ("negative", grouped(-n, ",")),
        ("ten times", grouped(10 * n, ",")),
        ("digits swapped", swapped if swapped != text else f"{n + 2}"),
        ("a little more", f"{n}.0000001"),
        ("a little less", f"{digits(n - Fraction(1, 10**9))}"),
        ("a pair", f"({grouped(abs(n) + 1000, ',')})".replace(f"{abs(n) + 1000:,}", f"{abs(n):,}")),
        ("a list in brackets", f"[{grouped(abs(n), ',')}]"),
        ("two answers", f"{n} or {n + 1}"),
        ("a variable", f"{n}n"),
    )
    return wrong[1], f"{n}", wrong[0]


def decimals(rng: random.Random, right: bool) -> Drawn:
    places = rng.randint(1, 4)
    value = Fraction(rng.randrange(1, 10 ** (places + rng.randint(0, 3))), 10**places) * rng.choice((1, 1, -1))
    if value.denominator == 1:
        value += Fraction(1, 10)
    text = digits(value)
    if right:
        spelled = one(
            rng,
            ("a zero behind", f"{text}0"),
            ("fraction", frac(value)),
            ("slash", slash(value)),
            ("no zero before", text.replace("0.", ".", 1) if abs(value) < 1 else f"+{text}" if value > 0 else text),
            ("times ten to the", rf"{digits(value * 10)} \times 10^{{-1}}"),
            ("e", f"{digits(value * 100)}e-2"),
            ("percent", rf"{digits(value * 100)}\%"),
            ("float noise", repr(float(value) * 3 / 3) if abs(value) > 1 else f"{text}00"),
        )
        return spelled[1], text, spelled[0]
    last = Fraction(1, 10 ** (len(text.partition(".")[2])))
    wrong = one(
        rng,
        ("last place", digits(value + last)),
        ("point moved", digits(value * 10)),
        ("negative", digits(-value)),
        ("a little more", digits(value + Fraction(1, 10**8))),
        ("cut", f"{int(value)}" if int(value) != value else "0"),
        ("percent", rf"{text}\%" if abs(value) < 1 else rf"{digits(value * 10)}\%"),
        ("fraction inverted", frac(1 / value) if abs(value) != 1 else "2"),
    )
    return wrong[1], text, wrong[0]


def fractions(rng: random.Random, right: bool) -> Drawn:
    top, bottom = rng.randint(1, 60), rng.choice((3, 6, 7, 9, 11, 13, 8, 12, 2, 4, 5, 15))
    while gcd(top, bottom) != 1:
        top += 1
    value = Fraction(top, bottom) * rng.choice((1, 1, -1))
    sign = "-" if value < 0 else ""
    reference = rng.choice((frac(value), slash(value), frac(value, "dfrac")))
    whole, rest = divmod(abs(value), 1)
    is_mixed = bool(whole and rest)
    if right:
        factor = rng.randint(2, 5)
        spelled = one(
            rng,
            ("tfrac", frac(value, "tfrac")),
            ("not reduced", rf"{sign}\frac{{{top * factor}}}{{{bottom * factor}}}"),
            ("slash, not reduced", f"{sign}{top * factor}/{bottom * factor}"),
            ("no braces", rf"{sign}\frac{top}{bottom}" if top < 10 and bottom < 10 else frac(value)),
            ("sign inside", rf"\frac{{{sign}{top}}}{{{bottom}}}"),
            ("mixed", rf"{sign}{whole}\frac{{{rest.numerator}}}{{{bottom}}}" if is_mixed else slash(value)),
            ("mixed, slash", f"{sign}{whole} {rest.numerator}/{bottom}" if is_mixed else slash(value)),
            ("rounded", rounded(value, rng.randint(6, 9))),
            ("cut", digits(value, rng.randint(7, 12))),
            ("a float", repr(float(value))),
            ("over", rf"{sign}{{{top} \over {bottom}}}"),
            ("a product", rf"{sign}{top} \cdot \frac{{1}}{{{bottom}}}"),
        )
        return spelled[1], reference, spelled[0]
    off = Fraction(1, 10**8)
    wrong = one(
        rng,
        ("next numerator", frac(value + Fraction(1, bottom))),
        ("inverted", frac(1 / value) if abs(value) != 1 else "2"),
        ("negative", frac(-value)),
        ("three places", rounded(value, 3) if (value * 1000).denominator > 1 else digits(value + Fraction(1, 1000))),
        ("eighth place", rounded(value + 3 * off, 8)),
        ("mixed as a product", rf"{whole}\cdot\frac{{{rest.numerator}}}{{{bottom}}}" if is_mixed else frac(-value)),
        ("denominator", rf"{sign}\frac{{{top}}}{{{bottom + 1}}}"),
    )
    return wrong[1], reference, wrong[0]


def percents(rng: random.Random, right: bool) -> Drawn:
    percent = Fraction(rng.randint(2, 1999), rng.choice((1, 10, 20)))
    share = percent / 100
    text = digits(percent)
    reference = rng.choice((rf"{text}\%", f"{text}%", rf"{text} \%"))
    if right:
        spelled = one(
            rng,
            ("sign", f"{text}%"),
            ("a zero behind", rf"{text}{'0' if '.' in text else '.0'}\%"),
            ("percent", f"{text} percent"),
            ("\\text", rf"{text} \text{{ percent}}"),
            ("\\text sign", rf"{text}\text{{\%}}"),
            ("a decimal", digits(share)),
            ("a fraction", frac(share)),
            ("mathrm", rf"{text}\mathrm{{\%}}"),
            ("a fraction of a percent", rf"{frac(percent)}\%" if percent.denominator > 1 else rf"{text}\,\%"),
        )
        return spelled[1], reference, spelled[0]
    wrong = one(
        rng,
        ("last place", rf"{digits(percent + Fraction(1, 20))}\%"),
        ("ten times", rf"{digits(percent * 10)}\%"),
        ("a tenth", digits(share / 10)),
        ("negative", rf"-{text}\%"),
        ("share with a sign", rf"{digits(share)}\%"),
        ("next", rf"{digits(percent + 1)} \text{{ percent}}"),
    )
    return wrong[1], reference, wrong[0]


def powers(rng: random.Random, right: bool) -> Drawn:
    base, exponent = rng.choice((2, 3, 5, 6, 7, 10)), rng.choice((-4, -3, -2, 2, 3, 4, 6, 8, 10, 12))
    value = Fraction(base) ** exponent
    reference = rng.choice((f"{base}^{{{exponent}}}", slash(value)))
    if right:
        spelled = one(
            rng,
            ("braced", f"{base}^{{{exponent}}}"),
            ("in brackets", f"({base})^{{{exponent}}}"),
            ("stars", f"{base}**{exponent}" if exponent > 0 else f"1/{base}**{-exponent}"),
            ("a square", f"({base}^{{{exponent // 2}}})^2" if exponent % 2 == 0 else f"{base}^{{{exponent}}}"),
            ("a product", rf"{base}^{{{exponent - 1}}} \cdot {base}"),
            ("a product with \\times", rf"{base} \times {base}^{{{exponent - 1}}}"),
            ("inverse", rf"\left(\frac{{1}}{{{base}}}\right)^{{{-exponent}}}"),
            ("value", slash(value)),
            ("half the exponent", rf"{base * base}^{{{slash(Fraction(exponent, 2))}}}"),
        )
        return spelled[1], reference, spelled[0]
    wrong = one(
        rng,
        ("exponent", f"{base}^{{{exponent + 1}}}"),
        ("base", f"{base + 1}^{{{exponent}}}"),
        ("product", rf"{base} \cdot {exponent}" if base * exponent != value else f"{base}"),
        ("next value", slash(value + 1)),
        ("negative", f"-{base}^{{{exponent}}}"),
        ("sign of the exponent", f"{base}^{{{-exponent}}}"),
        ("a millionth more", f"{base}^{{{exponent}}} + 10^{{-9}}"),
    )
    return wrong[1], reference, wrong[0]


def roots(rng: random.Random, right: bool) -> Drawn:
    """a * sqrt(b) with b free of squares; and cube roots."""
    a, b = rng.randint(2, 9), rng.choice((2, 3, 5, 6, 7, 10, 11))
    square = a * a * b
    reference = rng.choice((rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{square}}}"))
    value = a * _exact_root(b)
    if right:
        spelled = one(
            rng,
            ("one root", rf"\sqrt{{{square}}}"),
            ("product", rf"{a} \cdot \sqrt{{{b}}}"),
            ("half power", f"{square}^{{1/2}}"),
            ("frac power", rf"{square}^{{\frac{{1}}{{2}}}}"),
            ("rationalised", rf"\frac{{{a * b}}}{{\sqrt{{{b}}}}}"),
            ("two roots", rf"\sqrt{{{a * a}}}\sqrt{{{b}}}"),
            ("no braces", rf"{a}\sqrt{b}" if b < 10 else rf"{a}\sqrt{{{b}}}"),
            ("sign √", f"{a}√{b}" if b < 10 else rf"{a}\sqrt {{{b}}}"),
            ("plain", f"{a}sqrt({b})" if rng.random() < 0.5 else f"{a}*sqrt({b})"),
            ("a cube root", rf"\sqrt[3]{{{a**3}}}\sqrt{{{b}}}"),
            ("rounded", rounded(value, rng.randint(6, 9))),
            ("a sum", rf"\sqrt{{{b}}} + {a - 1}\sqrt{{{b}}}"),
        )
        return spelled[1], reference, spelled[0]
    wrong = one(
        rng,
        ("coefficient", rf"{a + 1}\sqrt{{{b}}}"),
        ("radicand", rf"\sqrt{{{square + 1}}}"),
        ("negative", rf"-\sqrt{{{square}}}"),
        ("no root", f"{square}"),
        ("three places", rounded(value, 3)),
        ("eighth place", rounded(value + Fraction(3, 10**8), 8)),
        ("one factor", rf"\sqrt{{{b}}}"),
        ("both signs", rf"\pm {a}\sqrt{{{b}}}"),
        ("cube root", rf"\sqrt[3]{{{square}}}"),
    )
    return wrong[1], reference, wrong[0]


def _exact_root(n: int) -> Fraction:
    """To thirty places."""
    return Fraction(isqrt(n * 10**60), 10**30)


def scientific(rng: random.Random, right: bool) -> Drawn:
    places, exponent = rng.randint(0, 3), rng.choice((-9, -6, -4, -3, 3, 4, 5, 6, 8, 11))
    mantissa = (
        Fraction(rng.randrange(10**places + 1, 10 ** (places + 1)), 10**places)
        if places
        else Fraction(rng.randint(2, 9))
    )
    text, value = digits(mantissa), mantissa * Fraction(10) ** exponent
    reference = rng.choice((rf"{text} \times 10^{{{exponent}}}", rf"{text}\cdot 10^{{{exponent}}}", digits(value)))
    if right:
        spelled = one(
            rng,
            ("times", rf"{text}\times10^{{{exponent}}}"),
            ("cdot", rf"{text} \cdot 10^{{{exponent}}}"),
            ("e", f"{text}e{exponent}"),
            ("E with a sign", f"{text}E{exponent:+03}"),
            ("an upright e", rf"{text}\mathrm{{e}}{exponent}"),
            ("×", f"{text} × 10^{{{exponent}}}"),
            ("stars", f"{text}*10**{exponent}" if exponent > 0 else f"{text} x 10^{{{exponent}}}"),
            ("written out", digits(value)),
            ("point moved", rf"{digits(mantissa * 10)} \times 10^{{{exponent - 1}}}"),
            ("a fraction of ten", rf"\frac{{{text}}}{{10^{{{-exponent}}}}}"),
            ("superscripts", f"{text}×10{str(exponent).translate(_RAISED)}"),
        )
        return spelled[1], reference, spelled[0]
    last = Fraction(1, 10**places)
    wrong = one(
        rng,
        ("exponent", rf"{text} \times 10^{{{exponent + 1}}}"),
        ("sign of the exponent", rf"{text} \times 10^{{{-exponent}}}"),
        ("mantissa", rf"{digits(mantissa + last)} \times 10^{{{exponent}}}"),
        ("negative", rf"-{text} \times 10^{{{exponent}}}"),
        ("mantissa alone", text),
        ("zero", "0"),
    )
    return wrong[1], reference, wrong[0]


_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
