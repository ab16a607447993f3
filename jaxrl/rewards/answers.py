r"""The final answer in a response: the last one that is marked, or else the last number.

Marks, the most deliberate kind first: `\boxed{...}`, `#### ...` (GSM8K's own), `<answer>...</answer>`. In a response
without any mark the last number is taken: small chatty models end with it ("... so the answer is 12."). An answer that
is no number is what the response states ("The answer is ...", "Answer:"), or its last line. Where thinking ends with
`</think>`, what follows counts, unless nothing does.

Everything here takes time linear in the response's length, for any content.
"""

from __future__ import annotations

import re
from typing import Literal

Extract = Literal["auto", "none", "last_number", "boxed", "answer_tag"]

_BOXED = re.compile(r"\\f?box(?:ed)?\s*\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(  # not "a \boxed answer"
    r"\\boxed(?![A-Za-z])[ \t]*+(?=[-\d.(\\]|[A-Za-z](?![A-Za-z]))"
    r"((?:[^\s{}$\\.,;]|[.,](?=\d)|\\(?!f?box)[A-Za-z]+|(?<!\s)\{[^{}]*\})++)"
)
_JOIN = 40  # characters between two boxes that make one answer
_BESIDE_JOIN = re.compile(r"\\(?:text|q?quad|[][(), ])|[\s${}]|[A-Za-z]\s*=")
_JOINS = frozenset((",", ";", "and", "or", ",and", ",or"))
_HASHED = re.compile(r"####[ \t]*(\S[^\n]*)")
_LEAD = re.compile(r"(?:the\s)?(?:final\s)?answer(?:\sis)?\s?:?\s", re.IGNORECASE)
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_STATED = re.compile(
    r"\b(?:answer|option|choice)(?:\*\*)?(?:\sis\b\s?:?|\s?:|\s(?=\*\*))[\s*]*+(?:\\\[|\$\$)?\s*+", re.IGNORECASE
)
_FORMULA = re.compile(r"\$([^$]+)\$\.\s")  # a sentence behind it is no part of the answer
_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w)\]}.])[-+])?              # a sign, unless it stands between two operands
    (?:\\?\$\s?(?P<inner_sign>-)?)?            # $12, \$12, $-12
    (?:
        (?:(?<![\d.])(?P<whole>\d+)\s?)?\\[dt]?frac\{(?P<top>-?\d+)\}\{(?P<bottom>\d+)\}
      | (?<![\d.])(?P<number>
            (?:\d+\ )?\d+/\d+(?![\d/])         # 3/4, 1 3/4
          | \d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?
          | \d+(?:\.\d+)?(?:[eE][-+]?\d+)?
          | \.\d+
        )
    )
    """,
    re.VERBOSE | re.ASCII,
)
_GLUED_TO = re.compile(r"(\\?)([A-Za-z]+)$")
_GLUE = 24  # characters before a number that say what it is glued to
_NAMES = frozenset(("log", "ln", "lg", "sin", "cos", "tan", "exp", "max", "min", "utf", "sha", "mp", "web"))


def extract_answer(response: str, how: Extract = "auto") -> tuple[str | None, str]:
    """(the final answer or None, the kind of mark that it was found by)."""
    text = response.replace("\N{MINUS SIGN}", "-")
    if how == "none":
        return text.strip() or None, "none"
    text = after_thinking(text)
    match how:
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
    text = after_thinking(text)
    for mark, find in (("boxed", last_boxed), ("####", last_hashed), ("answer_tag", last_tagged)):
        answer = find(text)
        if answer is not None:
            return (last_stated(answer) or answer) if mark == "answer_tag" else answer, mark
    return None, "none"


def after_thinking(text: str) -> str:
    answer = text.rpartition("</think>")[2]
    return answer if answer and not answer.isspace() else text


def last_boxed(text: str) -> str | None:
    r"""The contents of the last complete `\boxed{...}` (braces balanced), or `\boxed 7`, that holds something; those of
    both of `\boxed{3}, \boxed{5}`."""
    text = _BARE_BOX.sub(r"\\boxed{\1}", text)
    boxes: list[tuple[int, int, int]] = []  # where one begins; start and end of its contents
    opened: list[tuple[int, int]] = []  # the same of boxes that are open; -1 for other braces
    for token in _BOXED.finditer(text):
        if token[0].endswith("{") and token[0] != "\\{":
            opened.append(token.span() if token[0] != "{" else (-1, -1))
        elif token[0] == "}" and opened:
            begin, start = opened.pop()
            is_later = start > (boxes[-1][1] if boxes else -1)
            if is_later and not text[start : token.start()].isspace() and start < token.start():
                boxes.append((begin, start, token.start()))
    if not boxes:
        return None
    begin, start, end = boxes.pop()
    answers = [text[start:end].strip()]
    while boxes and begin - boxes[-1][2] <= _JOIN and _BESIDE_JOIN.sub("", text[boxes[-1][2] + 1 : begin]) in _JOINS:
        begin, start, end = boxes.pop()
        answers.append(text[start:end].strip())
    return ", ".join(reversed(answers))


def last_hashed(text: str) -> str | None:
    """The text after the last `####`, to the end of its line, without emphasis and a leading `Answer:`."""
    last = None
    for last in _HASHED.finditer(text):  # noqa: B007  (of the matches, the last)
        pass
    if last is None:
        return None
    answer = re.sub(r"(?<![\w)])\*\*([^*]+)\*\*(?!\w)", r"\1", last[1].strip())
    lead = _LEAD.match(answer)
    return (answer[lead.end() :].strip() if lead else answer) or last[1].strip()


def last_tagged(text: str) -> str | None:
    """The contents of the last complete `<answer>...</answer>`."""
    found, start = None, -1
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start >= 0:
            found, start = text[start : tag.start()].strip(), -1
    return found or None


def last_stated(text: str) -> str | None:
    """The line, or its rest, that follows the last "answer is" or "Answer:", without a full stop."""
    text = after_thinking(text)
    last = None
    for last in _STATED.finditer(text):  # noqa: B007  (of the matches, the last)
        pass
    stated = text[last.end() :].partition("\n")[0] if last else ""
    if formula := _FORMULA.match(stated):
        return formula[1]
    return stated.strip().rstrip(".").strip("* \t") or None


def last_line(text: str) -> str | None:
    """The last line that holds more than math delimiters or a fence: of the line, what it states as the answer."""
    lines = [line for line in after_thinking(text).splitlines() if line.strip(" \t$\\[]`*")]
    return (last_stated(lines[-1]) or lines[-1].strip()) if lines else None


def last_number(text: str) -> str | None:
    r"""The last number of a text in plain form: `$1,234.50` is "1234.50", `\frac{3}{4}` is "3/4", `1\frac{1}{2}` is
    "1 1/2". A number that is glued to a word counts (`is18`), one that is part of a name does not (`H2O`, `x_1`)."""
    last = None
    for found in _NUMBER.finditer(text):
        if found["top"] or not _is_in_a_name(text, found.start("number")):
            last = found
    if last is None:
        return None
    if last["top"]:
        digits = f"{last['whole']} {last['top']}" if last["whole"] else last["top"]
        digits = f"{digits}/{last['bottom']}"
    else:
        digits = last["number"].replace(",", "")
    negative = (last["sign"] == "-") ^ (last["inner_sign"] == "-") ^ digits.startswith("-")
    return ("-" if negative else "") + digits.lstrip("-")


def _is_in_a_name(text: str, start: int) -> bool:
    before = text[max(start - _GLUE, 0) : start]
    last = before[-1:]
    if last == "_":  # emphasis, unless it makes a subscript
        base = before.rstrip("_")[-1:]
        return bool(base) and (base in "})" or (base.isascii() and base.isalnum()))
    word = _GLUED_TO.search(before)
    if word is None:
        return False
    is_word = len(word[2]) > 1 and word[2][1:].islower() and word[2].lower() not in _NAMES
    return bool(word[1]) or not is_word or text[start] == "."
