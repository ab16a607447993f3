"""The order in which rows are given: grain's deterministic shuffle, another one in each epoch, without end."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1 << 14)  # of few prompts grain takes ten milliseconds for each
def nth(count: int, seed: int | None, position: int) -> int:
    """The row at a position of the endless order of `count` rows; without a seed rows keep their order."""
    row = _endless(count, seed)[position]
    assert row is not None  # grain writes None for an element that a filter removed; nothing here filters
    return row


@lru_cache(maxsize=128)  # one for each source
def _endless(count: int, seed: int | None) -> Any:
    import grain  # which imports jax

    order = grain.MapDataset.range(count)
    return (order if seed is None else order.shuffle(seed=seed)).repeat()
