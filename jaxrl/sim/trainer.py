"""Simulated training: it learns nothing, and takes as long as training would.

Log-probabilities are zeros; losses and gradients do not exist, so their metrics are left out. A simulated critic is one
more `SimulatedTrainer`: it is as large, and its missing vocabulary head is not counted.

`SimulatedStream` is the stream trainer's half (RollPacker §4.4 and §5). The freed devices keep their own time, beside
the clock's: a dispatch begins when they are free, and the rollout does not wait for it. Another model on all devices
takes its time from them as from the others (`occupy`). Charged are: the weights' way to the freed devices, and the
sums' way back before the update; a forward pass for each set of log-probabilities that training asks for, with the swap
of the reference's weights; and gradients, on the freed devices' share of what training reaches. The update that follows
is charged for what is left alone, because its batch does not contain the streamed groups.

Departures: a batch's tokens count a prompt once per sample, though the update computes it less often; padding of
microbatches is part of the cost model's `mfu`. The fixed cost of a training step is charged to the update, and none of
it to the stream; a part of a batch is taken to reach the same share of the peak as a complete one; a verdict does not
wait for the current microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from jaxrl.scheduling.layouts.latency import causal_pairs
from jaxrl.sim.clock import SimulatedClock, nanoseconds
from jaxrl.sim.cost_model import CostModel, TrainLoad
from jaxrl.types import Group, TrainBatch

Which = Literal["actor", "ref"]
Logprobs = Callable[[TrainBatch, Which], list[np.ndarray]]
Prepare = Callable[[Sequence[Group], int, Logprobs], TrainBatch]
"""(groups, the update's step, what gives log-probabilities) -> their batch, with all that gradients need."""


class SimulatedTrainer:
    """Charges forward passes and updates to the clock.

    The cost model is asked for a step as a whole, and each update is charged what it adds to the step so far; so the
    fixed cost of a step is charged once. `synced` ends the step.
    """

    def __init__(self, cost: CostModel, num_devices: int, clock: SimulatedClock) -> None:
        self._cost, self._num_devices, self._clock = cost, num_devices, clock
        self.synced()

    def token_logprobs(self, batch: TrainBatch, which: Which) -> list[np.ndarray]:
        """Zeros, float32 [T] per sample, after the time of one forward pass."""
        tokens, pairs = load_of(batch)
        self._clock.advance(self._cost.forward_s(tokens, pairs, self._num_devices))
        return blank_logprobs(batch)

    def token_values(self, batch: TrainBatch) -> list[np.ndarray]:
        return self.token_logprobs(batch, "actor")

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        self.accumulate(batch)
        return self.apply()

    def accumulate(self, batch: TrainBatch) -> None:
        tokens, pairs = load_of(batch)
        self._tokens += tokens
        self._pairs += pairs

    def apply(self) -> dict[str, float]:
        """An optimizer update over what was accumulated since the last one; it has no metrics."""
        self._updates += 1
        load = TrainLoad(self._tokens, self._pairs, updates=self._updates)
        whole_s = self._cost.train_step_s(load, self._num_devices)
        self._clock.advance(max(whole_s - self._charged_s, 0.0))
        self._charged_s = whole_s
        return {}

    def synced(self) -> None:
        """The rollout has taken the weights over: the next update belongs to another step."""
        self._tokens, self._pairs, self._updates = 0, 0.0, 0
        self._charged_s = 0.0


class SimulatedStream:
    """In place of `jaxrl.mechanisms.stream_trainer.gradients.TrainStream`. `num_devices`: of the trainer, of which
    `part` are freed; `begins_ns`: when these are done with what they had before."""

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


def blank_logprobs(batch: TrainBatch) -> list[np.ndarray]:
    return [np.zeros(len(sample), np.float32) for sample in batch.samples]


def load_of(batch: TrainBatch) -> tuple[int, float]:
    """(tokens of prompts and responses, (query, key) pairs of their attention)."""
    lengths = [len(p.token_ids) + len(s) for p, s in zip(batch.prompts, batch.samples, strict=True)]
    return sum(lengths), sum(causal_pairs(length) for length in lengths)
