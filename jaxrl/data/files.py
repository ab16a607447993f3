"""Rows of data files: JSONL, gzipped JSONL and Parquet, each row with its file and line (or row).

JSON is read strictly: NaN, a duplicate key or half of a surrogate pair are refused.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl.config.inputs import reading, strict_json

if TYPE_CHECKING:
    from jaxrl.data.hub import HubName

_ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
MAX_LINE_BYTES = 64 * 2**20
"""The longest line of a JSONL file: a row is one problem, and a file without line ends would be read whole."""


def data_files(names: Sequence[str], option: str) -> list[Path]:
    """The files that an option names, as paths or as names of the Hugging Face Hub (`jaxrl.data.hub`). Raises
    ValueError for a missing file. A file that is named twice counts twice."""
    files: list[Path] = []
    for name in names:
        if not name.strip():
            raise ValueError(f"{option}: {name!r} is no file's name")
        if (on_hub := data_set_name(name)) is not None:
            from jaxrl.data.hub import data_paths

            files += data_paths(on_hub, option)
            continue
        path = Path(os.path.expanduser(name))
        if not path.is_file():
            raise ValueError(f"{path}: no such file; {option} must name existing files")
        files.append(path)
    return files


def data_set_name(text: str) -> HubName | None:
    """The Hub's name for data; None for a path, as is text that ends like a data file and names none in a data set."""
    if os.path.exists(text):
        return None
    from jaxrl.data.hub import hub_name

    found = hub_name(text)
    return None if found is None or (not found.file and text.endswith(_ENDINGS)) else found


def rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, row) for each row of a file. Raises ValueError for a file without rows."""
    if path.suffix == ".parquet":
        found = _parquet_rows(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        found = _json_rows(path)
    else:
        raise ValueError(f"{path}: a data file must end in .jsonl, .jsonl.gz or .parquet")
    empty = True
    for where, row in found:
        empty = False
        yield where, row
    if empty:
        raise ValueError(f"{path}: holds no rows")


def first_line(error: Exception) -> str:
    """The first line of an error's message, shortened; the error's name if there is no message."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 200 else f"{text[:200]}..."


def _json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with reading(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number in count(1):
            place = f"{path}, line {number}"
            with reading(path, number):
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(f"{place}: longer than {MAX_LINE_BYTES >> 20} MiB; a line must hold one problem")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = strict_json(text) if text else {}
            if not isinstance(row, dict):
                raise ValueError(f"{place}: a row must be a JSON object, found {type(row).__name__}")
            if text:
                yield place, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet as parquet

    number = 0
    with reading(path), path.open("rb") as opened:
        try:
            with parquet.ParquetFile(opened, page_checksum_verification=True) as file:
                names = file.schema_arrow.names
                if len(set(names)) < len(names):
                    twice = next(name for name in names if names.count(name) > 1)
                    raise ValueError(f"{path}: the column {twice!r} occurs twice")
                for batch in file.iter_batches(batch_size=16):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{path}, row {number}", row
        except (pyarrow.ArrowException, OSError) as error:  # ArrowInvalid is a ValueError as well
            if isinstance(error, OSError) and error.errno is not None:
                raise
            kind = "damaged after row" if number else "not a Parquet file, or a damaged one"
            raise ValueError(f"{path}: {kind}{f' {number}' if number else ''} ({first_line(error)})") from None
