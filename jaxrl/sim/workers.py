"""The executors of several simulated workers, on one clock, as what a backend asks of them together.

Purpose: `SimulatedWorkers` implements `jaxrl.runtime.backend.Worker`. Plans of different workers overlap by themselves,
because each executor knows when its own devices are free; what a backend asks of all of them starts on all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.executor import SimulatedExecutor


class SimulatedWorkers:
    """Several executors; `executors` are by the worker's number.

    Attributes:
      recompiles: 0, because there are no programs.
    """

    def __init__(self, executors: Sequence[SimulatedExecutor], clock: SimulatedClock) -> None:
        self.executors = tuple(executors)
        self.recompiles = 0
        self._clock = clock

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, by all."""
        return sum(executor.num_tokens for executor in self.executors)

    def sync_weights(self, train_params: Any, policy_version: int) -> None:
        """The devices get weights of another version, each worker's at the same time."""
        self._clock.at_once(partial(each.sync_weights, train_params, policy_version) for each in self.executors)

    def allocate(self) -> None:
        """The devices wake up, all at the same time."""
        self._clock.at_once(each.allocate for each in self.executors)

    def release(self, *, weights: bool = False) -> None:
        """Nothing: see `SimulatedExecutor.release`."""
        for each in self.executors:
            each.release(weights=weights)

    def release_some(self, workers: Sequence[int]) -> None:
        """Closed workers: nothing, as in `release`."""
        for worker in workers:
            self.executors[worker].release(weights=True)
