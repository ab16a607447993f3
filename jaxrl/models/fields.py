"""Typed values out of a model's JSON files; an error names file, value and rule. Sizes have an upper bound: a damaged
number is refused before it becomes a loop or an allocation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxrl.config.inputs import read_object
from jaxrl.schema.declared import shown

MAX_ID = 2**31 - 1
"""Token ids and positions are 32-bit integers on the devices."""


def read_model_file(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except FileNotFoundError:
        if (path.parent / "adapter_config.json").is_file():
            raise ValueError(
                f"{path.parent} has adapters alone: jaxrl export --merge writes a model, and jaxrl serve takes them "
                "beside their base (--adapter NAME=FOLDER)"
            ) from None
        raise ValueError(f"{path}: no such file; a model folder needs config.json") from None


class Fields:
    """The values of one JSON object of a file, which messages name. A value that is null counts as left out, as in
    transformers."""

    def __init__(self, raw: Mapping[str, Any], file: str) -> None:
        self.raw = raw
        self.file = file

    def get(self, name: str, default: Any = None) -> Any:
        value = self.raw.get(name)
        return default if value is None else value

    def wrong(self, name: str, rule: str) -> NoReturn:
        if name not in self.raw:
            raise ValueError(f"{self.file}: {name} is missing; it must be {rule}")
        raise ValueError(f"{self.file}: {name} ({shown(self.raw[name])}) must be {rule}")

    def refuse(self, what: str, supported: str) -> NoReturn:
        """Raises for something that the decoder does not compute."""
        raise ValueError(f"{self.file}: {what} is not supported; {supported}")

    def integer(self, name: str, default: int | None = None, *, high: int, low: int = 1) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None, *, high: float, above: float = 0.0) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not above < value <= high:
            self.wrong(name, f"a number above {above:g}, and at most {high:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.wrong(name, "true or false")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        for each in ids:
            if not isinstance(each, int) or isinstance(each, bool):
                self.wrong(name, "a token id or a list of token ids")
            if not 0 <= each < vocab_size:
                self.wrong(name, f"within the vocabulary: from 0 to {vocab_size - 1}")
        return tuple(ids)
