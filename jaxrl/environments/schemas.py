"""A typed Python function with a docstring, as a tool that a chat template describes to a model.

Source: the form of OpenAI's `tools`, made from a function as transformers' `get_json_schema` makes it: the description
is the docstring up to `Args:`, where each parameter has its own line. Departure: the description of the result is left
out, since no family's template shows it.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

Schema = dict[str, Any]
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Note|Notes):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def tool_schema(function: Callable[..., Any], name: str = "", *, is_method: bool = False) -> Schema:
    """The description of a function, in the form that chat templates and OpenAI's `tools` take. `is_method`: its first
    parameter is the object. Raises ValueError if it has no docstring; or a parameter has no type, no line under `Args:`
    or a type that JSON does not have, or cannot be given by name."""
    name = name or function.__name__
    if not callable(function):
        raise ValueError(f"{name} is a {type(function).__name__}, which cannot be called: begin its name with _")
    inner = inspect.unwrap(function)
    inner = inspect.unwrap(inner.func) if isinstance(inner, functools.partial) else inner
    typed = inner if inspect.isroutine(inner) else type(inner).__call__
    text = inspect.getdoc(inner) if typed is inner else inspect.cleandoc(typed.__doc__ or inner.__doc__ or "")
    if not text:
        raise ValueError(f"{name} has no docstring: the model would not know what it is for")
    description, lines = _read(text)
    if not description:
        raise ValueError(f"{name}: the docstring must say what it is for, before Args:")
    parameters = list(signature_of(function).parameters.values())[is_method:]
    try:
        hints = typing.get_type_hints(typed)
    except Exception as error:  # whatever a name in an annotation is
        raise ValueError(f"{name}: its types cannot be read: {error}") from None
    properties: dict[str, Schema] = {}
    for parameter in parameters:
        which = f"{name}: the parameter {parameter.name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"{which} must be an ordinary one: a model gives arguments by name")
        if parameter.name not in hints:
            raise ValueError(f"{which} has no type")
        if not lines.get(parameter.name):
            raise ValueError(f"{which} has no line under Args: in the docstring")
        properties[parameter.name] = _of_type(hints[parameter.name], which) | {"description": lines[parameter.name]}
    required = [each.name for each in parameters if each.default is each.empty]
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters that a model may give: those of a partial function that it does not bind."""
    signature, inner = inspect.signature(function), inspect.unwrap(function)
    bound = inner.keywords if isinstance(inner, functools.partial) else {}
    return signature.replace(parameters=[each for each in signature.parameters.values() if each.name not in bound])


def _of_type(hint: Any, which: str) -> Schema:
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if hint is Any:
        return {}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        kinds = {type(value) for value in arguments}
        if len(kinds) == 1 and (kind := kinds.pop()) in _PLAIN:
            return {"type": _PLAIN[kind], "enum": list(arguments)}
    elif origin in (Union, types.UnionType):
        some = [_of_type(each, which) for each in arguments if each is not type(None)]
        nullable = {"nullable": True} if len(some) < len(arguments) else {}
        if len(some) == 1:
            return some[0] | nullable
        if all(set(each) == {"type"} for each in some):
            return {"type": [each["type"] for each in some]} | nullable
        return {"anyOf": some} | nullable
    elif hint is list or (origin in (list, tuple) and len(arguments) == 1 + (origin is tuple and arguments[-1] is ...)):
        return {"type": "array"} | ({"items": _of_type(arguments[0], which)} if arguments else {})
    elif hint is dict or (origin is dict and arguments[0] is str):
        return {"type": "object"} | ({"additionalProperties": _of_type(arguments[1], which)} if arguments else {})
    raise ValueError(
        f"{which} has the type {getattr(hint, '__name__', hint)}: it must be str, int, float, bool, list, dict with "
        "text as keys, Literal of one kind, Any, or several of these"
    )


def _read(text: str) -> tuple[str, Mapping[str, str]]:
    """(the description, the text for each parameter) of a docstring in Google's style."""
    first = _SECTION.search(text)
    description = " ".join(text[: first.start() if first else None].split())
    lines: dict[str, str] = {}
    for section in _SECTION.finditer(text):
        if section[1] not in ("Args", "Arguments", "Parameters"):
            continue
        following = _SECTION.search(text, section.end())
        body = inspect.cleandoc("\n" + text[section.end() : following.start() if following else None])
        name = ""
        for line in body.splitlines():
            found = None if line.startswith(" ") else _ARGUMENT.match(line)
            if found:
                name = found[1]
                lines[name] = found[2].strip()
            elif name:
                lines[name] = f"{lines[name]} {line.strip()}".strip()
    return description, lines
