"""Chat templates: jinja2 in the environment that templates on the Hugging Face Hub expect, with limits.

A template is a program that came with the model, and jinja's sandbox bounds neither its time nor its memory
(`{{ 9 ** (9 ** 9) }}` is computed while it is compiled). So each template is first tried, on three short conversations,
in a process of its own with limits of the operating system. One that writes the same whatever the user says is refused:
the model would never see a prompt. Only then is it compiled here; each conversation that it renders has a limit of
size, and one of time, which every turn of a loop and every call of a macro looks at.

A tokenizer may have several, by name (`default`, `tool_use`, `rag`). Which one renders a conversation is decided as in
transformers: the one that is named, or else `tool_use` where tools are given and there is one, or else `default`.

This file is also the program of that process, so it imports nothing large of jaxrl.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxrl.data.limits import limit

TIME_LIMIT_S = 2
"""Processor time of the trial, and of one conversation: a template takes a millisecond."""
MAX_CHARACTERS = 2**20
"""The longest template, and the most that it may write around the messages."""
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names that templates have on the Hub; the only one of a tokenizer is the default."""
THINKING = ("reasoning_content", "reasoning", "thinking")
"""Names of what an assistant has thought: data has one of them, and a template reads another."""
_TEMPLATE_NAME = re.compile(r"\w[\w.-]*")
_MEMORY_LIMIT_BYTES = 2**30
_LOOK, _UNTIL = "_jaxrl_look_at_time", "_jaxrl_until"
_TOO_LARGE, _NO_MEMORY, _IGNORES = 3, 4, 5  # statuses of the trial
_TRIED: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "1 + 1 = ?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 = ?"}],
    [
        {"role": "user", "content": "1 + 1 = ?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2 = ?"},
    ],
)
_TRIED_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template.

    Attributes:
      source: in jinja.
      place: the file that it comes from, for messages.
    """

    source: str
    place: str = field(compare=False)


class RefusedMessages(ValueError):
    """The template is sound, but not for these messages."""


def check_template_name(name: Any, place: str) -> None:
    """Raises ValueError for what cannot name a template: a saved one is a file of that name."""
    if not isinstance(name, str) or not _TEMPLATE_NAME.fullmatch(name):
        raise ValueError(
            f"{place}: a chat template's name must be made of letters, digits, _, - and ., found {name!r:.80}"
        )


def choose(
    templates: Mapping[str, ChatTemplate], owner: str, name: str | None = None, *, has_tools: bool = False
) -> ChatTemplate:
    """The template that renders a conversation.

    Args:
      templates: of a tokenizer, by name.
      owner: the tokenizer's folder or file, for messages.
      name: of the one that is asked for.
      has_tools: whether tools are given.

    Raises:
      ValueError: there is none of that name; or none, without a name.
    """
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
    """The rendered conversation.

    Args:
      source: the template.
      place: the file that it comes from, for messages.
      context: the template's other variables.

    Raises:
      ValueError: the template is no template, or exceeds a limit.
      RefusedMessages: it refuses these messages, or fails with them.
    """
    # what tools say is no more tried than what messages say: each new list would be another trial
    tried = {**context, "tools": _TRIED_TOOLS} if context.get("tools") else context
    template = _usable(source, place, json.dumps(dict(tried), default=str))
    given = [_as_templates_read(message, f"{place}: message {number}") for number, message in enumerate(messages, 1)]
    return _rendered_or_refused(template, place, given, context)


class _Arguments(dict[str, Any]):
    """What a call gives: an object for templates that write JSON, and as text its JSON for those that take text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return f"{self}{text}"

    def __radd__(self, text: str) -> str:
        return f"{text}{self}"


def _as_templates_read(message: Mapping[str, Any], named: str) -> dict[str, Any]:
    """With its thinking under each name, and the arguments of calls as objects."""
    thought = next((message[name] for name in THINKING if message.get(name)), None)
    found = {**message, **(dict.fromkeys(THINKING, thought) if thought else {})}
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [_call(call, named) for call in calls]
    return found


def _call(call: Mapping[str, Any], named: str) -> dict[str, Any]:
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _call(function, named)}
    given = call.get("arguments")
    try:
        value = (json.loads(given) if given.strip() else {}) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        value = given
    if value is not None and not isinstance(value, Mapping):
        raise RefusedMessages(f"{named}: the arguments of a call must be a JSON object, found {given!r:.80}")
    return {**call, **({"arguments": _Arguments(value or {})} if "arguments" in call else {})}


@lru_cache(maxsize=16)
def variables_of(source: str, place: str) -> frozenset[str]:
    """The variables that a template reads, the conversation among them; ValueError where it is no template."""
    _usable(source, place, "{}")
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


def _rendered_or_refused(
    template: jinja2.Template, place: str, messages: Sequence[Mapping[str, Any]], context: Mapping[str, Any]
) -> str:
    try:
        return _rendered(template, messages, context)
    except _Limit as error:
        raise RefusedMessages(f"{place}: the chat template {error} with these messages") from None
    except jinja2.TemplateError as error:
        raise RefusedMessages(f"{place}: the chat template refuses these messages: {_said(error)}") from None
    except Exception as error:  # whatever the template's own operations raise
        raise RefusedMessages(f"{place}: the chat template fails with these messages: {_said(error)}") from None


class _Limit(Exception):
    """A limit was exceeded; the text says which, as a verb and its object."""


def _rendered(template: jinja2.Template, messages: Sequence[Mapping[str, Any]], context: Mapping[str, Any]) -> str:
    conversation = [dict(message) for message in messages]
    most = MAX_CHARACTERS + 16 * sum(len(part) for m in conversation for part in m.values() if isinstance(part, str))
    size, pieces, until = 0, [], {_UNTIL: time.thread_time() + TIME_LIMIT_S}
    for piece in template.generate(messages=conversation, **context, **until):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise _Limit(f"writes more than {most} characters")
    return "".join(pieces)


@lru_cache(maxsize=16)
def _usable(source: str, place: str, context: str) -> jinja2.Template:
    """The compiled template, after its trial."""
    if len(source) > MAX_CHARACTERS:
        raise ValueError(f"{place}: the chat template has {len(source)} characters, more than {MAX_CHARACTERS}")
    _try(source, place, context)
    try:
        return _compiled(source)
    except jinja2.TemplateSyntaxError as error:
        said = _said(error)
        raise ValueError(f"{place}: the chat template is no jinja template (line {error.lineno}: {said})") from None
    except RecursionError:
        raise ValueError(f"{place}: the chat template is nested too deeply") from None
    except Exception as error:  # what is constant is computed now
        raise ValueError(f"{place}: the chat template is no jinja template ({_said(error)})") from None


def _try(source: str, place: str, context: str) -> None:
    here = os.getcwd()  # stands first with `python -m`; there the child would find a user's re.py for Python's own
    paths = os.pathsep.join(sorted((path or here for path in sys.path), key=lambda path: path == here))
    done = subprocess.run(
        [sys.executable, "-P", __file__],
        input=json.dumps([source, json.loads(context), TIME_LIMIT_S]),
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode == 0:
        return
    short = "for a short conversation"
    known = {
        -signal.SIGXCPU: f"takes more than {TIME_LIMIT_S} s {short}",
        -signal.SIGKILL: f"takes more than {TIME_LIMIT_S} s {short}",  # SIGXCPU came while Python held it back
        _TOO_LARGE: f"writes more than {MAX_CHARACTERS} characters {short}",
        _NO_MEMORY: f"takes more than {_MEMORY_LIMIT_BYTES >> 20} MiB of memory {short}",
        _IGNORES: "writes the same whatever the user says: it must write messages[i].content, as text",
    }
    said = f"ended its trial with status {done.returncode} ({' '.join(done.stderr.split())[-200:]})"
    raise ValueError(f"{place}: the chat template {known.get(done.returncode, said)}")


def _trial() -> int:
    """The trial's process: the status says which limit was exceeded. Other faults are found when messages come."""
    source, context, limit_s = json.load(sys.stdin)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, limit_s, limit_s + 1)
    limit(resource.RLIMIT_AS, _MEMORY_LIMIT_BYTES)
    differs = []
    for messages in _TRIED:
        others = [m | {"content": m["content"] + " Why?"} if m["role"] == "user" else m for m in messages]
        try:
            template = _compiled(source)
            differs.append(_rendered(template, messages, context) != _rendered(template, others, context))
        except _Limit:
            return _TOO_LARGE
        except MemoryError:
            return _NO_MEMORY
        except Exception:
            continue
    return _IGNORES if differs and not any(differs) else 0


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training masks; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_context
def _look_at_time(context: Context, _: None) -> None:
    if time.thread_time() > context.get(_UNTIL, math.inf):
        raise _Limit(f"takes more than {TIME_LIMIT_S} s")


class _Environment(ImmutableSandboxedEnvironment):
    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for part in tree.find_all((nodes.For, nodes.Macro)):
            look = nodes.Filter(nodes.Const(None), _LOOK, [], [], None, None)
            part.body.insert(0, nodes.ExprStmt(look, lineno=part.lineno))
        return tree


def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # jinja2's own filter escapes HTML, which would change what the model reads.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters |= {"tojson": tojson, _LOOK: _look_at_time}
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


def _said(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0][:300]
    return text or type(error).__name__


if __name__ == "__main__":
    sys.exit(_trial())
