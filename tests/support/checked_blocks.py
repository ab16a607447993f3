"""The invariants of block accounting."""

from __future__ import annotations

from collections import Counter

import numpy as np

from jaxrl.scheduling.tokens.blocks import BlockManager
from jaxrl.scheduling.tokens.plan import TRASH_BLOCK


def check_blocks(blocks: BlockManager) -> None:
    """Asserts the invariants: every block is free or held, counts are right, only prompt blocks are shared."""
    for group in range(blocks.num_groups):
        held: Counter[int] = Counter()
        owners: dict[int, set[tuple[object, int]]] = {}
        for request_id, holding in blocks._holdings.items():
            if holding.group != group:
                continue
            table, behind = blocks.table(request_id), blocks._behind[holding.row].tolist()
            assert not blocks.tables[holding.row, len(table) :].any(), "a table is not filled up with the trash block"
            stacks = len(blocks.stacks)
            own = [(i, block) for i, block in enumerate(table) if i // stacks >= behind[i % stacks]]
            assert len({block for _, block in own}) == len(own), f"request {request_id} names a block twice"
            assert any(table) == any(block for _, block in own), "a block behind a window is held"
            held.update(block for _, block in own)
            for i, block in own:
                shared = holding.share is not None and i // len(blocks.stacks) < holding.num_shareable
                owners.setdefault(block, set()).add((holding.share if shared else ("own", request_id), i))
        alone, by_parked = set(range(blocks.num_blocks)) - set(held), Counter[int]()
        for session, each in blocks._parked.items():
            if each.group != group:
                continue
            by_parked.update(block for block in each.blocks.tolist() if block != TRASH_BLOCK)
            num_shared = each.num_shareable * len(blocks.stacks) if each.share is not None else 0
            for i, block in enumerate(each.blocks.tolist()):
                if block != TRASH_BLOCK:
                    owners.setdefault(block, set()).add((each.share if i < num_shared else ("parked", session), i))
        references = blocks._parked_references[group].tolist()
        assert all(references[block] == by_parked[block] for block in range(blocks.num_blocks) if block != TRASH_BLOCK)
        held += by_parked
        parked = alone & set(held)
        assert len(parked) == blocks._num_parked[group], "parked blocks are counted wrongly"
        assert parked == set(np.flatnonzero(blocks._is_parked(group, np.arange(blocks.num_blocks))).tolist())
        free = blocks._free[group, : blocks._num_free[group]].tolist()
        assert TRASH_BLOCK not in {*held, *free}, "a request got the block that belongs to none"
        assert len({*held, *free}) == len(held) + len(free), "a block is free and held, or free twice"
        assert len(free) + len(held) == blocks.capacity, "a block is lost"
        assert all(blocks._references[group][block] == held[block] for block in range(blocks.num_blocks))
        assert all(len(owner) == 1 for owner in owners.values()), "unrelated requests hold the same block"
    for (group, _), published in blocks._published.items():
        assert any(published), "an empty entry stayed"
        references = blocks._references[group]
        assert all(references[block] for block in published if block != TRASH_BLOCK), "a free block is published"
        assert all(published) or not blocks.stacks.is_whole
