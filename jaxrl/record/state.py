"""Serialization of a run's host state: nested JSON values with numpy arrays among them.

A checkpoint of a real run stores values and arrays apart (`split_arrays`); a simulated run stores all in one JSON file
with its SHA-256 (`dump_state`).
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

_STATE_SCHEMA = 2
"""Of a simulated run's file: a line that names it and the digest of the rest."""


def split_arrays(state: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Nested state as JSON values, and its numpy arrays by dotted name."""
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


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Nested state as JSON values alone: an array as an object, and a number that is not finite, which JSON has not, as
    one with its text. `state_of_plain` is the reverse."""
    return {key: _plain(value) for key, value in state.items()}


def state_of_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """What `plain_state` was given, but that a tuple is a list."""
    return json.loads(json.dumps(values, allow_nan=False), object_hook=_special)


def dump_state(state: Mapping[str, Any]) -> str:
    """`Loop.host_state` as JSON, arrays included."""
    body = json.dumps({"state": plain_state(state)}, allow_nan=False)
    return f"{_head(body)}\n{body}"


def _head(body: str) -> str:
    return json.dumps({"simulation": _STATE_SCHEMA, "sha256": hashlib.sha256(body.encode()).hexdigest()})


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
    """An object of JSON as what it stands for (`_plain`)."""
    if value.keys() == {"array", "shape", "values"}:
        return np.asarray(value["values"], np.dtype(value["array"])).reshape(value["shape"])
    if value.keys() == {"number"}:
        return float(value["number"])
    return value


def load_state(text: str, where: str) -> dict[str, Any]:
    """What `dump_state` wrote. Raises ValueError for anything else, and for what has changed since."""
    head, _, body = text.partition("\n")
    if not head.startswith(f'{{"simulation": {_STATE_SCHEMA},'):
        raise ValueError(f"{where}: not a simulation's state of schema {_STATE_SCHEMA}; remove it to start again")
    if head != _head(body):
        raise ValueError(f"{where}: changed since it was written; bring it back, or remove it to start again")
    return json.loads(body, object_hook=_special)["state"]
