"""Which sample each row decoded, and when: a track per row on the timeline.

Purpose: `RowTracks` traces in the batchers who got a row and who lost it, and draws each stay as a bar: from the moment
at which the host made the plan that begins it to the one at which it knew the end. A row is `row 1.3`, row 3 of dp
group 1; with several workers `row 0.1.3`, of worker 0. Aborted and moved requests are not in the trace: they are found
by comparing with the batcher's rows where the counts differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxrl.runtime.plan_timeline import PlanTimeline
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Capacity
from jaxrl.scheduling.tokens.progress import Admitted, Completed, Preempted, TraceEvent
from jaxrl.types import SampleKey

_ROWS, _GROUPS = 1 << 16, 1 << 10  # of a group and of a worker at most, for the order of tracks


@dataclass(frozen=True, slots=True)
class _Stay:
    key: SampleKey
    since_s: float


class RowTracks:
    """Draws the rows of the workers.

    Args:
      engines: of the workers, by their numbers; those whose trace somebody else has are not drawn.
      timeline: where to.
    """

    def __init__(self, engines: Sequence[Engine], timeline: PlanTimeline) -> None:
        self._engines, self._timeline, self._several = tuple(engines), timeline, len(engines) > 1
        self._stays: list[dict[tuple[int, int], _Stay]] = [{} for _ in engines]  # by dp group and slot
        self._rows: list[dict[SampleKey, tuple[int, int]]] = [{} for _ in engines]
        self._capacities: list[Capacity] = [engine.batcher.capacity for engine in engines]
        self._drawn = [engine.batcher.trace is None for engine in engines]
        for worker, engine in enumerate(engines):
            if self._drawn[worker]:
                engine.batcher.trace = partial(self._trace, worker)

    def follow(self, worker: int) -> None:
        """To be called when plans of a worker may have been made or collected, or requests aborted or moved."""
        batcher, rows = self._engines[worker].batcher, self._rows[worker]
        is_known = batcher.capacity is self._capacities[worker] and batcher.num_running == len(rows)
        if is_known or not self._drawn[worker]:
            return
        self._capacities[worker] = batcher.capacity
        now = {progress.request.key: (progress.group, progress.slot) for progress in batcher.running()}
        for key in [key for key, row in rows.items() if now.get(key) != row]:
            self._end(worker, key, "moved" if key in now else "abort")
        for key in now.keys() - rows.keys():
            self._begin(worker, key, now[key])

    def _trace(self, worker: int, event: TraceEvent) -> None:
        match event:
            case Admitted(key=key, dp_group=group, slot=slot):
                self._begin(worker, key, (group, slot))
            case Preempted(key=key):
                self._end(worker, key, "preempted")
            case Completed(key=key, num_tokens=tokens, finish_reason=reason):
                self._end(worker, key, reason, tokens=tokens)

    def _begin(self, worker: int, key: SampleKey, row: tuple[int, int]) -> None:
        for left in (key, before.key if (before := self._stays[worker].get(row)) is not None else None):
            if left is not None:  # it has left its row outside of the trace
                self._end(worker, left, "abort")
        self._rows[worker][key] = row
        self._stays[worker][row] = _Stay(key, self._timeline.now_s)

    def _end(self, worker: int, key: SampleKey, why: str, **more: Any) -> None:
        row = self._rows[worker].pop(key, None)
        if row is None:
            return
        stay, (group, slot) = self._stays[worker].pop(row), row
        name = f"{worker}.{group}.{slot}" if self._several else f"{group}.{slot}"
        order = (worker * _GROUPS + group) * _ROWS + slot
        shown = f"{key.epoch}.{key.prompt_index}.{key.sample_index}"
        self._timeline.row(name, order, shown, stay.since_s, self._timeline.now_s, end=why, **more)
