"""Reads users' files; every error names the file.

Every reader of such a file works inside `with reading(path):`.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import yaml

MAX_JSON_BYTES = 100_000_000
"""The largest JSON file and header of a tensor file: the limit of the safetensors format."""
MODULE_PREFIX = "jaxrl_user_"
"""How the names of the modules begin that users' Python files become."""
MAX_CONFIG_BYTES = 1 << 20
# what YAML's own reader accepts; half of a pair and control characters belong in no text
_UNPRINTABLE = re.compile("[^\\t\\n\\r\\x20-\\x7e\\x85\\xa0-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")

_HALF = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")


class ConfigError(ValueError):
    """A configuration that cannot run. The message has a line for each problem.

    Attributes:
      rest: the `Config` with defaults in place of what is wrong; None where a part of it could not be read.
    """

    def __init__(self, *problems: str, rest: Any = None) -> None:
        super().__init__("\n".join(problems))
        self.problems, self.rest = problems, rest


@dataclass(slots=True)
class Options:
    """Nested values of a configuration, and where each option was given (`file, line 3`)."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)


class NotStrict(ValueError):
    """JSON that Python's parser lets pass, and that `strict_json` refuses; `reading` names the file."""


@contextmanager
def reading(path: str | PathLike[str], line: int | None = None) -> Iterator[None]:
    """Names `path` (and `line`, from 1) in what the block raises: a ValueError where the content is cut off, damaged,
    not UTF-8, not JSON, not YAML, or nested too deeply, or the system's own OSError. Other ValueErrors pass as they
    are: a reader that knows what is wrong names the file itself."""
    place = str(path) if line is None else f"{path}, line {line}"
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 text (byte {error.start})") from None
    except NotStrict as error:
        raise ValueError(f"{place}: {error}") from None
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{place}: not valid JSON ({error.msg}, {at})") from None
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{place}: damaged or cut off ({error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{place}{at}: not valid YAML ({getattr(error, 'problem', None) or error})") from None
    except RecursionError:
        raise ValueError(f"{place}: nested too deeply") from None
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def regular_size(path: Path) -> int:
    """A file's size; ValueError if it is a pipe, a device or a folder: reading those may never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: must be a file, found {kind_of(status.st_mode)}")
    return status.st_size


def kind_of(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_text(path: Path) -> str:
    """The text of a config file, of at most `MAX_CONFIG_BYTES` and without control characters; a BOM is left out."""
    with reading(path):
        if not path.exists():
            raise ConfigError(f"{path}: no such config file")
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # a device or a pipe may have no end
            what = "a pipe or a socket" if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else kind_of(mode)
            raise ConfigError(f"{path}: cannot be read as a config file: it is {what}")
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        if len(raw) > MAX_CONFIG_BYTES:
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


def read_json(path: Path) -> Any:
    """The value of a JSON file, read by `strict_json`; ValueError for what is no file or has over `MAX_JSON_BYTES`."""
    with reading(path):
        if (size := regular_size(path)) > MAX_JSON_BYTES:
            raise ValueError(f"{path}: has {size} bytes, and at most {MAX_JSON_BYTES} are read")
        return strict_json(path.read_text(encoding="utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """The same of a file that must hold a JSON object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, found {type(value).__name__}")
    return value


def strict_json(text: str) -> Any:
    """A JSON value. Call it inside `reading`, which adds the file's name to errors. Raises NotStrict for NaN or
    Infinity, a duplicate key in one object, and half of a surrogate pair."""
    value = json.loads(text, object_pairs_hook=_each_key_once, parse_constant=_no_number)
    if _ESCAPED_HALF.search(text):
        _check_text(value)
    return value


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise NotStrict(f"key {twice[:80]!r} stands twice in one object")
    return found


def _no_number(text: str) -> NoReturn:
    raise NotStrict(f"{text} is no number in JSON")


def _check_text(value: Any) -> None:
    for name, part in value.items() if isinstance(value, dict) else [("", value)]:
        half = _HALF.search(json.dumps([name, part], ensure_ascii=False))
        if half is not None:
            holder = f"{name[:80]!a} holds " if name else "it holds "
            raise NotStrict(f"{holder}half a character (\\u{ord(half.group()):04x} without its other half)")
