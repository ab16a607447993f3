"""Ranking groups: prompts ranked by the lengths of their last responses; workers get long and short ones in turn.

Source: RhymeRL §6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Interval

from jaxrl.mechanisms.ranking_groups.session import RankingSession
from jaxrl.scheduling.mechanism import LAYOUTS, PROMPTS_OF_ROUNDS, WORKERS, RolloutMemory
from jaxrl.schema.declared import Checked

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.report.charts import Chart
    from jaxrl.report.curves import PagePart
    from jaxrl.report.runs import Run as RecordedRun
    from jaxrl.runtime.run import Run
    from jaxrl.scheduling.tokens.local_workers import By


class RankedRounds(RankingSession):
    """Ranks the prompts of rounds, and moves outliers between workers."""

    @dataclass(frozen=True)
    class Options(Checked):
        """Prompts ranked by the lengths of their last responses; workers get long and short ones in turn."""

        enable: Annotated[bool, "Switch ranking groups on."] = False
        num_groups: Annotated[int, Interval(ge=2, le=65536), "Groups that a step's ranked prompts are cut into."] = 8
        outlier_share: Annotated[
            float, Interval(ge=0, le=1), "A response may move if it is among the last so many of its group, as a share."
        ] = 0.1
        min_growth: Annotated[
            float,
            Interval(ge=1, le=100),
            "A response moves if it is longer than the largest median of its group's prompts in their last rollout "
            "by this factor at least, or by the 75th percentile of how much the last epoch's responses grew.",
        ] = 1.1
        move: Annotated[
            Literal["auto", "recompute", "kv"],
            "How a response moves to another worker: its KV computed again, or copied; auto: what is predicted to be "
            "cheaper.",
        ] = "auto"
        two_tier: Annotated[bool, "Groups get as many workers as their lengths need; off: as many as any other."] = True

        def excludes_hosts(self, config: Any) -> tuple[str, str] | None:
            if not self.enable or self.move != "kv":
                return None
            return "rollout.ranking_groups.move (kv)", "the KV of a response stays on its host; use recompute"

    title = "ranking groups"
    option = "rollout.ranking_groups.enable"
    changes = frozenset({WORKERS})
    relies_on: ClassVar = {
        PROMPTS_OF_ROUNDS: "both decide which prompts share a round's workers, the one by the last rollout's lengths "
        "and the other by those of this one",
        LAYOUTS: "groups are shared out by what workers of one layout take for them",
    }

    @classmethod
    def reads_profile(cls, config: Config) -> bool:
        return config.rollout.ranking_groups.enable and bool(config.rollout.layout.profile)

    @classmethod
    def problem(cls, config: Config, racing: Sequence[str]) -> str | None:
        option, rollout = "rollout.ranking_groups.enable", config.rollout
        needs = []
        if not config.trainer.one_step_off:
            needs.append(
                "trainer.one_step_off: workers that are done with a step's rollout go on with the next one's, while "
                "the update runs"
            )
        if not rollout.num_devices:
            needs.append(
                "rollout.num_devices: workers take the next step's weights while others still draw the present "
                "one's, so the rollout needs devices of its own"
            )
        if config.num_workers < 2:
            needs.append(f"rollout.num_workers to be at least 2, found {config.num_workers}: they share the groups")
        if needs:
            return f"{option} needs {'; and '.join(needs)}"
        if rollout.max_active_requests:
            return (
                f"{option} excludes rollout.max_active_requests ({rollout.max_active_requests} samples): prompts are "
                "ranked when all of a round start together"
            )
        return None

    @classmethod
    def rollout_memory(
        cls, config: Config, num_devices: int, platform: str, weight_bytes: int, is_timeless: bool
    ) -> RolloutMemory | None:
        """Weights of two versions exist where workers that are done with a round may begin with the next one."""
        if not is_timeless:
            return None
        return RolloutMemory("the next round's weights", {"rollout weights of the next round": weight_bytes})

    @classmethod
    def page_part(cls) -> PagePart:
        from jaxrl.report.curves import PagePart

        return PagePart(_charts)

    @classmethod
    def build(cls, run: Run) -> Self | None:
        """With a latency profile groups are ranked by predicted times, else they have equal shares of the workers."""
        from jaxrl.mechanisms.ranking_groups.rule import RankingGroups
        from jaxrl.scheduling.layouts.plan_cost import step_seconds

        if not cls.is_on(run.config):
            return None
        assert run.history is not None, "ranks by lengths that nothing keeps"
        options, engines, predictor = run.config.rollout.ranking_groups, run.workers.engines, run.machine.predictor()
        step_s = None if predictor is None else step_seconds(predictor, engines[0])
        ranking = RankingGroups(options, len(engines), run.history, step_s, is_timed=run.is_timeless)
        return cls(ranking, run.executors, _moves(run))


def _moves(run: Run) -> By:
    """How outliers move. A profile of one degree alone says nothing of moving KV."""
    from jaxrl.scheduling.layouts.plan_cost import cheaper_move

    move, predictor = run.config.rollout.ranking_groups.move, run.machine.predictor()
    if move != "auto":
        return "migrate" if move == "kv" else "recompute"
    if predictor is None or not predictor.profile.switches or run.config.hosts.num > 1:
        return "recompute"
    return partial(cheaper_move, predictor)


def _charts(run: RecordedRun) -> list[Chart]:
    """How busy ranking groups have kept the workers; none where they are off."""
    from jaxrl.report.charts import Chart, Curve
    from jaxrl.report.curves import with_epochs

    if not run.series("rollout/ranking/idle_share"):
        return []
    shares = [
        Curve("of workers' time idle", run.series("rollout/ranking/idle_share")),
        Curve("of responses moved", run.series("rollout/ranking/moved_share"), "c2"),
        Curve("begun in an earlier round", run.series("rollout/ranking/carried_share"), "c4"),
    ]
    return [with_epochs(run, Chart("Workers of ranking groups", "share", shares, "rollout/ranking/*", top=1))]
