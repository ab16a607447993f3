"""Every option as text, for the option reference."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jaxrl.config.declared import Declared, allowed_text, declared, number_or_name, walk
from jaxrl.config.mapping import flatten, to_mapping
from jaxrl.config.options import Config


@dataclass(frozen=True, slots=True)
class OptionDoc:
    """What the option reference says of one option.

    Attributes:
      path: `rollout.n`.
      type: `int`, `one of up, both`, `list of str`.
      default: its value.
      bounds: `at least 1`; empty where there are none.
      cap: of a size, the most that it may be, with the reason: `65536 (...)`; empty where there is none.
      doc: what it is, with its unit.
    """

    path: str
    type: str
    default: Any
    bounds: str
    doc: str
    cap: str = ""


def options() -> list[OptionDoc]:
    """All options, in the order of declaration; those of sections with names of the user's as
    `reward.domains.NAME.weight`, behind the mapping that holds them."""
    defaults = flatten(to_mapping(Config()))
    found: list[OptionDoc] = []
    for path, option in walk(Config):
        found.append(_doc(path, option, defaults[path]))
        if option.named_section is not None:
            values = dataclasses.asdict(option.named_section())
            found += [_doc(f"{path}.NAME.{name}", inner, values[name]) for name, inner in walk(option.named_section)]
    return found


def _doc(path: str, option: Declared, default: Any) -> OptionDoc:
    return OptionDoc(
        path,
        _type_text(option.type),
        default,
        allowed_text(option),
        option.doc,
        f"{option.cap.most} ({option.cap.why})" if option.cap else "",
    )


def sections() -> dict[str, str]:
    """What each section is about, by its path (`rollout.layout`), outer sections before those inside them."""
    return dict(_sections(Config, ""))


def _sections(section: type, prefix: str) -> Iterator[tuple[str, str]]:
    for name, found in declared(section).items():
        if found.is_section:
            yield prefix + name, found.type.__doc__
            yield from _sections(found.type, f"{prefix}{name}.")
        elif found.named_section is not None:
            yield f"{prefix}{name}.NAME", found.named_section.__doc__ or ""


def _type_text(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin in (typing.Union, types.UnionType):
        number, names = number_or_name(hint)
        return f"{number.__name__}, or {' or '.join(names)}"
    if origin is list:
        return f"list of {_type_text(arguments[0])}"
    if origin is dict:
        return "mapping of sections" if dataclasses.is_dataclass(arguments[1]) else "mapping"
    return hint.__name__
