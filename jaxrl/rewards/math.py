r"""Answers to mathematical problems: the final one in a response, compared with the reference.

`jaxrl.rewards.answers` finds the final answer, `jaxrl.rewards.quantities` reads plain numbers with units. Comparison
tries cheap exact tests first: the same text, choice, number, or elements of a list, interval or set. It leaves the rest
to `math-verify`. Its input has been bounded before (`jaxrl.rewards.sizes`): towers of powers and factorials would take
gigabytes. A decimal in an expression is an exact fraction, and a decimal for an expression such as `\sqrt{2}` must be
that number rounded or cut.

Departures: math-verify compares floats to six places, and constants to fifteen; here the digits of a number say how
many places count. It takes letters for complex numbers; here they are real in an expression with a root. It reads i as
a letter; here it may be the imaginary unit too. It drops degrees; here they are radians, or, outside functions, a unit
that may be left out. Its own timeouts are switched off: they are SIGALRM handlers, which raise outside the main thread.
The reward pool ends a comparison that takes too long (`reward.math_timeout_s`), with its process. So `score` must run
in a pool, not in the trainer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

from jaxrl.rewards.answers import Extract, after_thinking, extract_answer, last_line, last_stated, marked_answer
from jaxrl.rewards.quantities import NAMED, Quantity, clean, quantity, same_quantity, to_number, unwrapped
from jaxrl.rewards.sizes import digits

__all__ = ["Extract", "equal", "extract_answer", "load", "marked_answer", "score", "to_number"]

_MAX_ANSWER_CHARS = 2000  # a longer "answer" is none, unless the reference is as long
_MAX_SYMPY_CHARS = 1000  # the LaTeX parser's time grows faster than its text's length
_MAX_UNORDERED = 30  # elements of a list that is compared in any order
_MAX_DEPTH = 3  # of lists in each other

_ENDS_WITH = re.compile(r"\b(?:is|are|equals|get)[ :]*+\$([^$]+)\$\.?$")
_WORDS = re.compile(r"[A-Za-z][A-Za-z '\-]*")
_TALK = re.compile(r"[A-Za-z]{2},? [a-z]{2}")  # a parser may pick a formula out of a sentence
_CHOICE = re.compile(r"(?:(?i:option|choice|answer) )?[\[(]?([A-Ja-j])(?:[\])][.:]?(?P<what>.*)|[.:](?P<this>.*))?")
_SECOND_CHOICE = re.compile(r"(?<![A-Za-z])(?:[A-HJ]|or|and)(?![A-Za-z])")
_TIME = re.compile(r"(\d{1,2})(?::(\d\d))? ?(?:([ap])\.?m\.?)?", re.IGNORECASE)
_UNSURE = re.compile(r"(?<![A-Za-z\\])(?:to|not|either|maybe|perhaps)(?![A-Za-z])|^\\neq?(?![A-Za-z])|\(or(?![A-Za-z])")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_DECIMAL = re.compile(r"(?<![\w.])(\d*)\.(\d+)(?![\d.eE])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\}) ?\\degree(?![A-Za-z])")
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
_SIDE = re.compile(
    r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_(?:\w|\{\w+\}))?'?(?:\([A-Za-z_,]{1,20}\))?(?:=|\\in(?![A-Za-z]))(?P<right>[^=]+)"
)
_MIXED = re.compile(r"(?<![\w.}\\^])(\d+) ?\\[dt]?frac ?(?:\{(\d+)\}\{(\d+)\}|(\d)(\d)(?!\d))")
_BASE = re.compile(
    r"[({]?(?P<what>-?\d[\d.]*|-?[\dA-F]+(?=_\{1[1-6]\}))[)}]?(?:_| ?\(?(?:in )?base ?)[{(]*(?:base ?)?(?P<of>\w+)[)}]*"
)
_MODULUS = re.compile(
    r"(?:[A-Za-z](?:=|\\equiv ?))?(?P<what>(?:[-+\d,./^{}() ]|\\pm)+?)[, ]?"
    r"\(?(?:\\[pb]?mod|mod(?:ulo)?)(?![a-z]) ?\{?(?P<of>\w+)\}?\)?"
)
_VECTOR = re.compile(  # one column, or one row
    r"(?:\\begin\{[pbB]?matrix\}|[(\[]\\begin\{array\}\{[clr]+\})((?:(?!\\begin|\\end|&).)*+|(?:(?!\\begin|\\end|\\\\).)*+)"
    r"(?:\\end\{[pbB]?matrix\}|\\end\{array\}[)\]])"
)
_NEXT = re.compile(r"\\\\|&")
_OPENING, _CLOSING = "([{", ")]}"


def score(response: str, reference: str, extract: Extract = "auto") -> tuple[float, dict[str, Any]]:
    """1.0 if the response's final answer equals the reference, else 0.0; with the answer, and how it was compared.

    A reference may be marked as responses are ("The answer is 42.", a whole solution with a box).
    """
    reference = marked_answer(reference)[0] or last_stated(reference) or reference
    answer, mark = extract_answer(response, extract)
    if extract == "auto" and mark == "last_number" and (unmarked := _unmarked(response, reference, answer)):
        answer, mark = unmarked, "stated"
    if answer is None:
        return 0.0, {"extracted": None, "extracted_by": mark}
    correct, compared_by = equal(answer, reference)
    return float(correct), {"extracted": answer, "extracted_by": mark, "compared_by": compared_by}


def _unmarked(response: str, reference: str, number: str | None) -> str | None:
    """The answer of a response without marks, where it is not the last number; None where it is."""
    whole = after_thinking(response).strip()
    if len(whole) <= 2 * len(reference) and clean(whole) == clean(reference):
        return whole  # of several lines, perhaps
    line = last_line(response) or ""
    if quantity(clean(reference)) is not None:
        return line if quantity(clean(line)) not in (None, quantity(number or "")) else None  # "12 cm^2" is not 2
    has_words = _TALK.search(reference) or _WORDS.fullmatch(unwrapped(clean(reference)))
    if (stated := last_stated(response)) or has_words or not _TALK.search(line):
        return stated or line
    found = _ENDS_WITH.search(line)
    return found[1] if found else None


def equal(answer: str, reference: str) -> tuple[bool, str]:
    """(whether the answer equals the reference, what decided).

    What decides: "text", "choice", "number", "time", "words", "elements" or "math_verify"; "length" for an answer that
    is too long to be one, "size" for an expression whose value would be too large to write down.
    """
    if len(answer) > max(_MAX_ANSWER_CHARS, 2 * len(reference)):
        return False, "length"
    return _equal(clean(answer), clean(reference), _MAX_DEPTH)


def _equal(answer: str, reference: str, depth: int) -> tuple[bool, str]:
    """Both texts are clean."""
    a, b = unwrapped(answer), unwrapped(reference)
    if a == b:
        return True, "text"
    ours, theirs = _qualified(a), _qualified(b)
    if ours and theirs and ours[1] != theirs[1]:
        return False, "number"
    if ours or theirs:
        return _equal(ours[0] if ours else a, theirs[0] if theirs else b, depth)
    choice = _choice(b) if len(b) <= 3 and not b[:1].islower() else None
    if choice is not None and (chosen := _choice(a)) is not None:
        return chosen == choice, "choice"
    x, y = quantity(answer), quantity(reference)
    if x is not None and y is not None:
        return same_quantity(x, y), "number"
    if (same := _same_time(a, b)) is not None:
        return same, "time"
    if _UNSURE.search(a) and not _UNSURE.search(b) and b.casefold() not in ("no", "false"):  # "No, it is not"
        return False, "words"
    if _WORDS.fullmatch(b) and b != "i":
        # "Yes" is a word, while a LaTeX parser reads e * y * s, which equals "sey"
        return _same_words(a, b), "words"
    right = _right_sides(a, b)
    if right is not None:
        return _equal(*right, depth)
    if depth > 0:
        decided = _by_elements(a, b, depth)
        if decided is not None:
            return decided, "elements"
    if max(len(answer), len(reference)) > _MAX_SYMPY_CHARS:
        return False, "length"
    if digits(answer) is None or digits(reference) is None:
        return False, "size"
    return _math_verify(answer, reference), "math_verify"


def _qualified(text: str) -> tuple[str, str] | None:
    r"""A number without its base or modulus, and that; `-2 \pmod 7` is 5. None where it has neither.

    One may leave them out, but numbers in two bases are never the same: the question has one of them itself.
    """
    found = _BASE.fullmatch(text) or _MODULUS.fullmatch(text)
    if found is None:
        return None
    what, of = found["what"], str(NAMED.get(found["of"], found["of"]))
    if found.re is _MODULUS and re.fullmatch(r"-\d{1,18}", what) and re.fullmatch(r"\d{1,18}", of):
        what = str(int(what) + int(of)) if int(what) + int(of) > 0 else what
    return what, of


def _choice(text: str) -> str | None:
    """The letter of `(C)`, `C.` or `C) 12 apples`; None for what names no choice, or two."""
    found = _CHOICE.fullmatch(text)
    return None if found is None or _SECOND_CHOICE.search(found["what"] or found["this"] or "") else found[1].upper()


def _same_words(a: str, b: str) -> bool:
    """A few words, compared without case; `Yes, it is` begins with its answer."""
    first = re.match(r"(yes|no|true|false)[,.;:]", a, re.IGNORECASE)
    return (first[1] if first and b.casefold() in ("yes", "no", "true", "false") else a).casefold() == b.casefold()


def _same_time(a: str, b: str) -> bool | None:
    """Two times of day, of which one says which half of the day; None where they are none."""
    times = [_TIME.fullmatch(a), _TIME.fullmatch(b)]
    if not all(times) or not any(time and time[3] for time in times):
        return None
    halves = [{"a": (0,), "p": (12,)}.get((time[3] or "").lower(), (0, 12)) for time in times if time]
    hours = [int(time[1]) for time in times if time]
    may_be = [{hour % 12 + half for half in halves[i]} if hour <= 12 else {hour} for i, hour in enumerate(hours)]
    return bool(may_be[0] & may_be[1]) and len({time[2] or "00" for time in times if time}) == 1


def _right_sides(a: str, b: str) -> tuple[str, str] | None:
    """Both without `x =` before them, where one of them has it; None where neither or both have."""
    ours, theirs = (_SIDE.fullmatch(each) or _SIDE.fullmatch("=".join(each.split("=")[::-1])) for each in (a, b))
    if ours is not None and "=" not in b and theirs is None:
        return ours["right"].strip(), b
    if theirs is not None and "=" not in a and ours is None:
        return a, theirs["right"].strip()
    return None


@dataclass(frozen=True, slots=True)
class _Elements:
    """The parts between brackets (`(]` of `(0, 1]`, `{}` of a set; empty without any), or between commas."""

    brackets: str
    parts: tuple[str, ...]


def _by_elements(a: str, b: str, depth: int) -> bool | None:
    """Whether two lists, tuples, intervals or sets are equal element by element; None where they are no such things."""
    if (r"\begin" in a) != (r"\begin" in b):
        a, b = (_VECTOR.sub(lambda vector: f"({re.sub(_NEXT, ',', vector[1])})", text) for text in (a, b))
    x, y = _elements(a), _elements(b)
    if x is None or y is None:
        several, one = (x, b) if y is None else (y, a)
        if several is None or len(several.parts) < 2 or quantity(one) is None:
            return None
        is_repeated = not several.brackets and len(several.parts) <= _MAX_UNORDERED  # 5 or 5.0
        return is_repeated and all(_equal(part, one, depth - 1)[0] for part in several.parts)
    if len(x.parts) != len(y.parts):
        return False
    if len(x.parts) == 1:
        return _equal(x.parts[0], y.parts[0], depth - 1)[0] if x.brackets != y.brackets else None
    if not _may_be_same(x.brackets, y.brackets, len(x.parts)):
        return False

    def same(ours: str, theirs: str) -> bool:
        return _equal(ours, theirs, depth - 1)[0]

    is_unordered = not {x.brackets, y.brackets} - {"", "{}"} and len(x.parts) <= _MAX_UNORDERED
    letters = [part for part in y.parts if len(part) == 1 and part.isalpha()]
    if is_unordered and (len(letters) < len(y.parts) or sorted(letters) == letters):
        return _same_in_any_order(x.parts, y.parts, same)
    return all(same(ours, theirs) for ours, theirs in zip(x.parts, y.parts, strict=True))


def _may_be_same(a: str, b: str, count: int) -> bool:
    """Brackets say what a list is: `(1, 2)` is a pair or an open interval, `[1, 2]` another one, `{1, 2}` a set."""
    if a == b or not a or not b:
        return a == b or "{}" in (a, b) or "()" in (a, b) or count > 2
    return {a, b} == {"()", "[]"} and count > 2


def _same_in_any_order(a: Sequence[str], b: Sequence[str], same: Callable[[str, str], bool]) -> bool:
    left = list(b)
    for part in a:
        if part in left:
            left.remove(part)
            continue
        match = next((other for other in left if same(part, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _elements(text: str) -> _Elements | None:
    """The elements of a text without spaces; None if it is one thing without brackets, or a LaTeX environment."""
    if r"\begin" in text or r"\cup" in text or r"\mid" in text:
        return None
    text = text.replace(r"\{", "{").replace(r"\}", "}").replace(r"\pm", "±")
    if re.fullmatch(r"[^±]*±[^±]+", text) and "," not in text:
        text = f"{text.replace('±', '+').removeprefix('+')},{text.replace('±', '-')}"
    text = re.sub(r"(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|;", ",", text)
    level, cuts, whole = 0, [], len(text) > 1 and text[0] in _OPENING and text[-1] in _CLOSING
    for i, character in enumerate(text):
        level += (character in _OPENING) - (character in _CLOSING)
        if level < 0:
            return None
        if whole and level == 0 and i < len(text) - 1:
            whole = False
            cuts = []
            break
    if level and not whole:
        level = 0
    inner = text[1:-1] if whole else text
    for i, character in enumerate(inner):
        level += (character in _OPENING) - (character in _CLOSING)
        if character == "," and level == 0:
            cuts.append(i)
    parts = [inner[i:j].strip(" ,") for i, j in zip([0, *[cut + 1 for cut in cuts]], [*cuts, len(inner)], strict=True)]
    parts = [part for part in parts if part]
    if not parts or (len(parts) == 1 and not whole):
        return None
    return _Elements(text[0] + text[-1] if whole else "", tuple(parts))


def load() -> None:
    """Imports math-verify, and compares something: the first time its parser and sympy build tables, for which a sample
    should not pay."""
    _math_verify("x+1", r"\frac{2x+2}{2}")


def _math_verify(answer: str, reference: str) -> bool:
    both = answer + reference
    if r"\degree" not in both:
        return _same_value(answer, reference)
    if any(r"\degree" in rest and r"\pi" in rest for rest in (_DEGREES.sub("", text) for text in (answer, reference))):
        return False  # degrees of an angle in radians, which the parser would drop
    in_radians = [_DEGREES.sub(r"(\\frac{\\pi}{180}\\cdot{\1})", text) for text in (answer, reference)]
    bare = [text.replace(r"\degree", "") for text in (answer, reference)]  # a unit, which may be missing
    return _same_value(*in_radians) or (not _FUNCTION.search(both) and _same_value(*bare))


def _same_value(answer: str, reference: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from sympy import Basic, I

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off: see above
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def read(text: str) -> list[Any]:
        bare = _DECIMAL.sub(_as_fraction, _MIXED.sub(_as_sum, text))
        # boxed, so that it is read whole, as LaTeX; the parser's own search would pick one number out of "[0, 1)"
        return parse(rf"\boxed{{{bare}}}", targets, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    def with_i(parsed: list[Any]) -> list[Any]:
        letters = [each for each in parsed if isinstance(each, Basic)]
        return [each.xreplace({x: I for x in each.free_symbols if str(x) == "i"}) for each in letters]

    ours, theirs = read(answer), read(reference)
    x, y = quantity(answer), quantity(reference)
    if (x or y or Quantity(Fraction(0))).places is not None:  # at most one of them is a number
        x, y = x or _constant(ours), y or _constant(theirs)
        if x is not None and y is not None:
            return same_quantity(x, y)
    places = 15 + (digits(answer) or 0) + (digits(reference) or 0)  # two fractions of this size differ there

    def agree(ours: list[Any], theirs: list[Any]) -> bool:
        return verify(theirs, ours, numeric_precision=places, timeout_seconds=None, allow_set_relation_comp=True)

    if agree(ours, theirs) or (r"\sqrt" in answer + reference and _agree_where_real(ours, theirs, agree)):
        return True
    if _IMAGINARY.search(answer + reference):
        with suppress(TypeError, ValueError):  # sympy's: i is where only real numbers can be, as in i < 2
            return agree(with_i(ours), with_i(theirs))
    return False


def _agree_where_real(ours: list[Any], theirs: list[Any], agree: Callable[[list[Any], list[Any]], bool]) -> bool:
    r"""Whether expressions agree wherever one is real: neither `\sqrt{1/n}` nor `1/\sqrt{n}` is where n is negative."""
    from sympy import Expr, Symbol

    if not (ours and theirs and isinstance(ours[0], Expr) and isinstance(theirs[0], Expr)):
        return False
    letters = sorted(ours[0].free_symbols | theirs[0].free_symbols, key=str)
    if not 0 < len(letters) <= 3:
        return False
    compared = False
    for signs in product((1, -1), repeat=len(letters)):
        real = {x: sign * Symbol(str(x), positive=True) for x, sign in zip(letters, signs, strict=True)}
        x, y = (each[0].xreplace(real).doit() for each in (ours, theirs))
        if x.is_real is False and y.is_real is False:
            continue
        if not agree([x], [y]):
            return False
        compared = True
    return compared


def _constant(parsed: list[Any]) -> Quantity | None:
    """The value of a real number without letters, to forty digits."""
    from sympy import Expr, Float, Rational

    value = parsed[0].evalf(40) if parsed and isinstance(parsed[0], Expr) and parsed[0].is_number else None
    return Quantity(Fraction(str(value))) if isinstance(value, Float | Rational) and value.is_finite else None


def _as_fraction(decimal: re.Match[str]) -> str:
    """An exact fraction for `2.50`: floats of the parser would be compared as such, to six places."""
    return rf"{{\frac{{{int(decimal[1] + decimal[2])}}}{{1{'0' * len(decimal[2])}}}}}"


def _as_sum(mixed: re.Match[str]) -> str:
    r"""`(3+\frac{1}{2})` for the mixed number `3\frac{1}{2}`; an improper fraction behind a number is a factor."""
    whole, top, bottom = mixed[1], mixed[2] or mixed[4], mixed[3] or mixed[5]
    if max(map(len, (top, bottom))) > 9 or int(top) >= int(bottom):
        return mixed[0]
    return rf"({whole}+\frac{{{top}}}{{{bottom}}})"
