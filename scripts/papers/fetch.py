"""RollPacker's baselines of Table 4: a stream trainer that gets groups a single time.

Source: RollPacker §6.6, "a single fetch of all available completed prompts", capped at 20, 30, 40 or 50 % of the batch.
The text leaves open when: at once, with what is there, or when there are so many. Both are here.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.runtime.streaming import GradientStream
from jaxrl.types import Group, TrainBatch


class SingleFetch:
    """A `GradientStream` that begins the gradients of the first groups that it is given, and of no others.

    Args:
      stream: computes them.
      most: groups at most.
      waits: for so many.
    """

    def __init__(self, stream: GradientStream, most: int, waits: bool) -> None:
        self._stream, self._most, self._waits = stream, most, waits
        self._seen: list[Group] = []
        self._fetched = False

    def open(self) -> None:
        self._seen, self._fetched = [], False
        self._stream.open()

    def give(self, groups: Sequence[Group], step: int) -> None:
        assert not self._fetched, "there is no room after the fetch"
        self._seen += groups
        if not self._waits or len(self._seen) >= self._most:
            self._fetched = True
            self._stream.give(self._seen[: self._most], step)

    def poll(self) -> bool:
        done = self._stream.poll()
        return done and not self._fetched

    def finish(self) -> None:
        self._stream.finish()

    def close(self) -> list[TrainBatch]:
        return self._stream.close()

    def abandon(self) -> None:
        self._stream.abandon()
