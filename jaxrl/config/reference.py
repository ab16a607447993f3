"""Every option as text, for the option reference."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jaxrl.config.mapping import flatten, to_mapping
from jaxrl.config.options import Config
from jaxrl.schema.declared import WORDS, Declared, allowed_text, declared, number_or_name, walk


@dataclass(frozen=True, slots=True)
class OptionDoc:
    """What the option reference says of one option; a text is empty where there is nothing to say."""

    path: str  # rollout.n
    type: str  # int; one of up, both; list of str
    default: Any
    bounds: str  # at least 1
    doc: str
    cap: str = ""  # the largest value of a size, with the reason: 65536 (...)
    unit: str = ""  # of a number: tokens, seconds
    choices: tuple[str, ...] = ()  # names that the value may be; of a switch, true and false
    names: str = ""  # of a path: file, folder or new folder

    @property
    def allowed(self) -> str:
        """What its value may be, in a few words: `tokens, at least 1`, `one of up, both`."""
        plain = {kind.__name__: word for kind, word in WORDS.items()}
        plain["str"] = self.names or plain["str"]
        number, _, names = self.type.partition(", ")  # of `int, or auto`
        if number in ("int", "float"):
            kind = " ".join(filter(None, (self.unit or plain[number], names)))
        else:
            kind = plain.get(self.type, self.type.replace("of str", "of text").replace("of int", "of whole numbers"))
        return f"{kind}, {self.bounds}" if self.bounds else kind


_ENDINGS = {
    "_s": "seconds",
    "_gib": "GiB",
    "_mib": "MiB",
    "_kib": "KiB",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_rounds": "rounds",
    "_share": "share",
    "_factor": "factor",
}
"""Units that an option's name ends in."""
_COUNTED = (
    *("seconds", "tokens", "prompts", "samples", "steps", "updates", "devices", "processes", "requests", "layers"),
    *("verdicts", "checkpoints", "rows", "plans", "workers", "groups", "passes", "rollouts", "versions", "blocks"),
    *("share", "times"),
)
"""Units that an option's text begins with."""


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
        _unit(path, option),
        _choices(option.type),
        option.names,
    )


def _unit(path: str, option: Declared) -> str:
    """What a number counts: by the ending of its name, or by the first words of its text."""
    if option.type not in (int, float) and typing.get_origin(option.type) not in (typing.Union, types.UnionType):
        return ""
    if "as a multiple of" in option.doc:
        return "factor"
    name = path.rpartition(".")[2]
    for ending, unit in _ENDINGS.items():
        if name.endswith(ending):
            return unit
    first = re.split(r"[;:.]", option.doc)[0].lower()
    if first.endswith(", in tokens"):
        return "tokens"
    if first.startswith(("seed", "draw", "standard deviation")):
        return ""
    words = re.findall(r"[a-z]+", re.split(r"[,(]| of a |with|that|whose", first)[0])[:4]
    return next((word for word in words if word in _COUNTED), "")


def _choices(hint: Any) -> tuple[str, ...]:
    if hint is bool:
        return "true", "false"
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return number_or_name(hint)[1]
    return ()


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
