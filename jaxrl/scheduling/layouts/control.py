"""A worker's layout, from plan to plan: asks the rule, has the engine switch, and holds what came of it against it.

Purpose: `LayoutControl` stands between a backend and its engine. Before each plan it looks at the live rows; where the
rule wants to switch, the plans in flight are collected, the rule decides on what is then known, the decision is
written down, and the engine changes its layout. The engine's own step times correct the predictor.

Source: PAT §4.2, Algorithm 1, lines 15 and 23-25; design §3 (what a clock decides is journalled before it takes
effect).

Collecting the plans in flight changes which plan knows what, and so the logical order in which responses end. It is
therefore a decision of the clock as well: whoever collected and then stayed has written that down too (`Decision`).
The logical time of a decision is the number of the next plan, counted from the start of the round, so a round that runs
again finds every decision where it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

from jaxrl.scheduling.layouts.relayout import LayoutExecutor, Switched, SwitchFailed, rows_of
from jaxrl.scheduling.layouts.round_layouts import RoundLayouts
from jaxrl.scheduling.layouts.situation import GroupCapacity, Situation
from jaxrl.scheduling.layouts.switch_rule import Switch
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.progress import PlanTimes, Progress

SCHEMA = 1
STEPS_SEEN = 4  # plans after a switch whose step times are taken for the real one
MAX_TRACE = 240  # points of a round's picture
HISTORY = 1024


class StepObserver(Protocol):
    """What is told of real step times (`jaxrl.scheduling.layouts.latency.LatencyPredictor`)."""

    def observe(self, tp: int, batch: int, context: float, step_s: float) -> float: ...


class Layouts(Protocol):
    """What changes the worker's layout (`jaxrl.runtime.layout_session.LayoutSession`); what a backend calls."""

    def enter(self) -> None: ...

    def begin(self, step: int, round_index: int, kind: str, /) -> None: ...

    def before_plan(self) -> None: ...

    def after_plan(self) -> None: ...

    def finished(self, length: int, /) -> None: ...

    def end(self, preemptions: int, /) -> dict[str, float]: ...

    def cancel(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided with nothing in flight, before plan `dispatch` of the round: a switch, or to stay.

    `failed`: the switch failed halfway; everything was recomputed in the old layout.
    """

    dispatch: int
    switch: Switch | None
    failed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain, for the journal."""
        switch = None if self.switch is None else self.switch.to_json()
        return {"schema": SCHEMA, "dispatch": self.dispatch, "switch": switch, "failed": self.failed}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Decision:
        """What `to_json` wrote. Raises ValueError for another schema."""
        if entry.get("schema") != SCHEMA:
            raise ValueError(f"journalled layout decision {dict(entry)!r}: this version reads schema {SCHEMA}")
        switch = None if entry["switch"] is None else Switch.from_json(entry["switch"])
        return cls(int(entry["dispatch"]), switch, bool(entry["failed"]))


@dataclass(slots=True)
class Episode:
    """A switch, as predicted and as it was.

    Attributes:
      decision: what the rule predicted. done: what the engine did; None if it failed halfway.
      prefill_s: prefills right after it, where KV was recomputed.
      steps_s: mean step times of the first plans after it that only decoded.
    """

    decision: Switch
    done: Switched | None
    prefill_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)

    @property
    def cost_s(self) -> float:
        """Seconds that it really took."""
        return self.prefill_s + (0.0 if self.done is None else self.done.times.total_s)

    def to_json(self) -> dict[str, Any]:
        """For the log and the report."""
        decision, done = self.decision, self.done
        return {
            "dispatch": decision.dispatch,
            "from_tp": decision.from_tp,
            "to_tp": decision.to_tp,
            "how": decision.how,
            "num_live": decision.num_live,
            "num_tokens": decision.num_tokens,
            "num_moved": 0 if done is None else done.num_moved,
            "failed": done is None,
            "predicted_cost_s": decision.cost_s,
            "cost_s": self.cost_s,
            "predicted_step_s": decision.step_after_s,
            "step_s": fmean(self.steps_s) if self.steps_s else None,
            "step_before_s": decision.step_before_s,
            "predicted_gain_s": decision.gain_s,
        }


class LengthHistory:
    """How much longer responses went on, from the lengths of the last ones that ended by themselves.

    The expected remaining length of a response of n tokens is the mean over those that were longer; with none, nothing
    is known. Decisions that rest on it are journalled; what it knows at a step's boundary is part of a checkpoint.
    """

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=HISTORY)

    def add(self, length: int) -> None:
        """A response ended after so many tokens."""
        self._lengths.append(length)

    def lengths(self) -> list[int]:
        """Those that count, the oldest first."""
        return list(self._lengths)

    def expected_remaining(self, progress: Progress) -> float | None:
        """Tokens that a live response is expected to gain still; None if no recorded one was longer."""
        so_far = progress.num_tokens
        longer = [length - so_far for length in self._lengths if length > so_far]
        return fmean(longer) if longer else None


class LayoutControl:
    """One worker's layout over its rounds.

    Args:
      engine: over an executor that can change its layout.
      layouts: the rules.
      degrees: those that a round may switch to.
      observer: hears of step times. history: what expected lengths come from (`LayoutSwitchConfig.bound`).

    Example::

        tp = control.start("short", recorded, write)     # engine idle; write(decision) returns once it is on the disk
        control.consider()                                # before each plan
        engine.step()
        control.note(now_s)                               # after it
        metrics = control.end(preemptions)
    """

    def __init__(
        self,
        engine: Engine,
        layouts: RoundLayouts,
        degrees: Sequence[int],
        observer: StepObserver | None = None,
        history: LengthHistory | None = None,
    ) -> None:
        if not isinstance(engine.executor, LayoutExecutor):
            raise ValueError(f"layout control: {type(engine.executor).__name__} cannot change its layout")
        self.engine = engine
        self.layouts = layouts
        self.episodes: list[Episode] = []
        self.trace: list[tuple[float, int, int]] = []  # (time, live rows, tp)
        self._executor = engine.executor
        self._degrees = tuple(degrees)
        self._capacities = self._possible()
        self._observer = observer
        self._history = history
        self._recorded: dict[int, Decision] = {}
        self._write: Callable[[Decision], None] = _nowhere
        self._first = 0
        self._quiet_until = 0
        self._errors: list[float] = []
        engine.watch = self._observe

    @property
    def tp(self) -> int:
        """The degree in use."""
        return self._executor.tp

    def start(
        self,
        kind: str = "all",
        recorded: Sequence[Decision] = (),
        write: Callable[[Decision], None] | None = None,
    ) -> int:
        """Begins a round with an idle engine; returns the degree to start in, which is in use then.

        Args:
          kind: of round, as the planner tells them apart.
          recorded: what the journal has of this round.
          write: puts a decision there; it takes effect when this returns.
        """
        switches = [decision.switch for decision in recorded if decision.switch is not None]
        tp = self.layouts.start(kind, switches)
        if tp != self.tp:
            self.engine.switch(tp)  # nobody is live: weights only
        self._recorded = {decision.dispatch: decision for decision in recorded}
        self._write = _nowhere if write is None else write
        self._first, self._quiet_until = self.engine.batcher.next_index, 0
        self.episodes, self.trace, self._errors = [], [], []
        return tp

    def consider(self) -> Episode | None:
        """Between two plans: switches if it pays; returns what was done.

        Raises `SwitchFailed` if a switch failed and the executor is of no use any more.
        """
        dispatch = self.engine.batcher.next_index - self._first
        last = max(self._recorded, default=-1)
        if dispatch <= last:
            known = self._recorded.get(dispatch)
            return None if known is None else self._follow(known)
        if dispatch < self._quiet_until or not self.layouts.wants(self._situation(dispatch)):
            return None
        self.engine.settle()
        switch = self.layouts.decide(self._situation(dispatch))
        self._quiet_until = (
            dispatch + STEPS_SEEN
        )  # what looked worth it in flight, and was not, is not asked for at once
        self._write(Decision(dispatch, switch))
        return None if switch is None else self._switch(switch)

    def note(self, now_s: float) -> None:
        """After a plan: a point of the round's picture."""
        self.trace.append((now_s, len(self.engine.unfinished()), self.tp))
        if len(self.trace) > 2 * MAX_TRACE:
            self.trace = _thinned(self.trace)

    def finished(self, length: int) -> None:
        """A response ended by itself after so many tokens."""
        if self._history is not None:
            self._history.add(length)

    def lengths(self) -> list[int]:
        """What expected lengths come from now, the oldest first."""
        return [] if self._history is None else self._history.lengths()

    def end(self, preemptions: int) -> dict[str, float]:
        """Ends the round; its metrics. Seconds are sums over the round's switches, predicted and real."""
        self.layouts.end(preemptions)
        done = [episode for episode in self.episodes if episode.done is not None]
        metrics: dict[str, float] = {
            "rollout/layout/switches": len(done),
            "rollout/layout/failed_switches": len(self.episodes) - len(done),
            "rollout/layout/final_tp": self.tp,
        }
        if done:
            metrics |= {
                "rollout/layout/moved_tokens": sum(e.done.num_moved for e in done if e.done is not None),
                "rollout/layout/cost_s": sum(e.cost_s for e in done),
                "rollout/layout/predicted_cost_s": sum(e.decision.cost_s for e in done),
            }
            stepped = [e for e in done if e.steps_s]
            if stepped:
                metrics["rollout/layout/step_s"] = fmean(fmean(e.steps_s) for e in stepped)
                metrics["rollout/layout/predicted_step_s"] = fmean(e.decision.step_after_s for e in stepped)
        if self._errors:
            metrics["rollout/layout/step_correction"] = fmean(self._errors)
        return metrics

    def cancel(self) -> None:
        """The round is dropped."""
        self.layouts.cancel()

    def picture(self) -> dict[str, Any]:
        """The round for the log: points (seconds since the first, live rows, tp), and its switches."""
        points = _thinned(self.trace) if len(self.trace) > MAX_TRACE else self.trace
        began = points[0][0] if points else 0.0
        return {
            "points": [[round(at - began, 4), live, tp] for at, live, tp in points],
            "switches": [episode.to_json() for episode in self.episodes],
        }

    # -- inside ------------------------------------------------------------------------------------------------------

    def _possible(self) -> dict[int, GroupCapacity]:
        found: dict[int, GroupCapacity] = {}
        for tp in self._degrees:
            capacity = self._executor.capacity(tp)
            found[tp] = GroupCapacity((capacity.num_blocks - 1) * capacity.block_size, capacity.num_slots)
        return found

    def _situation(self, dispatch: int) -> Situation:
        batcher = self.engine.batcher
        expected = None if self._history is None else self._history.expected_remaining
        return Situation(dispatch, self.tp, rows_of(batcher, expected), self._capacities, batcher.num_waiting)

    def _follow(self, known: Decision) -> Episode | None:
        """Does what was decided here before."""
        self.engine.settle()
        if known.switch is None:
            return None
        switch = self.layouts.decide(self._situation(known.dispatch))
        assert switch is not None
        assert switch == known.switch, "the rule replays the switches that it was given"
        if known.failed:
            self.engine.recompute()
            self.episodes.append(Episode(switch, None))
            return self.episodes[-1]
        return self._switch(switch)

    def _switch(self, switch: Switch) -> Episode:
        try:
            done: Switched | None = self.engine.switch(switch.to_tp, switch.how)
        except SwitchFailed as failure:
            if not failure.is_usable:
                raise
            done = None
            self._write(Decision(switch.dispatch, switch, failed=True))
        self.episodes.append(Episode(switch, done))
        return self.episodes[-1]

    def _observe(self, times: PlanTimes) -> None:
        """A plan was collected."""
        episode = self.episodes[-1] if self.episodes else None
        if times.prefill_tokens:
            if episode is not None and episode.decision.how == "recompute" and not episode.steps_s:
                episode.prefill_s += times.duration_s
            return
        if not times.num_steps or not times.was_queued:
            return  # the first plan after a pause waits for the host as well
        step_s = times.duration_s / times.num_steps
        if episode is not None and len(episode.steps_s) < STEPS_SEEN:
            episode.steps_s.append(step_s)
        if self._observer is not None and step_s > 0:
            self._errors.append(self._observer.observe(self.tp, times.batch, times.context, step_s))


def _nowhere(_: Decision) -> None:
    """Where decisions go without a journal."""


def _thinned(points: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """Half of the points; those at which the degree changes stay."""
    last = len(points) - 1
    return [
        point
        for i, point in enumerate(points)
        if i % 2 == 0 or i == last or point[2] != points[i - 1][2] or point[2] != points[i + 1][2]
    ]
