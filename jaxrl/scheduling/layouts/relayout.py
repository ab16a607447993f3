"""Changing where live requests run: an engine's layout, in the middle of a batch or before one, or their worker.

`switch` moves live requests to another tensor-parallel degree on the same devices. `recompute` prefills them all again
in the degree in use. `start_in` chooses the degree while there is nothing to move. `migrate_requests` moves live
requests, with their KV, between engines on disjoint devices; `recompute_requests` moves their tokens alone. Where the
workers have different weights, a response has tokens of two versions.

`plan_relayout` works out from the batcher's state alone which request goes where, which blocks move, and which requests
give up their rows. The executor carries it out, and only then does `apply` change the batcher. So a failure before
anything has moved leaves the engine as it was.

Source: docs/architecture.md (only valid KV moves; preempt until the live blocks fit, before anything moves), PAT §4.3
(migrate or recompute). To recompute is to preempt: every request waits with its tokens and is admitted again like any
other; samples of a prompt share its blocks again. So less is prefilled than PAT's equation 4 charges.

Requests are dealt so that the dp groups, with the rows that another worker has already, are balanced
(`jaxrl.scheduling.layouts.regroup`). Those that do not fit into free rows and blocks wait and are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from jaxrl.scheduling.layouts.batch_state import LiveRow, Rows
from jaxrl.scheduling.layouts.kv_plan import KvPlan, LiveBlocks, blocks_needed, plan_migration
from jaxrl.scheduling.layouts.regroup import regroup
from jaxrl.scheduling.tokens.batcher import Batcher
from jaxrl.scheduling.tokens.blocks import BlockManager
from jaxrl.scheduling.tokens.plan import Capacity, Executor, Request, Seat, resume
from jaxrl.scheduling.tokens.rows import Response

if TYPE_CHECKING:
    from jaxrl.scheduling.tokens.engine import Engine

How = Literal["migrate", "recompute"]
"""How a request's KV reaches another layout, or another worker."""


@dataclass(frozen=True, slots=True)
class ResidentRow:
    """The device's state of a row that decodes. `token`, the last of `response`, is at `position` and has no KV yet."""

    request: Request
    dp_group: int
    slot: int
    token: int
    position: int
    response: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TimeTaken:
    """Seconds that a change of layout took on the devices: weights, KV, and everything else (plans, compiling)."""

    weights_s: float = 0.0
    state_s: float = 0.0
    fixed_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.weights_s + self.state_s + self.fixed_s


@dataclass(frozen=True, slots=True)
class Relayout:
    """A change of layout, planned or carried out.

    Attributes:
      kv: the new pools, and the copies (none if everything is recomputed).
      rows: those that decode in the new layout without a prefill.
      seats: of the requests that keep their KV, by request id.
      evicted: requests without room in the new layout: they wait, and are recomputed.
      num_live: rows before the change.
    """

    from_tp: int
    to_tp: int
    capacity: Capacity
    kv: KvPlan
    rows: tuple[ResidentRow, ...]
    seats: Mapping[int, Seat]
    evicted: tuple[int, ...]
    num_live: int
    times: TimeTaken = TimeTaken()

    @property
    def num_moved(self) -> int:
        """Tokens whose KV is copied; those behind windows count for the part of the layers that still has them."""
        return len(self.kv.copies) * self.capacity.block_size // len(self.capacity.stacks)

    def apply(self, batcher: Batcher) -> None:
        batcher.counters.preemptions += len(self.evicted)
        batcher.reseat(self.capacity, self.kv.blocks, self.seats)


class SwitchFailed(RuntimeError):
    """A change of layout failed after something had moved. `is_usable`: the executor is back in the old layout, with
    weights taken anew and an empty pool; otherwise it has no weights."""

    def __init__(self, message: str, *, is_usable: bool) -> None:
        super().__init__(message)
        self.is_usable = is_usable


@runtime_checkable
class LayoutExecutor(Executor, Protocol):
    @property
    def tp(self) -> int: ...

    def capacity(self, tp: int) -> Capacity:
        """Raises ValueError if there is no such layout."""
        ...

    def start_in(self, tp: int, /) -> None:
        """Chooses the layout, while there are neither weights nor a pool."""
        ...

    def switch(self, move: Relayout) -> TimeTaken:
        """With nothing in flight. Raises `SwitchFailed` if it fails after something has moved; any other exception
        before that."""
        ...


def rows_of(batcher: Batcher, expected: Callable[[int], float | None] | None = None) -> tuple[Rows, ...]:
    """The rows of each dp group, without what the plans in flight will bring. `expected`: (tokens of a response so far)
    -> how many more history expects it to gain."""
    groups: list[list[LiveRow]] = [[] for _ in range(batcher.capacity.num_groups)]
    for progress in batcher.running():
        num_tokens = progress.num_tokens
        length = progress.num_prompt + num_tokens
        remaining = None if expected is None else expected(num_tokens)
        groups[progress.group].append(LiveRow(progress.request.request_id, length, progress.limit, remaining))
    return tuple(map(tuple, groups))


def plan_relayout(batcher: Batcher, from_tp: int, to_tp: int, capacity: Capacity, how: How) -> Relayout:
    """Works a change of layout out; nothing may be in flight. In a group with more rows or blocks than its pool offers,
    the youngest give up their rows. Raises ValueError for a request that could never run in the new pools."""
    _refuse_too_long(batcher, to_tp, capacity)
    by_id = {progress.request.request_id: progress for progress in batcher.running()}
    live = {i: live_blocks(batcher, progress) for i, progress in by_id.items()}
    dealt = regroup(rows_of(batcher), capacity.num_groups) if how == "migrate" else ((),) * capacity.num_groups
    rooms = [_Room(range(capacity.num_slots), capacity.num_blocks - 1)] * capacity.num_groups
    kv, seats, evicted = _seated(batcher, live, dealt, rooms, BlockManager.of(capacity))
    return Relayout(
        from_tp=from_tp,
        to_tp=to_tp,
        capacity=capacity,
        kv=kv,
        rows=tuple(resident_row(by_id[i], seat) for i, seat in seats.items() if seat.decodes),
        seats=seats,
        evicted=tuple(evicted),
        num_live=len(by_id),
    )


def resident_row(progress: Response, seat: Seat) -> ResidentRow:
    token, position = progress.last_token, progress.num_prompt + progress.num_tokens - 1
    return ResidentRow(progress.request, seat.dp_group, seat.slot, token, position, tuple(progress.tokens))


def live_blocks(batcher: Batcher, progress: Response) -> LiveBlocks:
    """What a running request holds, and the positions that it needs: its whole prefill, or the next plan's steps."""
    assert not progress.pending, "a layout changes while plans are in flight"
    request = progress.request
    if progress.is_resident:
        num_written = progress.num_written
        num_tokens = min(num_written + batcher.config.decode_steps, progress.limit)
    else:
        num_written, num_tokens = progress.prefilled, len(progress.prefix)
        if not batcher.capacity.stacks.is_whole:
            num_tokens = num_written  # its blocks come chunk by chunk
    return LiveBlocks(
        request_id=request.request_id,
        group=progress.group,
        table=batcher.blocks.table(request.request_id),
        num_written=num_written,
        num_tokens=num_tokens,
        share=request.share,
        prompt_len=len(request.prompt_ids),
    )


class _Room(NamedTuple):
    """Of a dp group: its free slots, and how many blocks are free."""

    slots: Sequence[int]
    num_blocks: int


def _seated(
    batcher: Batcher,
    live: Mapping[int, LiveBlocks],
    dealt: Sequence[Rows],
    rooms: Sequence[_Room],
    blocks: BlockManager,
) -> tuple[KvPlan, dict[int, Seat], list[int]]:
    """Seats for rows of a batcher, as they are dealt to dp groups; and the requests for which a group has no slot or no
    blocks, the youngest. `blocks`: as in `plan_migration`."""
    groups: list[list[int]] = []
    evicted: list[int] = []
    for rows, room in zip(dealt, rooms, strict=True):
        kept = sorted((row.request_id for row in rows), key=lambda i: batcher.progress(i).arrival)
        while kept and (
            len(kept) > len(room.slots)
            or blocks_needed([live[i] for i in kept], blocks.block_size, blocks.stacks) > room.num_blocks
        ):
            evicted.append(kept.pop())
        groups.append(kept)
    moving = [live[i] for ids in groups for i in ids]
    kv = plan_migration(moving, batcher.capacity.num_groups, groups, blocks)
    seats = {
        request_id: Seat(group, slot, kv.placements[request_id].num_written, batcher.progress(request_id).is_resident)
        for group, ids in enumerate(groups)
        for request_id, slot in zip(ids, rooms[group].slots, strict=False)
    }
    return kv, seats, evicted


def _refuse_too_long(batcher: Batcher, tp: int, capacity: Capacity) -> None:
    for request_id in batcher.live():
        progress = batcher.progress(request_id)
        need = capacity.stacks.most_blocks(progress.limit, capacity.block_size)
        if need > capacity.num_blocks - 1:
            raise ValueError(
                f"layout with tp {tp}: request {request_id} ({progress.request.key}) may grow to {progress.limit} "
                f"tokens, which take {need} blocks of {capacity.block_size}, and a pool of this layout has "
                f"{capacity.num_blocks - 1} (rollout.num_blocks)"
            )


def restart(batcher: Batcher, capacity: Capacity) -> None:
    """Empty pools of this capacity: every request keeps its tokens, waits, and is prefilled again."""
    batcher.reseat(capacity, BlockManager.of(capacity), {})


def switch(engine: Engine, tp: int, by: How = "migrate") -> Relayout:
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
    capacity = executor.capacity(tp)
    engine.settle()
    move = plan_relayout(engine.batcher, executor.tp, tp, capacity, by)
    try:
        times = executor.switch(move)
    except SwitchFailed:
        restart(engine.batcher, engine.batcher.capacity)
        raise
    move.apply(engine.batcher)
    return replace(move, times=times)


def recompute(engine: Engine) -> None:
    """Gives up the KV of all requests: they keep their tokens, wait, and are prefilled again."""
    engine.settle()
    restart(engine.batcher, engine.batcher.capacity)


def start_in(engine: Engine, tp: int) -> None:
    """Chooses the layout of an idle engine while its executor has neither weights nor a pool."""
    executor = engine.executor
    assert isinstance(executor, LayoutExecutor), "a worker without a layout"
    assert engine.batcher.is_idle, "requests are unfinished: the layout changes by Engine.switch alone"
    executor.start_in(tp)
    restart(engine.batcher, executor.capacity(tp))


def migrate_requests(source: Engine, target: Engine, request_ids: Iterable[int]) -> int:
    """Lets live requests of `source` continue in `target`, beside its own; the tokens whose KV was copied (as
    `Relayout.num_moved` counts them). Plans in flight of both are collected first; requests that ended in them are not
    moved.

    Raises:
      ValueError: before anything moves.
      SwitchFailed: the copy failed; the requests are still in `source`, and `target` recomputes its own.
    """
    receiver: Any = target.executor
    if not hasattr(receiver, "accept_migration"):  # on another host
        raise ValueError(f"migrate_requests: {type(receiver).__name__} cannot take requests over")
    source.settle()
    target.settle()
    batcher, capacity = target.batcher, target.batcher.capacity
    requests = _leaving(source, target, request_ids)
    running = {p.request.request_id: p for p in source.batcher.running() if p.request.request_id in requests}
    live = {i: live_blocks(source.batcher, progress) for i, progress in running.items()}
    groups = [tuple(row for row in rows if row.request_id in running) for rows in rows_of(source.batcher)]
    dealt = regroup(groups, capacity.num_groups, rows_of(batcher))
    rooms = [_Room(batcher.free_slots(g), batcher.blocks.num_free(g)) for g in range(capacity.num_groups)]
    kv, seats, _ = _seated(source.batcher, live, dealt, rooms, batcher.blocks)
    own = [(p, Seat(p.group, p.slot, p.num_written, True)) for p in batcher.running() if p.is_resident]
    new = [(running[i], seat) for i, seat in seats.items() if seat.decodes]
    try:
        receiver.accept_migration(source.executor, kv, [resident_row(progress, seat) for progress, seat in own + new])
    except SwitchFailed:
        restart(batcher, capacity)
        raise
    except BaseException:
        for request_id in seats:
            batcher.blocks.free(request_id)
        raise
    _queue(source, target, requests)
    batcher.seat(seats)
    return len(kv.copies) * capacity.block_size // len(capacity.stacks)


def recompute_requests(source: Engine, target: Engine, request_ids: Iterable[int]) -> int:
    """Lets live requests of `source` wait in `target`, behind its own, with their tokens: their KV is computed again,
    and none copied. Raises ValueError before anything moves."""
    source.settle()
    _queue(source, target, _leaving(source, target, request_ids))
    return 0


def _leaving(source: Engine, target: Engine, request_ids: Iterable[int]) -> dict[int, Request]:
    """The requests that are still live, in the order of arrival; raises ValueError for one that cannot run in the
    target."""
    asked = set(request_ids)
    requests = {i: source.batcher.progress(i).request for i in source.unfinished() if i in asked}
    for request in requests.values():
        target.executor.check(request)
        target.batcher.check(request)
    return requests


def _queue(source: Engine, target: Engine, requests: Mapping[int, Request]) -> None:
    """Takes requests out of the source; they wait in the target with their tokens."""
    for request, sample in zip(requests.values(), source.abort(requests), strict=True):
        target.add(resume(request, sample) if len(sample) else request)
