"""Adaptive layouts: the tensor-parallel degree of workers changes between steps, and while a batch drains.

Source: PAT §4 (switches within a generation), RollPacker §4.2 (the degree that a step begins with). PAT switches the
layout of each node by itself: a worker per node, with `rollout.layout.switch`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Interval

from jaxrl.mechanisms.adaptive_layouts.session import LayoutSessions, layout_sessions
from jaxrl.scheduling.mechanism import LAYOUTS
from jaxrl.schema.declared import Checked, Names, declared
from jaxrl.schema.devices import MAX_DEVICES, prime_factors

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.report.curves import PagePart
    from jaxrl.runtime.run import Run


class AdaptiveLayouts(LayoutSessions):
    """Changes the layouts of workers, each by itself."""

    @dataclass(frozen=True)
    class Options(Checked):
        """Tensor parallelism that adapts; `rollout.tensor_model_parallel_size` is where it begins."""

        switch: Annotated[bool, "Change tp while a batch drains, where the profile says that it saves time."] = False
        planner: Annotated[bool, "Choose the tp that a step begins with from the preemptions of the steps before."] = (
            False
        )
        degrees: Annotated[list[int], "The tp degrees to use; empty: all inside a host."] = field(default_factory=list)
        devices_per_host: Annotated[
            int, Ge(0), MAX_DEVICES, "Devices of a host, inside which tp stays; 0: all are in one host."
        ] = 0
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
            "How long rows are assumed to go on; max_length: to their limit, expected: as long as earlier ones did.",
        ] = "max_length"
        direction: Annotated[
            Literal["up", "both"], "Where tp may go within a generation; up: it only grows, both: it may fall again."
        ] = "up"
        min_gain: Annotated[
            float, Interval(ge=0, lt=1), "Share of the predicted time left that a switch must save."
        ] = 0.05
        cooldown: Annotated[int, Ge(1), "The fewest plans from one switch to the next."] = 4
        reversal_factor: Annotated[float, Gt(1), "Factor by which live rows must change before a switch back."] = 2.0
        state: Annotated[
            Literal["cheaper", "migrate", "recompute"],
            "How KV is carried over a switch; cheaper: moved or computed again, whichever is predicted to be faster.",
        ] = "cheaper"
        headroom_tokens: Annotated[
            int, Ge(0), "Tokens by which every live row must be able to grow in a new layout."
        ] = 32
        correction_weight: Annotated[
            float, Interval(ge=0, le=1), "Weight of a new step time in the correction of the profile; 0: no correction."
        ] = 0.1
        correction_max_factor: Annotated[
            float, Ge(1), "Measured step times count as at most this many times the predicted ones."
        ] = 2.0
        planner_rule: Annotated[
            Literal["paper", "confident"],
            "What the planner takes for a rise of preemptions; paper: more than rollout.layout.planner_rise times "
            "those of the step before, confident: the same in the mean, and beyond the noise of the steps before; it "
            "also tries to come down again.",
        ] = "paper"
        planner_rise: Annotated[
            float, Ge(1), "The planner raises tp where preemptions are more than this times those of the step before."
        ] = 1.05
        planner_quiet_rounds: Annotated[int, Ge(1), "The planner lowers tp after so many steps without preemption."] = 4

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
            host = self.devices_per_host or num_devices
            degrees = tuple(self.degrees) or tuple(degree for degree in possible if degree <= host)
            for degree in (*degrees, *chosen):
                if degree not in possible or degree > host or degree not in degrees:
                    raise ValueError(
                        f"rollout.layout.degrees: tp {degree} must be one of {', '.join(map(str, possible))} (which "
                        f"the {num_devices} devices can be factored into), at most the {host} devices of a host, and "
                        f"the first tp ({', '.join(map(str, chosen)) or 'auto'}) one of the degrees {degrees}"
                    )
            return degrees

        def problem(self, config: Any) -> str | None:
            rollout, degrees = config.rollout, self.degrees
            tp = None if config.is_tp_open else rollout.tp
            num_devices, num_workers = rollout.num_devices or config.trainer.num_devices, rollout.num_workers
            if not self.adapts and tp is not None:
                return None
            if self.switch and not self.profile:
                return "rollout.layout.profile is missing: rollout.layout.switch needs a file of `jaxrl profile`"
            if self.planner and self.switch and self.direction != "up":
                return (
                    f"rollout.layout.direction must be up where rollout.layout.planner is on, found {self.direction}: "
                    "the planner alone lowers tp, between steps"
                )
            if degrees and (
                degrees[0] < 1
                or any(a >= b or b % a for a, b in pairwise(degrees))
                or (tp is not None and tp not in degrees)
            ):
                return (
                    f"rollout.layout.degrees {degrees} must ascend from at least 1, each dividing the next, with "
                    f"rollout.tensor_model_parallel_size ({'auto' if tp is None else tp}) among them"
                )
            for degree in degrees if num_devices else ():
                if num_devices // num_workers % degree:
                    cut = f" / rollout.num_workers ({num_workers})" if num_workers > 1 else ""
                    return f"rollout.layout.degrees: {degree} must divide trainer.num_devices ({num_devices}){cut}"
            return None

        def unread(self, config: Any) -> Iterator[tuple[frozenset[str], str]]:
            if not self.planner:
                names = frozenset(name for name in declared(type(self)) if name.startswith("planner_"))
                yield names, "rollout.layout.planner is off"
            if not self.switch:
                names = frozenset({"direction", "min_gain", "cooldown", "reversal_factor", "bound", "headroom_tokens"})
                yield names, "rollout.layout.switch is off"

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
        from jaxrl.mechanisms.adaptive_layouts.report import layouts_section
        from jaxrl.report.curves import PagePart

        return PagePart(section=lambda run: layouts_section(run.layouts))

    @classmethod
    def build(cls, run: Run) -> Self | None:
        if not cls.is_on(run.config):
            return None
        rollout, engines = run.config.rollout, run.workers.engines
        predictors = [run.machine.predictor() if rollout.layout.switch else None for _ in engines]
        assert not rollout.layout.switch or all(predictors), "layouts switch by a profile, and none was read"
        given = rollout.layout, tuple(run.machine.degrees), rollout.tp, engines, predictors
        return cls(layout_sessions(*given, run.clock, run.timeline, run.layout_log, run.journal))
