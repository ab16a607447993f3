"""Opens GGUF files with the package `gguf`, and says in one sentence what is wrong with one that it cannot read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl.config.inputs import regular_size

if TYPE_CHECKING:
    from gguf import GGUFReader


def open_gguf(file: str | Path) -> GGUFReader:
    """The package's reader. Raises ValueError with one sentence if the file cannot be read."""
    from gguf import GGUFReader  # numpy-heavy, and only GGUF users need it

    if not Path(file).exists():
        raise ValueError(f"{file}: no such file")
    regular_size(Path(file))
    try:
        reader = GGUFReader(str(file))
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"{file}: truncated or not a GGUF file ({error})") from None
    if reader.byte_order == "S":
        raise ValueError(f"{file}: a big-endian GGUF file is not supported; convert the model again")
    return reader


def metadata(reader: GGUFReader, file: str | Path, key: str, default: Any = None) -> Any:
    """The value of a key. Raises ValueError for text that is not UTF-8."""
    field = reader.get_field(key)
    try:
        return default if field is None else field.contents()
    except UnicodeDecodeError:
        raise ValueError(f"{file}: metadata {key} is not UTF-8 text") from None
