"""Between nested mappings and `Config`.

A YAML file, overrides (`a.b=c`) and a gin file all arrive here as one nested mapping. An unknown key, a wrong type, a
value outside its bounds, or options that contradict each other raise `ConfigError` with one sentence: which option,
what was found, what is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl.config.checks import ConfigError, check
from jaxrl.config.commands import as_read
from jaxrl.config.options import Config
from jaxrl.schema.declared import (
    Declared,
    a_value,
    declared,
    number_or_name,
    number_problem,
    shown,
    text_problem,
    walk,
)

_MAPPINGS = frozenset(path for path, option in walk(Config) if typing.get_origin(option.type) is dict)

_NAMED_SECTIONS = frozenset(path for path, option in walk(Config) if option.named_section is not None)
"""Mappings from names of the user's to sections."""
_TEXTS = frozenset(path for path, option in walk(Config) if option.type is str)
_SECTIONS = frozenset(path[:end] for path, _ in walk(Config) for end in range(len(path)) if path[end] == ".")


def from_mapping(values: Mapping[str, Any], command: str = "") -> Config:
    """Builds and checks a `Config` from nested mappings (a parsed YAML file), as a command reads it (`as_read`); raises
    `ConfigError`."""
    config = as_read(build(Config, values, ""), command)
    check(config)
    return config


def is_text(path: str) -> bool:
    return path in _TEXTS


def is_section(path: str) -> bool:
    """Whether a path is that of a section, as `rollout.val_kwargs` is, and `reward.domains.gsm8k`, whose name is the
    user's."""
    return path in _SECTIONS or any(path.startswith(f"{mapping}.") for mapping in _NAMED_SECTIONS)


def to_mapping(config: Config) -> dict[str, Any]:
    """The resolved config as nested plain values; `from_mapping` of it gives an equal config."""
    return dataclasses.asdict(config)


def differences(old: Config, new: Config) -> list[str]:
    """One line per option with different values: `a.b: old -> new`."""
    a, b = flatten(to_mapping(old)), flatten(to_mapping(new))
    return [f"{key}: {a[key]!r} -> {b[key]!r}" for key in a if a[key] != b.get(key)]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as `a.b` keys; options that are mappings themselves (`data.task_config`) stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = prefix + key
        if isinstance(value, Mapping) and path not in _MAPPINGS:
            flat |= flatten(value, path + ".")
        else:
            flat[path] = value
    return flat


def build(section: type, values: Any, path: str) -> Any:
    """A section from nested mappings, each value of its type and within its bounds; `path` is where it stands."""
    if not isinstance(values, Mapping):
        switch = f": {path}.enable is its switch" if isinstance(values, bool) and "enable" in declared(section) else ""
        raise ConfigError(f"{path or 'the config'} must be a section with options, found {shown(values)}{switch}")
    known = declared(section)
    kwargs: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise ConfigError(_no_text(path or "the config", key))
        if key not in known:
            raise ConfigError(_unknown(path, key_text(key), value, list(known)))
        kwargs[key] = _convert(known[key], value, f"{path}.{key}" if path else key)
    return section(**kwargs)


def key_text(key: str) -> str:
    return key if len(key) <= 100 and key.isprintable() else shown(key)


def _no_text(path: str, key: Any) -> str:
    return f"{path}: a name must be text, found {shown(key)} ({type(key).__name__}): put it in quotation marks"


def _unknown(path: str, key: str, value: Any, known: list[str]) -> str:
    from jaxrl.config import verl_options

    full = f"{path}.{key}" if path else key
    if (from_verl := verl_options.advice(full, value)) is not None:
        option, advice = from_verl
        return f"unknown option {key_text(option)}: {advice}"
    near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.5)
    # of several with that name the first, or the first in the same section
    options = sorted((option for option, _ in walk(Config)), key=lambda option: not option.startswith(f"{path}."))
    everywhere = {option.rsplit(".", 1)[-1]: option for option in reversed(options)}
    if near:
        hint = f"did you mean {f'{path}.{near[0]}' if path else near[0]}?"
    elif key in everywhere:
        hint = f"did you mean {everywhere[key]}?"
    else:
        hint = f"known here: {', '.join(known)}"
    return f"unknown option {full}: {hint}"


def _convert(option: Declared, value: Any, path: str) -> Any:
    hint, origin = option.type, typing.get_origin(option.type)
    if option.is_section:
        return build(hint, {} if value is None else value, path)
    if origin is Literal:
        return _name(typing.get_args(hint), value, path)
    if origin in (typing.Union, types.UnionType):
        number, names = number_or_name(hint)
        if isinstance(value, str):
            if value in names:
                return value
            raise ConfigError(f"{path} must be {a_value(number)} or {' or '.join(names)}, found {shown(value)}")
        return _convert(dataclasses.replace(option, type=number), value, path)
    if origin in (list, types.GenericAlias):
        item = Declared(typing.get_args(hint)[0], names=option.names)
        if isinstance(value, str) and item.holds_text:
            value = [value]  # a list of one
        if not isinstance(value, list | tuple):
            advice = ": an empty list is []" if value is None else ""
            raise ConfigError(f"{path} must be a list, found {shown(value)}{advice}")
        return [_convert(item, element, f"{path}[{i}]") for i, element in enumerate(value)]
    if origin is dict:
        return _mapping(Declared(typing.get_args(hint)[1]), value, path)
    return _plain(value, path) if hint is Any else _scalar(option, value, path)


def _name(allowed: tuple[str, ...], value: Any, path: str) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    from jaxrl.config import verl_options

    near = difflib.get_close_matches(value[:100].lower(), allowed, n=1) if isinstance(value, str) else []
    ours = verl_options.VALUES.get(value.lower()) if isinstance(value, str) else None
    hint = f"; here it is {ours}" if ours else f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"{path} must be one of {', '.join(allowed)}, found {shown(value)}{hint}")


def _mapping(item: Declared, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        advice = ": an empty mapping is {}" if value is None else ""
        raise ConfigError(f"{path} must be a mapping, found {shown(value)}{advice}")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(_no_text(path, key))
    return {key: _convert(item, element, f"{path}.{key_text(key)}") for key, element in value.items()}


def _plain(value: Any, path: str) -> Any:
    """Any value that config.yaml and run.json can hold: text, numbers, lists, mappings."""
    match value:
        case float() if not math.isfinite(value):
            raise ConfigError(f"{path} must be a finite number, found {shown(value)}")
        case bool() | int() | float() | None:
            return value
        case str():
            return _scalar(Declared(str), value, path)
        case list() | tuple():
            return [_plain(element, f"{path}[{i}]") for i, element in enumerate(value)]
        case Mapping():
            return _mapping(Declared(Any), value, path)
        case _:
            raise ConfigError(
                f"{path} must be text, a number, a list or a mapping, found {shown(value)} ({type(value).__name__})"
            )


def _scalar(option: Declared, value: Any, path: str) -> Any:
    hint = option.type
    if hint is str and value is None:
        value = ""  # `option=` on the command line, or `option:` in YAML
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads `1e-6` as text
        with contextlib.suppress(ValueError):
            value = float(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if value.bit_length() < 1024 else math.copysign(math.inf, value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        advice = ": put it in quotation marks" if hint is str and not isinstance(value, bytes) else ""
        if advice and isinstance(value, dict):
            advice += " (to YAML, a { at the beginning or a : at the end makes a mapping)"
        kind = " (text)" if isinstance(value, str) else ""  # '4' is one, which is easily overlooked
        raise ConfigError(f"{path} must be {a_value(hint)}, found {shown(value)}{kind}{advice}")
    problem = None
    if isinstance(value, str):
        problem = text_problem(path, value, option)
    elif not isinstance(value, bool):
        problem = number_problem(path, value, option)
    if problem is not None:
        raise ConfigError(problem)
    return value
