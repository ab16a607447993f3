"""Paged KV accounting: the blocks that each request holds, and those that it shares.

Purpose: every dp group has a pool of `num_blocks` blocks of `block_size` positions; a request holds a list of blocks,
its table. Requests with the same `share` key have the same prompt, so the full blocks of that prompt are held once per
dp group and counted.

Source: paged attention as in vLLM (Kwon et al. 2023) and prefix caching as in nano-vllm's block manager.

Departures: sharing goes by an explicit key, not by hashes of token blocks, because the samples of one prompt are the
case that matters here. Only full blocks in front of the prompt's last token are shared, because at least one token must
be run to get logits; so a shared block is never written again, and copy-on-write never happens.

The blocks of a conversation are *parked* between two of its turns: those that nobody else holds count as free. Its next
request takes over the blocks in front of the first token that differs. Nobody shares the last of them, so its remainder
may be overwritten. When a pool runs dry, the blocks parked longest ago are freed.

A block becomes shareable when it is *published*, that is, when the chunk that writes it has been put into a plan. Plans
run in order, and one plan writes the prefill KV of a layer before any of its rows reads that layer. So the same plan
may use a published block without waiting for the device.

Where layers have windows (`jaxrl.scheduling.tokens.stacks`), a request that needs blocks first frees those behind the
window of every future query. Its table has the trash block in their places. So has the published prompt, once all
holders of a block have passed it. Such a prompt is found as long as all that its next token sees is there; after that
the next request with the prompt runs it again, and publishes its own blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jaxrl.scheduling.tokens.plan import TRASH_BLOCK, Capacity
from jaxrl.scheduling.tokens.stacks import WHOLE, KvStacks, is_there


@dataclass(slots=True)
class _Holding:
    """The blocks of one request. `row`: its row of `BlockManager.tables`."""

    group: int
    row: int
    share: object | None
    num_shareable: int  # how many leading blocks (of each stack) may be shared
    is_publisher: bool = True  # its leading blocks are the published ones, as far as those go


@dataclass(frozen=True, slots=True)
class _Parked:
    """The KV of a conversation's tokens, in their order; the rest as of the request that left it."""

    group: int
    blocks: np.ndarray
    tokens: tuple[int, ...]
    share: object | None
    num_shareable: int
    behind: tuple[int, ...]


class BlockManager:
    """The pools of all dp groups.

    Attributes:
      tables: a row (`row`) for each request that holds blocks, padded with the trash block: int32 [rows, widest].
      held: blocks of each of these rows for each stack, also behind windows: int64 [rows].

    Example::

        blocks = BlockManager(num_groups=1, num_blocks=9, block_size=4)
        blocks.allocate(1, group=0, num_tokens=10, share="p", prompt_len=9)  # 0 tokens are there already
        blocks.publish(1, num_tokens=9)  # the chunk that writes the prompt is in a plan
        blocks.allocate(2, group=0, num_tokens=10, share="p", prompt_len=9)  # 8 tokens are: two full blocks
        blocks.extend(2, num_tokens=13)  # True: one block more
        blocks.free(1)
    """

    def __init__(self, num_groups: int, num_blocks: int, block_size: int, stacks: KvStacks = WHOLE) -> None:
        assert num_blocks >= 2, "one block belongs to no request"
        self.num_groups = num_groups
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.stacks = stacks
        self._limits = stacks.limits(block_size)
        # Popped from the end: the lowest numbers go first, and what was freed last is used next.
        numbers = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._free = np.tile(numbers[numbers != TRASH_BLOCK], (num_groups, 1))
        self._num_free = [num_blocks - 1] * num_groups  # of each row of `_free`, the entries that count
        self._references = np.zeros((num_groups, num_blocks), np.int32)
        self._holdings: dict[int, _Holding] = {}
        self.tables = np.full((8, 8), TRASH_BLOCK, np.int32)
        self.held = np.zeros(8, np.int64)
        self._behind = np.zeros((8, len(stacks)), np.int64)  # of each stack, leading blocks given back, or never taken
        self._free_rows = list(range(7, -1, -1))
        self._published: dict[tuple[int, object], list[int]] = {}
        self._holders: dict[object, Counter[int]] = {}
        self._parked: dict[object, _Parked] = {}  # by session, those parked longest ago first
        self._parked_references = np.zeros((num_groups, num_blocks), np.int32)  # of a block's, those of parked ones
        self._num_parked = [0] * num_groups  # blocks that nobody else holds

    @classmethod
    def of(cls, sizes: Capacity) -> Self:
        return cls(sizes.num_groups, sizes.num_blocks, sizes.block_size, sizes.stacks)

    @property
    def capacity(self) -> int:
        return self.num_blocks - 1

    def num_free(self, group: int) -> int:
        """The blocks that a request may get, including parked ones, which are freed for it."""
        return self._num_free[group] + self._num_parked[group]

    def num_parked(self, group: int) -> int:
        return self._num_parked[group]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of a table that covers `num_tokens` positions, those behind windows too."""
        return -(-num_tokens // self.block_size) * len(self.stacks)

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that a request holds at a time on its way to `num_tokens` positions."""
        return self.stacks.most_blocks(num_tokens, self.block_size)

    def more_for(self, rows: Any, num_tokens: Any) -> Any:
        """The most blocks that requests, rows of `tables`, may hold more than now on their way to `num_tokens`
        positions; numbers, or arrays."""
        more = np.maximum(-(-num_tokens // self.block_size) - self.held[rows], 0)
        if self.stacks.is_whole:
            return more
        left = (limit - self.held[rows] + self._behind[rows, stack] for stack, limit in enumerate(self._limits))
        pairs = zip(self._limits, left, strict=True)
        return sum(np.minimum(more, np.maximum(of_stack, 0)) if limit else more for limit, of_stack in pairs)

    def row(self, request_id: int) -> int:
        """The row of `tables` that a request has until its blocks are freed."""
        return self._holdings[request_id].row

    def table(self, request_id: int) -> tuple[int, ...]:
        return tuple(self._blocks(self._holdings[request_id]).tolist())

    def _blocks(self, holding: _Holding) -> np.ndarray:
        return self.tables[holding.row, : self.held[holding.row] * len(self.stacks)]

    def num_shareable(self, prompt_len: int) -> int:
        """Full blocks in front of a prompt's last token."""
        return max(prompt_len - 1, 0) // self.block_size

    def groups_holding(self, share: object | None) -> tuple[int, ...]:
        """The dp groups in which requests with this `share` hold blocks, in ascending order."""
        return () if share is None else tuple(sorted(self._holders.get(share, ())))

    def num_published(self, group: int, share: object | None, prompt_len: int) -> int:
        """Blocks (of each stack) that a request with this `share` would find ready in `group`."""
        return len(self._ready(group, share, prompt_len)) // len(self.stacks)

    def num_saved(
        self, group: int, share: object | None, prompt_len: int, session: object | None = None, num_tokens: int = 0
    ) -> int:
        """Blocks that a request would find ready in `group`, its conversation's too, and that are not among the free
        ones (`num_free`). With windows: what that saves on its way to `num_tokens` positions, its conversation's
        left out, because they may lack what its next token sees."""
        if self.stacks.is_whole and not self._parked:
            return self.num_published(group, share, prompt_len)
        parked = self._parked.get(session)
        ready: Any = self._ready(group, share, prompt_len)
        if parked is not None and parked.group == group:
            ready = parked.blocks if self.stacks.is_whole else ()
        if self.stacks.is_whole:
            return self._num_in_use(group, ready)
        left = num_tokens - len(ready) // len(self.stacks) * self.block_size
        saved = self.most_blocks(num_tokens) - self.most_blocks(left) - (len(ready) - self._num_in_use(group, ready))
        return max(saved, 0)  # what is parked counts as free, and a request never holds more than its most

    def allocate(
        self,
        request_id: int,
        group: int,
        num_tokens: int,
        share: object | None = None,
        prompt_len: int = 0,
        first: int = 0,
    ) -> int | None:
        """Gives a request blocks for its first `num_tokens` positions, of which none before `first` is run again.

        Returns how many of its leading tokens are in shared blocks, so need no prefill; None if the pool has too few
        blocks (then nothing has changed).
        """
        assert num_tokens >= prompt_len or not self.stacks.is_whole, (num_tokens, prompt_len)
        ready = np.asarray(self._ready(group, share, prompt_len, first), np.int32)
        behind = self.stacks.behind(max(first, len(ready) // len(self.stacks) * self.block_size), self.block_size)
        shared = self._seen(ready, behind)
        new = self._not_behind(np.arange(len(shared), self.blocks_for(num_tokens)), behind)
        num_parked = self._count_parked(group, shared)
        if len(new) + num_parked > self.num_free(group):
            return None
        self._num_parked[group] -= num_parked
        if len(shared):
            self._references[group, shared[shared != TRASH_BLOCK]] += 1
        num_shareable = self.num_shareable(prompt_len) if share is not None else 0
        self._hold(request_id, group, shared, behind, num_tokens, share, num_shareable)
        if share is not None:
            self._holders.setdefault(share, Counter())[group] += 1
        return len(shared) // len(self.stacks) * self.block_size

    def extend(self, request_id: int, num_tokens: int, first: int = 0) -> bool:
        """Lets a request's table cover `num_tokens` positions; False if the pool runs dry. If it does not cover them
        already, what no query at `first` or beyond sees is given back before."""
        holding = self._holdings[request_id]
        num_new = self.blocks_for(num_tokens) - int(self.held[holding.row]) * len(self.stacks)
        if num_new <= 0:
            return True
        if not self.stacks.is_whole:
            self._pass(holding, first)
        if num_new > self.num_free(holding.group):
            return False
        self._take(holding, num_new)
        return True

    def extend_all(self, rows: np.ndarray, groups: np.ndarray, more: np.ndarray) -> bool:
        """Gives requests, rows of `tables`, `more` blocks each, in this order. Changes nothing and returns False if a
        pool would run dry, or layers have windows: then the caller extends each by itself."""
        wanted = np.bincount(groups, more, self.num_groups).astype(np.int64)
        num_free = np.array(self._num_free)
        if not self.stacks.is_whole or (wanted > num_free).any():
            return False
        if self.num_groups > 1:
            by_group = np.argsort(groups, kind="stable")
            rows, groups, more = rows[by_group], groups[by_group], more[by_group]
        self._widen(int((self.held[rows] + more).max()))
        # all blocks one after another: those of a group's first row, of its second row ...
        number_B, ends = np.arange(int(wanted.sum())), np.cumsum(more)
        row_B, group_B = np.repeat(rows, more), np.repeat(groups, more)
        of_row_B = number_B - np.repeat(ends - more, more)
        of_group_B = number_B - (np.cumsum(wanted) - wanted)[group_B]
        block_B = self._free[group_B, num_free[group_B] - 1 - of_group_B]
        self.tables[row_B, self.held[row_B] + of_row_B] = block_B
        self._references[group_B, block_B] = 1
        self.held[rows] += more
        self._num_free = (num_free - wanted).tolist()
        return True

    def _pass(self, holding: _Holding, first: int) -> None:
        """Gives back the blocks behind the windows of queries at `first` and beyond."""
        row, stacks = holding.row, len(self.stacks)
        behind, before = self.stacks.behind(first, self.block_size), self._behind[row].tolist()
        passed = [
            stack + stacks * i
            for stack, (was, now) in enumerate(zip(before, behind, strict=True))
            for i in range(was, min(now, int(self.held[row])))
        ]
        if not passed:
            return
        blocks = self.tables[row, passed]
        self.tables[row, passed] = TRASH_BLOCK
        self._behind[row] = np.maximum(before, behind)
        self._give_back(holding.group, blocks)
        if passed[0] < len(self._published.get((holding.group, holding.share), ())):
            self._forget_freed(holding.group, holding.share)

    def _not_behind(self, places: np.ndarray, behind: Sequence[int]) -> np.ndarray:
        """The places of a table without the leading ones that `behind` counts."""
        if not any(behind):
            return places
        return places[places // len(behind) >= np.asarray(behind)[places % len(behind)]]

    def _seen(self, blocks: np.ndarray, behind: Sequence[int]) -> np.ndarray:
        """The blocks at the beginning of a table, without those that `behind` counts."""
        if not any(behind):
            return blocks
        seen, there = np.full_like(blocks, TRASH_BLOCK), self._not_behind(np.arange(len(blocks)), behind)
        seen[there] = blocks[there]
        return seen

    def publish(self, request_id: int, num_tokens: int) -> None:
        """Notes that the chunks which write the first `num_tokens` positions of a request are in plans."""
        holding = self._holdings[request_id]
        num_full = min(num_tokens // self.block_size, holding.num_shareable) * len(self.stacks)
        if not num_full or not holding.is_publisher:
            return
        published = self._published.setdefault((holding.group, holding.share), [])
        if not self.stacks.is_whole and not self._is_ready(published, 0):
            published[:] = ()  # what the next one with this prompt needs is gone
        # A request that holds a published block holds all those before it, so the list shrinks from its end only. So a
        # request that started its own copy before another one published must not publish.
        own = self._blocks(holding)[: max(num_full, len(published))].tolist()
        if own[: len(published)] != published[: len(own)] and (
            self.stacks.is_whole or any(a != b for a, b in zip(own, published, strict=False) if a and b)
        ):
            holding.is_publisher = False
            return
        published.extend(own[len(published) : num_full])
        if not any(published):
            del self._published[holding.group, holding.share]

    def free(self, request_id: int) -> None:
        """Gives a request's blocks back; blocks that other requests share stay in use."""
        holding = self._holdings.pop(request_id)
        self._give_back(holding.group, self._blocks(holding))
        self.tables[holding.row] = TRASH_BLOCK
        self._free_rows.append(holding.row)
        self._leave(holding.group, holding.share)

    def _ready(self, group: int, share: object | None, prompt_len: int, first: int = 0) -> Sequence[int]:
        """The blocks that a request with this `share`, which runs no position before `first`, finds in `group`."""
        published = None if share is None else self._published.get((group, share))
        if not published:
            return ()
        ready = published[: self.num_shareable(prompt_len) * len(self.stacks)]
        return ready if self.stacks.is_whole or self._is_ready(ready, first) else ()

    def _is_ready(self, blocks: Sequence[int], first: int) -> bool:
        """Whether all is there that queries behind these leading blocks of a prompt see."""
        num_there = len(blocks) // len(self.stacks)
        return is_there(blocks, self.stacks.behind(max(first, num_there * self.block_size), self.block_size), num_there)

    def _forget_freed(self, group: int, share: object) -> None:
        """Names no block in what is published that nobody holds any more."""
        published, references = self._published.get((group, share), []), self._references[group]
        published[:] = [block if references[block] else TRASH_BLOCK for block in published]
        if not any(published):
            self._published.pop((group, share), None)

    def _leave(self, group: int, share: object | None) -> None:
        """One holder less of what this `share` publishes."""
        if share is None:
            return
        published, references = self._published.get((group, share), []), self._references[group]
        while published and references[published[-1]] == 0:
            published.pop()
        if not published:
            self._published.pop((group, share), None)
        elif not self.stacks.is_whole:
            del published[len(published) // len(self.stacks) * len(self.stacks) :]
            self._forget_freed(group, share)
        holders = self._holders[share]
        holders[group] -= 1
        if not holders[group]:
            del holders[group]
        if not holders:
            del self._holders[share]

    # Conversations

    def park(self, request_id: int, session: object, tokens: tuple[int, ...]) -> None:
        """Takes the blocks of a request's first tokens, which these are, from it, and keeps them while there is room.

        Those that it shares must be among them. A session has the tokens that were parked last.
        """
        holding = self._holdings[request_id]
        kept = self.blocks_for(len(tokens))
        assert kept >= holding.num_shareable * len(self.stacks), "a part of the prompt is left behind"
        self.forget(session)
        group, blocks = holding.group, self._blocks(holding).copy()
        behind = tuple(self._behind[holding.row].tolist())
        parked = _Parked(group, blocks[:kept], tokens, holding.share, holding.num_shareable, behind)
        self._parked[session] = parked
        self._parked_references[group, parked.blocks] += 1
        self._num_parked[group] += int(self._is_parked(group, parked.blocks).sum())
        self.tables[holding.row, : len(blocks) - kept] = blocks[kept:]
        self.held[holding.row] = (len(blocks) - kept) // len(self.stacks)
        holding.share, holding.num_shareable = None, 0

    def parked_in(self, session: object) -> int | None:
        """The dp group in which a conversation's KV is parked; None: nowhere."""
        parked = self._parked.get(session)
        return None if parked is None else parked.group

    def num_resumed(self, group: int, session: object, tokens: tuple[int, ...]) -> int:
        """How many of the tokens that a conversation's next request must run would have their KV in `group`: never
        all, because the last one must be run to get logits; none, where what that token sees is not all there."""
        parked = self._parked.get(session)
        if parked is None or parked.group != group:
            return 0
        num_there = min(_num_common(parked.tokens, tokens), len(tokens) - 1)
        seen = zip(parked.behind, self.stacks.behind(num_there, self.block_size), strict=True)
        return num_there if all(gone <= behind for gone, behind in seen) else 0

    def resume(
        self, request_id: int, group: int, num_tokens: int, session: object, tokens: tuple[int, ...]
    ) -> int | None:
        """`allocate` for a conversation's next request: `tokens` are those that it must run before it draws one.

        Returns how many of them have their KV (`num_resumed`); None if the pool has too few blocks.
        """
        num_blocks, num_there = self.blocks_for(num_tokens), self.num_resumed(group, session, tokens)
        parked = self._parked.get(session)
        behind, kept = self.stacks.behind(num_there, self.block_size), np.zeros(0, np.int32)
        if parked is not None:
            kept = self._seen(parked.blocks[: self.blocks_for(num_there)], behind)
        if num_blocks - self._num_in_use(group, kept) > self.num_free(group):
            return None
        share, num_shareable = None, 0
        if parked is not None:
            self._unpark(session)
            left = np.append(parked.blocks[: len(kept)] != kept, np.ones(len(parked.blocks) - len(kept), bool))
            self._give_back(parked.group, parked.blocks[left])
            if num_there and parked.share is not None:
                share, num_shareable = parked.share, parked.num_shareable
                if not self.stacks.is_whole:
                    self._forget_freed(group, share)
                assert num_there >= num_shareable * self.block_size, "a shared block would be written over"
            else:
                self._leave(parked.group, parked.share)
        self._hold(request_id, group, kept, behind, num_tokens, share, num_shareable, is_publisher=False)
        return num_there

    def forget(self, session: object) -> None:
        """Frees what is parked of a conversation, if anything is."""
        if (parked := self._unpark(session)) is not None:
            self._give_back(parked.group, parked.blocks)
            self._leave(parked.group, parked.share)

    def forget_all(self) -> None:
        """Frees all that is parked: the weights are others."""
        for session in list(self._parked):
            self.forget(session)

    def _unpark(self, session: object) -> _Parked | None:
        """The parked blocks of a conversation, which the caller now owns."""
        parked = self._parked.pop(session, None)
        if parked is not None:
            self._num_parked[parked.group] -= self._count_parked(parked.group, parked.blocks)
            self._parked_references[parked.group, parked.blocks] -= 1
        return parked

    def _is_parked(self, group: int, blocks: Any) -> np.ndarray:
        """Which of these blocks parked conversations hold, and nobody else."""
        blocks = np.asarray(blocks, np.int64)
        references = self._references[group, blocks]
        return (references > 0) & (references == self._parked_references[group, blocks])

    def _num_in_use(self, group: int, blocks: Any) -> int:
        """How many of these, which are all held (or the trash block), are not among the free ones."""
        return len(blocks) - self._count_parked(group, blocks)

    def _count_parked(self, group: int, blocks: Any) -> int:
        return int(self._is_parked(group, blocks).sum()) if self._num_parked[group] else 0

    def _reclaim(self, group: int, count: int) -> None:
        """Frees the blocks parked longest ago until `count` are free."""
        while self._num_free[group] < count:
            self.forget(next(session for session, parked in self._parked.items() if parked.group == group))

    # Blocks and rows

    def _hold(
        self,
        request_id: int,
        group: int,
        blocks: np.ndarray,
        behind: Sequence[int],
        num_tokens: int,
        share: object | None,
        num_shareable: int,
        *,
        is_publisher: bool = True,
    ) -> None:
        """Gives a request a row of `tables`: these blocks, which are its own now, and new ones for `num_tokens`."""
        assert request_id not in self._holdings, f"request {request_id} holds blocks already"
        if not self._free_rows:
            rows = len(self.held)
            self.tables = np.pad(self.tables, ((0, rows), (0, 0)), constant_values=TRASH_BLOCK)
            self.held, self._behind = np.pad(self.held, (0, rows)), np.pad(self._behind, ((0, rows), (0, 0)))
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        row = self._free_rows.pop()
        self._widen(len(blocks))
        self.tables[row, : len(blocks)] = blocks
        self.held[row], self._behind[row] = len(blocks) // len(self.stacks), behind
        holding = self._holdings[request_id] = _Holding(group, row, share, num_shareable, is_publisher)
        self._take(holding, self.blocks_for(num_tokens) - len(blocks))

    def _widen(self, width: int) -> None:
        if width > (has := self.tables.shape[1]):
            self.tables = np.pad(self.tables, ((0, 0), (0, max(width - has, has))), constant_values=TRASH_BLOCK)

    def _take(self, holding: _Holding, count: int) -> None:
        """Adds `count` blocks to a table; the trash block is used behind windows."""
        if count <= 0:
            return
        group, row = holding.group, holding.row
        if (
            count == 1 and self.stacks.is_whole and self._num_free[group] and self.held[row] < self.tables.shape[1]
        ):  # nearly always
            self._num_free[group] -= 1
            block = self._free[group, self._num_free[group]]
            self._references[group, block] = 1
            self.tables[row, self.held[row]] = block
            self.held[row] += 1
            return
        begin = int(self.held[row]) * len(self.stacks)
        places = self._not_behind(np.arange(begin, begin + count), self._behind[row].tolist())
        self._reclaim(group, len(places))
        self._widen(begin + count)
        left = self._num_free[group] - len(places)
        blocks = self._free[group, left : left + len(places)][::-1]
        self._num_free[group] = left
        assert not self._references[group, blocks].any()
        self._references[group, blocks] = 1
        self.tables[row, places] = blocks
        self.held[row] += count // len(self.stacks)

    def _give_back(self, group: int, blocks: np.ndarray) -> None:
        """Drops a reference to each of these, which are free with their last one."""
        if not self.stacks.is_whole:
            blocks = blocks[blocks != TRASH_BLOCK]
        self._references[group, blocks] -= 1
        gone = blocks[self._references[group, blocks] == 0][::-1]
        begin = self._num_free[group]
        self._free[group, begin : begin + len(gone)] = gone
        self._num_free[group] += len(gone)
        if self._parked:
            self._num_parked[group] += int(self._is_parked(group, blocks).sum())


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
