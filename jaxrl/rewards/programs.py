"""The program in a response, and the tests in a prompt's columns.

Tests from any column have one of three forms:

- `stdin`: inputs and what a program must write for each (LiveCodeBench, APPS);
- `calls`: arguments and what a function must return for each (LiveCodeBench, APPS, TACO and Eurus-2 with `fn_name`);
- `tests`: a test program: HumanEval's `test` with `entry_point`, MBPP's `test_list`, KodCode's pytest functions.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from jaxrl.rewards.answers import after_thinking, last_tagged
from jaxrl.rewards.request import ScoreRequest

_MAX_DIGITS = 400
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")
_LINE, _INLINE = r"^(?P<lead>[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)", r"(?<=[\w:>])[ \t]*(?=```py)"
_MARK = r"(?P<mark>`{3,}|~{3,})[ \t]*(?P<info>[^`\s]*)[^`\n]*$"
_STRING = r"""(?P<quotes>'{3}|"{3})(?:(?!(?P=quotes)|^```\w)[\s\S])*(?P=quotes)|'(?:\\.|[^'\\\n])*|"(?:\\.|[^"\\\n])*"""
_OPENING = re.compile(rf"(?:{_LINE}|{_INLINE}){_MARK}", re.MULTILINE)
_IN_BLOCK = re.compile(rf"{_STRING}|#.*|(?:{_LINE}|(?=`)){_MARK}", re.MULTILINE)
_PYTHON = re.compile(r"\W*(?:python|py)[\d.]*\W*", re.IGNORECASE)
_DEFINITION = re.compile(
    r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]*)?=(?!=)", re.MULTILINE
)
_STATEMENT = re.compile(r"^[ \t]*(?:def|class|import|from|for|while|print|return)\b|=", re.MULTILINE)
_WRITES = re.compile(r"\bprint\b|\bwrite")
_READS = re.compile(r"\binput\b|\bstdin\b|\bfileinput\b|\b(?:open|read)\(0")
_ASSERTS = re.compile(r"(?:^|[;:])[ \t]*(?:assert|raise)\b|\b(?:assert|raises|fail)\w*[ \t]*\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Checks:
    """Tests of one prompt."""

    shape: str  # stdin, calls or tests
    pairs: tuple[tuple[str, str], ...] = ()  # of stdin: each input and output
    # of the others: the checker's job (`jaxrl.rewards.sandbox.suites.run_tests`)
    job: dict[str, Any] = field(default_factory=dict)
    count: int | None = None  # of cases; None where only the checker can tell
    entry_point: str = ""  # the function that a completion continues (HumanEval)
    prompt: str = ""  # the text that it continues; empty: a response is the whole program
    before: str = ""  # the part of that text before the function: imports and helpers
    # what the tests call and do not define, one of which the program defines; empty of stdin
    names: frozenset[str] = frozenset()


def checks_of(request: ScoreRequest, key: str = "") -> Checks:
    """The tests of a prompt. `key`: the column that holds them; empty: they are looked for in the columns of known data
    sets. Raises ValueError: there are none, or they have none of the forms."""
    extra = request.extra
    if key:
        value = _column(extra, key)
        if value is None:
            raise ValueError(f"{request.source}: the prompt has no column {key!r} (reward.code.tests_key)")
        return _read(value, extra, f"{request.source}: column {key!r}")
    for name in ("test_list", "test", "input_output", "public_test_cases"):
        if extra.get(name):
            return _read(extra[name], extra, f"{request.source}: column {name!r}")
    if extra.get("inputs") is not None and extra.get("outputs") is not None:
        return _read(extra, extra, f"{request.source}: columns 'inputs' and 'outputs'")
    if request.answer:
        return _read(request.answer, extra, f"{request.source}: the reference answer")
    raise ValueError(
        f"{request.source}: the prompt has no tests: no column test_list, test, input_output, public_test_cases or "
        "inputs and outputs (reward.code.tests_key names another)"
    )


def _column(extra: Mapping[str, Any], key: str) -> Any:
    """A column, or what a dotted name reaches in one, also through JSON text; None without it."""
    value: Any = extra
    for part in (key,) if key in extra else key.split("."):
        value = _json(value) if isinstance(value, str) else value
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _read(value: Any, extra: Mapping[str, Any], where: str) -> Checks:
    if isinstance(value, str):
        read = _json(value)
        if not isinstance(read, list | dict):
            return _program(value, extra, where)
        value = read
    if isinstance(value, Mapping):
        inputs, outputs = _list(value.get("inputs")), _list(value.get("outputs"))
        if inputs is None or outputs is None or len(inputs) != len(outputs) or not inputs:
            raise ValueError(f"{where}: a mapping of tests needs as many `inputs` as `outputs`, and at least one")
        return _pairs(inputs, outputs, _function(value, extra), where)
    if isinstance(value, Sequence) and value and all(isinstance(item, str) for item in value):
        return _program("\n".join(value), extra, where)
    if isinstance(value, Sequence) and value and all(isinstance(i, Mapping) and "input" in i for i in value):
        name = _function(*value, extra)
        if not name and any("function" in f"{item.get('testtype')} {item.get('type')}" for item in value):
            raise ValueError(f"{where}: tests of a function name it: fn_name, func_name or metadata.func_name")
        return _pairs([i["input"] for i in value], [i.get("output") for i in value], name, where, are_items=True)
    raise ValueError(f"{where}: tests are text, a list of assertions, or a mapping with `inputs` and `outputs`")


def _function(*places: Mapping[str, Any]) -> str:
    """The function that tests call, which a test, its `metadata` (LiveCodeBench) or the row names; empty: none does."""
    for place in places:
        metadata = place.get("metadata")
        read = _json(metadata) if isinstance(metadata, str) else metadata
        for each in (place, read if isinstance(read, Mapping) else {}):
            if name := each.get("fn_name") or each.get("func_name"):
                return str(name)
    return ""


def _program(text: str, extra: Mapping[str, Any], where: str) -> Checks:
    if not _ASSERTS.search(text):
        raise ValueError(f"{where} asserts nothing, so that any program would pass: {text!r:.80}")
    setup = "\n".join((*(_list(extra.get("test_imports")) or []), str(extra.get("test_setup_code") or "")))
    entry = str(extra.get("entry_point") or "")
    prompt, before = _continued(extra, entry) if entry else ("", "")
    job = {"shape": "tests", "text": f"{setup}\n{text}", "entry_point": entry, "before": before}
    own = {name for found in _DEFINITION.findall(text) for name in found}
    names = frozenset(re.findall(r"\w+", entry)[:1] or {*re.findall(r"\b(\w+)[ \t]*\(", text)} - own)
    return Checks("tests", job=job, entry_point=entry, prompt=prompt, before=before, names=names)


def _continued(extra: Mapping[str, Any], entry: str) -> tuple[str, str]:
    """The text that a response may continue, and its part before the function `entry`; empty without one.

    It is the question from the data, or else the column `prompt`. Unless the data has a column of that name, that is
    all the text that the model saw, with special tokens and instructions. An entry like `Solution().f`
    (LeetCodeDataset) continues nothing; the column `prompt` is the part before it.
    """
    if not entry.isidentifier():
        before = str(extra.get("prompt") or "")
        return "", before if _parses(before) else ""
    for text in (str(extra.get(name) or "") for name in ("question", "prompt")):
        *_, last = (None, *re.finditer(rf"^(async[ \t]+)?def[ \t]+{re.escape(entry)}\b", text, re.MULTILINE))
        if last is None:
            continue
        lines = text[: last.start()].splitlines(keepends=True)
        while lines and lines[-1].startswith("@"):
            lines.pop()
        before = "".join(lines)
        if _parses(before):  # else there are instructions to the model in it
            return text, before
    return "", ""


def _parses(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in a model's strings
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


def _pairs(inputs: list[Any], outputs: list[Any], name: str, where: str, *, are_items: bool = False) -> Checks:
    """Inputs with their outputs. Of a function, lists of arguments come with values, and lines of JSON with JSON.

    Whether values are wrapped is decided per problem: if each is a list of one, both 4 and [4] are right for [4]. The
    graders of APPS and verl decide per case, and take the first of any list: there a program passes that returns 4
    where other cases show that a list is wanted. As with them, whole numbers as the keys of an argument are numbers.
    LiveCodeBench's grader does neither: it compares the text in items (`are_items`) verbatim.
    """
    if not name:
        texts = [(_as_text(given), _as_text(wanted)) for given, wanted in zip(inputs, outputs, strict=True)]
        return Checks("stdin", pairs=tuple(texts), count=len(texts))
    is_exact = are_items and isinstance(inputs[0], str)
    cases: list[list[Any]] = []
    for given, wanted in zip(inputs, outputs, strict=True):
        if isinstance(given, str):
            arguments = [_json(line, line) for line in given.split("\n") if line.strip()]
            wanted = _json(wanted, wanted) if isinstance(wanted, str) else wanted
        elif isinstance(given, list):
            arguments = given
        else:
            raise ValueError(
                f"{where}: the input of a function is a list of arguments or lines of JSON, not {given!r:.80}"
            )
        cases.append([arguments, wanted])
    is_wrapped = not is_exact and all(isinstance(wanted, list) and len(wanted) == 1 for _, wanted in cases)
    job = {"shape": "calls", "name": name, "cases": cases, "is_wrapped": is_wrapped, "has_number_keys": not is_exact}
    return Checks("calls", job=job, count=len(cases), names=frozenset((name,)))


def _as_text(value: Any) -> str:
    """Some data sets give lines as a list."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _list(value: Any) -> list[Any] | None:
    read = _json(value) if isinstance(value, str) else value
    return read if isinstance(read, list) else None


def _json(text: str, otherwise: Any = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def program_of(request: ScoreRequest, tests: Checks) -> str:
    """The program in a response: a fenced block, or all of it; what continues the prompt, behind the prompt.

    Text before `</think>` is no program, unless nothing follows it.
    """
    text = after_thinking(request.response)
    tagged = last_tagged(text) or ""
    if _OPENING.search(tagged) or _is_program(tagged):  # else it says something about a block
        text = tagged
    block = chosen_block(text, tests)
    program = text if block is None else block
    if not tests.prompt:
        return f"{tests.before}\n{program}" if tests.before else program
    if re.search(rf"^[ \t]*(async[ \t]+)?def[ \t]+{re.escape(tests.entry_point)}\b", program, re.MULTILINE):
        return tests.before + "\n" + program  # it may rely on the prompt's imports and helpers
    if block is None:
        return tests.prompt + _body(program)
    return tests.prompt + ("" if tests.prompt.endswith("\n") else "\n") + program


def chosen_block(text: str, tests: Checks) -> str | None:
    """The last of the best blocks between fences; None without a fence.

    Best are those that define what the tests call, of programs for stdin those that read and write: a demonstration and
    an example's output do not. Among these (or where there are none) Python is better than no language, and that than
    another one. A prompt may have opened the first fence: then the text before the fence in the response is a block.
    """
    blocks = _blocks(text)
    if _OPENING.search(text):
        is_named = text.partition("\n")[0] in ("python", "py")  # behind the fence's own characters
        opened = _blocks(f"```{text}" if is_named else f"```python\n{text}")
        blocks = opened if opened and _is_program(opened[0][1]) else blocks

    def rank(number: int) -> tuple[int, int, int]:
        info, block = blocks[number]
        if tests.shape == "stdin":
            is_meant = bool(_READS.search(block)) + bool(_WRITES.search(block))
        else:
            defined = {name for found in _DEFINITION.findall(block) for name in found}
            is_meant = bool(defined & tests.names) or (bool(tests.prompt) and block[:1].isspace())
        return is_meant, 2 if _PYTHON.fullmatch(info) else not info, number

    return blocks[max(range(len(blocks)), key=rank)][1] if blocks else None


def _is_program(text: str) -> bool:
    """Whether a text is Python, or the body of a function, and no word or two that happen to be."""
    return bool(_STATEMENT.search(text)) and _parses(f"if 1:\n{text}" if text[:1] in (" ", "\t") else text)


def _blocks(text: str) -> list[tuple[str, str]]:
    """The language and the text of each block between fences that holds something, as far to the left as its fence.

    What looks like a fence in a string of three quotes is the program's text, unless it is at the margin and names a
    language: then the string is broken. A block that the response's end or another opening cuts off counts.
    """
    blocks: list[tuple[str, str]] = []
    position = 0
    while opening := _OPENING.search(text, position):
        fences = (each for each in _IN_BLOCK.finditer(text, opening.end()) if each["mark"])
        end = next((each for each in fences if each["info"] or each["mark"].startswith(opening["mark"])), None)
        block = text[opening.end() + 1 : end and end.start()]
        position = len(text) if end is None else end.start() if end["info"] else end.end()
        if block.strip():
            first = re.search(r"^[ \t]*(?=\S)", block, re.MULTILINE)
            width = min(len(first[0] if first else ""), len(opening["lead"] or ""))
            blocks.append((opening["info"], re.sub(rf"^[ \t]{{0,{width}}}", "", block, flags=re.MULTILINE)))
    return blocks


def _body(completion: str) -> str:
    """The part of a completion that belongs to the function which it continues: up to a line that is not indented."""
    kept: list[str] = []
    has_begun = False
    for line in completion.split("\n"):
        if has_begun and line[:1].strip():
            break
        has_begun = has_begun or bool(line)
        kept.append(line)
    return "\n".join(kept) + "\n"


def same_output(output: str, wanted: str) -> bool:
    """Whether lines are the same but for white space at their ends, and words that are numbers the same numbers."""
    ours, theirs = ([line.strip() for line in text.strip().splitlines()] for text in (output, wanted))
    if len(ours) != len(theirs):
        return False
    return all(a == b or _same_words(a.split(), b.split()) for a, b in zip(ours, theirs, strict=True))


def _same_words(ours: list[str], theirs: list[str]) -> bool:
    return len(ours) == len(theirs) and all(
        a == b or ((x := _number(a)) is not None and x == _number(b)) for a, b in zip(ours, theirs, strict=True)
    )


def _number(word: str) -> Decimal | None:
    """Decimal itself also takes 0_9 and digits of other scripts, of which no grader does."""
    return Decimal(word) if len(word) <= _MAX_DIGITS and _NUMBER.fullmatch(word) else None
