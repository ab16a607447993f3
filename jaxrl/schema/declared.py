"""What an option's annotation says beside its type: the largest value, a sentinel, the kind of path; and how an error
shows a value.

Imports no pydantic: readers of files and processes that score use it as well.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from annotated_types import GroupedMetadata, Le

from jaxrl.schema.hidden import hider

MAX_INT = 2**31 - 1  # counts and token ids become 32-bit integers on the devices
MAX_SEED = 2**32 - 1  # as of numpy, torch and grain's shuffle
MAX_FLOAT = 3.4028234663852886e38  # the largest float32


@dataclass(frozen=True, slots=True)
class Cap(GroupedMetadata):
    """The largest value of a size, and what goes wrong beyond it."""

    most: float
    why: str

    def __iter__(self) -> Iterator[object]:
        yield Le(self.most)


SEED = Cap(MAX_SEED, "the largest unsigned 32-bit integer")


@dataclass(frozen=True, slots=True)
class Or:
    """A sentinel: a value outside the bounds with a special meaning, as `Or(0, "off")`. It is listed after them."""

    value: float
    meaning: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core.core_schema import no_info_wrap_validator_function

        return no_info_wrap_validator_function(
            lambda value, inner: float(value) if value == self.value else inner(value), handler(source)
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        own = handler(schema)
        return own if self.value == math.inf else {"anyOf": [own, {"const": self.value}]}  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class Names:
    """The kind of path that an option's text is; a new folder is one that a run may make."""

    what: Literal["file", "folder", "new folder"]


def is_url(text: str) -> bool:
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text) is not None


class _Short(reprlib.Repr):
    """`repr`, cut where a value is long, wide or deep."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 3, 8, 8, 8

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(hider()(x), level)


def shown(value: Any) -> str:
    """A value for a sentence: its `repr`, of bounded length."""
    return _Short().repr(value)
