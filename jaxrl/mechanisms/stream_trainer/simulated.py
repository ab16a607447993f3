"""The simulated stream trainer: gradients beside the rollout take time on the freed devices, and are made nowhere.

The freed devices keep their own time, beside the clock's: a dispatch begins when they are free, and the rollout does
not wait for it. Another model on all devices takes its time from them as from the others (`occupy`).

Source: RollPacker §4.4 and §5. Charged are: the weights' way to the freed devices, and the sums' way back before the
update; a forward pass for each set of log-probabilities that training asks for, with the swap of the reference's
weights; and gradients, on the freed devices' share of what training reaches. The update that follows is charged for
what is left alone (`SimulatedTrainer`), because its batch does not contain the streamed groups.

Departures: the fixed cost of a training step is charged to the update, and none of it to the stream; a part of a batch
is taken to reach the same share of the peak as a complete one; a verdict does not wait for the current microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from jaxrl.sim.clock import SimulatedClock, nanoseconds
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.trainer import blank_logprobs, load_of
from jaxrl.types import Group, TrainBatch

Which = Literal["actor", "ref"]
Logprobs = Callable[[TrainBatch, Which], list[np.ndarray]]
Prepare = Callable[[Sequence[Group], int, Logprobs], TrainBatch]
"""(groups, the update's step, what gives log-probabilities) -> their batch, with all that gradients need."""


class SimulatedStream:
    """Implements `jaxrl.mechanisms.stream_trainer.GradientStream`. `num_devices`: of the trainer, of which `part` are
    freed; `begins_ns`: when these are done with what they had before."""

    def __init__(
        self,
        cost: CostModel,
        clock: SimulatedClock,
        num_devices: int,
        part: int,
        prepare: Prepare,
        begins_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        assert 0 < part < num_devices, "a stream has some of the trainer's devices, and not all"
        self._cost, self._clock = cost, clock
        self._num_devices, self._part = num_devices, part
        self._prepare, self._begins_ns = prepare, begins_ns
        self._free_ns: int | None = None  # when the devices are done with everything; None: closed
        self._batches: list[TrainBatch] = []

    def open(self) -> None:
        """The freed devices take the weights, in float32 as the trainer has them."""
        assert self._free_ns is None, "the stream is open already"
        self._free_ns = max(self._clock.now_ns, self._begins_ns())
        self._charge(self._cost.regroup_s(self._num_devices, self._part))

    def give(self, groups: Sequence[Group], step: int) -> None:
        assert self._free_ns is not None, "the stream is closed"
        self._free_ns = max(self._free_ns, self._clock.now_ns)
        batch = self._prepare(groups, step, self._logprobs)
        self._charge(self._cost.gradients_s(*load_of(batch), self._part))
        self._batches.append(batch)

    def poll(self) -> bool:
        return self._free_ns is None or self._free_ns <= self._clock.now_ns

    def wait_quiet(self) -> None:
        """Nothing: what else runs on the devices takes them by `occupy`."""

    def occupy(self, from_ns: int, duration_ns: int) -> None:
        """Something else runs on the freed devices, from a moment on, for a duration: what they have got ends later."""
        if self._free_ns is not None:
            self._free_ns = max(self._free_ns, from_ns) + duration_ns

    def finish(self) -> None:
        if self._free_ns is not None:
            self._clock.reach(self._free_ns)

    def close(self) -> list[TrainBatch]:
        self.finish()
        if self._batches:
            self._clock.advance(self._cost.regroup_s(self._num_devices, self._part))
        batches = self._batches
        self.abandon()
        return batches

    def abandon(self) -> None:
        self._free_ns, self._batches = None, []

    def _logprobs(self, batch: TrainBatch, which: Which) -> list[np.ndarray]:
        seconds = self._cost.forward_s(*load_of(batch), self._part)
        self._charge(seconds + (self._cost.swap_s(self._part) if which == "ref" else 0.0))
        return blank_logprobs(batch)

    def _charge(self, seconds: float) -> None:
        assert self._free_ns is not None, "the stream is closed"
        self._free_ns += nanoseconds(seconds)
