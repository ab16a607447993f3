"""The simulated trainer: learns nothing, and takes as long as training would.

Log-probabilities are zeros; losses and gradients do not exist, so their metrics are left out. A simulated critic is one
more of them: it is as large, and its missing vocabulary head is not counted.

Departures: a batch's tokens count a prompt once per sample, though the update computes it less often; padding of
microbatches is part of the cost model's `mfu`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from jaxrl.scheduling.layouts.latency import causal_pairs
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.cost_model import CostModel, TrainLoad
from jaxrl.types import TrainBatch


class SimulatedTrainer:
    """Charges forward passes and updates to the clock.

    The cost model is asked for a step as a whole, and each update is charged what it adds to the step so far; so the
    fixed cost of a step is charged once. `synced` ends the step.
    """

    def __init__(self, cost: CostModel, num_devices: int, clock: SimulatedClock) -> None:
        self._cost, self._num_devices, self._clock = cost, num_devices, clock
        self.synced()

    def token_logprobs(self, batch: TrainBatch, which: Literal["actor", "ref"]) -> list[np.ndarray]:
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


def blank_logprobs(batch: TrainBatch) -> list[np.ndarray]:
    return [np.zeros(len(sample), np.float32) for sample in batch.samples]


def load_of(batch: TrainBatch) -> tuple[int, float]:
    """(tokens of prompts and responses, (query, key) pairs of their attention)."""
    lengths = [len(p.token_ids) + len(s) for p, s in zip(batch.prompts, batch.samples, strict=True)]
    return sum(lengths), sum(causal_pairs(length) for length in lengths)
