"""RollPacker's baselines of Table 4: a stream trainer that gets groups a single time.

Source: RollPacker §6.6, "a single fetch of all available completed prompts", capped at 20, 30, 40 or 50 % of the batch;
the authors' code fetches once devices are freed (Farrrrland/RollPacker, rlvr_pipeline_fixed_async.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.mechanisms.stream_trainer import GradientStream
from jaxrl.types import Group, TrainBatch


class SingleFetch:
    """A `GradientStream` that begins the gradients of the first groups that it is given together, and of no others:
    what it is given later is left to the update.

    Args:
      stream: computes them.
      most: groups at most.
    """

    def __init__(self, stream: GradientStream, most: int) -> None:
        self._stream, self._most = stream, most
        self._fetched = False

    def open(self) -> None:
        self._fetched = False
        self._stream.open()

    def give(self, groups: Sequence[Group], step: int) -> None:
        if not self._fetched:
            self._stream.give(groups[: self._most], step)
        self._fetched = True

    def poll(self) -> bool:
        done = self._stream.poll()
        return done and not self._fetched

    def wait_quiet(self) -> None:
        self._stream.wait_quiet()

    def finish(self) -> None:
        self._stream.finish()

    def close(self) -> list[TrainBatch]:
        return self._stream.close()

    def abandon(self) -> None:
        self._stream.abandon()
