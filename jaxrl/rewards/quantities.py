r"""The exact values of numbers as people and models write them, with their units.

`\frac{7}{2}`, `3\frac{1}{2}`, `3 1/2`, `3.5`, `3.5 \text{ cm}`, `$3.50`, `350%`, `3.5 \times 10^{0}` and
`0.3\overline{5}` are read; anything else is an expression, and none of this module's business. Every function takes
time in proportion to its text's length.

How exact an answer must be follows from what was asked. A whole number matches only itself, in any spelling; a fraction
(or a root) matches itself or a decimal of it. A decimal matches another number if it is that number rounded, or cut, to
the written places: at least six, and, below 0.01, six digits. Of two decimals the one with fewer places must be such a
decimal of the other. What differs by 1e-14 of its size is a float's noise, and is the same, unless one of the two is a
whole number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import log10

_MAX_DIGITS = 20_000  # of one number: beyond, exact arithmetic would cost seconds
_MAX_EXPONENT = 5000

_FRACTIONS = "½12 ⅓13 ⅔23 ¼14 ¾34 ⅕15 ⅖25 ⅗35 ⅘45 ⅙16 ⅚56 ⅛18 ⅜38 ⅝58 ⅞78"
_SIGNS = r"""×\times ·\cdot ⋅\cdot ÷/ ⁄/ ∕/ π\pi ∞\infty ≤\le ≥\ge ≠\ne ±\pm ∪\cup ∩\cap ∅\emptyset ∈\in √\sqrt °^\circ
    ，, 。. ：: ≡\equiv ⟨\langle ⟩\rangle"""
_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_CHARACTERS = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width forms of ASCII
    | dict.fromkeys("\N{MINUS SIGN}\N{FULLWIDTH HYPHEN-MINUS}\N{HYPHEN}\N{NON-BREAKING HYPHEN}", "-")
    | dict.fromkeys("\u00a0\u2002\u2003\u2009\u200a\u202f\u3000", " ")
    | dict.fromkeys("\u200b\u2060\ufeff", "")
    | {each[0]: rf"\frac{{{each[1]}}}{{{each[2]}}}" for each in _FRACTIONS.split()}
    | {each[0]: f"{each[1:]} " if each[1] == "\\" else each[1:] for each in _SIGNS.split()}
)
_TEXT = r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\s?"
_UNWRAPPED = re.compile(_TEXT + r"\{([^{}]*)\}")
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_VALUE = re.compile(
    rf"""
    (?P<sign>(?:[-+]\s?)*)
    (?:
        (?P<whole>\d+)\s(?P<top>\d+)/(?P<bottom>\d+)
      | (?P<latex_whole>\d+)?\s?\\frac\{{(?P<latex_top>-?{_DECIMAL})\}}\{{(?P<latex_bottom>-?{_DECIMAL})\}}
      | (?P<before>\d*)\.(?P<fixed>\d*)\\overline\{{(?P<repeated>\d+)\}}
      | (?P<mantissa>{_DECIMAL})
        (?:
            [eE](?P<exponent>[-+]?\d+)
          | \s?(?:\\times|\\cdot|\*|x)\s?10\s?(?:\^|\*\*)\s?(?:\{{(?P<ten_braced>[-+]?\d+)\}}|(?P<ten>[-+]?\d+))
          | \s?/\s?(?P<divisor>{_DECIMAL})
          | \s?\^\s?(?:\{{(?P<power_braced>[-+]?\d+)\}}|(?P<power>\d+))
        )?
    )
    """,
    re.VERBOSE | re.ASCII,
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SHORT_WORDS = """cm mm km nm ml dl cl kg mg lb oz ft in yd mi hr hz ms ns us pm am kw mw gb mb kb tb ev pa kpa cc sq cu
    mph kmh"""
_SHORT_UNITS = frozenset(_SHORT_WORDS.split())
_LETTER_UNITS = frozenset("mgshlnjwvk")
_OTHER_WORDS = """and or plus minus times over half halves third thirds quarter quarters fourth fourths fifth fifths
    point mod pi sin cos tan cot sec csc log exp sqrt infinity inf oo theta alpha beta gamma lambda to not either maybe
    perhaps if for choose wrong incorrect false"""
_NUMBER_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"""
NAMED: dict[str, int] = dict(zip(_NUMBER_WORDS.split(), [*range(20), *range(20, 100, 10)], strict=True))
_NO_UNITS = frozenset(_OTHER_WORDS.split()) | set(_SCALES) | set(NAMED)  # they make a number part of something else
_TIGHT = re.compile(  # brackets without spaces or more brackets in them
    r"(?:[(\[]|\\\{) ?(?:[^\s()\[\]\\]|\\[A-Za-z])*+ ?(?:[)\]]|\\\})"
)
_REASON = re.compile(r"[,;.]?\s?\(?(?:because|since|as)\b", re.IGNORECASE)
_SAME_UNITS = {
    "dollar": "$", "usd": "$", "buck": "$", "cent": "¢", "euro": "€", "eur": "€", "pound": "lb", "lbs": "lb",
    "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km",
    "millimeter": "mm", "millimetre": "mm", "inche": "in", "inch": "in", "foot": "ft", "feet": "ft", "mile": "mi",
    "gram": "g", "kilogram": "kg", "ounce": "oz", "liter": "l", "litre": "l", "milliliter": "ml", "second": "s",
    "sec": "s", "minute": "min", "hour": "h", "hr": "h", "degree": "°", "circ": "°", "deg": "°",
}  # fmt: skip
_KNOWN_UNITS = _SHORT_UNITS | set(_SAME_UNITS.values()) | _LETTER_UNITS


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and its unit.

    Attributes:
      value: of `50%` it is 50. unit: words in small letters and singular; `%` for a percentage.
      places: decimal places that it is written with, after which it may be rounded; None for an exact number.
    """

    value: Fraction
    unit: tuple[str, ...] = ()
    places: int | None = None


def clean(text: str) -> str:
    r"""The text in plain characters, without what does not change an answer: math delimiters, spacing and sizing
    commands, thousands separators, emphasis, white space, a final period. `\text` stays, since it tells units."""
    text = re.sub(r"\s+", " ", text.translate(_CHARACTERS)).strip()
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"^{{{m[0].translate(_POWERS)}}}", text)
    text = re.sub(r"(?<![\w)])\*\*([^*]+)\*\*(?!\w)", r"\1", text)
    text = re.sub(r"\\([lr])brace(?![A-Za-z])", lambda m: r"\{" if m[1] == "l" else r"\}", text)
    text = re.sub(r"(\\\\)\[\d*\.?\d+(?:pt|em|ex|mm|cm)\]", r"\1", text)
    text = re.sub(r",(?:\\[,;: ]|~)", ", ", text.replace(r",\!", "{,}"))
    text = re.sub(r"(?<!\\)\\[()\[\],;:!]|\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![A-Za-z])|\\?\$", "", text)
    text = re.sub(r"\\([lr])angle(?![A-Za-z])", lambda m: "(" if m[1] == "l" else ")", text)
    if text.startswith("<") and text.endswith(">") and "," in text:
        text = f"({text[1:-1]})"
    text = re.sub(r"\\(?:quad|qquad|ldots|dots)(?![A-Za-z])|(?<!\\)\\(?: |$)|~", " ", text)
    text = _TIGHT.sub(lambda m: re.sub(r"(?<!\{),(?!\})", ", ", m[0]), text)  # (1,234) is a pair
    text = re.sub(r"\\[cdt]frac(?![A-Za-z])", r"\\frac", text).replace(r"\%", "%").replace("{,}", ",")
    text = re.sub(r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac ?\{([^{}]*)\} ?(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac ?(\d) ?\{([^{}]*)\}", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac ?\{ ?([^{} ]*) ?\} ?\{ ?([^{} ]*) ?\}", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))", r"\\degree ", text)
    text = re.sub(r"(?<=\d) ?(?:degrees?\b|\\text\{ ?degrees? ?\})", r"\\degree ", text)
    text = re.sub(r"(?<=\d)\\(?:mathrm|text)\{[eE]\}\{?([-+]?\d+)\}?", r"e\1", text)
    text = re.sub(r"\\(?:mathrm|mathit|operatorname)\{([ei])\}", r" \1 ", text)
    text = re.sub(r"(?<=[\w)}])\*\* ?(-?\w+)", r"^{\1}", text)
    text = re.sub(r"\\varnothing(?![A-Za-z])|\\\{ ?\\\}", r"\\emptyset", text)
    text = re.sub(r"(?<![\d,.])([1-9]\d{0,2}(?:,\d{3})+)(?!\d|,\d)", lambda m: m[1].replace(",", ""), text)
    text = re.sub(r"(?<![\w.,])([1-9]\d{0,2}(?: \d{3}){1,9})(?![\w/])(?! \d)", lambda m: m[1].replace(" ", ""), text)
    text = re.sub(r" +", " ", text).strip()
    for mark in ("`", "_", "*"):
        if len(text) > 2 and text.startswith(mark) and text.endswith(mark):
            text = text.strip(mark).strip()
    if (whole := _UNWRAPPED.fullmatch(text)) is not None:
        text = whole[1].strip()
    while text.startswith("{") and text.endswith("}") and "{" not in text[1:-1] and "}" not in text[1:-1]:
        text = text[1:-1].strip()
    return text.removesuffix(".").strip() if not text.endswith("..") else text


def unwrapped(text: str) -> str:
    r"""A cleaned text without `\text` and its like, and without spaces beside anything but words."""
    text = _UNWRAPPED.sub(r"\1", text)
    text = re.sub(r"\+?\\infty|(?<![A-Za-z\\])(?:\+?infinity|\+?inf|\+?oo)(?![A-Za-z])", r"\\infty ", text)
    text = re.sub(r" ?([^\w\s]) ?", r"\1", re.sub(r"\s+", " ", text))
    return text.strip().removesuffix(".").strip()


def to_number(text: str) -> Fraction | None:
    """The exact value of a plain number, ratio, or mixed number; None for anything else, percentages among them."""
    found = _VALUE.match(cleaned := _UNWRAPPED.sub(r"\1", clean(text)))
    return _value(found) if found is not None and found.end() == len(cleaned) else None


def quantity(cleaned: str) -> Quantity | None:
    """The number and the unit that a cleaned text consists of; None if it holds anything else."""
    text = re.sub(r"^(?P<sign>[-+]?) ?(?:US ?|USD ?|Rs\.? ?)?[\u20ac\u00a3\u00a5\u20b9]? ?", r"\g<sign>", cleaned)
    text = re.sub(rf"^{_TEXT}\{{ ?([^{{}}A-Za-z]*)\}}", r"\1", text)
    found = _VALUE.match(text)
    value = _value(found) if found is not None else None
    if found is None or value is None:
        return None
    places, rest = _places(found), text[found.end() :]
    scale = re.match(rf" ?(?:{_TEXT}\{{ ?)?({'|'.join(_SCALES)})s?\b\}}?", rest, re.IGNORECASE)
    if scale is not None:
        value, rest = value * _SCALES[scale[1].lower()], rest[scale.end() :]
        places = None if places is None else places - round(log10(_SCALES[scale[1].lower()]))
    named = re.match(r" ?\(([A-Za-z]{3,9})(?:[- ]([A-Za-z]{3,5}))?\)", rest)
    if named is not None and value == sum(NAMED.get(word.lower(), 1000) for word in named.groups() if word):
        rest = rest[named.end() :]  # 7 (seven) days
    unit = _unit(rest)
    return None if unit is None else Quantity(value, unit, places)


def same_quantity(a: Quantity, b: Quantity) -> bool:
    """Whether two quantities are the same, b the reference: numbers equal, and units no contradiction."""
    if ("%" in a.unit) != ("%" in b.unit):
        x, y = (_share(each) if "%" in each.unit else each for each in (a, b))
        return _same(x, y) or (abs(a.value) >= 1 and _same(a, b))
    ours, theirs = set(a.unit), set(b.unit)
    if ours and theirs and not ours & theirs:
        return False
    if (ours & _KNOWN_UNITS) and (theirs & _KNOWN_UNITS) and (ours & _KNOWN_UNITS) != (theirs & _KNOWN_UNITS):
        return False
    return _same(a, b)


def _share(percent: Quantity) -> Quantity:
    return Quantity(percent.value / 100, (), None if percent.places is None else percent.places + 2)


def _same(a: Quantity, b: Quantity) -> bool:
    """Equal, or one a decimal of the other: rounded or cut, as the module's text says."""
    x, y = a.value, b.value
    written = [(each.places, each.value) for each in (a, b) if each.places is not None]
    if x == y or x.denominator == 1 or y.denominator == 1 or not written:
        return x == y
    places, short = min(written)
    unit = Fraction(10) ** -places
    off = short - (y if short == x else x)
    is_long = places >= 6 and (abs(y) >= Fraction(1, 100) or abs(y) >= unit * 10**5)
    is_cut = abs(off) < unit and off * short <= 0
    return (is_long and (abs(off) <= unit / 2 or is_cut)) or abs(off) <= abs(y) / 10**14


def _value(found: re.Match[str]) -> Fraction | None:
    if len(found[0]) > _MAX_DIGITS:
        return None
    value = _unsigned(found)
    return -value if value is not None and found["sign"].count("-") % 2 else value


def _unsigned(found: re.Match[str]) -> Fraction | None:
    if found["bottom"]:
        return _ratio(found["top"], found["bottom"], found["whole"])
    if found["latex_bottom"]:
        return _ratio(found["latex_top"], found["latex_bottom"], found["latex_whole"])
    if found["repeated"]:
        fixed, repeated = found["fixed"], found["repeated"]
        tail = _decimal(repeated) / (10 ** len(repeated) - 1)
        return _decimal(f"{found['before']}.{fixed}0") + tail / 10 ** len(fixed)
    mantissa = _decimal(found["mantissa"])
    if found["divisor"]:
        divisor = _decimal(found["divisor"])
        return mantissa / divisor if divisor else None
    ten = found["exponent"] or found["ten_braced"] or found["ten"]
    if ten:
        return mantissa * Fraction(10) ** int(ten) if len(ten) < 6 and abs(int(ten)) <= _MAX_EXPONENT else None
    power = found["power_braced"] or found["power"]
    if power is None:
        return mantissa
    if len(power) > 5 or abs(int(power)) * len(found["mantissa"]) > _MAX_EXPONENT or (int(power) < 0 and not mantissa):
        return None
    return mantissa ** int(power)


def _places(found: re.Match[str]) -> int | None:
    """Decimal places of a number that is written with a point or a power of ten; None for an exact one."""
    ten = found["exponent"] or found["ten_braced"] or found["ten"]
    if not found["mantissa"] or found["divisor"] or not (ten or ("." in found["mantissa"])):
        return None
    return len(found["mantissa"].partition(".")[2]) - int(ten or 0)


def _ratio(top: str, bottom: str, whole: str | None) -> Fraction | None:
    """A fraction, or a mixed number; a whole number before an improper fraction is a factor."""
    below = _decimal(bottom)
    if not below:
        return None
    value = _decimal(top) / below
    if whole is None:
        return value
    return _decimal(whole) + value if 0 <= value < 1 else _decimal(whole) * value


def _decimal(text: str) -> Fraction:
    """Exact, and by way of `Decimal`, since `int` takes no text of more than 4,300 digits."""
    return Fraction(Decimal(text))


def _unit(rest: str) -> tuple[str, ...] | None:
    """The words of the unit that a text is; None if it is none. After `because` anything may stand."""
    if not rest or _REASON.match(rest):
        return ()
    if rest in ("%", " %"):
        return ("%",)
    is_text = re.match(r" ?" + _TEXT, rest) is not None
    glued = rest[0].isalpha()
    plain = _UNWRAPPED.sub(r" \1", rest).replace("\\degree", " degree").replace("\\cdot", "·")
    plain = re.sub(r"\^ ?\{?[23]\}?", "", plain).strip(" ,;.:-")
    if re.search(r"[\d\\+*=<>\[\]^_|!&#@]", plain) or not plain:
        return () if not plain and "^" not in rest else None
    words = [word.lower() for word in re.findall(r"[A-Za-z]+|%|¢|°", plain)]
    if words[:1] in (["percent"], ["pct"]) or words == ["percentage", "points"]:
        words[0] = "%"
    for word in words:
        if word in _NO_UNITS or not (is_text or _may_be_unit(word, glued) or (word == "a" and len(words) > 2)):
            return None
    if not words:
        return None if re.search(r"[^\s()/.,;:'\u20ac\u00a3\u00a5-]", plain) else ()
    return tuple(dict.fromkeys(_canonical(word) for word in words))


def _may_be_unit(word: str, glued: bool) -> bool:
    """Letters may be variables: one letter, or some that are glued to the number, only if they are a known unit."""
    if len(word) == 1:
        return (word in _LETTER_UNITS and not glued) or word in "%¢°"
    if glued:
        return word in _SHORT_UNITS or _canonical(word) in _KNOWN_UNITS
    return len(word) > 2 or word in _SHORT_UNITS or word in ("of", "a", "an", "at", "is", "by", "he", "we", "in", "on")


def _canonical(word: str) -> str:
    single = word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
    return _SAME_UNITS.get(word, _SAME_UNITS.get(single, single))
