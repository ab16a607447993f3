r"""Answers to mathematical problems: find the final one in a response, compare it with the reference.

Extraction takes the last marked answer, the most deliberate kind of mark first: `\boxed{...}`, `#### ...` (GSM8K's
own), `<answer>...</answer>`, and in a response without any mark its last number, with which small chatty models end
("... so the answer is 12.").

Comparison first tries cheap exact tests (the same text, the same number), and leaves the rest to `math-verify`. Most
rewards of grade-school problems never reach sympy.

Departures: math-verify's own timeouts are switched off. They are SIGALRM handlers, which raise outside the main thread
and replace whatever alarm the process had; a comparison that never ends (`9^{9^{9^9}}`) is ended by the reward pool,
with the process it runs in. So `score` must run in a pool, not in the trainer.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from typing import Any, Literal

Extract = Literal["auto", "none", "last_number", "boxed", "answer_tag"]

_MAX_ANSWER_CHARS = 2000  # a longer "answer" is no answer, and the LaTeX parser's time grows faster than its length

_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w)\]}.])[-+])?              # a sign, unless it stands between two operands
    (?:\\?\$\s?(?P<inner_sign>-)?)?            # $12, \$12, $-12
    (?:
        \\[dt]?frac\{(?P<top>-?\d+)\}\{(?P<bottom>\d+)\}
      | (?<![\w.])(?P<number>
            (?:\d+\ )?\d+/\d+(?![\d/])         # 3/4, 1 3/4
          | \d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?
          | \d+(?:\.\d+)?(?:[eE][-+]?\d+)?
          | \.\d+
        )
    )
    """,
    re.VERBOSE,
)
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?")
_RATIO = re.compile(r"(?P<sign>[-+]?)(?:(?P<whole>\d+) )?(?P<top>\d+)/(?P<bottom>\d+)")
_FRAC = re.compile(r"([-+]?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z '\-]*")


def score(response: str, reference: str, extract: Extract = "auto") -> tuple[float, dict[str, Any]]:
    """1.0 if the response's final answer equals the reference, else 0.0; with the answer, and how it was compared."""
    answer, mark = extract_answer(response, extract)
    if answer is None:
        return 0.0, {"extracted": None, "extracted_by": mark}
    correct, compared_by = equal(answer, reference)
    return float(correct), {"extracted": answer, "extracted_by": mark, "compared_by": compared_by}


def extract_answer(response: str, how: Extract = "auto") -> tuple[str | None, str]:
    """(the final answer or None, the kind of mark that it was found by)."""
    text = response.replace("\N{MINUS SIGN}", "-")
    match how:
        case "none":
            return text.strip() or None, "none"
        case "boxed":
            return last_boxed(text), "boxed"
        case "answer_tag":
            return last_tagged(text), "answer_tag"
        case "last_number":
            return last_number(text), "last_number"
    answer, mark = marked_answer(text)
    return (answer, mark) if answer is not None else (last_number(text), "last_number")


def marked_answer(text: str) -> tuple[str | None, str]:
    """The last deliberately marked answer: boxed, after `####`, or in a tag."""
    for mark, find in (("boxed", last_boxed), ("####", last_hashed), ("answer_tag", last_tagged)):
        answer = find(text)
        if answer is not None:
            return answer, mark
    return None, "none"


def last_boxed(text: str) -> str | None:
    r"""The contents of the last complete `\boxed{...}` (braces balanced); a truncated one does not count."""
    for start in reversed([m.end() for m in re.finditer(r"\\f?boxed\s*\{", text)]):
        depth = 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0) if text[i - 1] != "\\" else 0
            if depth == 0:
                return text[start:i].strip() or None
    return None


def last_hashed(text: str) -> str | None:
    """What stands after the last `####`, to the end of its line."""
    found = re.findall(r"####[ \t]*(\S[^\n]*)", text)
    return found[-1].strip() if found else None


def last_tagged(text: str) -> str | None:
    """The contents of the last complete `<answer>...</answer>`."""
    found = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL | re.IGNORECASE)
    return (found[-1].strip() or None) if found else None


def last_number(text: str) -> str | None:
    """The last number of a text in plain form: `$1,234.50` is "1234.50", `\\frac{3}{4}` is "3/4"."""
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    last = found[-1]
    digits = f"{last['top']}/{last['bottom']}" if last["top"] else last["number"].replace(",", "")
    negative = (last["sign"] == "-") ^ (last["inner_sign"] == "-") ^ digits.startswith("-")
    return ("-" if negative else "") + digits.lstrip("-")


def equal(answer: str, reference: str) -> tuple[bool, str]:
    """(whether the answer equals the reference, what decided: "text", "number", "words", "length" or "math_verify")."""
    if len(answer) > _MAX_ANSWER_CHARS:
        return False, "length"
    a, b = _normalised(answer), _normalised(reference)
    if a == b:
        return True, "text"
    x, y = to_number(a), to_number(b)
    if x is not None and y is not None:
        # a rounded decimal of a fraction counts as the fraction, to the six places that math-verify takes; whole
        # numbers are compared exactly
        rounded = (x.denominator != 1 or y.denominator != 1) and round(x, 6) == round(y, 6)
        return x == y or rounded, "number"
    if _WORDS.fullmatch(b):
        # "Yes" is a word, while a LaTeX parser reads e * y * s, which equals "sey"
        return a.casefold() == b.casefold(), "words"
    return _math_verify(answer, reference), "math_verify"


def to_number(text: str) -> Fraction | None:
    """The exact value of a plain number, ratio, or mixed number; None for anything else."""
    text = _FRAC.sub(r"\1\2/\3", text).removeprefix("--")
    if _PLAIN_NUMBER.fullmatch(text):
        return Fraction(text)
    match = _RATIO.fullmatch(text)
    if match is None or int(match["bottom"]) == 0:
        return None
    value = int(match["whole"] or 0) + Fraction(int(match["top"]), int(match["bottom"]))
    return -value if match["sign"] == "-" else value


def _normalised(text: str) -> str:
    r"""The text without the parts that do not change an answer: math delimiters, spacing commands, `\text`, thousands
    commas, units of currency, and a final period."""
    text = text.replace("\N{MINUS SIGN}", "-").strip()
    text = re.sub(r"\\[()\[\]]|\\[,;!]|\\(?:left|right)(?![A-Za-z])|\\?\$", "", text)
    text = re.sub(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"(?<![\d,])(\d{1,3}(?:,\d{3})+)(?![\d,])", lambda m: m[1].replace(",", ""), text)
    text = re.sub(r"\s+", " ", text).strip()
    return text.removesuffix(".").strip() if not text.endswith("..") else text


def load() -> None:
    """Imports math-verify, and silences its warning that its timeouts are off (on purpose, see above)."""
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(logging.ERROR)


def _math_verify(answer: str, reference: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    load()
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def read(text: str) -> list[Any]:
        bare = re.sub(r"^(?:\\[(\[]|\$+)|(?:\\[)\]]|\$+)$", "", text.strip())
        # boxed, so that it is read whole, as LaTeX; the parser's own search would pick one number out of "[0, 1)"
        return parse(rf"\boxed{{{bare}}}", targets, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    return verify(read(reference), read(answer), timeout_seconds=None)
