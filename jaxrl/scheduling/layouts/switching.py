"""Changing an engine's layout: in the middle of a batch, or before one.

`switch` moves live requests to another tensor-parallel degree on the same devices, `recompute` prefills them all again
in the degree in use, and `start_in` chooses the degree while there is nothing to move. For requests that move to
another worker see `jaxrl.scheduling.layouts.request_migration`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from jaxrl.scheduling.layouts.relayout import How, LayoutExecutor, SwitchFailed, TimeTaken, plan_relayout, restart
from jaxrl.scheduling.tokens.engine import Engine


@dataclass(frozen=True, slots=True)
class Switched:
    from_tp: int
    to_tp: int
    how: How
    num_live: int
    num_tokens: int
    num_moved: int
    num_evicted: int
    times: TimeTaken


def switch(engine: Engine, tp: int, by: How = "migrate") -> Switched:
    """Changes the tensor-parallel degree, in the middle of a batch.

    Plans in flight are collected first; the next `step` or `drain` returns the requests that ended in them. No request
    is lost, none starts anew, and no token changes. Requests that do not fit wait and are recomputed.

    Raises:
      ValueError: before anything moves, for an impossible layout; the old one stays.
      SwitchFailed: something failed after the move had begun. If it `is_usable`, the engine recomputes every request in
        the old layout; otherwise the executor needs weights first.
    """
    executor = engine.executor
    if not isinstance(executor, LayoutExecutor):
        raise ValueError(f"switch to tp {tp}: {type(executor).__name__} cannot change its layout")
    if tp == executor.tp:
        raise ValueError(f"switch to tp {tp}: that is the layout in use")
    if by not in get_args(How):
        raise ValueError(f"switch to tp {tp}: by={by!r} must be one of {', '.join(get_args(How))}")
    capacity = executor.capacity(tp)
    engine.settle()
    move = plan_relayout(engine.batcher, executor.tp, tp, capacity, by)
    try:
        times = executor.switch(move)
    except SwitchFailed:
        restart(engine.batcher, engine.batcher.capacity)
        raise
    move.apply(engine.batcher)
    return Switched(
        from_tp=move.from_tp,
        to_tp=tp,
        how=by,
        num_live=move.num_live,
        num_tokens=move.num_tokens,
        num_moved=move.num_moved,
        num_evicted=len(move.evicted),
        times=times,
    )


def recompute(engine: Engine) -> None:
    """Gives up the KV of all requests: they keep their tokens, wait, and are prefilled again."""
    engine.settle()
    restart(engine.batcher, engine.batcher.capacity)


def start_in(engine: Engine, tp: int) -> None:
    """Chooses the layout of an engine while its executor has neither weights nor a pool. Raises ValueError if requests
    are unfinished."""
    executor = engine.executor
    assert isinstance(executor, LayoutExecutor), "a worker without a layout"
    if not engine.batcher.is_idle:
        raise ValueError(
            f"start_in({tp}): {len(engine.batcher.live())} requests are unfinished, so the layout changes by "
            "Engine.switch alone"
        )
    executor.start_in(tp)
    restart(engine.batcher, executor.capacity(tp))
