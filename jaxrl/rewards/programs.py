"""The program in a response, and the tests in a prompt's columns.

Tests have one of three forms, whatever column they come from:

- `stdin`: inputs and what a program must write for each (LiveCodeBench, APPS);
- `calls`: arguments and what a function must return for each (LiveCodeBench with `fn_name`);
- `tests`: a test program: HumanEval's `test` with `entry_point`, MBPP's `test_list`, KodCode's pytest functions.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from jaxrl.rewards.request import ScoreRequest

_MAX_DIGITS = 400
_LANGUAGES = ("", "python", "python3", "py")
_ASSERTS = re.compile(r"(?:^|[;:])[ \t]*(?:assert|raise)\b|\b(?:assert|raises|fail)\w*[ \t]*\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Checks:
    """Tests of one prompt.

    Attributes:
      shape: stdin, calls or tests.
      pairs: of stdin: each input and output.
      job: of the others: what the checker is given (`jaxrl.rewards.sandbox.suites.run_tests`).
      count: of cases; None where only the checker can tell.
      entry_point: the function that a completion continues (HumanEval).
      prompt: the text that it continues; empty: there is none, and a response is the whole program.
      before: what stands in that text before the function: imports and helpers.
    """

    shape: str
    pairs: tuple[tuple[str, str], ...] = ()
    job: dict[str, Any] = field(default_factory=dict)
    count: int | None = None
    entry_point: str = ""
    prompt: str = ""
    before: str = ""


def checks_of(request: ScoreRequest, key: str = "") -> Checks:
    """The tests of a prompt.

    Args:
      key: the column that holds them; empty: they are looked for in the columns of known data sets.

    Raises:
      ValueError: there are none, or they have none of the forms.
    """
    extra = request.extra
    if key:
        if key not in extra:
            raise ValueError(f"{request.source}: the prompt has no column {key!r} (reward.code.tests_key)")
        return _read(extra[key], extra, f"{request.source}: column {key!r}")
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
        return _pairs(inputs, outputs, str(value.get("fn_name") or ""), where)
    if isinstance(value, Sequence) and value and all(isinstance(item, str) for item in value):
        return _program("\n".join(value), extra, where)
    if isinstance(value, Sequence) and value and all(isinstance(i, Mapping) and "input" in i for i in value):
        name = next((str(item[k]) for item in value for k in ("fn_name", "func_name") if item.get(k)), "")
        return _pairs([i["input"] for i in value], [i.get("output") for i in value], name or _function(extra), where)
    raise ValueError(f"{where}: tests are text, a list of assertions, or a mapping with `inputs` and `outputs`")


def _function(extra: Mapping[str, Any]) -> str:
    """The function of LiveCodeBench's `metadata`."""
    metadata = extra.get("metadata")
    read = _json(metadata) if isinstance(metadata, str) else metadata
    return str(read.get("func_name") or "") if isinstance(read, Mapping) else ""


def _program(text: str, extra: Mapping[str, Any], where: str) -> Checks:
    if not _ASSERTS.search(text):
        raise ValueError(f"{where} asserts nothing, so that any program would pass: {text!r:.80}")
    setup = "\n".join((*(_list(extra.get("test_imports")) or []), str(extra.get("test_setup_code") or "")))
    entry = str(extra.get("entry_point") or "")
    prompt, before = _continued(extra, entry) if entry else ("", "")
    job = {"shape": "tests", "text": f"{setup}\n{text}", "entry_point": entry, "before": before}
    return Checks("tests", job=job, entry_point=entry, prompt=prompt, before=before)


def _continued(extra: Mapping[str, Any], entry: str) -> tuple[str, str]:
    """The text that a response may continue, and what stands in it before the function `entry`; empty without one.

    It is the question as the data has it, or else the column `prompt`, which is the whole text that the model saw
    (special tokens and instructions among it) unless the data has a column of that name.
    """
    for text in (str(extra.get(name) or "") for name in ("question", "prompt")):
        *_, last = (None, *re.finditer(rf"^(async[ \t]+)?def[ \t]+{re.escape(entry)}\b", text, re.MULTILINE))
        if last is None:
            continue
        lines = text[: last.start()].splitlines(keepends=True)
        while lines and lines[-1].startswith("@"):
            lines.pop()
        before = "".join(lines)
        try:
            ast.parse(before)
        except (SyntaxError, ValueError, RecursionError):  # instructions to the model
            continue
        return text, before
    return "", ""


def _pairs(inputs: list[Any], outputs: list[Any], name: str, where: str) -> Checks:
    if not name:
        texts = [(_as_text(given), _as_text(wanted)) for given, wanted in zip(inputs, outputs, strict=True)]
        return Checks("stdin", pairs=tuple(texts), count=len(texts))
    cases: list[list[Any]] = []
    for given, wanted in zip(inputs, outputs, strict=True):
        if isinstance(given, str):  # an argument a line, each as JSON
            arguments = [_json(line, line) for line in given.split("\n") if line.strip()]
        elif isinstance(given, list):
            arguments = given
        else:
            raise ValueError(
                f"{where}: the input of a function is a list of arguments or lines of JSON, not {given!r:.80}"
            )
        cases.append([arguments, _json(wanted, wanted) if isinstance(wanted, str) else wanted])
    return Checks("calls", job={"shape": "calls", "name": name, "cases": cases}, count=len(cases))


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
    """The program in a response: its last fenced block, or all of it; what continues the prompt, behind the prompt."""
    block = last_block(request.response)
    program = request.response if block is None else block
    if not tests.entry_point or not tests.prompt:
        return program
    if re.search(rf"^[ \t]*(async[ \t]+)?def[ \t]+{re.escape(tests.entry_point)}\b", program, re.MULTILINE):
        return tests.before + "\n" + program  # it may rely on the prompt's imports and helpers
    if block is None:
        return tests.prompt + _body(program)
    return tests.prompt + ("" if tests.prompt.endswith("\n") else "\n") + program


def last_block(response: str) -> str | None:
    """The last block of Python between fences, or of any language if there is none of Python; None without a fence.

    A block that the response's end cuts off counts.
    """
    found: dict[bool, str] = {}
    lines: list[str] | None = None
    is_python = False
    for line in response.splitlines():
        if not line.lstrip().startswith("```"):
            if lines is not None:
                lines.append(line)
        elif lines is None:
            lines, is_python = [], line.strip().strip("`").strip().lower() in _LANGUAGES
        else:
            found[is_python] = "\n".join(lines) + "\n"
            lines = None
    if lines:
        found[is_python] = "\n".join(lines) + "\n"
    return found.get(True, found.get(False))


def _body(completion: str) -> str:
    """The part of a completion that belongs to the function which it continues: up to a line that is not indented."""
    kept: list[str] = []
    for line in completion.split("\n"):
        if any(kept) and line[:1].strip():
            break
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
    try:
        number = Decimal(word) if len(word) <= _MAX_DIGITS else None
    except InvalidOperation:
        return None
    return number if number is not None and number.is_finite() else None
