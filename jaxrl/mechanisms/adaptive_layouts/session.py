"""The hooks that a backend, real or simulated, calls around its rounds and plans if layouts adapt.

Purpose: `LayoutSession` connects one worker's `LayoutControl` with the clock, the journal, the timeline and the run's
log. `LayoutSessions` holds those of all workers, and is the mechanism that the backend calls. Each worker switches by
itself, by its own rows, step times and preemptions; all learn from every response that ends. Never imports jax.

Decisions in the journal are those of workers that share the requests in one way. A run that goes on with another number
of workers has other rows at the same places, so nothing of theirs is repeated: the step that was cut off decides anew.
No token depends on it.

Source: PAT §4 switches the layout of each node by itself: a worker per node, with `rollout.layout.switch`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any

from jaxrl.mechanisms.adaptive_layouts.control import Decision, LayoutControl
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.relayout import SwitchFailed
from jaxrl.scheduling.mechanism import Mechanism, RoundEnd, RoundInfo, Tracer
from jaxrl.scheduling.rounds.events import Interrupted
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.types import Sample

if TYPE_CHECKING:
    from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts
    from jaxrl.record.journal import Journal
    from jaxrl.record.layouts import LayoutLog

_log = logging.getLogger(__name__)
KIND = "layout"
SUMMED = frozenset(
    f"rollout/layout/{name}" for name in ("switches", "failed_switches", "moved_tokens", "cost_s", "predicted_cost_s")
)
"""Metrics that add up over workers."""


class LayoutSession:
    """The layout of one worker.

    Args:
      control: the rules over its engine.
      clock: seconds from any origin, the same as `tracer` has.
      tracer, log: where switches are shown; None: nowhere.
      journal: where decisions go; None for a simulated clock, which decides the same again.
      worker: its number, and of how many; named in journal, log and timeline, where there are several. The only one
        writes what was written before there were several.
    """

    def __init__(
        self,
        control: LayoutControl,
        clock: Callable[[], float],
        tracer: Tracer,
        log: LayoutLog | None,
        journal: Journal | None,
        worker: tuple[int, int] = (0, 1),
    ) -> None:
        self.control = control
        self._worker, self._num_workers = worker
        self._place = worker if self._num_workers > 1 else ()  # of a key in the journal, behind round and dispatch
        self._of_worker = f" {self._worker}" if self._place else ""  # behind the names of tracks
        self._clock, self._tracer, self._log, self._journal = clock, tracer, log, journal
        self._at = (0, 0, "")  # step, round, kind
        self._spans: list[tuple[float, float]] = []  # start times of the round's switches, in the timeline's clock

    def enter(self) -> None:
        """A rollout phase begins, with neither weights nor pool: takes the layout of the next round at no cost."""
        self.control.enter()

    def begin(self, step: int, round_index: int, kind: str) -> None:
        """A round begins, with an idle engine."""
        self._at, self._spans = (step, round_index, kind), []
        journal = self._journal
        if journal is None:
            self.control.begin(kind)
            return
        entries = [entry for entry in journal.entries(step, KIND) if entry["key"][0] == round_index]
        self._say_others(step, {_num_workers(entry) for entry in entries} - {self._num_workers})
        entries = [entry for entry in entries if tuple(entry["key"][2:]) == self._place]

        def write(decision: Decision) -> None:
            journal.append(step, KIND, (round_index, decision.dispatch, *self._place), decision.to_json())

        self.control.begin(kind, [Decision.from_json(entry) for entry in entries], write)

    def _say_others(self, step: int, others: set[int]) -> None:
        """The journal has decisions of so many workers: the first worker says it for all."""
        if others and self._worker == 0:
            counts = " and ".join(map(str, sorted(others)))
            _log.warning(
                "step %d: the journal has layout decisions of a run with %s worker(s), and this one has %d "
                "(rollout.num_workers): they are not repeated, and the step decides anew",
                step,
                counts,
                self._num_workers,
            )

    def before_plan(self, decides: bool) -> None:
        """Switches if it pays (`LayoutControl.before_plan`). Raises SwitchFailed where nothing can go on."""
        began = self._clock()
        if self.control.before_plan(decides) is not None:
            self._spans.append((began, self._clock()))

    def after_plan(self) -> None:
        self.control.after_plan(self._clock())
        self._tracer.counter(f"tp{self._of_worker}", tp=self.control.tp)

    def finished(self, length: int) -> None:
        """A response ended by itself."""
        self.control.finished(length)

    def end(self, preemptions: int) -> dict[str, float]:
        """The round is over; its metrics. Draws and logs its switches."""
        metrics = self.control.end(preemptions)
        for (began, ended), episode in zip(self._spans, self.control.episodes, strict=True):
            told = episode.to_json()
            name = f"tp {told['from_tp']} to {told['to_tp']} ({told['how']})"
            self._tracer.complete(f"layout{self._of_worker}", name, began, ended, **told)
        if self._log is not None:
            predictor = self.control.predictor
            source = "none" if predictor is None else predictor.profile.source
            named = {"worker": self._worker} if self._place else {}
            self._log.write(*self._at, source, named | self.control.picture())
        return metrics

    def cancel(self) -> None:
        """The round is dropped."""
        self.control.cancel()

    def state_dict(self) -> dict[str, Any]:
        """Part of a checkpoint."""
        return self.control.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another run was; without a state, where it starts."""
        self.control.load_state_dict(state)


class LayoutSessions(Mechanism):
    """Layouts that adapt: the sessions of the workers, by their numbers."""

    name = "layouts"

    def __init__(self, sessions: Sequence[LayoutSession]) -> None:
        self.sessions = tuple(sessions)

    def enter_rollout(self, policy_version: int, *, was_released: bool) -> bool:
        """Where there are neither weights nor pools, takes the layouts of the next round at no cost."""
        if was_released:
            for session in self.sessions:
                session.enter()
        return False

    def round_begins(self, info: RoundInfo) -> None:
        """A round begins, with idle engines."""
        for session in self.sessions:
            session.begin(info.step, info.index, info.kind)

    def before_plan(self, worker: int | None) -> None:
        """Lets the layout of one worker change, before a plan of it. Raises Interrupted where nothing can go on.

        A round that runs again decides nothing by itself before the last decision of any worker has been repeated:
        until then it is the same round.
        """
        if worker is None:
            return
        follows = any(session.control.follows for session in self.sessions)
        try:
            self.sessions[worker].before_plan(decides=not follows)
        except SwitchFailed as failure:
            _log.error("the run stops: %s", failure)
            raise Interrupted(str(failure)) from failure

    def after_plan(self, worker: int | None) -> None:
        if worker is not None:
            self.sessions[worker].after_plan()

    def on_finished(self, samples: Sequence[Sample], *, is_stopping: bool) -> None:
        """Responses ended by themselves, in any worker."""
        for sample in samples:
            for session in self.sessions:
                session.finished(len(sample))

    def round_ends(self, end: RoundEnd) -> dict[str, float]:
        """The round's metrics: sums over the workers of what is counted and of seconds spent, means of the others."""
        return together([own.end(each.preemptions) for own, each in zip(self.sessions, end.workers, strict=True)])

    def round_cancelled(self) -> None:
        """The round is dropped."""
        for session in self.sessions:
            session.cancel()

    def state_dict(self) -> dict[str, Any]:
        """Part of a checkpoint. One worker's is its session's."""
        states = [session.state_dict() for session in self.sessions]
        return states[0] if len(states) == 1 else {"workers": {str(i): state for i, state in enumerate(states)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another run was; without a state, where it starts. If that run had fewer workers, the states of
        those are dealt out in turn."""
        saved = state.get("workers", {"0": state})
        for worker, session in enumerate(self.sessions):
            session.load_state_dict(saved[str(worker % len(saved))])


def together(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of several workers as those of all."""
    if len(found) == 1:
        return found[0]
    return {
        name: (sum if name in SUMMED else fmean)([own[name] for own in found if name in own])
        for name in dict.fromkeys(chain(*found))
    }


def layout_sessions(
    options: AdaptiveLayouts.Options,
    degrees: Sequence[int],
    initial: int,
    engines: Sequence[Engine],
    predictors: Sequence[LatencyPredictor | None],
    clock: Callable[[], float],
    tracer: Tracer,
    log: LayoutLog | None,
    journal: Journal | None,
) -> list[LayoutSession]:
    """A session for each engine, whose executors can change their layouts.

    Args:
      options, degrees, initial: see `LayoutControl`, of every worker.
      predictors: one for each engine, corrected by that engine's step times.
      clock, tracer, log, journal: see `LayoutSession`.
    """
    controls = [
        LayoutControl(engine, options, degrees, initial, predictor)
        for engine, predictor in zip(engines, predictors, strict=True)
    ]
    return [
        LayoutSession(control, clock, tracer, log, journal, (worker, len(controls)))
        for worker, control in enumerate(controls)
    ]


def _num_workers(entry: Mapping[str, Any]) -> int:
    """Of the run that made a decision: (round, dispatch), and of several workers (worker, of how many)."""
    return 1 if len(entry["key"]) == 2 else entry["key"][3]
