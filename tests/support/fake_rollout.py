"""Prompts and samples of tests: tokens that name their sample, and a checkpoint of their state."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from jaxrl.types import Prompt, Sample, SampleKey


def make_sample(key: SampleKey, versions: list[int], reason: Any) -> Sample:
    """Tokens and log-probabilities that encode their sample, their position, and the version that wrote them."""
    places = np.arange(len(versions))
    ids = (1000 * key.prompt_index + 100 * key.sample_index + 10 * key.attempt + places).astype(np.int32)
    wrote = np.asarray(versions, np.int32)
    return Sample(key, ids, (-wrote - 0.5).astype(np.float32), (-wrote - 0.25).astype(np.float32), wrote, reason)


class FakePrompts:
    """`num_prompts` per epoch, each epoch in an order of its own, without end."""

    def __init__(self, num_prompts: int, position: int = 0) -> None:
        self.num_prompts, self.position = num_prompts, position

    def next(self, num_prompts: int) -> list[Prompt]:
        places = range(self.position, self.position + num_prompts)
        self.position += num_prompts
        return [self.get(p // self.num_prompts, (p + 7 * (p // self.num_prompts)) % self.num_prompts) for p in places]

    def get(self, epoch: int, index: int) -> Prompt:
        return Prompt(epoch, index, (1, 2), f"prompt {index}", "test")


def through_disk(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a checkpoint brings it back: JSON values as JSON, arrays as numpy files."""
    arrays: list[np.ndarray] = []

    def take_out(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value)
            return {"array": len(arrays) - 1}
        return {k: take_out(v) for k, v in value.items()} if isinstance(value, dict) else value

    def put_back(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return found[value["array"]] if set(value) == {"array"} else {k: put_back(v) for k, v in value.items()}

    text = json.dumps(take_out(state))
    found = []
    for array in arrays:
        file = io.BytesIO()
        np.save(file, array, allow_pickle=False)
        found.append(np.load(io.BytesIO(file.getvalue()), allow_pickle=False))
    return put_back(json.loads(text))


def tangled(seed: int, *numbers: int) -> int:
    """A number that does not follow simply from its arguments."""
    value = seed
    for number in numbers:
        value = (value * 1103515245 + number * 12345 + 99991) % (1 << 31)
        value ^= value >> 7
    return value
