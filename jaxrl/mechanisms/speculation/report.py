"""Drafts on a run's page."""

from __future__ import annotations

from jaxrl.report.charts import Chart, Curve
from jaxrl.report.curves import PagePart, with_epochs
from jaxrl.report.runs import Run


def _drafts(run: Run) -> list[Chart]:
    """What speculation brought, with the steps at which an epoch begins; none where it is off."""
    if not run.series("rollout/spec/accept_rate"):
        return []
    shares = [
        Curve("accepted, of those drafted", run.series("rollout/spec/accept_rate")),
        Curve("of decoded tokens from drafts", run.series("rollout/spec/drafted_share"), "c2"),
        Curve("of plans that verify", run.series("rollout/spec/plans_share"), "c4"),
    ]
    tokens = [Curve("tokens", run.series("rollout/spec/tokens_per_step"))]
    charts = [
        Chart("Drafts from history", "share", shares, "rollout/spec/accept_rate", top=1),
        Chart("Tokens of a step that verifies", "per row", tokens, "rollout/spec/tokens_per_step"),
    ]
    return [with_epochs(run, chart) for chart in charts]


PART = PagePart(_drafts)
