"""Adaptive layouts: the tensor-parallel degree of workers changes between steps, and while a batch drains. No token
depends on it. `control.py` has a run's; never imports jax.

Source: PAT §4 (switches within a generation; it switches the layout of each node by itself, as a worker per node does
here), RollPacker §4.2 (the degree that a step begins with).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Interval

from jaxrl.scheduling.mechanism import LAYOUTS, Mechanism
from jaxrl.schema.declared import Names
from jaxrl.schema.devices import prime_factors
from jaxrl.schema.section import Section

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.mechanisms.adaptive_layouts.control import LayoutSession
    from jaxrl.report.curves import PagePart
    from jaxrl.report.runs import RecordedRun
    from jaxrl.run.run import Run


class AdaptiveLayouts(Mechanism):
    """Changes the layouts of workers."""

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
    def build(cls, run: Run) -> LayoutSession | None:
        if not cls.is_on(run.config):
            return None
        from jaxrl.mechanisms.adaptive_layouts.control import LayoutSession

        return LayoutSession(run)


def _section(run: RecordedRun) -> str:
    if not run.layouts:
        return ""
    from jaxrl.mechanisms.adaptive_layouts.report import layouts_section

    return layouts_section(run.layouts)
