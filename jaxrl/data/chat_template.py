"""Chat templates: jinja2 in the environment that templates on the Hugging Face Hub expect, with limits.

A template is a program that came with the model, and jinja's sandbox bounds neither its time nor its memory. Here each
rendering has a limit of time, which loops and macros check, and limits of size, on what it writes and on each value
that an operation makes. Each template is first tried on three short conversations. One that writes the same whatever
the user says is refused.
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
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
from jinja2.visitor import NodeTransformer

TIME_LIMIT_S = 2
"""Processor time of one conversation: a template takes a millisecond."""
MAX_CHARACTERS = 2**20
"""The longest template, and the most that it may write around the messages."""
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names that templates have on the Hub; the only one of a tokenizer is the default."""
THINKING = ("reasoning_content", "reasoning", "thinking")
"""Names of what an assistant has thought: data has one of them, and a template reads another."""
_TEMPLATE_NAME = re.compile(r"\w[\w.-]*")
_CHECK_TIME, _JOIN, _BUDGET = "_jaxrl_check_time", "_jaxrl_join", "_jaxrl_budget"
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
    ValueError if the source is no template, or exceeds a limit on a short conversation; RefusedMessages if it refuses
    these messages, fails with them, or exceeds a limit."""
    # what tools say is no more tried than what messages say: each new list would be another trial
    tried = {**context, "tools": _TRIED_TOOLS} if context.get("tools") else context
    template = _usable(source, place, json.dumps(dict(tried), default=str))
    given = [_as_templates_read(message, f"{place}: message {number}") for number, message in enumerate(messages, 1)]
    try:
        return _rendered(template, given, context)
    except _Limit as error:
        raise RefusedMessages(f"{place}: the chat template {error} with these messages") from None
    except jinja2.TemplateError as error:
        raise RefusedMessages(f"{place}: the chat template refuses these messages: {_said(error)}") from None
    except Exception as error:  # whatever the template's own operations raise
        raise RefusedMessages(f"{place}: the chat template fails with these messages: {_said(error)}") from None


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
    """The variables that a template reads, `messages` among them. Raises ValueError if it is no template."""
    _usable(source, place, "{}")
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


class _Limit(Exception):
    """A limit was exceeded; the text says which, as a verb and its object."""


@dataclass(slots=True)
class _Budget:
    """What one rendering may still take. `size`: of one value; `written`: characters, captured ones included."""

    until: float
    size: int
    written: int = 0


_NO_LIMIT = _Budget(math.inf, MAX_CHARACTERS)  # of what is evaluated outside of a rendering


def _rendered(template: jinja2.Template, messages: Sequence[Mapping[str, Any]], context: Mapping[str, Any]) -> str:
    conversation = [dict(message) for message in messages]
    most = MAX_CHARACTERS + 16 * sum(len(part) for m in conversation for part in m.values() if isinstance(part, str))
    budget = _Budget(time.thread_time() + TIME_LIMIT_S, most)
    size, pieces = 0, list[str]()
    for piece in template.generate(messages=conversation, **context, **{_BUDGET: budget}):
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
    try:
        template = _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        said = _said(error)
        raise ValueError(f"{place}: the chat template is no jinja template (line {error.lineno}: {said})") from None
    except RecursionError:
        raise ValueError(f"{place}: the chat template is nested too deeply") from None
    except Exception as error:  # whatever Python's compiler raises
        raise ValueError(f"{place}: the chat template is no jinja template ({_said(error)})") from None
    differs = list[bool]()
    for messages in _TRIED:
        others = [m | {"content": m["content"] + " Why?"} if m["role"] == "user" else m for m in messages]
        try:
            one, other = (_rendered(template, given, json.loads(context)) for given in (messages, others))
        except _Limit as error:
            raise ValueError(f"{place}: the chat template {error} for a short conversation") from None
        except Exception:  # found again when messages come
            continue
        differs.append(one != other)
    if differs and not any(differs):
        raise ValueError(
            f"{place}: the chat template writes the same whatever the user says: it must write messages[i].content, as "
            "text"
        )
    return template


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training masks; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_context
def _check_time(context: Context, _: None) -> None:
    if time.thread_time() > context.get(_BUDGET, _NO_LIMIT).until:
        raise _Limit(f"takes more than {TIME_LIMIT_S} s")


@jinja2.pass_context
def _written(context: Context, value: Any) -> Any:
    """Counts a value that is written. A finalizer that takes the context also keeps jinja from computing constants
    while it compiles."""
    budget = context.get(_BUDGET, _NO_LIMIT)
    budget.written += len(value) if isinstance(value, str) else 1
    if budget.written > 16 * budget.size:  # a text may be captured some times before it is written for good
        raise _Limit(f"writes more than {budget.size} characters")
    return value


@jinja2.pass_context
def _joined(context: Context, parts: list[Any]) -> str:
    """The operator `~`."""
    texts = [str(part) for part in parts]
    _check_size(context, sum(map(len, texts)))
    return "".join(texts)


def _check_size(context: Context, size: float) -> None:
    most = context.get(_BUDGET, _NO_LIMIT).size
    if size > most:
        raise _Limit(f"makes a value of more than {most} characters")


def _size(value: Any) -> int:
    """About how many characters a value takes, parts of parts left out."""
    if isinstance(value, list | tuple):
        return sum(len(part) if isinstance(part, str) else 1 for part in value)
    return len(value) if isinstance(value, str) else 1 + value.bit_length() // 8 if isinstance(value, int) else 1


def _size_of_operation(operator: str, left: Any, right: Any) -> float:
    match operator, left, right:
        case "**", int(), int():
            return _size(left) * abs(right)
        case "*", str() | list() | tuple(), int():
            return _size(left) * right
        case "*", int(), str() | list() | tuple():
            return left * _size(right)
        case "%", str(), _:
            return _size_of_format(left)
    return _size(left) + _size(right)


def _size_of_format(text: str) -> float:
    """The largest width in a text with format fields; infinite where a width is itself an argument."""
    fields = re.findall(r"%(?:\(\w*\))?[^a-zA-Z%]*|\{[^}]*", text)
    if any("*" in field or "{" in field[1:] for field in fields):
        return math.inf
    return max((float(width) for field in fields for width in re.findall(r"\d+", field)), default=0)


_SIZE_OF_CALL: Mapping[str, Callable[..., float]] = {
    "batch": lambda value, linecount, *_, **__: linecount,
    "center": lambda text, width=80, *_: width,
    "expandtabs": lambda text, tabsize=8: text.count("\t") * tabsize,
    "format": lambda text, *_, **__: _size_of_format(text),
    "format_map": lambda text, _: _size_of_format(text),
    "indent": lambda text, width=4, *_, **__: str(text).count("\n") * (width if isinstance(width, int) else len(width)),
    "ljust": lambda text, width, *_: width,
    "replace": lambda text, old, new, *_, **__: str(text).count(str(old)) * len(str(new)),
    "rjust": lambda text, width, *_: width,
    "round": lambda value, precision=0, *_, **__: abs(precision),
    "slice": lambda value, slices, *_, **__: slices,
    "tojson": lambda value, *_, indent=0, **__: indent if isinstance(indent, int) else 0,
    "zfill": lambda text, width: width,
}
"""Filters and methods of text whose result may be much larger than their arguments, and about how large it is."""


class _Guarded(NodeTransformer):
    """Puts checks of time into loops and macros, and one of size into the operator `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_time_check(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_time_check(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), _JOIN, [], [], None, None, lineno=node.lineno)

    def _with_time_check(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        check = nodes.Filter(nodes.Const(None), _CHECK_TIME, [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(check, lineno=node.lineno))
        return node


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Guarded().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_size(context, _size_of_operation(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str) and (size := _SIZE_OF_CALL.get(method.__name__)):
            _check_size(context, size(text, *args, **kwargs))
        return super().call(context, function, *args, **kwargs)


def _sized(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(context: Context, *given: Any, **options: Any) -> Any:
        _check_size(context, _SIZE_OF_CALL[name](*given, **options))
        takes_settings = getattr(function, "jinja_pass_arg", None) is not None
        return function(*((context.eval_ctx,) if takes_settings else ()), *given, **options)

    return jinja2.pass_context(checked)


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # jinja2's own filter escapes HTML, which would change what the model reads.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        optimized=False,
        finalize=_written,
    )
    filters = environment.filters
    filters |= {"tojson": tojson, _CHECK_TIME: _check_time, _JOIN: _joined}
    filters |= {name: _sized(name, filters[name]) for name in _SIZE_OF_CALL if name in filters}
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    del environment.globals["lipsum"]
    return environment


def _said(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0][:300]
    return text or type(error).__name__
