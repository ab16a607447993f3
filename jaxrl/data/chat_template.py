"""Chat templates: jinja2's sandbox, in the environment that templates on the Hugging Face Hub expect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxrl.data.files import first_line

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names that templates have on the Hub; the only one of a tokenizer is the default."""
THINKING = ("reasoning_content", "reasoning", "thinking")
"""Names of what an assistant has thought: data has one of them, and a template reads another."""
_TEMPLATE_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template in jinja, and the file that it comes from."""

    source: str
    place: str = field(compare=False)


class RefusedMessages(ValueError):
    """The template is valid, but refuses these messages."""


def check_template_name(name: Any, place: str) -> None:
    """Raises ValueError for a name that cannot be a template's: a saved template is a file of that name."""
    if not isinstance(name, str) or not _TEMPLATE_NAME.fullmatch(name):
        raise ValueError(
            f"{place}: a chat template's name must be made of letters, digits, _, - and ., found {name!r:.80}"
        )


def choose(
    templates: Mapping[str, ChatTemplate], owner: str, name: str | None = None, *, has_tools: bool = False
) -> ChatTemplate:
    """The template that renders a conversation, chosen as in transformers: the one of this name, else the one for tools
    if there are tools, else the default. `owner`: the folder or file. Raises ValueError if there is none."""
    there = ", ".join(map(repr, sorted(templates)))
    if name is not None:
        if not isinstance(name, str) or name not in templates:
            raise ValueError(
                f"{owner}: chat_template must name one of its templates ({there or 'none'}), found {name!r:.80}"
            )
        return templates[name]
    if not templates:
        raise ValueError(f"{owner}: has no chat template; give prompts as text (data.apply_chat_template=false)")
    found = templates.get(WITH_TOOLS) if has_tools else None
    found = templates.get(DEFAULT) if found is None else found
    if found is None:
        raise ValueError(
            f"{owner}: none of its chat templates ({there}) is called {DEFAULT!r}: name one, as in "
            "data.apply_chat_template_kwargs.chat_template"
        )
    return found


def render(source: str, place: str, messages: Sequence[Mapping[str, Any]], context: Mapping[str, Any]) -> str:
    """The rendered conversation. `place`: the template's file, for messages; `context`: its other variables. Raises
    ValueError if the source is no template; RefusedMessages if it refuses these messages, or fails with them."""
    given = [_as_templates_read(message, f"{place}: message {number}") for number, message in enumerate(messages, 1)]
    template = _compiled(source, place)
    try:
        return template.render(messages=given, **context)
    except jinja2.TemplateError as error:
        raise RefusedMessages(f"{place}: the chat template refuses these messages: {first_line(error)}") from None
    except Exception as error:  # whatever the template's own operations raise
        raise RefusedMessages(f"{place}: the chat template fails with these messages: {first_line(error)}") from None


class _Arguments(dict[str, Any]):
    """A call's arguments: an object for templates that write JSON, and its JSON text for those that take text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return f"{self}{text}"

    def __radd__(self, text: str) -> str:
        return f"{text}{self}"


def _as_templates_read(message: Mapping[str, Any], named: str) -> dict[str, Any]:
    """The message with its thinking under each of its names, and with the arguments of calls as objects."""
    thought = next((message[name] for name in THINKING if message.get(name)), None)
    found = {**message, **(dict.fromkeys(THINKING, thought) if thought else {})}
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [_call(call, named) for call in calls]
    return found


def _call(call: Mapping[str, Any], named: str) -> dict[str, Any]:
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _call(function, named)}
    from jaxrl.data.tool_calls import arguments_of

    given = call.get("arguments")
    try:
        value = arguments_of(given)
    except ValueError as error:
        raise RefusedMessages(f"{named}: the arguments of a call {error}, found {given!r:.80}") from None
    return {**call, **({"arguments": _Arguments(value)} if "arguments" in call else {})}


@lru_cache(maxsize=16)
def variables_of(source: str, place: str) -> frozenset[str]:
    """The variables that a template reads, `messages` among them. Raises ValueError if it is no template."""
    _compiled(source, place)
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


@lru_cache(maxsize=16)
def _compiled(source: str, place: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        said = f"line {error.lineno}: {first_line(error)}"
        raise ValueError(f"{place}: the chat template is no jinja template ({said})") from None
    except Exception as error:  # whatever Python's compiler raises
        raise ValueError(f"{place}: the chat template is no jinja template ({first_line(error)})") from None


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training masks; rendering passes it through."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # jinja2's own filter escapes HTML, which would change what the model reads.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment
