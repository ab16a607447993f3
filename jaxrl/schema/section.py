"""The base of all sections of the configuration: pydantic models that are strict, frozen and without unknown names.

An option is `name: Annotated[type, bounds, "what it is, with its unit"] = default`; the text is the description in the
JSON schema as well.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator
from typing import Any, Self, TypeVar

from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from jaxrl.schema.declared import MAX_FLOAT, MAX_INT, Cap, Names, Or, is_url, shown

JsonObject = dict[str, JsonValue]
"""Text, numbers, lists and mappings by names: what config.yaml and run.json can hold."""
UNIONS = (typing.Union, types.UnionType)
_Mark = TypeVar("_Mark")


class Section(BaseModel):
    """Options with their rules; `config` is the complete configuration (`jaxrl.config.Config`) around them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = mark(field, str)

    def replace(self, **changes: Any) -> Self:
        """A copy with other values, which are not checked."""
        assert changes.keys() <= type(self).model_fields.keys(), f"{type(self).__name__} has no such options: {changes}"
        return self.model_copy(update=changes)

    def problems(self, config: Any) -> Iterator[str]:
        """Why the options cannot be combined, a sentence each."""
        yield from ()

    def excludes_hosts(self, config: Any) -> tuple[str, str] | None:
        """An option that excludes several hosts, with the reason, or None."""
        return None

    def unread(self, config: Any) -> Iterator[tuple[frozenset[str], str]]:
        """Options of the section that nothing reads, by name, and why; asked unless an option `enable` is off."""
        yield from ()

    @field_validator("*", mode="before")
    @classmethod
    def _as_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """`option=` on the command line and `section:` in YAML are empty, and one text may stand for a list of one."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if value is None and kind is str:
            return ""
        if value is None and is_section(kind):
            return {}
        if isinstance(value, str) and typing.get_origin(kind) is list and typing.get_args(kind)[0] not in (int, float):
            return [value]
        return value

    @field_validator("*")
    @classmethod
    def _fits(cls, value: Any, info: ValidationInfo) -> Any:
        """Whatever a declaration says, a float is finite as a float32, and an integer has 32 bits, but for sentinels
        and what a cap allows; a path is no URL."""
        field = cls.model_fields[info.field_name or ""]
        match value:
            case float() if MAX_FLOAT < abs(value) < math.inf:
                raise ValueError(f"must be at most {MAX_FLOAT:.3g} (the largest float32), found {shown(value)}")
            case int() if abs(value) > MAX_INT and mark(field, Cap) is None:
                raise ValueError(f"must be at most {MAX_INT} (the largest 32-bit integer), found {shown(value)}")
            case str() | list():
                for path in [value] if isinstance(value, str) else value:
                    if (names := mark(field, Names)) is not None:
                        _refuse_no_path(path, names)
        return value


def _refuse_no_path(path: str, names: Names) -> None:
    if is_url(path):
        is_new = names.what == "new folder"
        advice = "give one on this machine" if is_new else f"download it and give the {names.what}"
        raise ValueError(f"is a URL ({path}): {advice}")


def is_section(kind: Any) -> typing.TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


def named_section(field: FieldInfo) -> type[Section] | None:
    """The sections' class, for a mapping from user-chosen names to sections."""
    of_values = typing.get_args(field.annotation)[1:]
    return of_values[0] if of_values and is_section(of_values[0]) else None


def walk(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every option under a section with its path, in the order of declaration."""
    for name, field in section.model_fields.items():
        if is_section(field.annotation):
            yield from walk(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def mark(field: FieldInfo, kind: type[_Mark]) -> _Mark | None:
    """The mark of a kind in an option's annotation, as its `Cap`."""
    return next((each for each in _marks(field) if isinstance(each, kind)), None)


def _marks(field: FieldInfo) -> Iterator[Any]:
    """Marks of the option itself, and of the number in a union such as `int | Literal["auto"]`."""
    yield from field.metadata
    if typing.get_origin(field.annotation) in UNIONS:
        for arm in typing.get_args(field.annotation):
            yield from getattr(arm, "__metadata__", ())


def allowed_text(field: FieldInfo) -> str:
    """What the value of an option must be, its cap aside: `in [0.001, 100], or 0 for greedy`; empty: anything."""
    bounds: dict[str, Any] = {}
    for each in _marks(field):
        if isinstance(each, Ge | Gt | Le | Lt | Interval):
            limits = ((name, getattr(each, name, None)) for name in ("gt", "ge", "lt", "le"))
            bounds |= {name: limit for name, limit in limits if limit is not None}
    if not bounds:
        return ""
    other = mark(field, Or)
    return bounds_text(Interval(**bounds)) + (f", or {other.value:g} for {other.meaning}" if other else "")


def bounds_text(bounds: Interval) -> str:
    """What a value must be: `at least 1`, `in (0, 1]`."""
    low = bounds.gt if bounds.ge is None else bounds.ge
    high = bounds.lt if bounds.le is None else bounds.le
    if high is None:
        return f"{'above' if bounds.ge is None else 'at least'} {low}"
    if low is None:
        return f"{'below' if bounds.le is None else 'at most'} {high}"
    return f"in {'(' if bounds.ge is None else '['}{low}, {high}{')' if bounds.le is None else ']'}"
