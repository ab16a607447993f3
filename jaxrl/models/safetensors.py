"""Hugging Face folders: read into the training form, written from it.

Of a tensor, only the slices that a device needs are read; codes become plain numbers (`jaxrl.models.coded_files`). An
export holds the tensors of one file in memory at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl.config.inputs import reading, regular_size
from jaxrl.models.config import ModelConfig
from jaxrl.models.fields import Fields, read_model_file
from jaxrl.models.weights import Weight, leaves
from jaxrl.schema.declared import shown
from jaxrl.sharding import rules

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_FILE_BYTES = 5_000_000_000
"""A larger export is cut into several files with an index, as Hugging Face does."""

# Buffers that old exports hold and no model reads.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    content: Any  # the open file, of the package `safetensors`
    dtype: str  # as the file names it
    dequantized: Callable[..., np.ndarray] | None = None  # reads codes in place of it (`jaxrl.models.coded_files`)

    def read(self, *part: slice) -> np.ndarray:
        """The tensor, or the part that slices of its first dims select, copied from the file."""
        if self.dequantized is not None:
            return self.dequantized(*part)
        if not part or not math.prod(self.shape):  # the package slices no tensor without numbers
            return self.content.get_tensor(self.name)[part]
        return self.content.get_slice(self.name)[part]


def read_header(file: Path, packed: str = "") -> dict[str, Tensor]:
    """The tensors of one safetensors file, which may also have the dtype `packed`. Raises ValueError if the file is
    damaged."""
    try:
        regular_size(file)
        with reading(file):
            content = safe_open(file, framework="numpy")
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except SafetensorError as error:
        said = str(error).removeprefix("Error while deserializing header: ")
        said = "".join(letter for letter in said if letter.isprintable())
        raise ValueError(f"{file}: truncated or not a safetensors file ({said[:200]})") from None
    tensors: dict[str, Tensor] = {}
    for name in content.keys():  # noqa: SIM118 (no mapping)
        entry = content.get_slice(name)
        if (dtype := entry.get_dtype()) not in DTYPES and dtype != packed:
            known = ", ".join(DTYPES)
            raise ValueError(f"{file}: tensor {name[:80]} has dtype {dtype}, which is not supported; use {known}")
        tensors[name] = Tensor(file, name, tuple(entry.get_shape()), content, dtype)
    return tensors


def read_folder(folder: Path, packed: str = "") -> dict[str, Tensor]:
    """All tensors of a folder: those of its one file, or else those that the index names."""
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE, packed)
    if not (index := folder / INDEX).exists():
        raise ValueError(f"{folder}: holds no {SINGLE} and no {INDEX}; weights must be in safetensors files")
    return _read_indexed(folder, index, packed)


def _read_indexed(folder: Path, index: Path, packed: str) -> dict[str, Tensor]:
    placed = read_model_file(index).get("weight_map")
    if not isinstance(placed, dict):
        raise ValueError(f"{index}: must have an object weight_map")
    for name, file in placed.items():
        # a path would let a model folder read files elsewhere; links, as the Hub's cache has them, are the user's own
        if not isinstance(file, str) or file in ("", "..") or "\0" in file or PurePosixPath(file).name != file:
            raise ValueError(
                f"{index}: weight_map places tensor {name} in {shown(file)}; it must name a file in this folder"
            )
    files = {name: read_header(folder / name, packed) for name in sorted(set(placed.values()))}
    for name, file in placed.items():
        if name not in files[file]:
            raise ValueError(f"{folder / file}: tensor {name} is missing, though {INDEX} places it there")
    return {name: files[file][name] for name, file in placed.items()}


def check_tensors(table: Mapping[str, Any], found: Mapping[str, tuple[int, ...]], where: Callable[[str], str]) -> None:
    """Raises ValueError unless every weight is there in its shape, and nothing else is."""
    expected = {name: weight.file_shape for weight in leaves(dict(table)) for name in weight.names()}
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


def place(
    weight: Weight,
    tensor: Callable[[int], Tensor],
    dtype: Any,
    sharding: jax.sharding.Sharding | None,
) -> jax.Array:
    """One weight of the training form on its devices; `tensor`: by the index in `Weight.names`. Without a sharding it
    is on the first device."""
    sharding = SingleDeviceSharding(jax.local_devices()[0]) if sharding is None else sharding
    dtype = jnp.dtype(dtype)

    def part(unit: int, index: tuple[slice, ...]) -> np.ndarray:
        return _rounded(weight.from_file(tensor(unit).read, index), dtype)

    def layer(number: int, index: tuple[slice, ...]) -> np.ndarray:
        if not weight.each_apart:
            return part(number, index)
        first, experts = number * weight.units_per_layer, range(*index[0].indices(weight.shape[1]))
        return np.stack([part(first + expert, index[1:]) for expert in experts])

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        if not weight.stacked:
            return part(0, index)
        return np.stack([layer(i, index[1:]) for i in range(*index[0].indices(weight.shape[0]))])

    return jax.make_array_from_callback(weight.shape, sharding, lambda index: shard(index or ()), dtype=dtype)


def _rounded(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts to another dtype, rounding once: numpy takes float64 to bfloat16 by way of float32."""
    values = np.asarray(values)
    if values.dtype == np.float64 and dtype == jnp.bfloat16:
        bits = values.view(np.uint64)  # bfloat16 has 7 of the 52; to nearest, and between two to the even one
        values = ((bits + ((1 << 44) - 1) + ((bits >> 45) & 1)) & ~np.uint64((1 << 45) - 1)).view(np.float64)
    return np.asarray(values, dtype)


def shardings_of(config: ModelConfig, mesh: Mesh | None) -> dict[str, Any]:
    table = config.weights()
    return rules.map_weights(lambda _: None, table) if mesh is None else rules.train_shardings(config, mesh)


class OpenModel(NamedTuple):
    """A model's checked files, of which no weight is read yet. `table`: the weights as these files have them;
    `tensors`: of one, by the index in `Weight.names`."""

    config: ModelConfig
    table: Mapping[str, Any]
    tensors: Callable[[Weight], Callable[[int], Tensor]]

    def load(self, mesh: Mesh | None, dtype: Any, *, with_layers: bool = True) -> Any:
        """The params in training form, on the mesh's train shardings."""

        def one(weight: Weight, sharding: Any) -> jax.Array:
            return place(weight, self.tensors(weight), dtype, sharding)

        table = {name: weight for name, weight in self.table.items() if with_layers or name != "layers"}
        return rules.map_weights(one, table, shardings_of(self.config, mesh))

    def load_layer(self, index: int, mesh: Mesh | None, dtype: Any) -> Any:
        """The weights of one layer, stacked on a leading dim of 1."""

        def one(weight: Weight, sharding: Any) -> jax.Array:
            tensors, first = self.tensors(weight), index * weight.units_per_layer
            own = replace(weight, shape=(1, *weight.layer_shape))
            return place(own, lambda i: tensors(first + i), dtype, sharding)

        shardings = shardings_of(replace(self.config, num_layers=1), mesh)
        return rules.map_weights(one, self.table["layers"], shardings["layers"])


def open_hf(folder: str | Path) -> OpenModel:
    """Opens a Hugging Face folder. Raises ValueError where its tensors do not fit its config."""
    folder = Path(folder)
    config = ModelConfig.from_hf(folder)
    fields = Fields(read_model_file(folder / "config.json"), str(folder / "config.json"))
    quantization: Any = fields.get("quantization_config")
    if quantization is None:
        tensors = read_folder(folder)
    elif quantization.get("quant_method") == "mxfp4":
        from jaxrl.models import coded_files

        tensors = coded_files.unpacked(read_folder(folder, coded_files.MXFP4))
    else:
        from jaxrl.models import coded_files

        blocks = coded_files.read_blocks(fields)
        tensors = coded_files.scaled(read_folder(folder, coded_files.FLOAT8), blocks, folder)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(_IGNORED_SUFFIXES)}
    if config.tie_word_embeddings and not config.scalar_head:
        tensors = _one_embedding(tensors)

    table = config.weights()
    check_tensors(
        table,
        {name: tensor.shape for name, tensor in tensors.items()},
        lambda name: str(tensors[name].file if name in tensors else folder),
    )

    def of(weight: Weight) -> Callable[[int], Tensor]:
        names = weight.names()
        return lambda unit: tensors[names[unit]]

    return OpenModel(config, table, of)


def _one_embedding(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model with tied embeddings, of which some exports write the head, too, or the head alone. A head
    that differs is refused: transformers up to version 4 drops it, and version 5 uses both."""
    rest = {name: tensor for name, tensor in tensors.items() if name != _HEAD}
    if _HEAD not in tensors:
        return rest
    head = tensors[_HEAD]
    embedding = rest.setdefault(_EMBEDDING, head)
    if embedding is not head and not np.array_equal(embedding.read(), head.read(), equal_nan=True):
        raise ValueError(
            f"{head.file}: tensor {_HEAD} differs from {_EMBEDDING}, though config.json says tie_word_embeddings true; "
            "set that to false to use both, or remove the tensor"
        )
    return rest


def export_hf(
    params: Mapping[str, Any],
    config: ModelConfig,
    folder: str | Path,
    dtype: Any = jnp.bfloat16,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes config.json, generation_config.json and safetensors files that transformers loads. `params`: training
    form, on any sharding that this process can read whole."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES.values():
        raise ValueError(f"export dtype ({dtype.name}) must be one of {', '.join(DTYPES.values())}")
    for old in (*folder.glob("model-*-of-*.safetensors"), folder / INDEX, folder / SINGLE):
        old.unlink(missing_ok=True)
    arrays: dict[str, list[tuple[Weight, Any, int]]] = {}
    for weight, array in _pairs(config.weights(), params):  # rows that share a tensor come in their order there
        for i, name in enumerate(weight.names()):
            arrays.setdefault(name, []).append((weight, array, i))
    groups = _split(arrays, dtype.itemsize, max_file_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        save_file({name: _in_file(arrays[name], dtype) for name in names}, folder / file, {"format": "pt"})
    if len(groups) > 1:
        total = config.num_params() * dtype.itemsize
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    content = config.to_hf() | {"dtype": dtype.name, "torch_dtype": dtype.name}
    _write_json(folder / "config.json", content)
    ids = {name: content[name] for name in ("bos_token_id", "eos_token_id") if content[name] is not None}
    _write_json(folder / "generation_config.json", ids)


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


def _split(
    arrays: Mapping[str, Sequence[tuple[Weight, Any, int]]], itemsize: int, max_file_bytes: int
) -> list[list[str]]:
    """Tensor names by file, each of at most `max_file_bytes` (or one tensor)."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, ((weight, *_), *_) in arrays.items():
        each = math.prod(weight.file_shape) * itemsize
        if groups[-1] and size + each > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += each
    return groups


def _in_file(parts: Sequence[tuple[Weight, Any, int]], dtype: np.dtype) -> np.ndarray:
    """A file's tensor, made of the weights whose rows it holds; contiguous, which `save_file` requires."""
    found = [weight.to_file(np.asarray(weight.unit(array, number))) for weight, array, number in parts]
    if len(found) == 1:
        return np.ascontiguousarray(found[0], dtype)
    whole = np.empty(parts[0][0].file_shape, dtype)
    for (weight, *_), part in zip(parts, found, strict=True):
        whole[weight.place_in_file()] = part
    return whole


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
