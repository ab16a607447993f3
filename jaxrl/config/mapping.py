"""Between nested mappings and `Config`.

A YAML file, overrides (`a.b=c`) and a gin file all arrive here as one nested mapping. pydantic finds unknown names,
wrong types and values outside their bounds; each becomes a sentence: which option, what is allowed, what was found.
"""

from __future__ import annotations

import copy
import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jaxrl.config.checks import as_read, broken_rules
from jaxrl.config.inputs import ConfigError
from jaxrl.config.options import Config
from jaxrl.schema.declared import Cap, shown
from jaxrl.schema.section import UNIONS, Section, allowed_text, is_section, mark, named_section, walk

_WORDS: Mapping[type, str] = {str: "text", bool: "true or false", int: "whole number", float: "number"}


def from_mapping(values: Mapping[str, Any], command: str = "") -> Config:
    """Builds and checks a `Config` from nested mappings (a parsed YAML file), as a command reads it (`as_read`); raises
    `ConfigError`, with a line for each problem."""
    try:
        config, problems = unchecked(values), ()
    except ConfigError as error:
        config, problems = error.rest, error.problems
    config = as_read(config, command)
    named = {name for problem in problems for name in _names(problem)}
    # a rule about an option that is wrong anyway would only say what follows from that
    problems = [*problems, *(rule for rule in broken_rules(config) if named.isdisjoint(_names(rule)))]
    if problems:
        raise ConfigError(*problems, rest=config)
    return config


def unchecked(values: Mapping[str, Any]) -> Config:
    """The same, without rules between options."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        found: dict[str, str] = {}
        right = copy.deepcopy(values)
        for each in error.errors(include_url=False):
            unknown = str(each["loc"][-1]) if each["type"] == "extra_forbidden" else ""
            # of `int | Literal["auto"]` the number comes first: its bounds say more than that it is no name
            found.setdefault(_followed(each["loc"])[0] + unknown, _sentence(each))
            _remove(right, each["loc"])
        try:
            rest = unchecked(right) if right != values else Config()
        except ConfigError as more:  # what is wrong in the rest, once this is gone
            rest = more.rest
        raise ConfigError(*found.values(), rest=rest) from None


def _remove(values: Any, loc: Sequence[int | str]) -> None:
    """Removes the option to which pydantic's steps lead, if it is still there."""
    while isinstance(values.get(loc[0]), dict) and len(loc) > 1:
        values, loc = values[loc[0]], loc[1:]
    values.pop(loc[0], None)


def _names(sentence: str) -> list[str]:
    return re.findall(r"[a-z]\w*(?:\.\w+)+", sentence)


@cache
def by_path() -> Mapping[str, FieldInfo]:
    """All options, in the order of declaration."""
    return dict(walk(Config))


def is_text(path: str) -> bool:
    option = by_path().get(path)
    return option is not None and option.annotation is str


def is_section_path(path: str) -> bool:
    """Whether a path is that of a section, as `rollout.val_kwargs` is, and `reward.domains.gsm8k`, whose name is the
    user's."""
    return any(
        option.startswith(f"{path}.") or (path.startswith(f"{option}.") and named_section(field) is not None)
        for option, field in by_path().items()
    )


def to_mapping(config: Config) -> dict[str, Any]:
    """The resolved config as nested plain values; `from_mapping` of it gives an equal config."""
    return config.model_dump()


def differences(old: Config, new: Config) -> list[str]:
    """One line per option with different values: `a.b: old -> new`."""
    a, b = flatten(to_mapping(old)), flatten(to_mapping(new))
    return [f"{key}: {a[key]!r} -> {b[key]!r}" for key in a if a[key] != b.get(key)]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as `a.b` keys; options that are mappings themselves (`data.task_config`) stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = prefix + key
        if isinstance(value, Mapping) and path not in by_path():
            flat |= flatten(value, path + ".")
        else:
            flat[path] = value
    return flat


def _sentence(error: Any) -> str:
    """The error that pydantic found, as a sentence that begins with the option."""
    path, section, option, kind = _followed(error["loc"])
    value = error["input"]
    match error["type"]:
        case "extra_forbidden":
            *_, name = error["loc"]
            return _unknown(_followed(error["loc"][:-1])[0], key_text(name), value, section)
        case "invalid_key" | "string_type" if error["type"] == "invalid_key" or error["loc"][-1] == "[key]":
            steps = error["loc"][:-1] if error["type"] == "invalid_key" else error["loc"][:-2]
            within = _followed(steps)[0] or "the config"
            kind = type(value).__name__
            return f"{within}: a name must be text, found {shown(value)} ({kind}): put it in quotation marks"
        case "value_error":
            return f"{path} {error['ctx']['error']}"
        case "less_than_equal" if (cap := option and mark(option, Cap)) and value > cap.most:
            return f"{path} must be at most {cap.most} ({cap.why}), found {shown(value)}"
        case "finite_number":
            return f"{path} must be a finite number, found {shown(value)}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return f"{path} must be {option and allowed_text(option)}, found {shown(value)}"
    return f"{path or 'the config'} must be {_wanted(kind)}, found {shown(value)}{_hint(path, kind, value)}"


def _followed(loc: tuple[int | str, ...]) -> tuple[str, type[Section], FieldInfo | None, Any]:
    """Where pydantic's steps lead: the path, the innermost section, the option, and the type that a value there has."""
    path, section, option, kind = "", Config, None, typing.cast("Any", Config)
    for step in loc:
        if is_section(kind):
            section, option = kind, kind.model_fields.get(str(step))
            kind = option.annotation if option else None
        elif typing.get_origin(kind) in (list, dict):
            kind = typing.get_args(kind)[-1]
        else:
            break  # an arm of a union, or inside a value of any kind
        path += f"[{step}]" if isinstance(step, int) and path else f"{'.' if path else ''}{key_text(step)}"
    return path, section, option, kind


def type_text(kind: Any) -> str:
    """What the values of a type are, in a few words: `whole number or auto`, `list of text`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return type_text(arguments[0])
    if is_section(kind):
        return "section with options"
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin in UNIONS:
        return " or ".join(
            typing.get_args(arm)[0] if typing.get_origin(arm) is Literal else type_text(arm) for arm in arguments
        )
    if origin is list:
        return f"list of {type_text(arguments[0])}" + "s" * (arguments[0] in (int, float))
    if origin is dict:
        return "mapping of sections" if is_section(arguments[1]) else "mapping"
    return _WORDS.get(kind, "text, number, list or mapping")


def _wanted(kind: Any) -> str:
    """The same within a sentence."""
    text = type_text(kind)
    return text if text.startswith(("text", "true", "one of")) else f"a {text}"


def _hint(path: str, kind: Any, value: Any) -> str:
    if kind is str:
        braces = " (to YAML, a { at the beginning or a : at the end makes a mapping)" if isinstance(value, dict) else ""
        return f": put it in quotation marks{braces}"
    if is_section(kind) and isinstance(value, bool) and "enable" in kind.model_fields:
        return f": {path}.enable is its switch"
    if not isinstance(value, str):
        return ""
    if typing.get_origin(kind) is not Literal:
        return " (text)" if kind in _WORDS else ""  # '4' is one, which is easily overlooked
    from jaxrl.config import verl_options

    if ours := verl_options.VALUES.get(value.lower()):
        return f"; here it is {ours}"
    near = difflib.get_close_matches(value[:100].lower(), typing.get_args(kind), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def key_text(key: Any) -> str:
    return key if isinstance(key, str) and len(key) <= 100 and key.isprintable() else shown(key)


def _unknown(path: str, key: str, value: Any, section: type[Section]) -> str:
    from jaxrl.config import verl_options

    full = f"{path}.{key}" if path else key
    if (from_verl := verl_options.advice(full, value)) is not None:
        option, advice = from_verl
        return f"unknown option {key_text(option)}: {advice}"
    near = difflib.get_close_matches(key.lower(), section.model_fields, n=1, cutoff=0.5)
    # of several with that name the first, or the first in the same section
    options = sorted(by_path(), key=lambda option: not option.startswith(f"{path}."))
    everywhere = {option.rsplit(".", 1)[-1]: option for option in reversed(options)}
    if key in everywhere:
        hint = f"did you mean {everywhere[key]}?"
    elif near:
        hint = f"did you mean {f'{path}.{near[0]}' if path else near[0]}?"
    else:
        hint = f"known here: {', '.join(section.model_fields)}"
    return f"unknown option {full}: {hint}"
