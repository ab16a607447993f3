"""Configuration files: YAML or gin, plus overrides from the command line, to one checked `Config`.

Each problem is a sentence, with the places that gave the options it names: file and line, or the command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.config.checks import without_effect
from jaxrl.config.inputs import ConfigError, Options, read_text, refuse_unprintable
from jaxrl.config.mapping import from_mapping, is_section_path, is_text, unchecked
from jaxrl.config.options import Config
from jaxrl.config.yaml_text import parse_yaml, yaml_places
from jaxrl.schema.declared import shown
from jaxrl.schema.hidden import hider

_COMMAND_LINE = "command line: "
OWN = Path(__file__).resolve().parents[1] / "configs"
"""The folder of the configurations that come with jaxrl."""


def load(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
    command: str = "",
    *,
    is_whole: bool = True,
) -> Config:
    """The checked config of a file (`.yaml`, `.yml` or `.gin`; None: the defaults) with overrides `a.b=c` on top.

    Args:
      path: one under `configs/` that is not there may be one of those that come with jaxrl.
      say: called with options that have no effect beside the others, and with the file where it is not the one named.
      command: that reads it, as in `jaxrl.config.checks.as_read`.
      is_whole: whether these are all options; if not, each is checked, but no rule between them.

    Raises ConfigError with all problems. If the file or an override cannot be read, the rest is still checked.
    """
    options, unread = Options(), list[str]()
    try:
        options = options if path is None else read(Path(path), say)
    except ValueError as error:
        unread += getattr(error, "problems", [str(error)])
    for text in overrides:
        try:
            overridden = apply_override(options.values, text)
        except ValueError as error:
            unread += getattr(error, "problems", [str(error)])
            continue
        text = hider()(text)
        _note_place(options, overridden, f"{_COMMAND_LINE}{text if len(text) <= 100 else text[:100] + '...'}")
    if is_whole and not unread:
        return checked(options, say, command)
    try:
        config = unchecked(options.values)
    except ConfigError as error:
        raise ConfigError(*unread, *_placed(error, options)) from None
    if unread:
        raise ConfigError(*unread)
    return config


def put(options: Options, path: str, value: Any, place: str) -> None:
    """Replaces an option's value, or those in a section that a mapping names. `place`: for errors."""
    keys = path.split(".")
    if not all(keys):
        raise ConfigError(f"{place}: {shown(path)} must have the form section.option")
    _merge(_section_of(options.values, keys, place), keys[-1], value, path)
    _note_place(options, path, place)


def _note_place(options: Options, path: str, place: str) -> None:
    gone = f"{path}.", f"{path}["
    kept = (each for each in options.places.items() if each[0] != path and not each[0].startswith(gone))
    options.places = dict(kept)
    options.places[path] = place
    for end in (i for i, character in enumerate(path) if character == "."):
        options.places.setdefault(path[:end], place)


def load_recorded(path: Path, overrides: Sequence[str] = (), say: Callable[[str], None] = lambda text: None) -> Config:
    """The same of a run's own file. `say` is called with options that have no effect and stand in an override: nobody
    wrote the others."""
    return load(path, overrides, lambda text: say(text) if _COMMAND_LINE in text else None)


def checked(options: Options, say: Callable[[str], None] = lambda text: None, command: str = "") -> Config:
    """The configuration that options make; arguments and errors are those of `load`."""
    try:
        config = from_mapping(options.values, command)
    except ConfigError as error:
        raise ConfigError(*_placed(error, options)) from None
    for text in without_effect(unchecked(options.values), command):
        say(f"{text}{_place(text, options.places, most=1)}")
    return config


def _placed(error: ConfigError, options: Options) -> Iterator[str]:
    return (hider()(f"{problem}{_place(problem, options.places)}") for problem in error.problems)


def _found(path: Path, say: Callable[[str], None]) -> Path:
    """A configuration file; of those that come with jaxrl where nothing else is there, as after an installation."""
    if path.exists() or path.parts[:1] != (OWN.name,):
        return path
    own = OWN.joinpath(*path.parts[1:])
    if own.is_file():
        say(f"{path} is not here: reading the one that comes with jaxrl, {own}")
        return own
    names = sorted(file.relative_to(OWN.parent).as_posix() for file in OWN.rglob("*.yaml"))
    raise ConfigError(f"{path}: no such file; with jaxrl come {', '.join(names)}")


def read(path: Path, say: Callable[[str], None] = lambda text: None) -> Options:
    """The options of a file, not checked yet. `say`: called with the file where it is not the one named."""
    path, options = _found(path, say), Options()
    if path.suffix == ".gin":
        from jaxrl.config.gin_file import GinFile

        GinFile(path, options).read()
        return options
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path}: a config file must end in .yaml, .yml, .gin")
    values, node = parse_yaml(read_text(path), str(path))
    if values is not None:
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise ConfigError(f"{path}: must hold sections with options, found {shown(values)}")
        options.values = values
        options.places |= dict(yaml_places(node, "", str(path)))
    return options


def apply_override(values: dict[str, Any], text: str) -> str:
    """Puts `a.b=c` into nested mappings. Returns the option's path.

    `c` is read as YAML, except for a text option, which takes it verbatim unless it is in quotation marks or `null`.
    (`{question}` would be a mapping, ` # ` a comment, `2026` a number.) A mapping for a section changes the options
    that it names, and leaves the others as they are.
    """
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    said = f"override {shown(text)}"
    if not equals or not all(keys):
        raise ConfigError(f"{said} must have the form section.option=value")
    if path.startswith("+"):  # of Hydra, where it adds a name that the configuration has not
        raise ConfigError(f"{said}: there is no + here, since every option has a default: write {text.lstrip('+')}")
    refuse_unprintable(text, said)
    node = _section_of(values, keys, said)
    parsed: Any = value.strip()
    if not is_text(path.strip()) or parsed.startswith(("'", '"')) or parsed in ("", "~", "null"):
        parsed, _ = parse_yaml(value, said, lines=False)
    _merge(node, keys[-1], parsed, path.strip())
    return path.strip()


def _section_of(values: dict[str, Any], keys: Sequence[str], said: str) -> dict[str, Any]:
    """The mapping that holds the option at these keys, made if it is missing."""
    node = values
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if child is None:  # a section without options
            child = node[key] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{said}: {key!r} is an option, not a section")
        node = child
    return node


def _merge(node: dict[str, Any], key: str, value: Any, path: str) -> None:
    if isinstance(value, dict) and isinstance(node.get(key), dict) and is_section_path(path):
        for name, element in value.items():
            _merge(node[key], name, element, f"{path}.{name}")
    else:
        node[key] = value


def _place(problem: str, places: Mapping[str, str], most: int = 3) -> str:
    """` (file, line 3; command line: a.b=c)`: where the options that a problem names were given, each place once.

    A name without a dot counts only where the problem begins with it: further on it may be an ordinary word. For an
    unknown option only its own place counts: other names in the sentence are suggestions.
    """
    said = problem.removeprefix("unknown option ")
    first = re.split(r"[ =]", said, maxsplit=1)[0].rstrip(":")
    others = re.findall(r"\w+(?:\.\w+|\[\d+\])+", said) if said == problem else []
    named = [_above(first, places), *(places.get(name, "") for name in others)]
    named = list(dict.fromkeys(filter(None, named)))[:most]
    given = [place.removeprefix(_COMMAND_LINE) for place in named if place.startswith(_COMMAND_LINE)]
    named = [place for place in named if not place.startswith(_COMMAND_LINE)]
    named += [_COMMAND_LINE + " ".join(given)] if given else []
    return f" ({'; '.join(named)})" if named else ""


def _above(name: str, places: Mapping[str, str]) -> str:
    """The place of an option, or of what holds it: `a.b` of `a.b.c` or `a.b[2]`; empty: none."""
    while name and name not in places:
        name = name[: max(name.rfind("."), name.rfind("["), 0)]
    return places.get(name, "")
