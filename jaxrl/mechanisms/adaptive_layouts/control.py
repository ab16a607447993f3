"""A worker's layout, round by round and plan by plan: how RollPacker's per-step planner and PAT's switches compose.

A round starts in the planner's degree for its kind; without a planner, in the configured one. Before each plan the
switch rule may want to switch. Then the plans in flight are collected, and the rule decides again on what is then
known. Its decision is written to the journal, and the engine changes its layout. At the end of the round the planner
observes all its preemptions, and the worker returns to the next round's first degree. So with a planner tp never falls
while rows are live, and the planner compares rounds that began in its own degrees.

Source: RollPacker §4.2 (the planner); PAT §4.2, Algorithm 1, lines 15 and 23-25 (switches); docs/architecture.md (what
a clock decides is journalled before it takes effect).

Collecting the plans in flight changes the logical order in which responses end, so the journal also records that plans
were collected and no switch followed (`Decision`). The logical time of a decision is the number of the next plan in the
round. Up to the last decision in the journal, a repeated round decides nothing by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any

from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts
from jaxrl.mechanisms.adaptive_layouts.rules import LayoutSwitchRule, Switch, TpPlanner
from jaxrl.scheduling.layouts.batch_state import BatchState, GroupCapacity
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.relayout import LayoutExecutor, Relayout, SwitchFailed, recompute, rows_of, start_in
from jaxrl.scheduling.mechanism import RoundEnd, RoundInfo
from jaxrl.scheduling.rounds.events import Interrupted
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.lengths import LengthHistory
from jaxrl.scheduling.tokens.progress import PlanTimes
from jaxrl.types import Sample, check_schema

if TYPE_CHECKING:
    from jaxrl.run.run import Run

KIND = "layout"
SCHEMA = 1
STEPS_SEEN = 4  # plans after a switch that give the real step time
MAX_TRACE = 240  # points of a round's picture


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision with nothing in flight, before plan `dispatch` of the round: to switch, or to stay. `failed`: the
    switch failed halfway; everything was recomputed in the old layout."""

    dispatch: int
    switch: Switch | None
    failed: bool = False

    def to_json(self) -> dict[str, Any]:
        switch = None if self.switch is None else self.switch.to_json()
        return {"schema": SCHEMA, "dispatch": self.dispatch, "switch": switch, "failed": self.failed}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Decision:
        """Reads the output of `to_json`. Raises ValueError for another schema."""
        check_schema("journalled layout decision", entry, SCHEMA)
        switch = None if entry["switch"] is None else Switch.from_json(entry["switch"])
        return cls(int(entry["dispatch"]), switch, bool(entry["failed"]))


@dataclass(slots=True)
class MeasuredSwitch:
    decision: Switch  # the rule's, with its predictions
    done: Relayout | None  # by the engine; None if the switch failed halfway
    prefill_s: float = 0.0  # of prefills right after it, where KV was recomputed
    steps_s: list[float] = field(default_factory=list)  # means of the first plans after it that only decoded

    @property
    def cost_s(self) -> float:
        return self.prefill_s + (0.0 if self.done is None else self.done.times.total_s)

    def to_json(self) -> dict[str, Any]:
        decision, done = self.decision, self.done
        decided = ("dispatch", "from_tp", "to_tp", "how", "num_live", "num_tokens")
        return {
            **{name: getattr(decision, name) for name in decided},
            "num_moved": 0 if done is None else done.num_moved,
            "failed": done is None,
            "predicted_cost_s": decision.cost_s,
            "cost_s": self.cost_s,
            "predicted_step_s": decision.step_after_s,
            "step_s": fmean(self.steps_s) if self.steps_s else None,
            "step_before_s": decision.step_before_s,
            "predicted_gain_s": decision.gain_s,
        }


class LayoutControl:
    """One worker's layout over its rounds.

    Args:
      degrees: that rounds may use, ascending.
      initial: the degree that rounds start in; with a planner, the first round of each kind.
      predictor: of step times and costs; None: a round stays in the degree that it starts in.
    """

    def __init__(
        self,
        engine: Engine,
        options: AdaptiveLayouts.Options,
        degrees: Sequence[int],
        initial: int,
        predictor: LatencyPredictor | None = None,
    ) -> None:
        assert isinstance(engine.executor, LayoutExecutor), "layouts adapt, and this executor cannot change its own"
        assert initial in degrees
        self.engine, self.predictor, degrees = engine, predictor, tuple(degrees)
        self.planner = TpPlanner(degrees, initial) if options.planner else None
        self.rule = None if predictor is None else LayoutSwitchRule(options, degrees, predictor)
        self.history = LengthHistory() if options.bound == "expected" else None
        self.switches: list[MeasuredSwitch] = []
        self.trace: list[tuple[float, int, int]] = []  # (time, live rows, tp)
        self._executor, self._initial = engine.executor, initial
        self._capacities: dict[int, GroupCapacity] = {}
        for tp in degrees:
            own = engine.executor.capacity(tp)
            tokens = own.stacks.num_tokens(own.num_blocks - 1, own.block_size)
            self._capacities[tp] = GroupCapacity(tokens, own.num_slots)
        self._kind: str | None = None  # of the round under way
        self._likely = "plain"  # the likely kind of the next training round
        self._recorded: deque[Decision] = deque()  # earlier decisions still to be repeated
        self._write: Callable[[Decision], None]
        self._first = self._quiet_until = 0
        self._ratios: list[float] = []
        engine.watchers.append(self._observe)

    @property
    def tp(self) -> int:
        return self._executor.tp

    def degree(self, kind: str = "all") -> int:
        return self._initial if self.planner is None else self.planner.degree(kind)

    def enter(self) -> None:
        """A rollout phase begins, with neither weights nor pool: takes the layout of the next round at no cost."""
        start_in(self.engine, self.degree(self._likely))

    def begin(
        self,
        kind: str = "all",
        recorded: Sequence[Decision] = (),
        write: Callable[[Decision], None] = lambda decision: None,
    ) -> None:
        """Begins a round with an idle engine, in the degree of its kind. `recorded`: the journal's decisions of this
        round; `write`: puts a new one there, which takes effect when it returns."""
        assert self._kind is None, f"a {kind!r} round begins before the {self._kind!r} round has ended"
        self._kind = kind
        self._likely = self._likely if kind == "eval" else kind
        if self.rule is not None:
            self.rule.begin()
        tp = self.degree(kind)
        if tp != self.tp:
            self.engine.switch(tp)  # no request is live: only weights move
        self._recorded = deque(sorted(recorded, key=lambda decision: decision.dispatch))
        self._write = write
        self._first, self._quiet_until = self.engine.batcher.next_index, 0
        self.switches, self.trace, self._ratios = [], [], []

    @property
    def follows(self) -> bool:
        """Whether decisions of an earlier run of this round are still to be repeated."""
        return bool(self._recorded)

    def before_plan(self, decides: bool = True) -> MeasuredSwitch | None:
        """Switches if it pays, or, unless it `decides`, where an earlier run of this round did; returns the switch.
        Raises ValueError for a journal of another run, and SwitchFailed where the executor has become unusable."""
        assert self._kind is not None, "no round has begun"
        dispatch = self.engine.batcher.next_index - self._first
        if self._recorded:
            return self._follow(self._recorded.popleft()) if dispatch >= self._recorded[0].dispatch else None
        if not decides or self.rule is None or dispatch < self._quiet_until:
            return None
        batcher = self.engine.batcher
        if not self.rule.considers(dispatch, self.tp, batcher.num_running, batcher.num_waiting):
            return None  # most plans: what the rows are need not be known
        if not self.rule.wants(self._batch_state(dispatch)):
            return None
        self.engine.settle()
        switch = self.rule.decide(self._batch_state(dispatch))
        # A switch that looked worth it with plans in flight, and was not, is not considered again at once.
        self._quiet_until = dispatch + STEPS_SEEN
        self._write(Decision(dispatch, switch))
        return None if switch is None else self._switch(switch)

    def after_plan(self, now_s: float) -> None:
        self.trace.append((now_s, len(self.engine.unfinished()), self.tp))
        if len(self.trace) > 2 * MAX_TRACE:
            self.trace = _thinned(self.trace)

    def finished(self, length: int) -> None:
        if self.history is not None:
            self.history.add(length)

    def end(self, preemptions: int) -> dict[str, float]:
        """Ends the round and returns its metrics. Seconds are sums over the round's switches, predicted and real."""
        assert self._kind is not None, "no round has begun"
        kind, self._kind = self._kind, None
        if self.planner is not None:
            self.planner.observe(preemptions, kind)
        done = [switch for switch in self.switches if switch.done is not None]
        metrics: dict[str, float] = {
            "rollout/layout/switches": len(done),
            "rollout/layout/failed_switches": len(self.switches) - len(done),
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
        if self._ratios:
            metrics["rollout/layout/step_correction"] = fmean(self._ratios)
        return metrics

    def cancel(self) -> None:
        """Drops the round: the planner does not observe it."""
        self._kind = None

    def picture(self) -> dict[str, Any]:
        """The round for the log: its points (seconds since the first point, live rows, tp) and its switches."""
        points = _thinned(self.trace) if len(self.trace) > MAX_TRACE else self.trace
        began = points[0][0] if points else 0.0
        return {
            "points": [[round(at - began, 4), live, tp] for at, live, tp in points],
            "switches": [switch.to_json() for switch in self.switches],
        }

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {} if self.planner is None else {"planner": self.planner.state_dict()}
        state |= {"likely": self._likely, "lengths": [] if self.history is None else self.history.lengths()}
        if self.predictor is not None:
            state["correction"] = self.predictor.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from another control's state; what the state lacks stays as it is."""
        if self.planner is not None and "planner" in state:
            self.planner.load_state_dict(state["planner"])
        self._likely = state.get("likely", self._likely)
        for length in state.get("lengths", ()):
            self.finished(length)
        if self.predictor is not None and "correction" in state:
            self.predictor.load_state_dict(state["correction"])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _batch_state(self, dispatch: int) -> BatchState:
        batcher = self.engine.batcher
        expected = None if self.history is None else self.history.expected_remaining
        return BatchState(dispatch, self.tp, rows_of(batcher, expected), self._capacities, batcher.num_waiting)

    def _follow(self, known: Decision) -> MeasuredSwitch | None:
        dispatch, switch = self.engine.batcher.next_index - self._first, known.switch
        if dispatch != known.dispatch or (switch is not None and switch.from_tp != self.tp):
            came_from = "" if switch is None else f" from tp {switch.from_tp}"
            raise ValueError(
                f"journalled layout decision at dispatch {known.dispatch}{came_from}: the run is at dispatch "
                f"{dispatch} with tp {self.tp}, so the journal is not of this run"
            )
        self._quiet_until = dispatch + 1  # one decision before a plan
        self.engine.settle()
        if switch is None:
            return None
        if self.rule is not None:
            self.rule.record(switch)
        if known.failed:
            recompute(self.engine)
            self.switches.append(MeasuredSwitch(switch, None))
            return self.switches[-1]
        return self._switch(switch)

    def _switch(self, switch: Switch) -> MeasuredSwitch:
        try:
            done: Relayout | None = self.engine.switch(switch.to_tp, switch.how)
        except SwitchFailed as failure:
            if not failure.is_usable:
                raise
            done = None
            self._write(Decision(switch.dispatch, switch, failed=True))
        self.switches.append(MeasuredSwitch(switch, done))
        return self.switches[-1]

    def _observe(self, times: PlanTimes) -> None:
        last = self.switches[-1] if self.switches else None
        if times.prefill_tokens:
            if last is not None and last.decision.how == "recompute" and not last.steps_s:
                last.prefill_s += times.duration_s
            return
        if not times.num_steps or not times.was_queued or times.verified:
            return  # the first plan after a pause waits for the host as well
        step_s = times.duration_s / times.num_steps
        if last is not None and len(last.steps_s) < STEPS_SEEN:
            last.steps_s.append(step_s)
        if self.predictor is not None and step_s > 0:
            self._ratios.append(self.predictor.observe(self.tp, times.batch, times.context, step_s))


SUMMED = frozenset(
    f"rollout/layout/{name}" for name in ("switches", "failed_switches", "moved_tokens", "cost_s", "predicted_cost_s")
)
"""Metrics that add up over workers; of the others there are means."""


class LayoutSession(AdaptiveLayouts):
    """The layouts of a run's workers.

    Each worker has a `LayoutControl`, and switches by its own rows, step times and preemptions; all learn from every
    response that ends. The journal names a worker, and of how many, where there are several. A run that resumes with
    another number of workers has other rows at the same places, so it repeats none of their decisions: the interrupted
    step decides anew.
    """

    def __init__(self, run: Run) -> None:
        assert run.timeline is not None, "an evaluation has no layouts that adapt"
        rollout, machine = run.config.rollout, run.machine
        predictors = [machine.predictor() if rollout.layout.switch else None for _ in run.workers.engines]
        assert not rollout.layout.switch or all(predictors), "layouts switch by a profile, and none was read"
        self.controls = tuple(
            LayoutControl(engine, rollout.layout, tuple(machine.degrees), rollout.tp, predictor)
            for engine, predictor in zip(run.workers.engines, predictors, strict=True)
        )
        self._clock, self._tracer, self._log, self._journal = run.clock, run.timeline, run.layout_log, run.journal
        self._round = (0, 0, "")  # step, index, kind
        # of the round's switches, by worker
        self._spans: list[list[tuple[float, float]]] = [[] for _ in self.controls]

    def enter_rollout(self, policy_version: int, *, was_released: bool) -> bool:
        """Where there are neither weights nor pools, takes the layouts of the next round at no cost."""
        if was_released:
            for control in self.controls:
                control.enter()
        return False

    def round_begins(self, info: RoundInfo) -> None:
        self._round = (info.step, info.index, info.kind)
        self._spans = [[] for _ in self.controls]
        journal = self._journal
        entries = [] if journal is None else [e for e in journal.entries(info.step, KIND) if e["key"][0] == info.index]
        # keys are (round, dispatch), and of several workers (worker, of how many)
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

    def before_plan(self, worker: int | None) -> None:
        """A round that runs again decides nothing by itself before the last decision of any worker has been repeated:
        until then it is the same round."""
        if worker is None:
            return
        follows = any(control.follows for control in self.controls)
        began = self._clock()
        try:
            switched = self.controls[worker].before_plan(decides=not follows)
        except SwitchFailed as failure:
            raise Interrupted(str(failure)) from failure
        if switched is not None:
            self._spans[worker].append((began, self._clock()))

    def after_plan(self, worker: int | None) -> None:
        if worker is not None:
            self.controls[worker].after_plan(self._clock())
            self._tracer.counter(self._track("tp", worker), tp=self.controls[worker].tp)

    def on_finished(self, samples: Sequence[Sample], *, is_stopping: bool) -> None:
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
                self._tracer.complete(self._track("layout", worker), name, began, ended, **shown)
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

    def round_cancelled(self) -> None:
        for control in self.controls:
            control.cancel()

    def state_dict(self) -> dict[str, Any]:
        """One worker's is its control's."""
        states = [control.state_dict() for control in self.controls]
        return states[0] if len(states) == 1 else {"workers": {str(i): state for i, state in enumerate(states)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from another run's state. If that run had fewer workers, their states are dealt out in turn."""
        saved = state.get("workers", {"0": state})
        for worker, control in enumerate(self.controls):
            control.load_state_dict(saved[str(worker % len(saved))])


def _thinned(points: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """Half of the points, with all points at which the degree changes."""
    last = len(points) - 1
    return [
        point
        for i, point in enumerate(points)
        if i % 2 == 0 or i == last or point[2] != points[i - 1][2] or point[2] != points[i + 1][2]
    ]
