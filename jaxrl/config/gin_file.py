"""A gin file and what it includes, as nested values and the places of its options (the extra `gin`).

An option's path is the name of its binding, so options are written as the docs name them::

    include 'base.gin'                 # beside the including file, or relative to the working directory
    learning_rate = 1e-5               # a macro
    actor.optim.lr = %learning_rate
    rollout:                           # a block
      n = 4
    data.task_config = {'min_terms': 2}

As in gin, a later binding replaces an earlier one, also across includes, and the last value of a macro wins.
Departures: gin's parser reads the file without its registry, so loading neither needs nor changes global state. Only
options can be configured, so references (`@name`), scopes (`a/b.c`) and imports are refused. An unused macro with the
name of a section or an option is refused too.
"""

from __future__ import annotations

import re
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.config.inputs import ConfigError, Options, one_line, read_text, reading
from jaxrl.config.mapping import by_path
from jaxrl.config.options import Config
from jaxrl.schema.declared import shown


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


class GinFile:
    """Reads a gin file and what it includes into nested values, then puts the macros' values in."""

    def __init__(self, path: Path, options: Options) -> None:
        self._path, self._options = path, options
        self._parser = _gin_parser()
        self._macros: dict[str, tuple[Any, str]] = {}  # value and place
        self._used: set[str] = set()
        self._reading: list[Path] = []

    def read(self) -> None:
        with reading(self._path):
            self._read_file(self._path)
            self._options.values = self._resolve(self._options.values, ())
        self._refuse_options_without_section()

    def _refuse_options_without_section(self) -> None:
        """`rollout = 3` and `n = 3` are macros to gin: nothing would come of them."""
        by_last_name = {path.rpartition(".")[2]: path for path in by_path()}
        for name, (_, place) in self._macros.items():
            if name in Config.model_fields:
                raise ConfigError(
                    f"{place}: {name} is a section: give its options one by one, as {name}.option = value"
                )
            if name in by_last_name and name not in self._used:
                raise ConfigError(
                    f"{place}: {name} is a macro that nothing uses, since it names no section: did you mean "
                    f"{by_last_name[name]}?"
                )

    def _read_file(self, path: Path) -> None:
        text = read_text(path)
        if path.resolve() in self._reading:
            raise ConfigError(f"{path}: includes itself")
        self._reading.append(path.resolve())
        try:
            for statement in self._parser.ConfigParser(text, self._delegate()):
                self._take(statement, path, f"{path}, line {statement.location.line_num}")
        except SyntaxError as error:
            where = f", line {error.lineno}" if error.lineno else ""
            raise ConfigError(f"{path}{where}: {_sentence(error.msg)}") from None
        except TypeError as error:  # a mapping with a list as a name
            raise ConfigError(f"{path}: not valid gin ({error})") from None
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
                self._macros[name] = _located(statement.value, place), place
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
                return {k: self._resolve(v, using) for k, v in value.items()}
            case list() | tuple():
                return [self._resolve(element, using) for element in value]
            case _Macro(name, place):
                if name not in self._macros:
                    raise ConfigError(f"{place}: the macro %{name} is used but never given a value")
                if name in using:
                    raise ConfigError(f"{place}: the macro %{name} is defined by itself")
                self._used.add(name)
                return self._resolve(self._macros[name][0], (*using, name))
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
            if any(isinstance(key, _Macro | _Reference) for key in value):
                raise ConfigError(f"{place}: a name in a mapping must be text, not a macro or a reference")
            return {k: _located(v, place) for k, v in value.items()}
        case list() | tuple():
            return [_located(element, place) for element in value]
        case _Macro(name):
            return _Macro(name, place)
        case _Reference(name):
            raise ConfigError(f"{place}: the reference @{name} is not supported: options are plain values")
        case _:
            return value


def _sentence(message: str | None) -> str:
    """The message of gin's parser, without the names of Python objects."""
    token = re.search(r"malformed node or string.*Failed to parse token '(.*)'", message or "", re.DOTALL)
    if token is not None:
        case = ", and true is written True" if token[1] in ("true", "false") else ""
        return f"{shown(token[1])} is no value: text must be in quotation marks{case}"
    return one_line(message or "not valid gin")
