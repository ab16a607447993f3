"""What arrays hold of the devices' memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax


def live_bytes() -> dict[int, int]:
    """Bytes of all arrays that are alive, per device; buffers that several arrays share count once."""
    seen: dict[tuple[int, int], int] = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            seen[shard.device.id, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    totals: dict[int, int] = {}
    for (device, _), size in seen.items():
        totals[device] = totals.get(device, 0) + size
    return totals


def bytes_on(devices: Iterable[jax.Device], kind: str | None = None) -> int:
    """Bytes of all buffers that are alive there, in this kind of memory or in any; arrays may share them."""
    wanted, found = set(devices), {}
    for array in jax.live_arrays():
        if kind is None or array.sharding.memory_kind == kind:
            for shard in array.addressable_shards:
                if shard.device in wanted and shard.data.nbytes:
                    found[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(found.values())


class Watched:
    """Stands for a function that makes compiled programs, and counts what they hold.

    Attributes:
      temporaries: bytes of each program that was made.
      seen: `live_bytes` after each run of one, when nothing that it took has been deleted yet.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self.temporaries: list[int] = []
        self.seen: list[dict[int, int]] = []

    def __call__(self, *arguments: Any) -> Callable[..., Any]:
        program = self._make(*arguments)
        self.temporaries.append(program.memory_analysis().temp_size_in_bytes)

        def run(*arrays: Any) -> Any:
            results = program(*arrays)
            jax.block_until_ready(results)
            self.seen.append(live_bytes())
            return results

        run.memory_analysis = program.memory_analysis  # type: ignore[attr-defined]
        return run
