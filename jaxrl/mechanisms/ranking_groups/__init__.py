"""Ranking groups: prompts ranked by the lengths of their last responses; workers get long and short ones in turn.

Source: RhymeRL §6. `session.py` has a run's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Interval

from jaxrl.scheduling.mechanism import LAYOUTS, PROMPTS_OF_ROUNDS, WORKERS, Mechanism, RolloutMemory
from jaxrl.schema.section import Section

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.mechanisms.ranking_groups.session import RankingSession
    from jaxrl.report.charts import Chart
    from jaxrl.report.curves import PagePart
    from jaxrl.report.runs import RecordedRun
    from jaxrl.run.run import Run


class RankingGroups(Mechanism):
    """Ranks the prompts of rounds, moves outliers between workers, and has idle workers begin with the next round."""

    class Options(Section):
        """Prompts ranked by the lengths of their last responses; workers get long and short ones in turn."""

        enable: Annotated[bool, "Switch ranking groups on."] = False
        num_groups: Annotated[int, Interval(ge=2, le=65536), "Groups that a step's ranked prompts are cut into."] = 8
        outlier_share: Annotated[
            float, Interval(ge=0, le=1), "Share of a group's responses, the last to end, that may move."
        ] = 0.1
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

    name = "ranking"
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
                "trainer.one_step_off: workers that are done with a step's rollout begin the next one's, while "
                "the update runs"
            )
        if not rollout.num_devices:
            needs.append(
                "rollout.num_devices: workers take the next step's weights while others still draw the present "
                "one's, so the rollout needs devices of its own"
            )
        if config.num_workers < 2:
            needs.append(f"rollout.num_workers to be at least 2, found {config.num_workers}: they share the groups")
        return f"{option} needs {'; and '.join(needs)}" if needs else None

    @classmethod
    def rollout_memory(
        cls, config: Config, num_devices: int, platform: str, weight_bytes: int, is_timeless: bool
    ) -> RolloutMemory | None:
        if not is_timeless:
            return None
        return RolloutMemory("the next round's weights", {"rollout weights of the next round": weight_bytes})

    @classmethod
    def page_part(cls) -> PagePart:
        from jaxrl.report.curves import PagePart

        return PagePart(_charts)

    @classmethod
    def build(cls, run: Run) -> RankingSession | None:
        if not cls.is_on(run.config):
            return None
        from jaxrl.mechanisms.ranking_groups.session import RankingSession

        return RankingSession(run)


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
    about = "How evenly the groups keep the workers busy."
    return [with_epochs(run, Chart("Workers of ranking groups", "share", shares, about, top=1))]
