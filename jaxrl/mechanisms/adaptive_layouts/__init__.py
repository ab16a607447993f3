"""Adaptive layouts: the tensor-parallel degree of workers changes between steps, and while a batch drains.

Each worker has a `LayoutControl`, and switches by its own rows, step times and preemptions; all learn from every
response that ends. The journal names a worker, and of how many, where there are several. A run that resumes with
another number of workers has other rows at the same places, so it repeats none of their decisions: the interrupted step
decides anew. No token depends on it. Never imports jax.

Source: PAT §4 (switches within a generation; it switches the layout of each node by itself, as a worker per node does
here), RollPacker §4.2 (the degree that a step begins with).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from annotated_types import Ge, Interval

from jaxrl.scheduling.mechanism import LAYOUTS, Mechanism, RoundEnd, RoundInfo
from jaxrl.scheduling.rounds.events import Interrupted
from jaxrl.schema.declared import Names
from jaxrl.schema.devices import prime_factors
from jaxrl.schema.section import Section
from jaxrl.types import Sample

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.mechanisms.adaptive_layouts.control import LayoutControl
    from jaxrl.record.journal import Journal
    from jaxrl.record.layouts import LayoutLog
    from jaxrl.report.curves import PagePart
    from jaxrl.report.runs import RecordedRun
    from jaxrl.run.plan_timeline import PlanTimeline
    from jaxrl.run.run import Run

KIND = "layout"
SUMMED = frozenset(
    f"rollout/layout/{name}" for name in ("switches", "failed_switches", "moved_tokens", "cost_s", "predicted_cost_s")
)
"""Metrics that add up over workers; of the others there are means."""


class AdaptiveLayouts(Mechanism):
    """Changes the layouts of workers. `log`: of switches; `journal`: of decisions."""

    class Options(Section):
        """Tensor parallelism that adapts; `rollout.tensor_model_parallel_size` is where it begins."""

        switch: Annotated[bool, "Change tp while a batch drains, where the profile says that it saves time."] = False
        planner: Annotated[bool, "Choose the tp that a step begins with from the preemptions of the steps before."] = (
            False
        )
        degrees: Annotated[list[int], "The tp degrees to use; empty: all that a worker's devices can have."] = []
        scale_rows: Annotated[
            bool,
            "Let rollout.max_num_seqs and rollout.num_blocks of a dp group grow with tp, so that the totals over all "
            "dp groups stay.",
        ] = True
        profile: Annotated[
            str, Names("file"), "The file that `jaxrl profile` wrote, which rollout.layout.switch needs."
        ] = ""
        allow_synthetic: Annotated[bool, "Accept a profile that was made up to try switches out."] = False
        bound: Annotated[
            Literal["max_length", "expected"],
            "How long rows are assumed to run; max_length: to their limit, expected: as long as earlier ones did.",
        ] = "max_length"
        direction: Annotated[
            Literal["up", "both"], "Where tp may go within a generation; up: it only grows, both: it may fall again."
        ] = "up"
        min_gain: Annotated[
            float, Interval(ge=0, lt=1), "Share of the predicted time left that a switch must save."
        ] = 0.05
        cooldown: Annotated[int, Ge(1), "The fewest plans from one switch to the next."] = 4
        state: Annotated[
            Literal["cheaper", "migrate", "recompute"],
            "How KV is carried over a switch; cheaper: moved or computed again, whichever is predicted to be faster.",
        ] = "cheaper"
        correction_weight: Annotated[
            float, Interval(ge=0, le=1), "Weight of a new step time in the correction of the profile; 0: no correction."
        ] = 0.1

        @property
        def adapts(self) -> bool:
            return self.switch or self.planner

        def scaled(self, rows: int, blocks: int, tp: int, degree: int) -> tuple[int, int]:
            """Rows and KV blocks of a dp group at a degree, from those at `tp`, where one block is reserved; 0 blocks:
            what the memory leaves."""
            if not self.scale_rows:
                return rows, blocks
            return max(rows * degree // tp, 1), max((blocks - 1) * degree // tp, 1) + 1 if blocks else 0

        def degrees_on(self, tp: int, num_devices: int) -> tuple[int, ...]:
            """The degrees of rounds that start in `tp` on a worker's devices. Raises ValueError where impossible."""
            return self.possible_on(num_devices, tp) if self.adapts else (tp,)

        def possible_on(self, num_devices: int, *chosen: int) -> tuple[int, ...]:
            """The degrees that a worker can use on its devices; `chosen` ones must be among them, else ValueError."""
            possible = tuple(accumulate((1, *prime_factors(num_devices)), operator.mul))
            degrees = tuple(self.degrees) or possible
            for degree in (*degrees, *chosen):
                if degree not in possible or degree not in degrees:
                    raise ValueError(
                        f"rollout.layout.degrees: tp {degree} must be one of {', '.join(map(str, possible))} (which "
                        f"the {num_devices} devices can be factored into); the first tp "
                        f"({', '.join(map(str, chosen)) or 'auto'}) must be one of the degrees {degrees}"
                    )
            return degrees

        def problems(self, config: Any) -> Iterator[str]:
            rollout, degrees = config.rollout, self.degrees
            tp = None if config.is_tp_open else rollout.tp
            num_devices, num_workers = rollout.num_devices or config.trainer.num_devices, rollout.num_workers
            if not self.adapts and tp is not None:
                return
            if self.switch and not self.profile:
                yield "rollout.layout.profile is missing: rollout.layout.switch needs a file of `jaxrl profile`"
            if self.planner and self.switch and self.direction != "up":
                yield (
                    f"rollout.layout.direction must be up where rollout.layout.planner is on, found {self.direction}: "
                    "the planner alone lowers tp, between steps"
                )
            if degrees and (
                degrees[0] < 1
                or any(a >= b or b % a for a, b in pairwise(degrees))
                or (tp is not None and tp not in degrees)
            ):
                yield (
                    f"rollout.layout.degrees {degrees} must ascend from at least 1, each dividing the next, with "
                    f"rollout.tensor_model_parallel_size ({'auto' if tp is None else tp}) among them"
                )
                return
            for degree in degrees if num_devices else ():
                if num_devices // num_workers % degree:
                    cut = f" / rollout.num_workers ({num_workers})" if num_workers > 1 else ""
                    yield f"rollout.layout.degrees: {degree} must divide trainer.num_devices ({num_devices}){cut}"

        def unread(self, config: Any) -> Iterator[tuple[frozenset[str], str]]:
            if not self.switch:
                names = frozenset({"direction", "min_gain", "cooldown", "bound"})
                yield names, "rollout.layout.switch is off"

    name = "layouts"
    title = "adaptive layouts"
    option = "rollout.layout.planner and rollout.layout.switch"
    changes = frozenset({LAYOUTS})
    excludes_spanning = "tp is all devices of such a worker"

    @classmethod
    def is_on(cls, config: Config) -> bool:
        return config.rollout.layout.adapts

    @classmethod
    def reads_profile(cls, config: Config) -> bool:
        return config.rollout.layout.switch

    @classmethod
    def page_part(cls) -> PagePart:
        from jaxrl.report.curves import PagePart

        return PagePart(section=_section)

    @classmethod
    def build(cls, run: Run) -> Self | None:
        if not cls.is_on(run.config):
            return None
        from jaxrl.mechanisms.adaptive_layouts.control import LayoutControl

        rollout, machine = run.config.rollout, run.machine
        predictors = [machine.predictor() if rollout.layout.switch else None for _ in run.workers.engines]
        assert not rollout.layout.switch or all(predictors), "layouts switch by a profile, and none was read"
        assert run.timeline is not None, "an evaluation has no layouts that adapt"
        controls = [
            LayoutControl(engine, rollout.layout, tuple(machine.degrees), rollout.tp, predictor)
            for engine, predictor in zip(run.workers.engines, predictors, strict=True)
        ]
        return cls(controls, run.clock, run.timeline, run.layout_log, run.journal)

    def __init__(
        self,
        controls: Sequence[LayoutControl],
        clock: Callable[[], float],
        tracer: PlanTimeline,
        log: LayoutLog | None,
        journal: Journal | None,
    ) -> None:
        self.controls = tuple(controls)
        self._clock, self._tracer, self._log, self._journal = clock, tracer, log, journal
        self._round = (0, 0, "")  # step, index, kind
        self._spans: list[list[tuple[float, float]]] = [[] for _ in controls]  # of the round's switches, by worker

    def enter_rollout(self, policy_version: int, *, was_released: bool) -> bool:
        """Where there are neither weights nor pools, takes the layouts of the next round at no cost."""
        if was_released:
            for control in self.controls:
                control.enter()
        return False

    def round_begins(self, info: RoundInfo) -> None:
        from jaxrl.mechanisms.adaptive_layouts.control import Decision

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
        from jaxrl.scheduling.layouts.relayout import SwitchFailed

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


def _section(run: RecordedRun) -> str:
    if not run.layouts:
        return ""
    from jaxrl.mechanisms.adaptive_layouts.report import layouts_section

    return layouts_section(run.layouts)
