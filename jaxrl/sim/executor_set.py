"""The executors of several simulated workers, on one clock.

Plans of different workers overlap by themselves, because each executor knows when its own devices are free; what a
backend asks of all of them starts on all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxrl.scheduling.tokens.plan import Ticket
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.executor import SimulatedExecutor, SimulatedTicket


class SimulatedExecutorSet:
    """`SimulatedExecutor`s as a run holds them (`Run.executors`).

    Args:
      executors: by the worker's number. sync_s: seconds of a weight sync beside the rollout.

    Attributes:
      beside: called, as `occupy` is, when something else takes all devices: what runs on those of closed workers.
    """

    def __init__(self, executors: Sequence[SimulatedExecutor], clock: SimulatedClock, sync_s: float = 0.0) -> None:
        self.executors = tuple(executors)
        self._sync_s = sync_s
        self.recompiles = 0
        self.beside: list[Callable[[int, int], object]] = []
        self._clock = clock
        self._asleep = set(range(len(self.executors)))  # workers that an update, or a stream, has or had
        self._buffered: tuple[int, int] | None = None  # a version, and when its weights are there

    @property
    def num_tokens(self) -> int:
        return sum(executor.num_tokens for executor in self.executors)

    def sync_weights(self, train_params: Any, policy_version: int) -> None:
        self._clock.at_once(partial(each.sync_weights, train_params, policy_version) for each in self.executors)

    def buffer_weights(self, train_params: Any, policy_version: int) -> None:
        """Weights of another version are on their way, as long as a sync takes; nothing waits for them."""
        began_ns = self._clock.now_ns
        self._clock.advance(self._sync_s)
        self._buffered, self._clock.now_ns = (policy_version, self._clock.now_ns), began_ns

    @property
    def is_buffered(self) -> bool:
        return self._buffered is not None and self._clock.now_ns >= self._buffered[1]

    def take_buffered(self, worker: int) -> None:
        """A worker switches to the buffered weights; waits until they are there."""
        assert self._buffered is not None, "no weights are buffered"
        version, at_ns = self._buffered
        self._clock.reach(at_ns)
        self.executors[worker].policy_version = version

    def share(self, kind: type) -> None: ...

    def first_done(self, tickets: Mapping[int, Ticket]) -> int:
        """Called with the plan in flight of each worker: the worker whose result is there first."""
        ends = {worker: ticket.end_ns for worker, ticket in tickets.items() if isinstance(ticket, SimulatedTicket)}
        return min(ends, key=lambda worker: (ends[worker], worker))

    def occupy(self, from_ns: int, duration_ns: int) -> int:
        """Something else runs on all devices, between plans; when it has ended everywhere."""
        for each in self.beside:
            each(from_ns, duration_ns)
        return max(executor.occupy(from_ns, duration_ns) for executor in self.executors)

    def free_ns(self, workers: Sequence[int]) -> int:
        return max(self.executors[worker].free_ns for worker in workers)

    def allocate(self) -> None:
        """The devices that are not awake wake up, all at the same time."""
        self._clock.at_once(self.executors[worker].allocate for worker in sorted(self._asleep))
        self._asleep.clear()

    def release(self, *, weights: bool = False) -> None:
        for each in self.executors:
            each.release(weights=weights)
        self._asleep = set(range(len(self.executors)))

    def release_some(self, workers: Sequence[int]) -> None:
        for worker in workers:
            self.executors[worker].release(weights=True)
        self._asleep.update(workers)
