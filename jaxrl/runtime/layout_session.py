"""What a backend calls around its rounds and plans where the layout adapts: real runs and simulations alike.

Purpose: `LayoutSession` implements `jaxrl.scheduling.layouts.control.Layouts` for one worker. It joins `LayoutControl`
with whatever tells the time, the journal, the timeline and the run's log. Never imports jax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from jaxrl.record.journal import Journal
from jaxrl.record.layouts import LayoutLog
from jaxrl.scheduling.layouts.control import Decision, LayoutControl
from jaxrl.scheduling.layouts.latency import LatencyPredictor

KIND = "layout"


class Drawing(Protocol):
    """Where switches are drawn (`jaxrl.record.timeline.Timeline`); seconds are those of the session's clock."""

    def complete(self, track: str, name: str, start_s: float, end_s: float, /, **args: Any) -> None: ...

    def counter(self, track: str, /, **values: float) -> None: ...


@runtime_checkable
class Startable(Protocol):
    """An executor whose layout may be chosen at no cost while it has neither weights nor a pool."""

    def start_in(self, tp: int, /) -> None: ...


class LayoutSession:
    """Implements `jaxrl.scheduling.layouts.control.Layouts`.

    Args:
      control: the rules over an engine.
      clock: seconds from any origin, the same as `drawing` has.
      drawing, log: where switches are shown; None: nowhere.
      journal: where decisions go; None where the clock is a simulated one, which decides the same again.
      predictor: what `control` was made with.
    """

    def __init__(
        self,
        control: LayoutControl,
        clock: Callable[[], float],
        drawing: Drawing,
        log: LayoutLog | None,
        journal: Journal | None,
        predictor: LatencyPredictor | None = None,
    ) -> None:
        self.control = control
        self._clock, self._drawing, self._log, self._journal = clock, drawing, log, journal
        self._predictor = predictor
        self._at = (0, 0)
        self._kind = self._likely = "plain"  # of this round, and of the next training round, as far as one can know
        self._spans: list[tuple[float, float]] = []  # of the round's switches, in the timeline's clock

    def enter(self) -> None:
        """A rollout phase begins, with neither weights nor pool: the layout of the next round, free of charge."""
        engine = self.control.engine
        if isinstance(engine.executor, Startable):
            engine.executor.start_in(self.control.layouts.degree(self._likely))
            engine.follow_executor()

    def begin(self, step: int, round_index: int, kind: str) -> None:
        """A round begins, with an idle engine."""
        self._at, self._kind, self._spans = (step, round_index), kind, []
        self._likely = self._likely if kind == "eval" else kind
        journal = self._journal
        if journal is None:
            self.control.start(kind)
            return
        entries = [e for e in journal.entries(step, KIND) if e["key"][0] == round_index]

        def write(decision: Decision) -> None:
            journal.append(step, KIND, (round_index, decision.dispatch), decision.to_json())

        self.control.start(kind, [Decision.from_json(entry) for entry in entries], write)

    def before_plan(self) -> None:
        """Switches if it pays. Raises SwitchFailed where nothing can go on."""
        began = self._clock()
        if self.control.consider() is not None:
            self._spans.append((began, self._clock()))

    def after_plan(self) -> None:
        self.control.note(self._clock())
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
            source = "none" if self._predictor is None else self._predictor.profile.source
            self._log.write(*self._at, self._kind, source, self.control.picture())
        return metrics

    def cancel(self) -> None:
        """The round is dropped."""
        self.control.cancel()

    def state_dict(self) -> dict[str, Any]:
        """Part of a checkpoint."""
        state = self.control.layouts.state_dict() | {"likely": self._likely, "lengths": self.control.lengths()}
        return state if self._predictor is None else state | {"correction": self._predictor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another run was; without a state, where it starts."""
        self.control.layouts.load_state_dict(dict(state))
        self._likely = state.get("likely", self._likely)
        for length in state.get("lengths", ()):
            self.control.finished(length)
        if self._predictor is not None and "correction" in state:
            self._predictor.load_state_dict(state["correction"])
