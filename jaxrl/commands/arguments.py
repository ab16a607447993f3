"""Arguments of the command line: their types with bounds, and a sentence for each mistake.

A sentence begins with the command and the option: `generate: --max-tokens must be a whole number of at least 1, found
0`.

Only the standard library is imported at the top, so that help is immediate.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

MAX_TOKENS = 2**20  # the longest context of any model
MAX_FACTOR = 100  # a round would launch that many batches at once
OVERRIDE = "section.option=value"
_MAX_SHOWN = 60  # characters of a value that a sentence shows
_CONFIG_FILES = (".yaml", ".yml", ".gin")


class Parser(argparse.ArgumentParser):
    """Raises ValueError with a sentence about a mistake, where argparse ends the process."""

    @property
    def command(self) -> str:
        """`train` of `jaxrl train`."""
        return self.prog.partition(" ")[2]

    def error(self, message: str) -> NoReturn:
        of_option = re.sub("^argument (-[^:/]*)[^:]*: ", r"\1 ", message)
        raise ValueError(f"{self.command}: {of_option}")


def parse(parser: Parser, commands: Mapping[str, Parser], arguments: Sequence[str]) -> argparse.Namespace:
    """The options of one command. Values after options count as well: `a=1 --config x.yaml b=2`. Raises ValueError."""
    first = next((text for text in arguments if not text.startswith("-")), "")
    if first not in commands and not {"-h", "--help", "--version"} & set(arguments):
        if first.endswith(_CONFIG_FILES):
            raise ValueError(f"{shown(first)} is not a command: did you mean train --config {first}?")
        near = nearest(first, commands)
        found = f"unknown command {shown(first)}{near}" if first else "no command is given"
        raise ValueError(found if near else f"{found}: give one of {', '.join(commands)}")
    options, extra = parser.parse_known_args(arguments)
    sub = commands[options.command]
    unknown = next((text for text in extra if text.startswith("-") and text != "-"), None)
    if unknown is not None:
        raise ValueError(_unknown(sub, unknown, arguments))
    many = next((action.dest for action in sub._actions if action.nargs == "*"), None)
    if many is not None:
        setattr(options, many, [*(getattr(options, many) or ()), *extra])
    elif extra:
        raise ValueError(f"{sub.command}: {shown(extra[0])} is one argument too many")
    if _takes(sub, "config") and options.config is None:
        file = next((text for text in options.overrides if "=" not in text and text.endswith(_CONFIG_FILES)), None)
        if file is not None:
            rule = "must have the form section.option=value"
            raise ValueError(f"{sub.command}: override {shown(file)} {rule}: did you mean --config {file}?")
    return options


def _unknown(sub: Parser, text: str, arguments: Sequence[str]) -> str:
    name, _, value = text.partition("=")
    said = f"{sub.command}: unknown option {shown(name)}"
    if name.startswith("--") and "." in name and _takes(sub, "overrides"):
        following = [*arguments, "-"][list(arguments).index(text) + 1]
        value = value or ("VALUE" if following.startswith("-") else following)
        return f"{said}: write {name.lstrip('-')}={value}"
    if name in ("--config-path", "--config-name", "--config-dir"):  # of Hydra
        return f"{said}: --config takes a file's whole path"
    return said + nearest(name, [each for action in sub._actions for each in action.option_strings])


def _takes(command: Parser, name: str) -> bool:
    return any(action.dest == name for action in command._actions)


def add(command: Any, name: str, kind: Callable[[str], Any] | None, text: str | None = None, **settings: Any) -> None:
    command.add_argument(name, type=kind, help=text, **settings)


def add_switch(command: Parser, name: str, text: str) -> None:
    command.add_argument(name, action="store_true", help=text)


def add_choice(command: Parser, name: str, *words: str, text: str | None = None, **settings: Any) -> None:
    add(command, name, one_of(*words), text, metavar=f"{{{','.join(words)}}}", **settings)


def add_dtype(command: Parser, *names: str, default: str) -> None:
    add_choice(command, "--dtype", *names, text=f"number format of the weights ({default})", default=default)


def add_overrides(command: Parser, text: str) -> None:
    add(command, "overrides", None, text, nargs="*", default=[], metavar=OVERRIDE)


# -- types of arguments: each reads a text, or raises ArgumentTypeError with a sentence about it ----------------------


def whole(least: int, most: int) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        return int(_bounded(text, int, least, most, f"a whole number from {least} to {most}"))

    return parsed


def device_sizes(text: str) -> tuple[int, float]:
    """`8x80`: eight devices with 80 GiB each."""
    match = re.fullmatch(r"(\d{1,5})[x×](\d+(?:\.\d+)?)", text)
    if match is None or not int(match[1]) or not float(match[2]):
        raise argparse.ArgumentTypeError(f"must be devices x GiB of each, as 8x80, found {shown(text)}")
    return int(match[1]), float(match[2])


def wholes(least: int, most: int) -> Callable[[str], tuple[int, ...]]:
    """Whole numbers within bounds, with commas between them; each once, ascending."""

    def parsed(text: str) -> tuple[int, ...]:
        return tuple(sorted(set(map(whole(least, most), text.split(",")))))

    return parsed


def seed(text: str) -> int:
    from jaxrl.schema.declared import MAX_SEED

    return whole(0, MAX_SEED)(text)


def count(text: str) -> int:
    from jaxrl.schema.declared import MAX_INT

    return whole(0, MAX_INT)(text)


def device_count(least: int) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        from jaxrl.schema.devices import MAX_DEVICES

        return whole(least, int(MAX_DEVICES.most))(text)

    return parsed


def number(least: float, most: float, *, above: bool = False, below: bool = False) -> Callable[[str], float]:
    """`above`: `least` itself is too small; `below`: `most` is too large."""

    def parsed(text: str) -> float:
        smallest = math.nextafter(least, math.inf) if above else least
        largest = math.nextafter(most, -math.inf) if below else most
        bounds = f"from {least:g} to {most:g}"
        if above or below:
            bounds = f"{'above' if above else 'of at least'} {least:g} and {'below' if below else 'at most'} {most:g}"
        return _bounded(text, float, smallest, largest, f"a number {bounds}")

    return parsed


def _bounded(text: str, kind: Callable[[str], float], least: float, most: float, rule: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {rule}, found {shown(text)}") from None
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"must be {rule}, found {shown(text)[1:-1]}")
    return value


def factors(text: str) -> tuple[float, ...]:
    """By how many times more is launched; numbers with commas between them."""
    return tuple(map(number(1, MAX_FACTOR), text.split(",")))


def one_of(*choices: str) -> Callable[[str], str]:
    def parsed(text: str) -> str:
        if text not in choices:
            near = nearest(text, choices)
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(choices)}, found {shown(text)}{near}")
        return text

    return parsed


def filled(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(f"must not be empty, found {shown(text)}")
    return text


def stop_string(text: str) -> str:
    """Text that a response can hold; a blank is one."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return utf8(text)


def utf8(text: str) -> str:
    """Bytes of another encoding come from the shell as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"must be UTF-8 text, found {shown(text[error.start])} in it") from None
    return text


def json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(utf8(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, found {shown(text)} ({error})") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, found {shown(text)}")
    return found


def written(text: str) -> str:
    """A file to write. That it cannot be is found before the work whose result it is for."""
    from jaxrl.record.files import file_problem

    if (problem := file_problem(filled(text))) is not None:
        raise argparse.ArgumentTypeError(problem)
    return text


def nearest(word: str, known: Iterable[str]) -> str:
    """`: did you mean train?`, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {near[0]}?" if near else ""


def shown(value: str) -> str:
    """A value as a sentence shows it: quoted, and cut where it is long."""
    return repr(value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + "…")
