"""What a section of the configuration declares about its options, read from the annotations of its fields.

Purpose: `declared(section)` and `walk(section)`; no other module reads the annotations.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from annotated_types import Ge, Gt, Interval, Le, Lt


@dataclass(frozen=True, slots=True)
class Declared:
    """One field of a section.

    Attributes:
      type: the field's type, without bounds and text: an option's type, or the class of a nested section.
      bounds: of an option's value; None: any value of the type.
      doc: an option's text; a section has a docstring instead.
    """

    type: Any
    bounds: Interval | None = None
    doc: str = ""

    @property
    def is_section(self) -> bool:
        return dataclasses.is_dataclass(self.type)


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


def _declared(hint: Any) -> Declared:
    if typing.get_origin(hint) is not Annotated:
        return Declared(hint)
    base, *marks = typing.get_args(hint)
    texts = [mark for mark in marks if isinstance(mark, str)]
    assert len(texts) == 1, f"{hint} must have one text"
    limits: dict[str, Any] = {}
    for mark in marks:
        if isinstance(mark, Ge | Gt | Le | Lt | Interval):
            limits |= {key: value for key, value in dataclasses.asdict(mark).items() if value is not None}
    return Declared(base, Interval(**limits) if limits else None, texts[0])
