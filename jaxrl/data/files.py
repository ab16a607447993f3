"""Rows of data files: JSONL, gzipped JSONL and Parquet, each row with the file and the line (or row) it stands in.

Python's json reads more than JSON: NaN, a key that stands twice (the last one wins), half of a surrogate pair. Each of
these would reach a prompt or a reward as something other than the file's author meant, so `parse_json` refuses them.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxrl.config.inputs import reading

MAX_LINE_BYTES = 64 * 2**20
"""The longest line of a JSONL file: a row is one problem, and a file without line ends would be read whole."""
MAX_DEPTH = 100
"""How deeply the lists and objects of a row may be nested: what takes rows on is recursive."""

_GZIP = b"\x1f\x8b"
_KINDS = {_GZIP: "gzip", b"PAR1": "Parquet", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def data_files(names: Sequence[str], option: str) -> list[Path]:
    """The files that an option names, each of them there and named once; ValueError otherwise."""
    files: list[Path] = []
    for name in names:
        if "://" in name:
            raise ValueError(f"{option}: {name} is a URL; download it and give the file")
        if not name.strip():
            raise ValueError(f"{option}: {name!r} is no file's name")
        try:
            path = Path(name).expanduser()
        except RuntimeError:
            raise ValueError(f"{option}: {name} begins with ~ and a name that has no home folder") from None
        if not path.exists():
            pattern = "; patterns are not filled in: name each file" if re.search(r"[*?\[]", name) else ""
            raise ValueError(f"{path}: no such file; {option} must name existing files{pattern}")
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "no regular file"
            raise ValueError(f"{path}: {kind}; {option} must name files")
        if any(path.samefile(other) for other in files):
            raise ValueError(f"{option}: {path} is named twice")
        files.append(path)
    return files


def rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, row) for each row of a file; a file without rows is an error."""
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


def parse_json(text: str, place: str) -> Any:
    """The value of a JSON text, read strictly; `place` (a file and line, say) begins every error's message.

    Raises:
      ValueError: not JSON, NaN or an infinite number, a key that stands twice in an object, text with half of a
        surrogate pair, or nesting beyond `MAX_DEPTH`.
    """

    def refuse(what: str) -> ValueError:
        return ValueError(f"{place}: {what}")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise refuse(f"the key {next(n for n in names if names.count(n) > 1)!a} stands twice in one object")
        return found

    def constant(name: str) -> Any:
        raise refuse(f"{name} is no JSON number")

    def real(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise refuse(f"the number {shown(digits, 30)} is too large")
        return value

    def whole(digits: str) -> int:
        if len(digits) > 1000:
            raise refuse(f"a number has {len(digits)} digits")
        return int(digits)

    with reading(place):
        value = json.loads(text, object_pairs_hook=once, parse_constant=constant, parse_float=real, parse_int=whole)
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value, place)
    if _ESCAPED_SURROGATE.search(text):
        _check_text(value, place)
    return value


def shown(text: str, length: int = 80) -> str:
    """What a message says of something that a file holds: cut where it is long."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with reading(path), path.open("rb") as file:
        start = file.read(4)
        kind = next((name for magic, name in _KINDS.items() if start.startswith(magic)), "")
        wanted = "gzip" if path.suffix == ".gz" else ""
        if kind != wanted and start:
            holds = f"holds {kind} data" if kind else "is not gzipped"
            raise ValueError(f"{path}: {holds}; what its name ends in must say what it holds")
        file.seek(0)
        lines = gzip.GzipFile(fileobj=file) if wanted else file
        yield from _lines(lines, path)  # pyright: ignore[reportArgumentType]


def _lines(lines: BinaryIO, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    number = 0
    while True:
        number += 1
        place = f"{path}, line {number}"
        with reading(path, number):
            line = lines.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{place}: longer than {MAX_LINE_BYTES >> 20} MiB; a line must hold one problem")
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        if text:
            row = parse_json(text, place)
            if not isinstance(row, dict):
                raise ValueError(f"{place}: a row must be a JSON object, found {type(row).__name__}")
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
                    raise ValueError(f"{path}: the column {twice!r} stands twice")
                for batch in file.iter_batches(batch_size=1024):
                    yield from _batch_rows(batch, path, number)
                    number += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:  # ArrowInvalid is a ValueError as well
            if isinstance(error, OSError) and error.errno is not None:
                raise
            said = (str(error).splitlines() or [type(error).__name__])[0]
            kind = "damaged after row" if number else "not a Parquet file, or a damaged one"
            raise ValueError(f"{path}: {kind}{f' {number}' if number else ''} ({shown(said, 120)})") from None


def _batch_rows(batch: Any, path: Path, before: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a batch, converted one by one where the whole cannot be, so that the row is known."""
    try:
        converted = batch.to_pylist()
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            with reading(f"{path}, row {before + i + 1}"):
                batch.slice(i, 1).to_pylist()
        raise
    for i, row in enumerate(converted):
        yield f"{path}, row {before + i + 1}", row


def _check_depth(value: Any, place: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"{place}: nested more than {MAX_DEPTH} levels deep")


def _check_text(value: Any, place: str) -> None:
    parts = value.items() if isinstance(value, dict) else [("", value)]
    for name, part in parts:
        half = _SURROGATE.search(json.dumps([name, part], ensure_ascii=False))
        if half is not None:
            holds = f"{name!a} holds" if name else "it holds"
            raise ValueError(f"{place}: {holds} half a character (\\u{ord(half.group()):04x} without its other half)")
