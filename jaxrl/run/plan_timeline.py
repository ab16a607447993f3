"""The plans of each worker on the timeline, and which sample each row decoded, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Capacity
from jaxrl.scheduling.tokens.progress import Admitted, Completed, Preempted, TraceEvent
from jaxrl.types import SampleKey

if TYPE_CHECKING:
    from jaxrl.record.timeline import Timeline
    from jaxrl.sim.clock import SimulatedPhases

    PlanTimeline = Timeline | SimulatedPhases


class PlanTracks:
    """A track for each engine; `timeline` None: plans are not drawn.

    A plan of one of several workers is drawn from when its devices can begin with it: it has been submitted, and the
    one before has been collected. It ends when the host has its outcome. So the timeline shows the work of each
    worker's devices, whichever worker the host waits for. A single worker's plan is drawn from before it is submitted
    until the one before it has been collected, which is what the host does.
    """

    def __init__(self, engines: Sequence[Engine], timeline: PlanTimeline | None) -> None:
        self._engines, self._timeline = tuple(engines), timeline
        self._is_alone = len(self._engines) == 1
        self._open: dict[int, tuple[int, AbstractContextManager[None]]] = {}  # by worker: the plan that is drawn

    @contextmanager
    def step(self, worker: int) -> Iterator[None]:
        """Around a step of a worker."""
        if self._timeline is None:
            yield
        elif self._is_alone:
            with self._timeline.span("engine", "plan", index=self._engines[worker].counters.plans):
                yield
        else:
            self.follow(worker)  # a change of layout may have collected plans
            yield
            self.follow(worker)

    def follow(self, worker: int) -> None:
        """Plans of a worker may have been collected, or submitted: ends what is drawn of the former, and begins with
        the next."""
        ticket, (index, span) = self._engines[worker].oldest, self._open.get(worker, (None, None))
        oldest = None if ticket is None else ticket.index
        if self._timeline is None or self._is_alone or index == oldest:
            return
        if span is not None:
            span.__exit__(None, None, None)
            del self._open[worker]
        if oldest is not None:
            span = self._timeline.span(f"engine {worker}", "plan", index=oldest)
            span.__enter__()
            self._open[worker] = oldest, span


_ROWS, _GROUPS = 1 << 16, 1 << 10  # of a group and of a worker at most, for the order of tracks


class RowTracks:
    """A track for each row: `row 1.3` is row 3 of dp group 1; with several workers `row 0.1.3`, of worker 0.

    The batchers trace who got a row and who lost it. Each stay is a bar, from the moment at which the host made the
    plan that begins it to the one at which it knew the end. Aborted and moved requests are not in the trace: they are
    found by comparing with the batcher's rows where the counts differ.
    """

    def __init__(self, engines: Sequence[Engine], timeline: PlanTimeline) -> None:
        self._engines, self._timeline, self._several = tuple(engines), timeline, len(engines) > 1
        # by dp group and slot: who has the row, since when
        self._stays: list[dict[tuple[int, int], tuple[SampleKey, float]]] = [{} for _ in engines]
        self._rows: list[dict[SampleKey, tuple[int, int]]] = [{} for _ in engines]
        self._capacities: list[Capacity] = [engine.batcher.capacity for engine in engines]
        for worker, engine in enumerate(engines):
            engine.batcher.trace = partial(self._trace, worker)

    def follow(self, worker: int) -> None:
        """To be called when plans of a worker may have been made or collected, or requests aborted or moved."""
        batcher, rows = self._engines[worker].batcher, self._rows[worker]
        is_known = batcher.capacity is self._capacities[worker] and batcher.num_running == len(rows)
        if is_known:
            return
        self._capacities[worker] = batcher.capacity
        slots = batcher.capacity.num_slots
        now = {response.request.key: divmod(response.seat, slots) for response in batcher.running()}
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
        self._end(worker, key, "abort")  # where it, or who had the row, left its row outside of the trace
        if row in self._stays[worker]:
            self._end(worker, self._stays[worker][row][0], "abort")
        self._rows[worker][key] = row
        self._stays[worker][row] = key, self._timeline.now_s

    def _end(self, worker: int, key: SampleKey, why: str, **more: Any) -> None:
        row = self._rows[worker].pop(key, None)
        if row is None:
            return
        (_, since_s), (group, slot) = self._stays[worker].pop(row), row
        name = f"{worker}.{group}.{slot}" if self._several else f"{group}.{slot}"
        order = (worker * _GROUPS + group) * _ROWS + slot
        shown = f"{key.epoch}.{key.prompt_index}.{key.sample_index}"
        self._timeline.row(name, order, shown, since_s, self._timeline.now_s, end=why, **more)
