"""The functions that a response calls, read back from its text in the forms that models write.

- Hermes, Qwen, SmolLM3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, and text around
  them.
- Llama 3: the whole response is one object `{"name": ..., "parameters": {...}}`, or several with `;` between them,
  perhaps after `<|python_tag|>`.
- Mistral, Ministral: text, and a list `[{"name": ..., "arguments": {...}}, ...]` after `[TOOL_CALLS]`; Granite 3 and
  Phi-4-mini: after `<|tool_call|>`. A whole response may be the list alone, since these marks are special tokens.
- Gemma and Phi-4 have no form of their own: they call as the prompt has it.

What cannot be read is text: a model that writes half a call has called nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

OPENS, CLOSES, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
LISTS = ("[TOOL_CALLS]", "<|tool_call|>")
_LIST_CLOSES = "<|/tool_call|>"


@dataclass(frozen=True, slots=True)
class Call:
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


def calls_in(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    """(what stands around the calls, the calls); (text, []) where there is none, or one that cannot be read, or one of
    a function that is not among `names`."""
    mark = next((mark for mark in LISTS if mark in text), None)
    found = _tagged(text) if OPENS in text else _bare(text) if mark is None else _listed(*text.split(mark, 1))
    if found is None or not found[1] or any(call.name not in names for call in found[1]):
        return text, []
    return found


def seems_to_call(text: str) -> bool:
    """Whether a text has the beginning of a call, or of what was meant for one."""
    marked = any(mark in text for mark in (OPENS, PYTHON_TAG, *LISTS))
    return marked or text.lstrip().startswith(('{"name"', '[{"name"'))


def may_begin(text: str) -> int:
    """How much of a growing response is certainly no part of a call: what may be handed out already."""
    stripped = text.lstrip()
    if stripped.startswith(("{", "[", PYTHON_TAG[: len(stripped)] or "{")) or not stripped:
        return 0
    marks = (OPENS, *LISTS)
    if places := [place for mark in marks if (place := text.find(mark)) >= 0]:
        return min(places)
    ends = (n for mark in marks for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n]))
    return len(text) - max(ends, default=0)


def _tagged(text: str) -> tuple[str, list[Call]] | None:
    before, *pieces = text.split(OPENS)
    calls: list[Call] = []
    for piece in pieces:
        inside, _, after = piece.partition(CLOSES)
        call = _call(inside)
        if call is None:
            return None
        calls.append(call)
        before += after
    return before.rstrip(), calls


def _listed(before: str, text: str) -> tuple[str, list[Call]] | None:
    try:
        values = json.loads(text.strip().removesuffix(_LIST_CLOSES), parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    calls = [_of_object(value) for value in values] if isinstance(values, list) else []
    return (before.rstrip(), [call for call in calls if call is not None]) if calls and all(calls) else None


def _bare(text: str) -> tuple[str, list[Call]] | None:
    if text.lstrip().startswith("["):
        return _listed("", text)
    rest, calls = text.strip().removeprefix(PYTHON_TAG).strip(), []
    decoder = json.JSONDecoder(parse_constant=_no_number)
    while rest:
        if not rest.startswith("{"):
            return None
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        call = _of_object(value)
        if call is None:
            return None
        calls.append(call)
        rest = rest[end:].strip()
        if rest and not rest.startswith(";"):
            return None
        rest = rest.removeprefix(";").strip()
    return "", calls


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _call(text: str) -> Call | None:
    try:
        return _of_object(json.loads(text, parse_constant=_no_number))
    except (ValueError, RecursionError):
        return None


def _of_object(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get("arguments", value.get("parameters", {}))
    if isinstance(given, str):  # written as text, as OpenAI hands it out
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    return Call(value["name"], json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None
