"""Paged KV accounting: the blocks that each request holds, and those that it shares.

Purpose: every dp group has a pool of `num_blocks` blocks of `block_size` positions; a request holds a list of blocks,
its table. Requests with the same `share` key have the same prompt, so the full blocks of that prompt are held once per
dp group and counted.

Source: paged attention as in vLLM (Kwon et al. 2023) and prefix caching as in nano-vllm's block manager.

Departures: sharing goes by an explicit key, not by hashes of token blocks: the samples of one prompt are the case that
matters here, and that needs no table of hashes. Only full blocks in front of the prompt's last token are shared,
because at least one token must be run to get logits; so a shared block is never written again and copy-on-write never
happens. A block is freed with its last holder, but for those that are *parked*.

The blocks of a conversation are parked between two of its turns: they hold the KV of known tokens, and those that
nobody else holds count as free. Its next request takes over those in front of the first token that is another one,
block and all: nobody shares the last of them, so what stands behind may be written over. Where a pool runs dry, what
was parked longest ago is given up. Conversations that begin with the same prompt share its blocks, parked or not.

A block becomes shareable when it is *published*, that is, when the chunk that writes it has been put into a plan.
Plans run in order, and one plan writes the prefill KV of a layer before any of its rows reads that layer, so a
published block may be named in the same plan without waiting for the device.

Where layers have windows (`jaxrl.scheduling.tokens.stacks`), a request that needs blocks first gives back those behind
the window of every query still to come. Its table then begins with the trash block in the stacks with a window; and so
does what is published of a prompt, once all who held a block have passed it. Such a prompt is found as long as all is
there that its next token sees; after that the next request with this prompt runs it again, and publishes its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxrl.scheduling.tokens.plan import TRASH_BLOCK
from jaxrl.scheduling.tokens.stacks import WHOLE, KvStacks, is_there


@dataclass(slots=True)
class _Holding:
    """What one request holds."""

    group: int
    blocks: list[int]
    share: object | None
    num_shareable: int  # how many leading blocks (of each stack) may be shared
    is_publisher: bool  # its leading blocks are the published ones, as far as those go
    table: tuple[int, ...] | None = None  # `blocks` as a tuple, kept until they change, because every plan names it
    behind: tuple[int, ...] = (0,)  # of each stack, the leading blocks that were given back, or never taken


@dataclass(frozen=True, slots=True)
class _Parked:
    """The KV of a conversation's tokens, in their order; the rest as of the request that left it."""

    group: int
    blocks: list[int]
    tokens: tuple[int, ...]
    share: object | None
    num_shareable: int
    behind: tuple[int, ...]


class BlockManager:
    """The pools of all dp groups.

    Example::

        blocks = BlockManager(num_groups=1, num_blocks=9, block_size=4)
        blocks.allocate(1, group=0, num_tokens=10, share="p", prompt_len=9)  # 0 tokens are there already
        blocks.publish(1, num_tokens=9)  # the chunk that writes the prompt is in a plan
        blocks.allocate(2, group=0, num_tokens=10, share="p", prompt_len=9)  # 8 tokens are: two full blocks
        blocks.extend(2, num_tokens=13)  # True: one block more
        blocks.free(1)
    """

    def __init__(self, num_groups: int, num_blocks: int, block_size: int, stacks: KvStacks = WHOLE) -> None:
        if num_groups < 1 or block_size < 1 or num_blocks < 2:
            raise ValueError(
                f"BlockManager: num_groups ({num_groups}) and block_size ({block_size}) must be >= 1, and num_blocks "
                f"({num_blocks}) >= 2, because block {TRASH_BLOCK} belongs to no request (rollout.num_blocks)"
            )
        self.num_groups = num_groups
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.stacks = stacks
        self._limits = stacks.limits(block_size)
        # Popped from the end: the lowest numbers go first, and what was freed last is used next.
        self._free = [[b for b in range(num_blocks - 1, -1, -1) if b != TRASH_BLOCK] for _ in range(num_groups)]
        self._references = [[0] * num_blocks for _ in range(num_groups)]
        self._holdings: dict[int, _Holding] = {}
        self._published: dict[tuple[int, object], list[int]] = {}
        self._holders: dict[object, Counter[int]] = {}
        self._parked: dict[object, _Parked] = {}  # by session, those parked longest ago first
        self._parked_references = [[0] * num_blocks for _ in range(num_groups)]  # of a block's, those of parked ones
        self._num_parked = [0] * num_groups  # blocks that nobody else holds

    @property
    def capacity(self) -> int:
        """Blocks of one pool that requests can hold."""
        return self.num_blocks - 1

    def num_free(self, group: int) -> int:
        """Those that a request may get: parked ones are given up for it."""
        return len(self._free[group]) + self._num_parked[group]

    def num_parked(self, group: int) -> int:
        """Those that parked conversations hold, and nobody else."""
        return self._num_parked[group]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of a table that covers `num_tokens` positions, those behind windows too."""
        return -(-num_tokens // self.block_size) * len(self.stacks)

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that a request holds at a time on its way to `num_tokens` positions."""
        return self.stacks.most_blocks(num_tokens, self.block_size)

    def more_for(self, request_id: int, num_tokens: int) -> int:
        """The most blocks that a request may hold more than now on its way to `num_tokens` positions."""
        holding = self._holdings[request_id]
        more = max(self.blocks_for(num_tokens) - len(holding.blocks), 0)
        if self.stacks.is_whole or not more:
            return more
        each, covered = more // len(self.stacks), self.num_held(request_id)
        pairs = zip(self._limits, holding.behind, strict=True)
        return sum(min(each, max(limit - covered + behind, 0)) if limit else each for limit, behind in pairs)

    def table(self, request_id: int) -> tuple[int, ...]:
        """The blocks of a request, in the order of its positions."""
        holding = self._holdings[request_id]
        if holding.table is None:
            holding.table = tuple(holding.blocks)
        return holding.table

    def num_held(self, request_id: int) -> int:
        """Blocks that its table has for each stack, those behind windows too."""
        return len(self._holdings[request_id].blocks) // len(self.stacks)

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
        ready = self._ready(group, share, prompt_len)
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
        assert request_id not in self._holdings, f"request {request_id} holds blocks already"
        assert num_tokens >= prompt_len or not self.stacks.is_whole, (num_tokens, prompt_len)
        ready = self._ready(group, share, prompt_len, first)
        behind = self.stacks.behind(max(first, len(ready) // len(self.stacks) * self.block_size), self.block_size)
        shared = self._seen(ready, behind)
        new = range(len(shared), self.blocks_for(num_tokens))
        num_new = len(new) if not any(behind) else sum(not self._is_behind(i, behind) for i in new)
        if num_new + sum(self._is_parked(group, block) for block in shared) > self.num_free(group):
            return None
        num_shareable = self.num_shareable(prompt_len) if share is not None else 0
        holding = _Holding(group, [*shared], share, num_shareable, True, behind=behind)
        for block in shared:
            if block != TRASH_BLOCK:
                self._num_parked[group] -= self._is_parked(group, block)
                self._references[group][block] += 1
        self._take(holding, len(new))
        self._holdings[request_id] = holding
        if share is not None:
            self._holders.setdefault(share, Counter())[group] += 1
        return len(shared) // len(self.stacks) * self.block_size

    def extend(self, request_id: int, num_tokens: int, first: int = 0) -> bool:
        """Lets a request's table cover `num_tokens` positions; False if the pool runs dry. If it does not cover them
        already, what no query at `first` or beyond sees is given back before."""
        holding = self._holdings[request_id]
        num_new = self.blocks_for(num_tokens) - len(holding.blocks)
        if num_new > 0 and not self.stacks.is_whole:
            self._pass(holding, first)
        if num_new > self.num_free(holding.group):
            return False
        self._take(holding, max(num_new, 0))
        return True

    def _pass(self, holding: _Holding, first: int) -> None:
        """Gives back the blocks behind the windows of queries at `first` and beyond."""
        behind, stacks = self.stacks.behind(first, self.block_size), len(self.stacks)
        passed = [
            stack + stacks * i
            for stack, (before, now) in enumerate(zip(holding.behind, behind, strict=True))
            for i in range(before, min(now, len(holding.blocks) // stacks))
        ]
        if not passed:
            return
        blocks = [holding.blocks[i] for i in passed]
        for i in passed:
            holding.blocks[i] = TRASH_BLOCK
        holding.behind, holding.table = tuple(map(max, holding.behind, behind)), None
        self._give_back(holding.group, blocks)
        if passed[0] < len(self._published.get((holding.group, holding.share), ())):
            self._forget_freed(holding.group, holding.share)

    def _is_behind(self, i: int, behind: Sequence[int]) -> bool:
        """Whether block i of a table is among the leading ones that `behind` counts."""
        each, stack = divmod(i, len(behind))
        return each < behind[stack]

    def _seen(self, blocks: Sequence[int], behind: Sequence[int]) -> Sequence[int]:
        """The blocks at the beginning of a table, without those that `behind` counts."""
        if not any(behind):
            return blocks
        return [TRASH_BLOCK if self._is_behind(i, behind) else block for i, block in enumerate(blocks)]

    def grow(self, wanted: Iterable[tuple[int, int]]) -> bool:
        """Gives requests more blocks: pairs of a request id and how many, at least one. False at the first with a pool
        that runs dry: the requests before it have got theirs."""
        holdings, free, references = self._holdings, self._free, self._references
        for request_id, count in wanted:
            holding = holdings[request_id]
            pool = free[holding.group]
            if count > len(pool):
                return False
            if count == 1:  # nearly always, and there are thousands
                block = pool.pop()
                references[holding.group][block] = 1
                holding.blocks.append(block)
                holding.table = None
            else:
                self._take(holding, count)
        return True

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
        if holding.blocks[: len(published)] != published[: len(holding.blocks)] and (
            self.stacks.is_whole or any(a != b for a, b in zip(holding.blocks, published, strict=False) if a and b)
        ):
            holding.is_publisher = False
            return
        published.extend(holding.blocks[len(published) : num_full])
        if not any(published):
            del self._published[holding.group, holding.share]

    def free(self, request_id: int) -> None:
        """Gives a request's blocks back; blocks that other requests share stay in use."""
        holding = self._holdings.pop(request_id)
        self._give_back(holding.group, holding.blocks)
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
        group, blocks = holding.group, holding.blocks[:kept]
        self._parked[session] = _Parked(group, blocks, tokens, holding.share, holding.num_shareable, holding.behind)
        for block in blocks:
            self._parked_references[group][block] += 1
            self._num_parked[group] += self._is_parked(group, block)
        holding.blocks, holding.table, holding.share, holding.num_shareable = holding.blocks[kept:], None, None, 0

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
        assert request_id not in self._holdings, f"request {request_id} holds blocks already"
        num_blocks, num_there = self.blocks_for(num_tokens), self.num_resumed(group, session, tokens)
        parked = self._parked.get(session)
        behind = self.stacks.behind(num_there, self.block_size)
        kept = [*self._seen(parked.blocks[: self.blocks_for(num_there)], behind)] if parked is not None else []
        if num_blocks - self._num_in_use(group, kept) > self.num_free(group):
            return None
        holding = _Holding(group, kept, None, 0, False, behind=behind)
        if parked is not None:
            self._unpark(session)
            left = [block for i, block in enumerate(parked.blocks) if i >= len(kept) or kept[i] != block]
            self._give_back(parked.group, left)
            if num_there and parked.share is not None:
                holding.share, holding.num_shareable = parked.share, parked.num_shareable
                if not self.stacks.is_whole:
                    self._forget_freed(group, parked.share)
                assert num_there >= holding.num_shareable * self.block_size, "a shared block would be written over"
            else:
                self._leave(parked.group, parked.share)
        self._take(holding, num_blocks - len(kept))
        self._holdings[request_id] = holding
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
        """What is parked of a conversation, which is now the caller's."""
        parked = self._parked.pop(session, None)
        if parked is not None:
            for block in parked.blocks:
                self._num_parked[parked.group] -= self._is_parked(parked.group, block)
                self._parked_references[parked.group][block] -= 1
        return parked

    def _is_parked(self, group: int, block: int) -> bool:
        """Whether parked conversations hold it, and nobody else."""
        return 0 < self._references[group][block] == self._parked_references[group][block]

    def _num_in_use(self, group: int, blocks: Sequence[int]) -> int:
        """How many of these, which are all held (or the trash block), are not among the free ones."""
        return sum(not self._is_parked(group, block) for block in blocks)

    def _reclaim(self, group: int, count: int) -> None:
        """Gives up what was parked longest ago, until so many blocks are free."""
        while len(self._free[group]) < count:
            self.forget(next(session for session, parked in self._parked.items() if parked.group == group))

    def check(self) -> None:
        """Asserts the invariants: every block is free or held, counts are right, only prompt blocks are shared."""
        for group in range(self.num_groups):
            held: Counter[int] = Counter()
            owners: dict[int, set[tuple[object, int]]] = {}
            for request_id, holding in self._holdings.items():
                if holding.group != group:
                    continue
                own = [(i, block) for i, block in enumerate(holding.blocks) if not self._is_behind(i, holding.behind)]
                assert len({block for _, block in own}) == len(own), f"request {request_id} names a block twice"
                assert any(holding.blocks) == any(block for _, block in own), "a block behind a window is held"
                held.update(block for _, block in own)
                for i, block in own:
                    shared = holding.share is not None and i // len(self.stacks) < holding.num_shareable
                    owners.setdefault(block, set()).add((holding.share if shared else ("own", request_id), i))
            alone = set(range(self.num_blocks)) - set(held)
            for session, each in self._parked.items():
                if each.group != group:
                    continue
                held.update(block for block in each.blocks if block != TRASH_BLOCK)
                num_shared = each.num_shareable * len(self.stacks) if each.share is not None else 0
                for i, block in enumerate(each.blocks):
                    if block != TRASH_BLOCK:
                        owners.setdefault(block, set()).add((each.share if i < num_shared else ("parked", session), i))
            parked = alone & set(held)
            assert len(parked) == self._num_parked[group], "parked blocks are counted wrongly"
            assert parked == {b for b in range(self.num_blocks) if self._is_parked(group, b)}
            free = self._free[group]
            assert TRASH_BLOCK not in {*held, *free}, "a request got the block that belongs to none"
            assert len({*held, *free}) == len(held) + len(free), "a block is free and held, or free twice"
            assert len(free) + len(held) == self.capacity, "a block is lost"
            assert all(self._references[group][block] == held[block] for block in range(self.num_blocks))
            assert all(len(owner) == 1 for owner in owners.values()), "unrelated requests hold the same block"
        for (group, _), published in self._published.items():
            assert any(published), "an empty entry stayed"
            references = self._references[group]
            assert all(references[block] for block in published if block != TRASH_BLOCK), "a free block is published"
            assert all(published) or not self.stacks.is_whole

    def _take(self, holding: _Holding, count: int) -> None:
        if not count:
            return
        holding.table = None
        begin = len(holding.blocks)
        new = range(begin, begin + count)
        if any(holding.behind):
            new = [i for i in new if not self._is_behind(i, holding.behind)]
        self._reclaim(holding.group, len(new))
        holding.blocks += [TRASH_BLOCK] * count
        free, references = self._free[holding.group], self._references[holding.group]
        for i in new:
            block = holding.blocks[i] = free.pop()
            assert references[block] == 0
            references[block] = 1

    def _give_back(self, group: int, blocks: Sequence[int]) -> None:
        references, free = self._references[group], self._free[group]
        parked_references = self._parked_references[group]
        if not self.stacks.is_whole:
            blocks = [block for block in blocks if block != TRASH_BLOCK]
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 0:
                free.append(block)
            else:
                self._num_parked[group] += references[block] == parked_references[block]


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
