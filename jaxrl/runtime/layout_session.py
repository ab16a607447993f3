"""The hooks that a backend, real or simulated, calls around its rounds and plans if the layout adapts.

Purpose: `LayoutSession` implements `jaxrl.scheduling.layouts.control.Layouts` for one worker. It connects
`LayoutControl` with the clock, the journal, the timeline and the run's log. Never imports jax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxrl.record.journal import Journal
from jaxrl.record.layouts import LayoutLog
from jaxrl.scheduling.layouts.control import Decision, LayoutControl

KIND = "layout"


class Drawing(Protocol):
    """Where switches are drawn (`jaxrl.record.timeline.Timeline`); seconds are those of the session's clock."""

    def complete(self, track: str, name: str, start_s: float, end_s: float, /, **args: Any) -> None: ...

    def counter(self, track: str, /, **values: float) -> None: ...


class LayoutSession:
    """Implements `jaxrl.scheduling.layouts.control.Layouts`.

    Args:
      control: the rules over an engine.
      clock: seconds from any origin, the same as `drawing` has.
      drawing, log: where switches are shown; None: nowhere.
      journal: where decisions go; None for a simulated clock, which decides the same again.
    """

    def __init__(
        self,
        control: LayoutControl,
        clock: Callable[[], float],
        drawing: Drawing,
        log: LayoutLog | None,
        journal: Journal | None,
    ) -> None:
        self.control = control
        self._clock, self._drawing, self._log, self._journal = clock, drawing, log, journal
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
        entries = [e for e in journal.entries(step, KIND) if e["key"][0] == round_index]

        def write(decision: Decision) -> None:
            journal.append(step, KIND, (round_index, decision.dispatch), decision.to_json())

        self.control.begin(kind, [Decision.from_json(entry) for entry in entries], write)

    def before_plan(self) -> None:
        """Switches if it pays. Raises SwitchFailed where nothing can go on."""
        began = self._clock()
        if self.control.before_plan() is not None:
            self._spans.append((began, self._clock()))

    def after_plan(self) -> None:
        self.control.after_plan(self._clock())
        self._drawing.counter("tp", tp=self.control.tp)

    def finished(self, length: int) -> None:
        """A response ended by itself."""
        self.control.finished(length)

    def end(self, preemptions: int) -> dict[str, float]:
        """The round is over; its metrics. Draws and logs its switches."""
        metrics = self.control.end(preemptions)
        for (began, ended), episode in zip(self._spans, self.control.episodes, strict=True):
            told = episode.to_json()
            name = f"tp {told['from_tp']} to {told['to_tp']} ({told['how']})"
            self._drawing.complete("layout", name, began, ended, **told)
        if self._log is not None:
            predictor = self.control.predictor
            source = "none" if predictor is None else predictor.profile.source
            self._log.write(*self._at, source, self.control.picture())
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
