"""Every option as text, for the option reference."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic.fields import FieldInfo

from jaxrl.config.mapping import by_path, type_text
from jaxrl.config.options import Config
from jaxrl.schema.declared import Cap, Names
from jaxrl.schema.section import UNIONS, Section, allowed_text, is_section, mark, named_section, walk


@dataclass(frozen=True, slots=True)
class OptionDoc:
    """The option reference's entry for one option; texts may be empty."""

    path: str  # rollout.n
    type: str  # whole number; one of up, both; list of text
    default: Any
    bounds: str  # at least 1
    doc: str
    cap: str = ""  # the largest value of a size, with the reason: 65536 (...)
    choices: tuple[str, ...] = ()  # names that the value, or an element of it, may be; of a switch, true and false
    names: str = ""  # of a path: file, folder or new folder

    @property
    def allowed(self) -> str:
        """Its possible values, in a few words: `whole number, at least 1`, `one of up, both`."""
        kind = self.names if self.names and self.type == "text" else self.type
        return f"{kind}, {self.bounds}" if self.bounds else kind


@cache
def options() -> tuple[OptionDoc, ...]:
    """All options, in the order of declaration; those of sections with names of the user's as
    `reward.domains.NAME.weight`, behind the mapping that holds them."""
    found: list[OptionDoc] = []
    for path, option in by_path().items():
        found.append(_doc(path, option))
        if (inner := named_section(option)) is not None:
            found += [_doc(name, each) for name, each in walk(inner, f"{path}.NAME.")]
    return tuple(found)


def _doc(path: str, option: FieldInfo) -> OptionDoc:
    cap, names = mark(option, Cap), mark(option, Names)
    return OptionDoc(
        path,
        type_text(option.annotation),
        option.default,
        allowed_text(option),
        option.description or "",
        f"{cap.most} ({cap.why})" if cap else "",
        _choices(option.annotation),
        names.what if names else "",
    )


def _choices(hint: Any) -> tuple[str, ...]:
    if hint is bool:
        return "true", "false"
    if typing.get_origin(hint) is list:
        return _choices(typing.get_args(hint)[0])
    arms = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
    return tuple(name for arm in arms if typing.get_origin(arm) is Literal for name in typing.get_args(arm))


def sections() -> dict[str, str]:
    """A description of each section, by its path (`rollout.layout`), outer sections before those inside them."""
    return dict(_sections(Config, ""))


def _sections(section: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        if is_section(field.annotation):
            yield prefix + name, field.annotation.__doc__ or ""
            yield from _sections(field.annotation, f"{prefix}{name}.")
        elif (inner := named_section(field)) is not None:
            yield f"{prefix}{name}.NAME", inner.__doc__ or ""
            yield from _sections(inner, f"{prefix}{name}.NAME.")
