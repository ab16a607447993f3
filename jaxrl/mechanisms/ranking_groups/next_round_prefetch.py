"""Idle workers begin with the next round while others still decode.

When the update beside a round has ended, the new weights are brought to the rollout's devices beside those in use (the
weight buffer); a worker with nothing left of the present round takes them, and starts what the next round will launch
there. What ends of it is held until that round begins and launches it.

Source: RhymeRL §6.2, Fig. 10 (worker-controlled weight updates: weights are propagated to the rollout workers' buffers,
and a worker takes them when it has completed its part of a step).

Departures: every token of a round is of one version, and a batch is all of its round. So a head start changes no
number, and a checkpoint holds only which prompts were taken from the data: a resumed run starts them again, with the
same keys and the same version, and samples the same tokens. A clock decides when it begins, so it is only for rounds
whose batch does not depend on which responses end first (`BatchRule.ahead`). None begins where an evaluation comes
between the two rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.scheduling.rounds.events import Launch
from jaxrl.scheduling.tokens.engine import Finished
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.types import Prompt, SampleKey

if TYPE_CHECKING:
    from jaxrl.rollout.remote import RemoteWorkers
    from jaxrl.rollout.worker_set import WorkerSet
    from jaxrl.sim.executor_set import SimulatedExecutorSet

    WeightBuffer = WorkerSet | RemoteWorkers | SimulatedExecutorSet  # with a second copy of the weights

Offer = Callable[[], Sequence[Launch] | None]
"""The launches of the next round, with their workers; None until its weights are there."""


class NextRoundPrefetches:
    """Samples of the next round, parked while the present one runs (`jaxrl.scheduling.mechanism.Parking`). `weights`:
    gives the trainer's current ones."""

    def __init__(
        self,
        engines: LocalWorkers,
        buffer: WeightBuffer,
        weights: Callable[[], Any],
        start: Callable[[Prompt, SampleKey, int], int],
        clock: Callable[[], float],
    ) -> None:
        self._engines, self._buffer, self._weights = engines, buffer, weights
        self._start, self._clock = start, clock
        self._offer: Offer | None = None
        self._next_version = 0
        self._version: int | None = None  # of the weights in the buffer, while some worker has not taken them
        self._behind: set[int] = set()  # workers that have not
        self._waiting: dict[int, list[tuple[Prompt, SampleKey]]] = {}  # by worker
        self._running: dict[SampleKey, int] = {}  # requests of the next round
        self._ended: dict[SampleKey, Finished] = {}
        self._began_s: float | None = None

    has_pending = False  # nothing of the present round waits here

    @property
    def is_on(self) -> bool:
        """Whether the next weights are in the buffer."""
        return self._version is not None

    @property
    def has_begun(self) -> bool:
        """Whether responses of the next round were started."""
        return bool(self._running or self._ended)

    def draws_now(self, worker: int) -> bool:
        """Whether a worker still has the weights of the present round."""
        return self._version is None or worker in self._behind

    # -- in a round --------------------------------------------------------------------------------------------------

    def expect(self, offer: Offer | None, policy_version: int) -> None:
        """A round has begun; `offer` will say what the next one launches, with weights of this version. None: it may
        not begin in this one."""
        self._offer, self._next_version, self._began_s = offer, policy_version, None

    def look(self) -> None:
        """Between plans: takes up the offer when it is there, and starts what workers that are done can start."""
        if self._offer is not None and (launches := self._offer()) is not None:
            self._offer = None
            if launches:
                self._take_up(launches)
        if not self._waiting or not self._buffer.is_buffered:
            return
        for worker in [each for each in self._waiting if not self._engines.num_live(each)]:
            self._switch(worker)
            for prompt, key in self._waiting.pop(worker):
                self._running[key] = self._start(prompt, key, worker)
            self._began_s = self._clock() if self._began_s is None else self._began_s

    def park(self, finished: Finished) -> bool:
        """Keeps what has ended if it is of the next round; returns whether it is."""
        key = finished.sample.key
        if self._running.pop(key, None) is None:
            return False
        self._ended[key] = finished
        return True

    def end(self) -> float:
        """The round has ended; returns for how many seconds the next one has been running."""
        self._offer = None
        return 0.0 if self._began_s is None else self._clock() - self._began_s

    # -- between rounds ----------------------------------------------------------------------------------------------

    def enter(self, policy_version: int) -> None:
        """All workers continue with the buffered weights."""
        assert self._version == policy_version, f"weights {self._version} are buffered, not {policy_version}"
        for worker in sorted(self._behind):
            self._switch(worker)
        self._version = None
        self._waiting.clear()  # the round launches them

    def release(self, key: SampleKey, *, keep: bool) -> None:
        """Samples of the present round are not parked here."""

    def adopt(self, key: SampleKey) -> int | Finished | None:
        """Takes over a response that the round launches: its request if it runs already, its end if it has ended, else
        None."""
        return self._running.pop(key) if key in self._running else self._ended.pop(key, None)

    def cancel(self) -> None:
        """Everything of the next round is dropped."""
        self._offer = self._version = None
        for kept in (self._behind, self._waiting, self._running, self._ended):
            kept.clear()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _take_up(self, launches: Sequence[Launch]) -> None:
        self._version = self._next_version
        self._behind = set(range(len(self._engines.engines)))
        self._buffer.buffer_weights(self._weights(), self._version)
        for launch in launches:
            for key, worker in zip(launch.keys, launch.workers, strict=True):
                self._waiting.setdefault(worker, []).append((launch.prompt, key))

    def _switch(self, worker: int) -> None:
        self._engines.settle(worker)  # a plan of rows that have all stopped may be in flight
        self._buffer.take_buffered(worker)
        self._behind.remove(worker)
