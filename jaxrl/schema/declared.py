"""What a section of the configuration declares about its options, read from the annotations of its fields."""

from __future__ import annotations

import dataclasses
import re
import reprlib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval, Le, Lt

from jaxrl.schema.hidden import hider

MAX_INT = 2**31 - 1  # counts and token ids become 32-bit integers on the devices
MAX_SEED = 2**32 - 1  # as of numpy, torch and grain's shuffle
MAX_FLOAT = 3.4028234663852886e38  # the largest float32


@dataclass(frozen=True, slots=True)
class Cap:
    """The largest value of a size, and what goes wrong beyond it."""

    most: float
    why: str


SEED = Cap(MAX_SEED, "the largest unsigned 32-bit integer")


@dataclass(frozen=True, slots=True)
class Or:
    """A sentinel: a value outside the bounds with a meaning of its own, as `Or(0, "off")`."""

    value: float
    meaning: str


@dataclass(frozen=True, slots=True)
class Names:
    """The kind of path that an option's text is; a new folder is one that a run may make."""

    what: Literal["file", "folder", "new folder"]


class Checked:
    """A section with rules of its own; `config` is the whole configuration (`jaxrl.config.Config`) around it."""

    def problem(self, config: Any) -> str | None:
        """Why the options cannot be combined, as a sentence; None if they can."""
        return None

    def excludes_hosts(self, config: Any) -> tuple[str, str] | None:
        """An option that excludes several hosts, and why; None if there is none."""
        return None

    def unread(self, config: Any) -> Iterator[tuple[frozenset[str], str]]:
        """Options of the section that nothing reads, by name, and why; asked unless an option `enable` is off."""
        yield from ()


@dataclass(frozen=True, slots=True)
class Declared:
    """One field of a section: an option, or a nested section."""

    type: Any  # without bounds and text: an option's type, or the class of a nested section
    bounds: Interval | None = None
    doc: str = ""  # an option's text; a section has a docstring instead
    cap: Cap | None = None
    other: Or | None = None
    names: Literal["file", "folder", "new folder", ""] = ""  # empty: the value is no path

    @property
    def is_section(self) -> bool:
        return dataclasses.is_dataclass(self.type)

    @property
    def holds_text(self) -> bool:
        return self.type is str or typing.get_origin(self.type) is Literal

    @property
    def named_section(self) -> type | None:
        """Of a mapping from names to sections: the class of those."""
        item = typing.get_args(self.type)[1] if typing.get_origin(self.type) is dict else None
        return item if dataclasses.is_dataclass(item) and isinstance(item, type) else None


@cache
def declared(section: type) -> Mapping[str, Declared]:
    """The fields of a section by name, in their order."""
    hints = typing.get_type_hints(section, include_extras=True)
    return {name: _declared(hint) for name, hint in hints.items()}


def walk(section: type, prefix: str = "") -> Iterator[tuple[str, Declared]]:
    """Every option under a section with its path, in the order of declaration."""
    for name, found in declared(section).items():
        if found.is_section:
            yield from walk(found.type, f"{prefix}{name}.")
        else:
            yield prefix + name, found


def number_or_name(hint: Any) -> tuple[type, tuple[str, ...]]:
    """Of `int | Literal["auto"]`: the type of numbers, and the names that may stand for one."""
    number, names = typing.get_args(hint)
    return number, typing.get_args(names)


WORDS: Mapping[type, str] = {str: "text", bool: "true or false", int: "whole number", float: "number"}
"""What a value of a type is called where users read it."""


def a_value(kind: type) -> str:
    """What an option's value must be, within a sentence: `a whole number`, `true or false`."""
    return f"a {WORDS[kind]}" if kind in (int, float) else WORDS[kind]


def is_within(value: Any, bounds: Interval) -> bool:
    """Whether a value keeps its bounds; a NaN never does."""
    return (
        (bounds.ge is None or value >= bounds.ge)
        and (bounds.gt is None or value > bounds.gt)
        and (bounds.le is None or value <= bounds.le)
        and (bounds.lt is None or value < bounds.lt)
    )


def bounds_text(bounds: Interval) -> str:
    """What a value must be: `at least 1`, `in (0, 1]`."""
    low = bounds.gt if bounds.ge is None else bounds.ge
    high = bounds.lt if bounds.le is None else bounds.le
    if high is None:
        return f"{'above' if bounds.ge is None else 'at least'} {low}"
    if low is None:
        return f"{'below' if bounds.le is None else 'at most'} {high}"
    return f"in {'(' if bounds.ge is None else '['}{low}, {high}{')' if bounds.le is None else ']'}"


def allowed_text(option: Declared) -> str:
    """What the value of an option must be, its cap aside: `in [0.001, 100], or 0 for greedy`; empty: anything."""
    if option.bounds is None:
        return ""
    other = f", or {option.other.value:g} for {option.other.meaning}" if option.other else ""
    return bounds_text(option.bounds) + other


def number_problem(name: str, value: int | float, option: Declared) -> str | None:
    """Why a number cannot be an option's value, as a sentence that begins with `name`; None if it can.

    Whatever a declaration says, a float is finite as a float32, and an integer has 32 bits, but for `Or` values and
    what a cap allows.
    """
    if option.other is not None and value == option.other.value:
        return None
    if option.bounds is not None and not is_within(value, option.bounds):
        return f"{name} must be {allowed_text(option)}, found {shown(value)}"
    if option.cap is not None and value > option.cap.most:
        return f"{name} must be at most {option.cap.most} ({option.cap.why}), found {shown(value)}"
    if isinstance(value, float) and not abs(value) <= MAX_FLOAT:
        return f"{name} must be a finite number (at most {MAX_FLOAT:.3g}, the largest float32), found {shown(value)}"
    if option.cap is None and isinstance(value, int) and not -MAX_INT <= value <= MAX_INT:
        return f"{name} must be at most {MAX_INT} (the largest 32-bit integer), found {shown(value)}"
    return None


def is_url(text: str) -> bool:
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text) is not None


def text_problem(name: str, value: str, option: Declared) -> str | None:
    """Why a text cannot be an option's value, as a sentence that begins with `name`; None if it can."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"{name} holds {value[error.start]!a}, which is no character, so that it cannot be written as UTF-8"
    if not option.names:
        return None
    if is_url(value):
        is_new = option.names == "new folder"
        advice = "give one on this machine" if is_new else f"download it and give the {option.names}"
        return f"{name}: {value} is a URL; {advice}"
    if "\0" in value:
        return f"{name} must be a path, found a NUL character in {shown(value)}"
    return None


class _Short(reprlib.Repr):
    """`repr`, cut where a value is long, wide or deep."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 3, 8, 8, 8

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(hider()(x), level)

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 256:  # Python refuses to print thousands of digits
            return f"a number of {x.bit_length()} bits"
        return repr(x)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """In the order that it has; reprlib sorts the names."""
        if x and level <= 0:
            return "{...}"
        parts = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxdict)]
        return "{" + ", ".join([*parts, *(["..."] if len(x) > self.maxdict else [])]) + "}"


def shown(value: Any) -> str:
    """A value for a sentence: its `repr`, of bounded length."""
    return _Short().repr(value)


def _declared(hint: Any) -> Declared:
    if typing.get_origin(hint) is not Annotated:
        return Declared(hint)
    base, *marks = typing.get_args(hint)
    texts = [mark for mark in marks if isinstance(mark, str)]
    assert len(texts) == 1, f"{hint} must have one text"
    limits: dict[str, Any] = {}
    cap, other, names = None, None, ""
    for mark in marks:
        match mark:
            case Ge() | Gt() | Le() | Lt() | Interval():
                limits |= {key: value for key, value in dataclasses.asdict(mark).items() if value is not None}
            case Cap():
                cap = mark
            case Or():
                other = mark
            case Names(what):
                names = what
            case _:
                assert isinstance(mark, str), f"{mark!r} says nothing about an option"
    return Declared(base, Interval(**limits) if limits else None, texts[0], cap, other, names)
