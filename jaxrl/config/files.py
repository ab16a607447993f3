"""Configuration files: YAML or gin, plus overrides from the command line, to one checked `Config`.

Purpose: `load(path, overrides)`. Both formats become the same nested mapping and go through
`jaxrl.config.from_mapping`, so equal options give equal configs. Every failure is a `ConfigError` of one sentence, with
file and line where they are known.

YAML: sections are mappings. A key that appears twice is refused (plain YAML would drop one in silence), and `1e-6` is a
number (YAML 1.1 would read text). Anchors and merges work.

gin (the extra `gin`): an option's path is the name of its binding, so options are written as the docs name them::

    include 'base.gin'                 # beside the including file, or relative to the working directory
    learning_rate = 1e-5               # a macro
    data.train_batch_size = 8
    actor.optim.lr = %learning_rate
    rollout:                           # a block
      n = 4
      temperature = 1.0
    rollout.val_kwargs.n = 4
    data.task_config = {'min_terms': 2}

As in gin, a later binding replaces an earlier one, also across includes, and a macro has the last value given to it,
even where it is used earlier. Departures: gin's parser reads the file, but its registry is not used, so loading neither
needs nor changes any global state; only options can be configured, so references (`@name`), scopes (`a/b.c`)
and imports are refused.
"""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxrl.config import Config, ConfigError, from_mapping

_SUFFIXES = {".yaml": "yaml", ".yml": "yaml", ".gin": "gin"}


@dataclass(slots=True)
class _Options:
    """Nested values, and where each option was given (`file, line 3`)."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The checked config of a file (`.yaml`, `.yml` or `.gin`; None: the defaults) with overrides `a.b=c` on top."""
    options = _Options() if path is None else _read(Path(path))
    for text in overrides:
        apply_override(options.values, text)
        overridden = text.partition("=")[0].strip()
        options.places = {
            option: place for option, place in options.places.items() if not _is_under(option, overridden)
        }
    try:
        return from_mapping(options.values)
    except ConfigError as error:
        raise ConfigError(f"{error}{_place(str(error), options.places)}") from None


def _read(path: Path) -> _Options:
    kind = _SUFFIXES.get(path.suffix)
    if kind is None:
        raise ConfigError(f"{path}: a config file must end in {', '.join(_SUFFIXES)}")
    options = _Options()
    if kind == "yaml":
        _read_yaml(path, options)
    else:
        _GinFile(path, options).read()
    return options


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a config file ({error})") from None


def _is_under(option: str, section: str) -> bool:
    return option == section or option.startswith(section + ".")


def _place(message: str, places: dict[str, str]) -> str:
    """` (file, line)` of the option that a message names first; where several begin there, of the longest. The name of
    a section counts only where the message begins: further on, it may be an ordinary word."""
    found = [
        (match.start(), -len(option), place)
        for option, place in places.items()
        if (match := re.search(rf"(?<![\w.]){re.escape(option)}(?![\w.]*\w)", message))
        and ("." in option or message[: match.start()] in ("", "unknown option "))
    ]
    return f" ({min(found)[2]})" if found else ""


# ---------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    None, None, f"{key.value!r} is given twice, first in line {seen[key.value]}", key.start_mark
                )
            seen[key.value] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def apply_override(values: dict[str, Any], text: str) -> None:
    """Puts `a.b=c` into nested mappings; `c` is read as YAML."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {text!r} must have the form section.option=value")
    node = values
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {text!r}: {key!r} is an option, not a section")
        node = child
    try:
        node[keys[-1]] = yaml.load(value, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"override {text!r}: the value is not valid YAML ({error.__class__.__name__})") from None


def _read_yaml(path: Path, options: _Options) -> None:
    text = _text(path)
    try:
        values = yaml.load(text, _Loader)
        node = yaml.compose(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: {error.problem or 'not valid YAML'}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if values is None:
        return
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold sections with options, found {values!r}")
    options.values = values
    options.places |= dict(_yaml_places(node, "", str(path), depth=4))


def _yaml_places(node: yaml.Node | None, prefix: str, file: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(node, yaml.MappingNode) and depth:  # a bound on depth, since an alias may hold itself
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield prefix + key.value, f"{file}, line {key.start_mark.line + 1}"
                yield from _yaml_places(value, f"{prefix}{key.value}.", file, depth - 1)


# ---------------------------------------------------------------- gin


@dataclass(frozen=True, slots=True)
class _Macro:
    name: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str


def _gin_parser() -> Any:
    try:
        from gin import config_parser
    except ModuleNotFoundError as error:
        if error.name != "gin":
            raise
        raise ConfigError(
            "a .gin file needs the package gin-config, which is not installed: pip install 'jaxrl[gin]', "
            "or write the options as YAML"
        ) from None
    return config_parser


class _GinFile:
    """Reads a gin file and what it includes into nested values, then puts the macros' values in."""

    def __init__(self, path: Path, options: _Options) -> None:
        self._path, self._options = path, options
        self._parser = _gin_parser()
        self._macros: dict[str, Any] = {}
        self._reading: list[Path] = []

    def read(self) -> None:
        self._read_file(self._path)
        self._options.values = self._resolve(self._options.values, ())

    def _read_file(self, path: Path) -> None:
        text = _text(path)
        if path.resolve() in self._reading:
            raise ConfigError(f"{path}: includes itself")
        self._reading.append(path.resolve())
        try:
            for statement in self._parser.ConfigParser(text, self._delegate()):
                self._take(statement, path, f"{path}, line {statement.location.line_num}")
        except SyntaxError as error:
            where = f", line {error.lineno}" if error.lineno else ""
            raise ConfigError(f"{path}{where}: {_sentence(error.msg)}") from None
        except tokenize.TokenError as error:
            raise ConfigError(f"{path}, line {error.args[1][0]}: {error.args[0]}") from None
        self._reading.pop()

    def _take(self, statement: Any, path: Path, place: str) -> None:
        match statement:
            case self._parser.IncludeStatement():
                beside = path.parent / statement.filename
                self._read_file(beside if beside.exists() else Path(statement.filename))
            case self._parser.BlockDeclaration():
                if statement.scope:
                    raise ConfigError(
                        f"{place}: scopes ({statement.scope}/...) are not supported: options have one value"
                    )
            case self._parser.ImportStatement():
                raise ConfigError(f"{place}: imports are not supported: options are plain values")
            case _ if not statement.arg_name:
                name = "/".join(filter(None, (statement.scope, statement.selector)))
                self._macros[name] = _located(statement.value, place)
            case _ if statement.scope:
                raise ConfigError(f"{place}: scopes ({statement.scope}/...) are not supported: options have one value")
            case _:
                self._bind(f"{statement.selector}.{statement.arg_name}", statement.value, place)

    def _bind(self, option: str, value: Any, place: str) -> None:
        *sections, name = option.split(".")
        node = self._options.values
        for depth, section in enumerate(sections, 1):
            self._options.places.setdefault(".".join(sections[:depth]), place)
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{place}: {option}: {section!r} is an option, not a section")
        node[name] = _located(value, place)
        self._options.places[option] = place

    def _resolve(self, value: Any, using: tuple[str, ...]) -> Any:
        match value:
            case dict():
                return {self._resolve(k, using): self._resolve(v, using) for k, v in value.items()}
            case list() | tuple():
                return [self._resolve(element, using) for element in value]
            case _Macro(name, place):
                if name not in self._macros:
                    raise ConfigError(f"{place}: the macro %{name} is used but never given a value")
                if name in using:
                    raise ConfigError(f"{place}: the macro %{name} is defined by itself")
                return self._resolve(self._macros[name], (*using, name))
            case _:
                return value

    def _delegate(self) -> Any:
        class Delegate(self._parser.ParserDelegate):
            # Nothing is refused here: gin would wrap the exception and rewrite its message.
            def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> _Reference:
                return _Reference(scoped_configurable_name + "()" * evaluate)

            def macro(self, macro_name: str) -> _Macro:
                return _Macro(macro_name)

        return Delegate()


def _located(value: Any, place: str) -> Any:
    """The value, with each macro's place noted; refuses references."""
    match value:
        case dict():
            return {_located(k, place): _located(v, place) for k, v in value.items()}
        case list() | tuple():
            return [_located(element, place) for element in value]
        case _Macro(name):
            return _Macro(name, place)
        case _Reference(name):
            raise ConfigError(f"{place}: the reference @{name} is not supported: options are plain values")
        case _:
            return value


def _sentence(text: str | None) -> str:
    return " ".join((text or "not valid gin").split()).rstrip(".")
