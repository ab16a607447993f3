"""The cost of plans, and of moves between workers, by a latency profile.

Source: PAT §4.2 (its offline profile predicts steps), equations 1 to 4 (moving and recomputing). Departures: ticks are
not corrected by what the engine measures, because logical time may not depend on a clock.

The profile has only the costs of moves inside a worker; `across_s` derives the costs between two from them. A device at
degree a holds 1/a of a token's KV. When it changes to degree b it sends 1 - min(a, b) / max(a, b) of that (equation 1).
So each measured cost per token is a time for the complete KV of a token over one link, and the largest counts. Between
workers a device of degree a sends all of its 1/a of a token. Where the degrees differ, the receiving worker then
changes to its own. Links between workers are assumed to be as fast as inside one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from jaxrl.scheduling.layouts.latency import LatencyPredictor, causal_pairs
from jaxrl.scheduling.layouts.relayout import How, LayoutExecutor, rows_of
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.local_workers import Ticks
from jaxrl.scheduling.tokens.progress import PlanTimes


def plan_ticks(predictor: LatencyPredictor, engines: Sequence[Engine]) -> Ticks:
    """Ticks of plans, in predicted nanoseconds, for workers with different layouts or rows: of a plan's prefill, as one
    row in each dp group, and its decode steps. `predictor` is never corrected, because logical time may not depend on
    a clock."""

    def ticks(worker: int, times: PlanTimes) -> int:
        engine, seconds = engines[worker], 0.0
        tp = _degree(engine)
        if times.prefill_tokens:
            tokens = times.prefill_tokens / engine.batcher.capacity.num_groups
            seconds += predictor.prefill_s(tp, tokens, causal_pairs(tokens))
        if times.num_steps and times.batch:
            seconds += times.num_steps * predictor.decode_step_s(tp, times.batch, times.context)
        return round(seconds * 1e9)

    return ticks


def cheaper_move(predictor: LatencyPredictor, source: Engine, target: Engine, request_ids: Collection[int]) -> How:
    """Whether the KV of live requests should move from `source` to `target`, or be computed again there.

    Only rows have KV. The fullest dp group of the source sets the time to send it; the target's groups prefill equal
    shares of the rows side by side.
    """
    leaving = set(request_ids)
    groups = [[row.length for row in rows if row.request_id in leaving] for rows in rows_of(source.batcher)]
    lengths = sorted((length for group in groups for length in group), reverse=True)
    move_s = across_s(predictor, _degree(source), _degree(target), max(map(sum, groups), default=0))
    again_s = predictor.recompute_s(_degree(target), lengths[:: target.batcher.capacity.num_groups])
    return "migrate" if move_s < again_s else "recompute"


def step_seconds(predictor: LatencyPredictor, engine: Engine) -> Callable[[float, float], float]:
    """(rows of a worker like `engine`, their tokens together) -> predicted seconds of a decode step. Rows are spread
    evenly over the dp groups. More rows than slots take turns, so one step of all of them is several. Room for their KV
    is ignored."""
    capacity, tp = engine.batcher.capacity, _degree(engine)

    def step_s(rows: float, tokens: float) -> float:
        in_group = rows / capacity.num_groups
        turns = max(in_group / capacity.num_slots, 1.0)
        batch = max(math.ceil(in_group / turns), 1)
        return turns * predictor.decode_step_s(tp, batch, tokens / capacity.num_groups / turns)

    return step_s


def across_s(predictor: LatencyPredictor, from_tp: int, to_tp: int, tokens: int) -> float:
    """Seconds to bring KV to another worker, when the fullest dp group sends `tokens` tokens; see the module. Raises
    ValueError if the profile lacks the costs."""
    costs = predictor.profile.switches
    if not costs:
        raise ValueError("the latency profile has no costs of a switch, from which those of a move are taken")
    whole_s = max(c.kv_s_per_token * c.from_tp / (1 - min(c.from_tp, c.to_tp) / max(c.from_tp, c.to_tp)) for c in costs)
    lands_s = predictor.move_s(from_tp, to_tp, tokens) if from_tp != to_tp else 0.0
    return tokens * whole_s / from_tp + lands_s


def _degree(engine: Engine) -> int:
    assert isinstance(engine.executor, LayoutExecutor), "a worker without a layout"
    return engine.executor.tp
