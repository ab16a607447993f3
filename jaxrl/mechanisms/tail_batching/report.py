"""Short and long rounds on a run's page."""

from __future__ import annotations

from jaxrl.record.metrics import ROUND_PHASES, seconds_of
from jaxrl.report.charts import Chart, Curve, Point
from jaxrl.report.curves import PagePart
from jaxrl.report.runs import Run


def _by_round(run: Run) -> list[Chart]:
    """Charts of rollout time and longest response by kind of round, and of the queue; none without long rounds."""
    is_long = dict(run.series("rollout/long_round"))
    if not any(is_long.values()):
        return []

    def dots(series: list[Point]) -> list[Curve]:
        kinds = ((0.0, "short", "c1"), (1.0, "long", "c2"))
        points = {kind: [(step, y) for step, y in series if is_long.get(step) == kind] for kind, *_ in kinds}
        return [Curve(label, points[kind], colour, dots=True, line=False) for kind, label, colour in kinds]

    rollout_s = [(row["step"], seconds_of(ROUND_PHASES, row)) for row in run.metrics if "timing_s/gen" in row]
    queue = [
        Curve("prompts that wait", run.series("rollout/queue_length")),
        Curve("longest wait, steps", run.series("rollout/queue_age_steps/max"), "c2"),
    ]
    return [
        Chart("Rollout time by round", "seconds", dots(rollout_s), "timing_s/gen"),
        Chart("Longest response by round", "tokens", dots(run.series("response_length/max")), "response_length/max"),
        Chart("Long-prompt queue", "prompts, steps", queue, "rollout/queue_length"),
    ]


PART = PagePart(_by_round)
