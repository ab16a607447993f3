"""Workers of ranking groups on a run's page."""

from __future__ import annotations

from jaxrl.report.charts import Chart, Curve
from jaxrl.report.curves import PagePart, with_epochs
from jaxrl.report.runs import Run


def _ranked(run: Run) -> list[Chart]:
    """How busy ranking groups have kept the workers; none where they are off."""
    if not run.series("rollout/ranking/idle_share"):
        return []
    shares = [
        Curve("of workers' time idle", run.series("rollout/ranking/idle_share")),
        Curve("of responses moved", run.series("rollout/ranking/moved_share"), "c2"),
        Curve("begun in an earlier round", run.series("rollout/ranking/carried_share"), "c4"),
    ]
    return [with_epochs(run, Chart("Workers of ranking groups", "share", shares, "rollout/ranking/*", top=1))]


PART = PagePart(_ranked)
