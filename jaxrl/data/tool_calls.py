"""The functions that a response calls, parsed from its text in the forms that models write.

- Hermes, Qwen, SmolLM3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, and text around
  them.
- Llama 3: the whole response is one object `{"name": ..., "parameters": {...}}`, or several with `;` between them,
  perhaps after `<|python_tag|>`.
- Mistral, Ministral (2410): text, and a list `[{"name": ..., "arguments": {...}}, ...]` after `[TOOL_CALLS]`; Granite 3
  and Phi-4-mini: after `<|tool_call|>`, or of the latter `functools`. A whole response may be the list alone, since
  these marks are special tokens.
- Mistral since 2025: `[TOOL_CALLS]name[ARGS]{...}`, any number of them, perhaps with `[CALL_ID]` and an id between; or
  `name{...}` without the marks.
- OLMo 3: lines `name(argument=value, ...)` between `<function_calls>` and `</function_calls>`, where values are
  Python's or JSON's. SmolLM3, asked to write Python, has such calls between `<code>` and `</code>` at the end of a
  response; a program that is more than calls is text.

Text that cannot be parsed calls nothing, and so does everything up to `</think>`. A call of an unknown function is a
call, so that it can be answered with an error. Where a model's marks are special tokens, text omits them. Then an
object is a call if its function exists, or if it has the keys of a call and no others. `name{...}` and the contents of
`<code>` are calls if one of their functions exists.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

OPENS, CLOSES, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
NAMED = "[TOOL_CALLS]"
LISTS = (NAMED, "<|tool_call|>")
FUNCTION_CALLS, CODE, CODE_CLOSES = "<function_calls>", "<code>", "</code>"
_MARKS = (OPENS, *LISTS, FUNCTION_CALLS)
_LIST_CLOSES, _FUNCTION_CALLS_CLOSE, _FUNCTOOLS = "<|/tool_call|>", "</function_calls>", "functools["
_NAMED_CALL = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")
_BARE_NAME = re.compile(r"([\w.-]{1,64})(\{|\Z)")
_NAME, _ID = re.compile(r"[\w.:/-]{1,64}"), re.compile(r"[A-Za-z0-9]{9}")
_OF_A_CALL = {"name", "arguments", "parameters", "id", "type"}
_THOUGHT = re.compile(  # no JSON text has a line's end in it, so that the second is no argument of a call
    r"\s*<think>.*?</think>|.*?(?:\n</think>|</think>\n)", re.DOTALL
)
_BACKSLASH, _ESCAPED = re.compile(r"\\(.)", re.DOTALL), "\\'\"abfnrtvxuUN0\n"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function's name, its arguments as JSON text, and the id that the model gave the call, if any."""

    name: str
    arguments: str
    id: str = ""


def call_id(*of: Any) -> str:
    """An id derived from the arguments: nine letters and digits, since Mistral's templates refuse any other."""
    return hashlib.sha256(repr(of).encode()).hexdigest()[:9]


def arguments_of(given: Any) -> dict[str, Any]:
    """A call's arguments: an object, as JSON text or as it is. Blank text and null are no arguments.

    Raises ValueError for anything else."""
    try:
        if isinstance(given, str):
            given = json.loads(given, parse_constant=_no_number) if given.strip() else None
    except (ValueError, RecursionError):
        given = ""
    if not isinstance(given, dict | None):
        raise ValueError("must be a JSON object")
    return given or {}


def calls_in(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """(the text around the calls, the calls); (text, []) if there is no call, or one that cannot be read. `names`:
    of the existing functions."""
    thought, said = _split(text)
    found = _read(said, names)
    if found and found[1] and all(call.name in names or _NAME.fullmatch(call.name) for call in found[1]):
        return thought + found[0], found[1]
    return text, []


def _split(text: str) -> tuple[str, str]:
    """(a model's thinking, the rest): a call inside the thinking does not count."""
    thought = _THOUGHT.match(text)
    return (thought[0], text[thought.end() :]) if thought else ("", text)


def _read(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]] | None:
    if (found := _bare(text, names)) is not None and found[1]:
        return found
    _, mark = min(((text.find(mark), mark) for mark in _MARKS if mark in text), default=(0, CODE))
    if mark == CODE:
        before, opened, rest = text.rstrip().rpartition(CODE)
        found = _python(before, rest, CODE_CLOSES) if opened and rest.endswith(CODE_CLOSES) else None
        return found if found and any(call.name in names for call in found[1]) else None
    before, rest = text.split(mark, 1)
    if mark == OPENS:
        return _tagged(before, rest)
    if mark == FUNCTION_CALLS:
        return _python(before, rest, _FUNCTION_CALLS_CLOSE)
    return _named(before, rest) if mark == NAMED and not rest.lstrip().startswith("[") else _listed(before, rest)


def seems_to_call(text: str) -> bool:
    """Whether a text contains the beginning of a call, or an attempt at one."""
    text = _split(text)[1]
    marked = any(mark in text for mark in (PYTHON_TAG, *_MARKS))
    return marked or text.lstrip().startswith(('{"name"', '[{"name"', _FUNCTOOLS))


def may_begin(text: str) -> int:
    """How many characters of a growing response are certainly no part of a call, and may be sent already."""
    thought, text = _split(text)
    stripped, begins = text.lstrip(), (PYTHON_TAG, _FUNCTOOLS)
    begun = any(begin.startswith(stripped) or stripped.startswith(begin) for begin in begins)
    if begun or stripped.startswith(("{", "[")) or _BARE_NAME.match(stripped):
        return len(thought)
    marks = (*_MARKS, CODE)
    if places := [place for mark in marks if (place := text.find(mark)) >= 0]:
        return len(thought) + min(places)
    ends = (n for mark in marks for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n]))
    return len(thought) + len(text) - max(ends, default=0)


def _tagged(before: str, text: str) -> tuple[str, list[ToolCall]] | None:
    calls: list[ToolCall] = []
    while True:
        value, rest = _first(text)
        call = _of_object(value)
        if call is None or (rest and not rest.startswith((CLOSES, OPENS))):
            return None
        calls.append(call)
        after, goes_on, text = rest.removeprefix(CLOSES).partition(OPENS)
        before += after
        if not goes_on:
            return before.rstrip(), calls


def _listed(before: str, text: str, names: Collection[str] | None = None) -> tuple[str, list[ToolCall]] | None:
    try:
        values = json.loads(text.strip().removesuffix(_LIST_CLOSES), parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    calls = [_of_object(value, names) for value in values] if isinstance(values, list) else []
    return (before.rstrip(), [call for call in calls if call is not None]) if calls and all(calls) else None


def _named(before: str, text: str) -> tuple[str, list[ToolCall]] | None:
    calls: list[ToolCall] = []
    while match := _NAMED_CALL.match(text):
        value, rest = _first(text[match.end() :])
        call = None if value is None else _made(match[1], value, match[2])
        if call is None or (rest and not rest.startswith(NAMED)):
            return None
        calls.append(call)
        if not rest:
            return before.rstrip(), calls
        text = rest.removeprefix(NAMED)
    return None


def _python(before: str, text: str, closes: str) -> tuple[str, list[ToolCall]] | None:
    inside, _, after = text.partition(closes)
    # of a backslash that escapes nothing Python warns, and keeps it
    inside = _BACKSLASH.sub(lambda match: match[0] if match[1] in _ESCAPED else f"\\{match[0]}", inside)
    try:
        calls = [_python_call(statement) for statement in ast.parse(dedent(inside).strip()).body]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    found = [call for call in calls if call is not None]
    return ((before + after).rstrip(), found) if len(found) == len(calls) else None


def _python_call(statement: ast.stmt) -> ToolCall | None:
    match statement:
        case ast.Expr(ast.Call(ast.Name(name), [], keywords)):
            given = {str(keyword.arg): _value(keyword.value) for keyword in keywords}
            return _made(name, given) if len(given) == len(keywords) and all(each.arg for each in keywords) else None
    return None


def _value(node: ast.expr | None) -> Any:
    """The value of a literal. Raises ValueError for any other expression."""
    match node:
        case ast.Constant(str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.Name("null" | "true" | "false" as name):
            return json.loads(name)
        case ast.List(items):
            return [_value(item) for item in items]
        case ast.Dict(keys, values) if all(isinstance(key, ast.Constant) and type(key.value) is str for key in keys):
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError(f"{node} is no value")


def _bare(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]] | None:
    rest, calls = text.strip().removeprefix(PYTHON_TAG).strip(), []
    if rest.startswith(("[", _FUNCTOOLS)):
        return _listed("", rest.removeprefix(_FUNCTOOLS[:-1]), names)
    is_named = _BARE_NAME.match(rest) is not None
    while rest:
        match = _BARE_NAME.match(rest) if is_named else None
        value, rest = _first(rest[match.end(1) if match else 0 :])
        call = _made(match[1], value) if match and value is not None else _of_object(value, names)
        if call is None or (rest and not is_named and not rest.startswith(";")):
            return None
        calls.append(call)
        rest = rest.removeprefix(";").strip()
    return ("", calls) if not is_named or any(call.name in names for call in calls) else None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _first(text: str) -> tuple[Any, str]:
    """The JSON value at the beginning of a text (None if there is none), and the text behind it."""
    text = text.strip()
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, ""
    return value, text[end:].lstrip()


def _of_object(value: Any, names: Collection[str] | None = None) -> ToolCall | None:
    """The call that a JSON object describes. `names`: None where marks say that it is a call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get("arguments", value.get("parameters"))
    if names is not None and value["name"] not in names and (given is None or not value.keys() <= _OF_A_CALL):
        return None
    return _made(value["name"], given, value.get("id"))


def _made(name: str, given: Any, own_id: Any = None) -> ToolCall | None:
    """The call, or None if its arguments are not an object, contain a number too large for JSON or half a character,
    or are nested too deep."""
    try:
        arguments = json.dumps(arguments_of(given), ensure_ascii=False, allow_nan=False)
        arguments.encode()
    except (ValueError, RecursionError):
        return None
    return ToolCall(name, arguments, own_id if isinstance(own_id, str) and _ID.fullmatch(own_id) else "")
