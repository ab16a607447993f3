"""Which KV blocks move where when requests change their dp groups: the bookkeeping half of a change of layout.
`jaxrl.sharding.kv_migration` moves the bytes, by `KvPlan.lanes`.

Source: docs/architecture.md (only valid KV moves; prompt blocks that are shared inside a dp group are copied once per
group when groups split, and joined again when they merge); PAT §4.3 for migrating at all.

The new tables come from a `BlockManager`, by the same calls as the batcher's own, which continues with that manager.
Requests of one `share` find the prompt blocks of the one that has written most of the prompt. So a request with an
incomplete prefill may have more of its prompt afterwards (`Placement.num_written`).

A *lane* is one dp group of the layout that has more of them: blocks move along it between a group before and a group
after. Neighbouring groups merge and split, so a lane's two groups follow from its number. A *home* is one dp group of
the layout that has fewer of them, with its lanes. A block that goes from one home to another is a *guest*: it first
goes over to the lane of the same place in the other home, and then along that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl.scheduling.tokens.blocks import BlockManager
from jaxrl.scheduling.tokens.plan import TRASH_BLOCK
from jaxrl.scheduling.tokens.stacks import WHOLE, KvStacks


@dataclass(frozen=True, slots=True)
class LiveBlocks:
    """A live request's row and blocks.

    Attributes:
      table: its blocks in dp group `group`, in the order of its positions (`jaxrl.scheduling.tokens.stacks`).
      num_written: how many of its leading positions have their KV in the pool.
      num_tokens: positions that its new table must cover: those written, all of a prefill in progress (where no layer
        has a window), and a reserve.
      share, prompt_len: as in `BlockManager.allocate`.
    """

    request_id: int
    group: int
    table: tuple[int, ...]
    num_written: int
    num_tokens: int
    share: object | None = None
    prompt_len: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request is afterwards; `num_written` leading positions have KV in its blocks."""

    group: int
    table: tuple[int, ...]
    num_written: int


@dataclass(frozen=True, slots=True)
class Copy:
    source_group: int
    source_block: int
    target_group: int
    target_block: int


class Lanes(NamedTuple):
    """Copies by lane: block numbers as int32, -1 in unused places.

    Attributes:
      sources, targets: [lanes, M], of the blocks that stay at home: M of the lane that has most.
      guest_sources: [lanes, homes, G], at the lane where a guest starts, by the home that it goes to.
      guest_targets: [lanes, homes, G], at the lane where it arrives, by the home that it comes from.
    """

    sources: np.ndarray
    targets: np.ndarray
    guest_sources: np.ndarray
    guest_targets: np.ndarray

    @property
    def sizes(self) -> tuple[int, int]:
        """(M, G)"""
        return self.sources.shape[-1], self.guest_sources.shape[-1]

    @property
    def is_any(self) -> bool:
        return self.sizes != (0, 0)


@dataclass(frozen=True, slots=True)
class KvPlan:
    """A migration: the pools of the new layout, filled, placements by request id, and every block to copy, each target
    once."""

    blocks: BlockManager
    placements: Mapping[int, Placement]
    copies: tuple[Copy, ...]
    num_groups_before: int
    num_groups: int

    @property
    def num_lanes(self) -> int:
        return max(self.num_groups_before, self.num_groups)

    @property
    def num_homes(self) -> int:
        return min(self.num_groups_before, self.num_groups)

    def lanes(self) -> Lanes:
        width = self.num_lanes // self.num_homes
        own: _Places = {}
        guests: _Places = {}
        for copy in self.copies:
            start, end = copy.source_group, copy.target_group
            if self.num_groups_before >= self.num_groups:
                end = end * width + start % width
            else:
                start = start * width + end % width
            if start == end:
                own.setdefault((start,), []).append((copy, (end,)))
            else:
                guests.setdefault((start, end // width), []).append((copy, (end, start // width)))
        return Lanes(*_filled((self.num_lanes,), own), *_filled((self.num_lanes, self.num_homes), guests))


_Places = dict[tuple[int, ...], list[tuple[Copy, tuple[int, ...]]]]  # by where they start: copies, and where they end


def _filled(shape: tuple[int, ...], places: _Places) -> tuple[np.ndarray, np.ndarray]:
    """Block numbers, int32 [*shape, M]: of sources, where copies start, and of targets, where they end."""
    sources, targets = np.full((2, *shape, max(map(len, places.values()), default=0)), -1, np.int32)
    for start, copies in places.items():
        for i, (copy, end) in enumerate(copies):
            sources[*start, i], targets[*end, i] = copy.source_block, copy.target_block
    return sources, targets


def plan_migration(
    requests: Sequence[LiveBlocks],
    num_groups_before: int,
    groups: Sequence[Sequence[int]],
    blocks: BlockManager,
) -> KvPlan:
    """Places every request in its new group.

    Args:
      requests: all live requests, with no plan in flight.
      groups: request ids of each dp group of the new layout, as `regroup` deals them.
      blocks: the new layout's pools; or those of another worker, which takes these requests in beside its own.
    """
    num_after, by_id = len(groups), {request.request_id: request for request in requests}
    assert blocks.num_groups == num_after
    assert num_groups_before % num_after == 0 or num_after % num_groups_before == 0, "groups only merge or split"
    assert Counter(i for ids in groups for i in ids) == Counter(request.request_id for request in requests)
    placements: dict[int, Placement] = {}
    copies: list[Copy] = []
    for group, ids in enumerate(groups):
        for request in sorted((by_id[i] for i in ids), key=_publishers_first(blocks.stacks)):
            shared = _allocate(blocks, group, request)
            assert shared is not None, f"dp group {group} has too few blocks: requests must be preempted first"
            num_written = max(request.num_written, shared)
            blocks.publish(request.request_id, min(num_written, request.prompt_len))
            table = blocks.table(request.request_id)
            placements[request.request_id] = Placement(group, table, num_written)
            copies += [
                Copy(request.group, request.table[i], group, table[i])
                for i in range(blocks.blocks_for(shared), blocks.blocks_for(request.num_written))
                if table[i] != TRASH_BLOCK
            ]
    return KvPlan(blocks, placements, tuple(copies), num_groups_before, len(groups))


def _publishers_first(stacks: KvStacks) -> Callable[[LiveBlocks], Any]:
    """Sorts requests: the one that has most of a prompt publishes it, and of several, where layers have windows, the
    one that has left least behind. The sort is stable, so else the caller's order stays."""
    return lambda r: (-min(r.num_written, r.prompt_len), 0 if stacks.is_whole else r.num_written)


def _allocate(blocks: BlockManager, group: int, request: LiveBlocks) -> int | None:
    own = request.request_id, group, request.num_tokens, request.share, request.prompt_len
    return blocks.allocate(*own, first=request.num_written)


def blocks_needed(requests: Sequence[LiveBlocks], block_size: int, stacks: KvStacks = WHOLE) -> int:
    alone = sum(-(-request.num_tokens // block_size) for request in requests) * len(stacks)
    pool = BlockManager(1, alone + 2, block_size, stacks)
    for request in sorted(requests, key=_publishers_first(stacks)):
        given: Any = _allocate(pool, 0, request)
        assert given is not None, "a pool for all of them without sharing is large enough"
        pool.publish(request.request_id, min(max(request.num_written, given), request.prompt_len))
    return pool.capacity - pool.num_free(0)
