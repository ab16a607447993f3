"""Hugging Face folders: read into the training form, written from it.

The file format is small (eight bytes of header length, a JSON header, raw little-endian tensors), so it is read and
written here: tensors are memory-mapped, only the slices that a device needs are converted, an export holds one tensor
in memory at a time, and errors say what is wrong with a damaged file. The layout follows the format's
specification (huggingface/safetensors, README, "Format").
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jaxrl.models.config import ModelConfig, read_json
from jaxrl.models.weights import Weight, leaves
from jaxrl.sharding import rules

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
MAX_FILE_BYTES = 5_000_000_000
"""A larger export is cut into several files with an index, as Hugging Face does."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Buffers that old exports hold and no model reads.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one tensor lies. `read` maps it into memory."""

    file: Path
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def read(self) -> np.ndarray:
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file; ValueError where the file is damaged."""
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file}: truncated or not a safetensors file ({size} bytes, header of {length} bytes)")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            entries = [(name, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{file}: the header is not that of a safetensors file") from None
    tensors = {}
    for name, dtype_name, shape, begin, end in entries:
        dtype = DTYPES.get(dtype_name)
        if dtype is None:
            known = ", ".join(DTYPES)
            raise ValueError(f"{file}: tensor {name} has dtype {dtype_name}, which is not supported; use {known}")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{file}: tensor {name} of shape {shape} has {end - begin} bytes, which do not fit it")
        if 8 + length + end > size:
            raise ValueError(
                f"{file}: truncated: tensor {name} of shape {shape} ends at byte {8 + length + end}, the file at {size}"
            )
        tensors[name] = Tensor(file, name, dtype, shape, 8 + length + begin)
    return tensors


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: one file, or those that the index names."""
    index = folder / INDEX
    if index.exists():
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict):
            raise ValueError(f"{index}: must have an object weight_map")
        files = {name: read_header(folder / name) for name in sorted(set(placed.values()))}
        for name, file in placed.items():
            if name not in files[file]:
                raise ValueError(f"{folder / file}: tensor {name} is missing, though {INDEX} places it there")
        return {name: files[file][name] for name, file in placed.items()}
    found = [folder / SINGLE] if (folder / SINGLE).exists() else sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(f"{folder}: holds no {SINGLE} and no {INDEX}; weights must be in safetensors files")
    return {name: tensor for file in found for name, tensor in read_header(file).items()}


def place(
    weight: Weight, read: Callable[[int], np.ndarray], dtype: Any, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """One weight of the training form on its devices.

    Args:
      read: the file's tensor of a layer (0 where the weight is not stacked), of shape `weight.hf_shape`.
      sharding: None is the first device.
    """
    sharding = SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding
    dtype = jnp.dtype(dtype)

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        if not weight.stacked:
            return np.asarray(weight.from_file(read(0))[index], dtype)
        chosen = range(*index[0].indices(weight.shape[0]))
        return np.stack([np.asarray(weight.from_file(read(i))[index[1:]], dtype) for i in chosen])

    return jax.make_array_from_callback(weight.shape, sharding, lambda index: shard(index or ()), dtype=dtype)


def shardings_of(config: ModelConfig, mesh: Mesh | None) -> dict[str, Any]:
    """The training form's shardings, or None at every leaf."""
    table = config.weights()
    return rules.map_weights(lambda _: None, table) if mesh is None else rules.train_shardings(config, mesh)


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


def load_hf(folder: str | Path, mesh: Mesh | None = None, dtype: Any = jnp.float32) -> tuple[ModelConfig, Any]:
    """(config, params in training form) of a Hugging Face folder, weight by weight, on the mesh's train shardings."""
    folder = Path(folder)
    config = ModelConfig.from_hf(folder)
    tensors = {n: t for n, t in read_folder(folder).items() if not n.endswith(_IGNORED_SUFFIXES)}
    if config.tie_word_embeddings:
        # Some exports write the tied head a second time.
        tensors.pop("lm_head.weight", None)

    def where(name: str) -> str:
        return str(tensors[name].file if name in tensors else folder)

    table = config.weights()
    check_tensors(table, {name: tensor.shape for name, tensor in tensors.items()}, where)

    def one(weight: Weight, sharding: Any) -> jax.Array:
        names = weight.names()
        return place(weight, lambda layer: tensors[names[layer]].read(), dtype, sharding)

    return config, rules.map_weights(one, table, shardings_of(config, mesh))


def export_hf(
    params: Mapping[str, Any],
    config: ModelConfig,
    folder: str | Path,
    tokenizer_files: Sequence[str | Path] = (),
    dtype: Any = jnp.bfloat16,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write config.json, generation_config.json and safetensors files that transformers loads.

    Args:
      params: training form, on any sharding that this process can read whole.
      config: the model's.
      folder: created if need be; files of the same names are replaced.
      tokenizer_files: copied into the folder (`Tokenizer.save` writes such files, too).
      dtype: float32, float16 or bfloat16 in the files.
      max_file_bytes: where to start another file.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = jnp.dtype(dtype)
    code = next((code for code, known in DTYPES.items() if known == dtype), None)
    if code is None:
        raise ValueError(f"export dtype ({dtype.name}) must be one of {', '.join(d.name for d in DTYPES.values())}")
    for old in (*folder.glob("model-*-of-*.safetensors"), folder / INDEX, folder / SINGLE):
        old.unlink(missing_ok=True)
    pairs = list(_pairs(config.weights(), params))
    groups = _split([weight for weight, _ in pairs], dtype.itemsize, max_file_bytes)
    arrays = {name: (weight, array, i) for weight, array in pairs for i, name in enumerate(weight.names())}
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        _write(folder / file, {name: arrays[name] for name in names}, code)
    if len(groups) > 1:
        total = config.num_params() * dtype.itemsize
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    content = config.to_hf() | {"dtype": dtype.name, "torch_dtype": dtype.name}
    _write_json(folder / "config.json", content)
    ids = {name: content[name] for name in ("bos_token_id", "eos_token_id") if content[name] is not None}
    _write_json(folder / "generation_config.json", ids)
    for source in tokenizer_files:
        shutil.copy(source, folder)


def _pairs(table: Mapping[str, Any], params: Mapping[str, Any]) -> Iterator[tuple[Weight, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _pairs(value, params[name])
        else:
            if params[name].shape != value.shape:
                raise ValueError(
                    f"export: weight {name} has shape {params[name].shape}, but the config asks for {value.shape}"
                )
            yield value, params[name]


def _split(table: Sequence[Weight], itemsize: int, max_file_bytes: int) -> list[list[str]]:
    """Tensor names by file, each file at most `max_file_bytes` (or one tensor)."""
    groups: list[list[str]] = [[]]
    size = 0
    for weight in table:
        each = math.prod(weight.hf_shape) * itemsize
        for name in weight.names():
            if groups[-1] and size + each > max_file_bytes:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += each
    return groups


def _write(file: Path, entries: Mapping[str, tuple[Weight, Any, int]], code: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (weight, _, _) in entries.items():
        begin, end = end, end + math.prod(weight.hf_shape) * DTYPES[code].itemsize
        header[name] = {"dtype": code, "shape": list(weight.hf_shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for weight, array, layer in entries.values():
            tensor = weight.to_file(np.asarray(array[layer] if weight.stacked else array))
            stream.write(np.ascontiguousarray(tensor, DTYPES[code]).tobytes())


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
