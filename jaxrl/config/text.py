"""What all configuration files share: reading their text, and the values and places that come out of it."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.config.checks import ConfigError
from jaxrl.config.inputs import kind_of, reading

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
"""Values in a file, each use of an alias or a macro counted: ten lines of them can stand for billions."""

# what YAML's own reader accepts; half of a pair and control characters belong in no text
_UNPRINTABLE = re.compile("[^\\t\\n\\r\\x20-\\x7e\\x85\\xa0-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


@dataclass(slots=True)
class Options:
    """Nested values, and where each option was given (`file, line 3`)."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)


def read_text(path: Path) -> str:
    """The text of a config file, of at most `MAX_BYTES` and without control characters; a BOM is left out."""
    with reading(path):
        if not path.exists():
            raise ConfigError(f"{path}: no such config file")
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # a device or a pipe may have no end
            what = "a pipe or a socket" if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else kind_of(mode)
            raise ConfigError(f"{path}: cannot be read as a config file: it is {what}")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(
                f"{path}: is larger than the 1 MiB that a config file may have: was another file meant, such as data?"
            )
        if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise ConfigError(f"{path}: not UTF-8 text but UTF-16: save it as UTF-8")
        text = raw.decode("utf-8-sig")
    refuse_unprintable(text, str(path))
    return text


def refuse_unprintable(text: str, place: str) -> None:
    """Raises ConfigError for a character that no text file has, with its line."""
    if found := _UNPRINTABLE.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ConfigError(f"{place}, line {line}: the character U+{ord(found[0]):04X} is not allowed")


def one_line(text: str) -> str:
    """A parser's message as part of a sentence: in one line, of bounded length, without a full stop."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= 200 else f"{text[:200]}..."
