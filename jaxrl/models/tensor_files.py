"""Which tensors a Hugging Face folder holds, and where: the headers of its safetensors files, and their index.

Source: the format's specification (huggingface/safetensors, README, "Format"). A header is checked whole before a
tensor is mapped into memory: its own length, each dtype, shape and place, and that the file reaches that far.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl.config.inputs import MAX_JSON_BYTES, reading, regular_size, strict_json
from jaxrl.models.fields import read_object
from jaxrl.models.weights import leaves
from jaxrl.schema.declared import shown

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one tensor lies. `read` maps it into memory."""

    file: Path
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """The byte after its last."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file; ValueError where the file is damaged."""
    try:
        size = regular_size(file)
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    with reading(file), file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file}: truncated or not a safetensors file ({size} bytes, header of {length} bytes)")
        if length > MAX_JSON_BYTES:
            raise ValueError(f"{file}: has a header of {length} bytes, and at most {MAX_JSON_BYTES} are read")
        try:
            header = strict_json(stream.read(length).decode("utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError):
            header = None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: the header is not that of a safetensors file")
    header.pop("__metadata__", None)
    return {name: _tensor(file, name, entry, 8 + length, size) for name, entry in header.items()}


def _tensor(file: Path, name: str, entry: Any, start: int, size: int) -> Tensor:
    """One entry of a header. `start`: where the tensors begin; `size`: the file's."""

    def wrong(what: str, value: Any, rule: str) -> ValueError:
        return ValueError(f"{file}: tensor {name[:80]}: {what} ({shown(value)}) must be {rule}")

    if not isinstance(entry, dict):
        raise wrong("its entry in the header", entry, "an object with dtype, shape and data_offsets")
    dtype_name, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype_name, str):
        raise wrong("dtype", dtype_name, f"one of {', '.join(DTYPES)}")
    dtype = DTYPES.get(dtype_name)
    if dtype is None:
        known = ", ".join(DTYPES)
        raise ValueError(f"{file}: tensor {name} has dtype {dtype_name[:40]}, which is not supported; use {known}")
    if not (isinstance(shape, list) and all(map(_is_size, shape))):
        raise wrong("shape", shape, "a list of whole numbers")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_size, offsets))):
        raise wrong("data_offsets", offsets, "two whole numbers")
    shape, (begin, end) = tuple(shape), offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{file}: tensor {name} of shape {shape} has {end - begin} bytes, which do not fit it")
    if start + end > size:
        raise ValueError(
            f"{file}: truncated: tensor {name} of shape {shape} ends at byte {start + end}, the file at {size}"
        )
    return Tensor(file, name, dtype, shape, start + begin)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: of its one file, or else those that the index names, or else of all files."""
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    index = folder / INDEX
    if index.exists():
        return _read_indexed(folder, index)
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(f"{folder}: holds no {SINGLE} and no {INDEX}; weights must be in safetensors files")
    tensors: dict[str, Tensor] = {}
    for file in found:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise ValueError(
                    f"{file}: tensor {name} is in {tensors[name].file.name} as well, and no {INDEX} says which counts"
                )
            tensors[name] = tensor
    return tensors


def _read_indexed(folder: Path, index: Path) -> dict[str, Tensor]:
    placed = read_object(index).get("weight_map")
    if not isinstance(placed, dict):
        raise ValueError(f"{index}: must have an object weight_map")
    for name, file in placed.items():
        # a path would let a model folder read files elsewhere; links, as the Hub's cache has them, are the user's own
        if not isinstance(file, str) or file in ("", "..") or "\0" in file or PurePosixPath(file).name != file:
            raise ValueError(
                f"{index}: weight_map places tensor {name} in {shown(file)}; it must name a file in this folder"
            )
    files = {name: read_header(folder / name) for name in sorted(set(placed.values()))}
    for name, file in placed.items():
        if name not in files[file]:
            raise ValueError(f"{folder / file}: tensor {name} is missing, though {INDEX} places it there")
    return {name: files[file][name] for name, file in placed.items()}


def check_places(tensors: Iterable[Tensor]) -> None:
    """No two tensors share bytes of a file; ValueError names both."""
    last: dict[Path, Tensor] = {}
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.end)):
        before = last.get(tensor.file)
        if before is not None and tensor.offset < before.end:
            raise ValueError(f"{tensor.file}: tensors {before.name} and {tensor.name} share bytes")
        last[tensor.file] = tensor


def check_tensors(
    table: Mapping[str, Any], found: Mapping[str, tuple[int, ...]], where: Callable[[str], str], kind: Any = "hf"
) -> None:
    """Every weight is there in its shape, and nothing else is; ValueError names file, tensor and shapes."""
    expected = {name: weight.hf_shape for weight in leaves(dict(table)) for name in weight.names(kind)}
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(f"{where(name)}: tensor {name} of shape {shape} is missing")
        if tuple(found[name]) != shape:
            raise ValueError(
                f"{where(name)}: tensor {name} has shape {tuple(found[name])}, but the config asks for {shape}"
            )
    for name in found:
        if name not in expected:
            raise ValueError(
                f"{where(name)}: tensor {name} of shape {tuple(found[name])} has no place in a model of this config"
            )
