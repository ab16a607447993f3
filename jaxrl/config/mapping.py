"""Between nested mappings and `Config`.

A YAML file, command-line overrides (`a.b=c`) and a gin file all arrive here as one nested mapping, so all three resolve
to the same `Config`. An unknown key, a wrong type, a value outside its bounds, or options that contradict each other
raise `ConfigError` with one sentence: which option, what was found, what is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxrl.config.checks import ConfigError, check
from jaxrl.config.declared import bounds_text, declared, is_within, number_or_name, walk
from jaxrl.config.options import Config

_GONE: dict[str, Any] = {"rollout.tail_batching.keep_finished": False}
"""Options of earlier versions, with their defaults. Every config.yaml of such a version has them."""
_MAPPINGS = frozenset(path for path, option in walk(Config) if typing.get_origin(option.type) is dict)


def from_mapping(values: Mapping[str, Any]) -> Config:
    """Builds and checks a `Config` from nested mappings (a parsed YAML file); raises `ConfigError`.

    An option that is gone is left out where it has its default, which changes nothing, and unknown otherwise.
    """
    config = build(Config, _without(values, "", lambda path, value: _GONE[path] == value), "")
    check(config)
    return config


def from_recorded(values: Mapping[str, Any]) -> Config:
    """The `Config` of a run's config.yaml, which an earlier version may have written with options that are gone."""
    return from_mapping(_without(values, "", lambda path, value: True))


def _without(values: Mapping[str, Any], prefix: str, left_out: Callable[[str, Any], bool]) -> dict[str, Any]:
    """Nested sections without those options of `_GONE` that `left_out` says of, by path and value."""
    return {
        key: _without(value, f"{prefix}{key}.", left_out) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if not (f"{prefix}{key}" in _GONE and left_out(f"{prefix}{key}", value))
    }


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
        raise ConfigError(f"{path or 'the config'} must be a section with options, found {values!r}")
    known = declared(section)
    kwargs: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(_unknown(path, str(key), list(known)))
        option, full = known[key], f"{path}.{key}" if path else key
        kwargs[key] = converted = _convert(option.type, value, full)
        named = isinstance(converted, str)  # `auto` of an option that is a number otherwise
        if option.bounds is not None and not named and not is_within(converted, option.bounds):
            raise ConfigError(f"{full} must be {bounds_text(option.bounds)}, found {converted!r}")
    return section(**kwargs)


def _unknown(path: str, key: str, known: list[str]) -> str:
    full = f"{path}.{key}" if path else key
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    everywhere = {option.rsplit(".", 1)[-1]: option for option, _ in walk(Config)}
    if near:
        hint = f"did you mean {f'{path}.{near[0]}' if path else near[0]}?"
    elif key in everywhere:
        hint = f"did you mean {everywhere[key]}?"
    else:
        hint = f"known here: {', '.join(known)}"
    return f"unknown option {full}: {hint}"


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), {} if value is None else value, path)
    if origin is Literal:
        allowed = typing.get_args(hint)
        if value not in allowed:
            near = difflib.get_close_matches(str(value), allowed, n=1)
            hint_text = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{path} must be one of {', '.join(map(str, allowed))}, found {value!r}{hint_text}")
        return value
    if origin in (typing.Union, types.UnionType):
        number, names = number_or_name(hint)
        if value in names:
            return value
        if isinstance(value, str):
            raise ConfigError(f"{path} must be {number.__name__} or {' or '.join(names)}, found {value!r}")
        return _convert(number, value, path)
    if origin in (list, types.GenericAlias):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path} must be a list, found {value!r}")
        (item,) = typing.get_args(hint)
        return [_convert(item, element, f"{path}[{i}]") for i, element in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be a mapping, found {value!r}")
        return dict(value)
    if hint is str and value is None:
        value = ""  # `option=` on the command line, or `option:` in YAML
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads `1e-6` as text
        with contextlib.suppress(ValueError):
            value = float(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{path} must be {hint.__name__}, found {value!r} ({type(value).__name__})")
    return value
