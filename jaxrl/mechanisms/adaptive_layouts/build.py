"""Layouts that adapt, of a real run, from their options."""

from __future__ import annotations

import time

from jaxrl.mechanisms.adaptive_layouts.session import LayoutSessions, layout_sessions
from jaxrl.mechanisms.parts import RunParts
from jaxrl.scheduling.layouts.latency import LatencyPredictor


def build(parts: RunParts) -> LayoutSessions | None:
    """A session for each worker's engine; None: layouts stay."""
    options, engines = parts.config.rollout.layout, parts.engines.engines
    if not options.adapts:
        return None
    predictors: list[LatencyPredictor | None] = [None] * len(engines)
    if options.switch:
        assert parts.profile is not None, "layouts switch by a profile, and none was read"
        predictors = [LatencyPredictor(parts.profile, options, parts.row_sizes) for _ in engines]
    kept = (time.perf_counter, parts.timeline, parts.layout_log, parts.journal)
    return layout_sessions(
        options,
        tuple(parts.row_sizes),
        parts.config.rollout.tp,
        engines,
        predictors,
        *kept,
    )
