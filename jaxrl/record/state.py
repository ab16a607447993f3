"""Serialization of a run's host state: nested JSON values with numpy arrays among them.

A checkpoint of a real run stores values and arrays apart (`split_arrays`), the arrays in a file of Apache Arrow
(`write_arrays`); a simulated run stores all in one JSON file with its SHA-256 (`dump_state`).
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_PART_BYTES = 2**26
_STATE_SCHEMA = 2  # of a simulated run's file: a line with this number and the digest of the rest


def split_arrays(state: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    values: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            values[key], inner = split_arrays(value, f"{prefix}{key}.")
            arrays |= inner
        elif isinstance(value, np.ndarray):
            arrays[prefix + key] = value
        else:
            values[key] = value
    return values, arrays


def join_arrays(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The reverse of `split_arrays`."""
    state = copy.deepcopy(dict(values))
    for name, array in arrays.items():
        *path, last = name.split(".")
        node = state
        for key in path:
            node = node[key]
        node[last] = array
    return state


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays into a file of Apache Arrow, compressed with zstd. A row is a part of an array: its `name`,
    `dtype`, `shape`, and up to 64 MiB of `bytes`."""
    import pyarrow as pa

    fields = (pa.field("name", pa.string()), pa.field("dtype", pa.string()), pa.field("shape", pa.list_(pa.int64())))
    schema = pa.schema([*fields, pa.field("bytes", pa.binary())])
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)  # a training run has the cores
    with open(path, "wb") as file, pa.ipc.new_file(file, schema, options=options) as writer:
        for name, array in arrays.items():
            if array.dtype.hasobject:
                raise ValueError(f"array {name} of a checkpoint holds objects ({array.dtype})")
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for start in range(0, max(flat.size, 1), _PART_BYTES):
                columns = [name], [array.dtype.str], [array.shape], [flat[start : start + _PART_BYTES].data]
                writer.write_batch(pa.record_batch([*columns], schema=schema))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    import pyarrow as pa

    arrays: dict[str, np.ndarray] = {}
    filled: dict[str, int] = {}
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        for number in range(reader.num_record_batches):
            name, dtype, shape, part = (column[0] for column in reader.get_batch(number).columns)
            if (key := name.as_py()) not in arrays:
                arrays[key], filled[key] = np.empty(shape.as_py(), np.dtype(dtype.as_py())), 0
            content = np.frombuffer(part.as_buffer(), np.uint8)
            arrays[key].reshape(-1).view(np.uint8)[filled[key] : filled[key] + content.size] = content
            filled[key] += content.size
    return arrays


def dump_state(state: Mapping[str, Any]) -> str:
    body = json.dumps({"state": _plain(state)}, allow_nan=False)
    return f"{_head(body)}\n{body}"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"array": value.dtype.str, "shape": value.shape, "values": _plain(value.ravel().tolist())}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(float(value))}
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"host state: {type(value).__name__} is neither a JSON value nor an array")


def _special(value: dict[str, Any]) -> Any:
    if value.keys() == {"array", "shape", "values"}:
        return np.asarray(value["values"], np.dtype(value["array"])).reshape(value["shape"])
    if value.keys() == {"number"}:
        return float(value["number"])
    return value


def _head(body: str) -> str:
    return json.dumps({"simulation": _STATE_SCHEMA, "sha256": hashlib.sha256(body.encode()).hexdigest()})


def load_state(text: str, where: str) -> dict[str, Any]:
    """Reads the output of `dump_state`. Raises ValueError for anything else."""
    head, _, body = text.partition("\n")
    if not head.startswith(f'{{"simulation": {_STATE_SCHEMA},'):
        raise ValueError(f"{where}: not a simulation's state of schema {_STATE_SCHEMA}; remove it to start again")
    if head != _head(body):
        raise ValueError(f"{where}: changed since it was written; bring it back, or remove it to start again")
    return json.loads(body, object_hook=_special)["state"]
