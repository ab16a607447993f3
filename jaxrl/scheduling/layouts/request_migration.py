"""Moving requests from one worker to another in the middle of a batch.

`migrate_requests` moves live requests, with their KV, between engines on disjoint devices; `recompute_requests` moves
their tokens alone. Where the workers have different weights, a response has tokens of two versions.

Requests are dealt so that the other worker's dp groups, with the rows that they have already, are balanced
(`jaxrl.scheduling.layouts.regroup`). Those that do not fit into its free rows and blocks wait there and are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl.scheduling.layouts.kv_plan import KvPlan, LiveBlocks, blocks_needed, plan_migration
from jaxrl.scheduling.layouts.regroup import regroup
from jaxrl.scheduling.layouts.relayout import SwitchFailed, live_blocks, resident_row, restart, rows_of
from jaxrl.scheduling.tokens.batcher import Batcher
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request, Seat, resume
from jaxrl.scheduling.tokens.progress import MigrationOutcome


def migrate_requests(source: Engine, target: Engine, request_ids: Iterable[int]) -> MigrationOutcome:
    """Lets live requests of `source` continue in `target`, beside its own. Plans in flight of both are collected first;
    requests that ended in them are not moved.

    Raises:
      ValueError: before anything moves.
      SwitchFailed: the copy failed; the requests are still in `source`, and `target` recomputes its own.
    """
    receiver: Any = target.executor
    if not hasattr(receiver, "accept_migration"):  # on another host
        raise ValueError(f"migrate_requests: {type(receiver).__name__} cannot take requests over")
    asked = _asked("migrate_requests", source, target, request_ids)
    if source.batcher.capacity.block_size != target.batcher.capacity.block_size:
        raise ValueError("migrate_requests: rollout.block_size must be the same in both workers")
    source.settle()
    target.settle()
    requests = _leaving(source, target, asked)
    leaving = list(requests)
    kv, seats = _plan(source.batcher, target.batcher, leaving)
    own = [(p, Seat(p.group, p.slot, p.num_written, True)) for p in target.batcher.running() if p.is_resident]
    new = [(source.batcher.progress(i), seat) for i, seat in seats.items() if seat.decodes]
    rows = [resident_row(progress, seat) for progress, seat in own + new]
    try:
        receiver.accept_migration(source.executor, kv, rows)
    except SwitchFailed:
        restart(target.batcher, target.batcher.capacity)
        raise
    except BaseException:
        for request_id in seats:
            target.batcher.blocks.free(request_id)
        raise
    _queue(source, target, requests)
    target.batcher.seat(seats)
    num_moved = len(kv.copies) * source.batcher.capacity.block_size // len(source.batcher.capacity.stacks)
    return MigrationOutcome(len(leaving), len(seats), num_moved)


def recompute_requests(source: Engine, target: Engine, request_ids: Iterable[int]) -> MigrationOutcome:
    """Lets live requests of `source` wait in `target`, behind its own, with their tokens: their KV is computed again.
    Raises ValueError before anything moves."""
    asked = _asked("recompute_requests", source, target, request_ids)
    source.settle()
    requests = _leaving(source, target, asked)
    _queue(source, target, requests)
    return MigrationOutcome(len(requests), 0, 0)


def _asked(what: str, source: Engine, target: Engine, request_ids: Iterable[int]) -> set[int]:
    asked = list(request_ids)
    unknown, doubled = set(asked) - set(source.unfinished()), set(asked) & set(target.unfinished())
    if unknown or doubled or len(set(asked)) < len(asked):
        raise ValueError(
            f"{what}: every request must be live in the source (not: {sorted(unknown)}), unknown to the target "
            f"(not: {sorted(doubled)}), and named once"
        )
    return set(asked)


def _leaving(source: Engine, target: Engine, asked: set[int]) -> dict[int, Request]:
    """The requests that are still live, in the order of arrival; raises ValueError for one that cannot run in the
    target."""
    requests = {i: source.batcher.progress(i).request for i in source.unfinished() if i in asked}
    for request in requests.values():
        target.executor.check(request)
        target.batcher.check(request)
    return requests


def _queue(source: Engine, target: Engine, requests: Mapping[int, Request]) -> None:
    """Takes requests out of the source; they wait in the target with their tokens."""
    for request, sample in zip(requests.values(), source.abort(requests), strict=True):
        target.add(resume(request, sample) if len(sample) else request)


def _plan(source: Batcher, target: Batcher, leaving: Sequence[int]) -> tuple[KvPlan, dict[int, Seat]]:
    running = {p.request.request_id: p for p in source.running() if p.request.request_id in set(leaving)}
    groups = [tuple(row for row in rows if row.request_id in running) for rows in rows_of(source)]
    live: dict[int, LiveBlocks] = {i: live_blocks(source, progress) for i, progress in running.items()}
    fitting: list[list[int]] = []
    for group, rows in enumerate(regroup(groups, target.capacity.num_groups, rows_of(target))):
        kept = sorted((row.request_id for row in rows), key=lambda i: running[i].arrival)
        free = target.free_slots(group)
        while kept and (
            len(kept) > len(free)
            or blocks_needed([live[i] for i in kept], target.capacity.block_size, target.capacity.stacks)
            > target.blocks.num_free(group)
        ):
            kept.pop()
        fitting.append(kept)
    kv = plan_migration(
        [live[i] for ids in fitting for i in ids],
        source.capacity.num_groups,
        fitting,
        target.capacity.num_blocks,
        target.capacity.block_size,
        into=target.blocks,
        stacks=target.capacity.stacks,
    )
    seats = {
        request_id: Seat(group, slot, kv.placements[request_id].num_written, running[request_id].is_resident)
        for group, ids in enumerate(fitting)
        for request_id, slot in zip(ids, target.free_slots(group), strict=False)
    }
    return kv, seats
