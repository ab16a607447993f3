"""Opens GGUF files: `check_layout` walks through a file's header before the `gguf` package reads it.

That package trusts every count: a truncated file costs it half a minute, and a damaged count gigabytes. Source: ggml,
docs/gguf.md, "File structure".
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jaxrl.config.inputs import regular_size

if TYPE_CHECKING:
    from gguf import GGUFReader

VERSIONS = (2, 3)
MAX_ENTRIES = 2**21
"""Of all arrays of metadata together: eight times the largest vocabulary. The reader makes an object of each."""

_TEXT, _ARRAY, _UINT32 = 8, 9, 4
_BYTES_OF = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MIN_PAIR, _MIN_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8
_MAX_DIMS = 4
_ALIGNMENT = "general.alignment"


def open_gguf(file: str | Path) -> GGUFReader:
    """The `gguf` package's reader. Raises ValueError with one sentence if the file cannot be read."""
    from gguf import GGUFReader  # numpy-heavy, and only GGUF users need it

    check_layout(file)
    try:
        return GGUFReader(str(file))
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"{file}: truncated or not a GGUF file ({error})") from None


def check_layout(file: str | Path) -> None:
    """Raises ValueError unless everything that the header describes lies inside the file."""
    path = Path(file)
    if not path.exists():
        raise ValueError(f"{file}: no such file")
    if (size := regular_size(path)) < 24:
        raise ValueError(f"{file}: truncated or not a GGUF file (it has {size} bytes)")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        _Walk(str(file), content, size).check()


@dataclass(slots=True)
class _Walk:
    file: str
    content: mmap.mmap
    size: int
    at: int = 0
    entries: int = 0
    alignment: int = 32
    names: set[str] = field(default_factory=set)

    def wrong(self, why: str) -> NoReturn:
        raise ValueError(f"{self.file}: truncated or not a GGUF file ({why})")

    def check(self) -> None:
        if self.content[:4] != b"GGUF":
            self.wrong("it does not begin with GGUF")
        self.at = 4
        version = self.number("<I")
        if version & 0xFFFF == 0:
            raise ValueError(f"{self.file}: a big-endian GGUF file is not supported; convert the model again")
        if version not in VERSIONS:
            raise ValueError(f"{self.file}: GGUF version {version} is not supported; supported are 2 and 3")
        num_tensors, num_pairs = self.number("<Q"), self.number("<Q")
        for count, least, what in ((num_tensors, _MIN_TENSOR, "tensors"), (num_pairs, _MIN_PAIR, "pairs of metadata")):
            if count * least > self.size:
                self.wrong(f"{count} {what} do not fit into {self.size} bytes")
        for _ in range(num_pairs):
            self.pair()
        self.names.clear()
        places = [self.tensor() for _ in range(num_tensors)]
        self.check_places(places)

    def take(self, count: int, what: str) -> int:
        """Advances by `count` bytes; returns where they begin."""
        begin = self.at
        if count > self.size - begin:
            self.wrong(f"{what} at byte {begin} has {count} bytes, and the file ends at {self.size}")
        self.at = begin + count
        return begin

    def number(self, kind: str) -> int:
        return struct.unpack_from(kind, self.content, self.take(struct.calcsize(kind), "a number"))[0]

    def text(self) -> bytes:
        begin = self.take(self.number("<Q"), "a text")
        return self.content[begin : self.at]

    def name(self, what: str) -> str:
        """A key or a tensor's name, which must be unique."""
        begin = self.at
        try:
            name = self.text().decode("utf-8")
        except UnicodeDecodeError:
            self.wrong(f"the name of {what} at byte {begin} is not UTF-8 text")
        if name in self.names:
            raise ValueError(f"{self.file}: {what} {name[:80]} stands twice")
        self.names.add(name)
        return name

    def pair(self) -> None:
        key = self.name("metadata")
        kind = self.number("<I")
        begin = self.at
        self.value(kind, key)
        if key == _ALIGNMENT:
            self.alignment = struct.unpack_from("<I", self.content, begin)[0] if kind == _UINT32 else 0
            if self.alignment.bit_count() != 1:
                raise ValueError(f"{self.file}: {_ALIGNMENT} must be a power of two")

    def value(self, kind: int, key: str) -> None:
        if kind == _TEXT:
            self.text()
        elif kind != _ARRAY:
            self.take(self.bytes_of(kind, key), f"metadata {key[:80]}")
        else:
            inner, count = self.number("<I"), self.number("<Q")
            self.entries += count
            if self.entries > MAX_ENTRIES:
                self.wrong(f"metadata {key[:80]} is an array of {count}, and at most {MAX_ENTRIES} entries are read")
            if inner == _TEXT:
                for _ in range(count):
                    self.text()
            else:
                self.take(count * self.bytes_of(inner, key), f"metadata {key[:80]}")

    def bytes_of(self, kind: int, key: str) -> int:
        if kind not in _BYTES_OF:
            self.wrong(f"metadata {key[:80]} is of the unknown type {kind}")
        return _BYTES_OF[kind]

    def tensor(self) -> tuple[int, int, str]:
        """(offset behind the header, bytes, name)."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self.name("tensor")
        num_dims = self.number("<I")
        if num_dims > _MAX_DIMS:
            self.wrong(f"tensor {name[:80]} has {num_dims} dims, and at most {_MAX_DIMS} are possible")
        count = 1
        for _ in range(num_dims):
            count *= self.number("<Q")
        kind, offset = self.number("<I"), self.number("<Q")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise ValueError(f"{self.file}: tensor {name[:80]} has the unknown type {kind}") from None
        if count % block:
            raise ValueError(
                f"{self.file}: tensor {name[:80]} has {count} numbers, which are no whole blocks of {block}"
            )
        return offset, count // block * block_bytes, name

    def check_places(self, places: list[tuple[int, int, str]]) -> None:
        """Every tensor ends inside the file, and begins after the one before it."""
        start = -(-self.at // self.alignment) * self.alignment
        before, end_before = "", 0
        for offset, count, name in sorted(places):
            if start + offset + count > self.size:
                self.wrong(f"tensor {name[:80]} ends at byte {start + offset + count}, the file at {self.size}")
            if offset < end_before:
                raise ValueError(f"{self.file}: tensors {before[:80]} and {name[:80]} share bytes")
            before, end_before = name, offset + count
