"""Which tensors a Hugging Face folder holds, and where: its safetensors files, and their index."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrl.config.inputs import reading, regular_size
from jaxrl.models.fields import read_model_file
from jaxrl.models.weights import leaves
from jaxrl.schema.declared import shown

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file. `content`: the open file, of the package `safetensors`."""

    file: Path
    name: str
    shape: tuple[int, ...]
    content: Any

    def read(self, *part: slice) -> np.ndarray:
        """The tensor, or the part that slices of its first dims cut out, copied from the file."""
        if not part or not math.prod(self.shape):  # the package slices no tensor without numbers
            return self.content.get_tensor(self.name)[part]
        return self.content.get_slice(self.name)[part]


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file; ValueError where the file is damaged."""
    try:
        regular_size(file)
        with reading(file):
            content = safe_open(file, framework="numpy")
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except SafetensorError as error:
        told = str(error).removeprefix("Error while deserializing header: ")
        told = "".join(letter for letter in told if letter.isprintable())
        raise ValueError(f"{file}: truncated or not a safetensors file ({told[:200]})") from None
    tensors: dict[str, Tensor] = {}
    for name in content.keys():  # noqa: SIM118 (no mapping)
        entry = content.get_slice(name)
        if (dtype := entry.get_dtype()) not in DTYPES:
            known = ", ".join(DTYPES)
            raise ValueError(f"{file}: tensor {name[:80]} has dtype {dtype}, which is not supported; use {known}")
        tensors[name] = Tensor(file, name, tuple(entry.get_shape()), content)
    return tensors


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
    placed = read_model_file(index).get("weight_map")
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
