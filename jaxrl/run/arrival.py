"""The order in which plans of several workers are collected where it is that of arrival (`rollout.order=arrival`).

Purpose: `ArrivalOrder` serves the worker whose plan is done first, so no worker waits for another. A clock decides
that, so each choice is written to the journal; a step that runs again after a crash takes its choices from there.

Source: none published; the papers' systems take results as they come and cannot repeat a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxrl.record.journal import Journal
from jaxrl.scheduling.mechanism import Mechanism, RoundInfo
from jaxrl.scheduling.tokens.plan import Ticket

KIND = "arrival"


class ArrivalOrder(Mechanism):
    """Implements `jaxrl.scheduling.tokens.local_workers.Arrival`. `first_done`: waits for one of the plans in flight,
    by worker, and names its worker; `journal`: None where the clock is simulated, and decides the same again."""

    def __init__(self, first_done: Callable[[Mapping[int, Ticket]], int], journal: Journal | None) -> None:
        self._first_done, self._journal = first_done, journal
        self._place, self._num_served = (0, 0), 0

    def round_begins(self, info: RoundInfo) -> None:
        self._place, self._num_served = (info.step, info.index), 0

    def __call__(self, tickets: Mapping[int, Ticket]) -> int:
        """The worker to serve, of those that have nothing to do but to wait for a plan."""
        step, round_index = self._place
        key, self._num_served = (round_index, self._num_served), self._num_served + 1
        entry = None if self._journal is None else self._journal.find(step, KIND, key)
        if entry is not None:
            return entry["worker"]
        worker = self._first_done(tickets)
        if self._journal is not None:
            self._journal.append(step, KIND, key, {"worker": worker}, sync=False)
        return worker
