"""Layouts that adapt: the mechanism over the workers of a backend, real or simulated.

`LayoutSessions` connects each worker's `LayoutControl` with the clock, the journal, the timeline and the run's log. A
worker switches by its own rows, step times and preemptions; all learn from every response that ends. Never imports jax.

The journal names a worker, and of how many, where there are several. A run that resumes with another number of workers
has other rows at the same places, so it repeats none of their decisions: the interrupted step decides anew. No token
depends on it.

Source: PAT §4 switches the layout of each node by itself: a worker per node, with `rollout.layout.switch`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from jaxrl.mechanisms.adaptive_layouts.control import Decision, LayoutControl
from jaxrl.mechanisms.adaptive_layouts.options import LayoutSection
from jaxrl.record.journal import Journal
from jaxrl.record.layouts import LayoutLog
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.relayout import SwitchFailed
from jaxrl.scheduling.mechanism import Drawing, Mechanism, RoundEnd, RoundInfo
from jaxrl.scheduling.rounds.events import Interrupted
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.types import Sample

_log = logging.getLogger(__name__)
KIND = "layout"
SUMMED = frozenset(
    f"rollout/layout/{name}" for name in ("switches", "failed_switches", "moved_tokens", "cost_s", "predicted_cost_s")
)
"""Metrics that add up over workers; of the others there are means."""


class LayoutSessions(Mechanism):
    """The layouts of all workers.

    Args:
      controls: by worker.
      clock: seconds from any origin, the same as `drawing` has.
      log: None: none is written.
      journal: where decisions go; None for a simulated clock, which decides the same again.
    """

    name = "layouts"

    def __init__(
        self,
        controls: Sequence[LayoutControl],
        clock: Callable[[], float],
        drawing: Drawing,
        log: LayoutLog | None,
        journal: Journal | None,
    ) -> None:
        self.controls = tuple(controls)
        self._clock, self._drawing, self._log, self._journal = clock, drawing, log, journal
        self._round = (0, 0, "")  # step, index, kind
        self._spans: list[list[tuple[float, float]]] = [[] for _ in controls]  # of the round's switches, by worker

    def enter_rollout(self, policy_version: int, *, was_released: bool) -> bool:
        """Where there are neither weights nor pools, takes the layouts of the next round at no cost."""
        if was_released:
            for control in self.controls:
                control.enter()
        return False

    def round_begins(self, info: RoundInfo) -> None:
        self._round = (info.step, info.index, info.kind)
        self._spans = [[] for _ in self.controls]
        journal, num_workers = self._journal, len(self.controls)
        entries = [] if journal is None else [e for e in journal.entries(info.step, KIND) if e["key"][0] == info.index]
        others = {_num_workers(entry) for entry in entries} - {num_workers}
        if others:
            _log.warning(
                "step %d: the journal has layout decisions of a run with %s worker(s), and this one has %d "
                "(rollout.num_workers): they are not repeated, and the step decides anew",
                info.step,
                " and ".join(map(str, sorted(others))),
                num_workers,
            )
        for worker, control in enumerate(self.controls):
            place = self._place(worker)
            recorded = [Decision.from_json(entry) for entry in entries if tuple(entry["key"][2:]) == place]

            def write(decision: Decision, place: tuple[int, ...] = place) -> None:
                if journal is not None:
                    journal.append(info.step, KIND, (info.index, decision.dispatch, *place), decision.to_json())

            control.begin(info.kind, recorded, write)

    def _place(self, worker: int) -> tuple[int, ...]:
        """The end of a worker's keys in the journal, behind round and dispatch; empty for the only one."""
        return (worker, len(self.controls)) if len(self.controls) > 1 else ()

    def before_plan(self, worker: int) -> None:
        """Lets the layout of one worker change, before a plan of it. Raises Interrupted where nothing can run any more.

        A round that runs again decides nothing by itself before the last decision of any worker has been repeated:
        until then it is the same round.
        """
        follows = any(control.follows for control in self.controls)
        began = self._clock()
        try:
            switched = self.controls[worker].before_plan(decides=not follows)
        except SwitchFailed as failure:
            _log.error("the run stops: %s", failure)
            raise Interrupted(str(failure)) from failure
        if switched is not None:
            self._spans[worker].append((began, self._clock()))

    def after_plan(self, worker: int | None) -> None:
        if worker is not None:
            self.controls[worker].after_plan(self._clock())
            self._drawing.counter(self._track("tp", worker), tp=self.controls[worker].tp)

    def finished(self, samples: Sequence[Sample], *, is_stopping: bool = False) -> None:
        for sample in samples:
            for control in self.controls:
                control.finished(len(sample))

    def round_ends(self, end: RoundEnd) -> dict[str, float]:
        """The round's metrics over all workers. Draws and logs its switches."""
        found: list[dict[str, float]] = []
        for worker, (control, counted) in enumerate(zip(self.controls, end.workers, strict=True)):
            found.append(control.end(counted.preemptions))
            for (began, ended), switch in zip(self._spans[worker], control.switches, strict=True):
                shown = switch.to_json()
                name = f"tp {shown['from_tp']} to {shown['to_tp']} ({shown['how']})"
                self._drawing.complete(self._track("layout", worker), name, began, ended, **shown)
            if self._log is not None:
                source = "none" if control.predictor is None else control.predictor.profile.source
                named = {"worker": worker} if len(self.controls) > 1 else {}
                self._log.write(*self._round, source, named | control.picture())
        if len(found) == 1:
            return found[0]
        return {
            name: (sum if name in SUMMED else fmean)([own[name] for own in found if name in own])
            for name in dict.fromkeys(chain(*found))
        }

    def _track(self, name: str, worker: int) -> str:
        return f"{name} {worker}" if len(self.controls) > 1 else name

    def cancelled(self) -> None:
        for control in self.controls:
            control.cancel()

    def state_dict(self) -> dict[str, Any]:
        """Part of a checkpoint. One worker's is its control's."""
        states = [control.state_dict() for control in self.controls]
        return states[0] if len(states) == 1 else {"workers": {str(i): state for i, state in enumerate(states)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from another run's state. If that run had fewer workers, their states are dealt out in turn."""
        saved = state.get("workers", {"0": state})
        for worker, control in enumerate(self.controls):
            control.load_state_dict(saved[str(worker % len(saved))])


def layout_sessions(
    options: LayoutSection,
    degrees: Sequence[int],
    initial: int,
    engines: Sequence[Engine],
    predictors: Sequence[LatencyPredictor | None],
    clock: Callable[[], float],
    drawing: Drawing,
    log: LayoutLog | None,
    journal: Journal | None,
) -> LayoutSessions:
    """The layouts of engines whose executors can change them: arguments as in `LayoutControl` and `LayoutSessions`, and
    one predictor for each engine, corrected by that engine's step times."""
    pairs = zip(engines, predictors, strict=True)
    controls = [LayoutControl(engine, options, degrees, initial, predictor) for engine, predictor in pairs]
    return LayoutSessions(controls, clock, drawing, log, journal)


def _num_workers(entry: Mapping[str, Any]) -> int:
    """Of the run that made a decision: (round, dispatch), and of several workers (worker, of how many)."""
    return 1 if len(entry["key"]) == 2 else entry["key"][3]
