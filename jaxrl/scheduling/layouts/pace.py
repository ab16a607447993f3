"""The pace of workers by a latency profile: what a plan costs in the logical time of several workers.

Purpose: `PredictedTicks` is a `jaxrl.scheduling.tokens.workers.Ticks` for workers that are not alike: of other layouts,
or with other rows. A tick is a predicted nanosecond.

Source: PAT §4.2 (its offline profile predicts steps). Departure: predictions are not corrected by what the engine
measures, because logical time may not depend on a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.relayout import LayoutExecutor
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.progress import PlanTimes


class PredictedTicks:
    """Ticks of plans, in whole nanoseconds.

    Args:
      predictor: one that nothing observes; its profile holds decode and prefill times of every degree that is used.
      engines: by the worker's number, each over an executor that has a layout.
    """

    def __init__(self, predictor: LatencyPredictor, engines: Sequence[Engine]) -> None:
        self._predictor = predictor
        self._engines = engines

    def __call__(self, worker: int, times: PlanTimes) -> int:
        """A plan's prefill, as one row in each dp group, and its decode steps."""
        engine = self._engines[worker]
        assert isinstance(engine.executor, LayoutExecutor), "a worker without a layout"
        tp, seconds = engine.executor.tp, 0.0
        if times.prefill_tokens:
            groups = engine.batcher.capacity.num_groups
            seconds += self._predictor.prefill_s(tp, 1, max(times.prefill_tokens / groups, 1.0))
        if times.num_steps and times.batch:
            seconds += times.num_steps * self._predictor.decode_step_s(tp, times.batch, times.context)
        return round(seconds * 1e9)
