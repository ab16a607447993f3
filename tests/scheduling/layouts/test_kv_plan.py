"""Migration plans: every live position arrives, nothing is copied twice, no pool overflows."""

from __future__ import annotations

import numpy as np
from checked_blocks import check_blocks
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.scheduling.layouts.batch_state import LiveRow
from jaxrl.scheduling.layouts.kv_plan import LiveBlocks, blocks_needed, plan_migration
from jaxrl.scheduling.layouts.regroup import regroup
from jaxrl.scheduling.tokens.blocks import BlockManager

BLOCK = 4


def live(request_id, group, num_written, blocks, share=None, prompt_len=0, num_tokens=None):
    return LiveBlocks(request_id, group, tuple(blocks), num_written, num_tokens or num_written, share, prompt_len)


@st.composite
def generations(draw):
    """(live requests as a real BlockManager holds them, dp groups before, new groups by `regroup`)."""
    dp_before, dp_after = (2 ** draw(st.integers(0, 3)) for _ in range(2))
    manager = BlockManager(dp_before, 400, BLOCK)
    prompts = draw(st.lists(st.integers(1, 21), min_size=1, max_size=4))
    requests, rows = [], [[] for _ in range(dp_before)]
    for request_id in range(draw(st.integers(0, 14))):
        prompt = draw(st.integers(0, len(prompts) - 1))
        prompt_len, group = prompts[prompt], draw(st.integers(0, dp_before - 1))
        share = draw(st.sampled_from([None, f"p{prompt}"]))
        num_tokens = prompt_len + draw(st.integers(0, 17))
        shared = manager.allocate(request_id, group, num_tokens, share, prompt_len)
        num_written = draw(st.integers(max(shared, 1), num_tokens))
        if draw(st.booleans()):  # a request that is silent leaves the next one a copy of its own
            manager.publish(request_id, min(num_written, prompt_len))
        requests.append((request_id, group, num_written, num_tokens, share, prompt_len))
        rows[group].append(LiveRow(request_id, num_written, num_written + 5))
    held = [
        LiveBlocks(i, group, manager.table(i), written, tokens, share, prompt_len)
        for i, group, written, tokens, share, prompt_len in requests
    ]
    groups = [[row.request_id for row in group] for group in regroup([tuple(each) for each in rows], dp_after)]
    return held, dp_before, groups


def contents(requests):
    """What each (group, block, offset) holds: (prompt or request, position), the same for all requests that share
    it."""
    pool = {}
    for r in requests:
        for position in range(r.num_written):
            owner = r.share if r.share is not None and position < r.prompt_len else r.request_id
            at = (r.group, r.table[position // BLOCK], position % BLOCK)
            assert pool.setdefault(at, (owner, position)) == (owner, position)
    return pool


def carry_out(plan, pool):
    """The new pools' contents after the plan's copies."""
    new = {}
    for copy in plan.copies:
        for offset in range(BLOCK):
            value = pool.get((copy.source_group, copy.source_block, offset))
            if value is not None:
                new[copy.target_group, copy.target_block, offset] = value
    return new


@given(generations())
def test_every_position_arrives(generation):
    requests, dp_before, groups = generation
    num_blocks = 1 + max([1, *(blocks_needed([r for r in requests if r.request_id in ids], BLOCK) for ids in groups)])
    plan = plan_migration(requests, dp_before, groups, BlockManager(len(groups), num_blocks, BLOCK))
    check_blocks(plan.blocks)
    new = carry_out(plan, contents(requests))
    for request in requests:
        placed = plan.placements[request.request_id]
        assert request.request_id in groups[placed.group]
        assert placed.table == plan.blocks.table(request.request_id)
        assert len(placed.table) == -(-request.num_tokens // BLOCK)
        assert request.num_written <= placed.num_written <= request.num_tokens
        for position in range(placed.num_written):
            is_prompt = request.share is not None and position < request.prompt_len
            owner = request.share if is_prompt else request.request_id
            assert new[placed.group, placed.table[position // BLOCK], position % BLOCK] == (owner, position)
    targets = [(copy.target_group, copy.target_block) for copy in plan.copies]
    assert len(set(targets)) == len(targets)
    ways = [(copy.source_group, copy.source_block, copy.target_group) for copy in plan.copies]
    assert len(set(ways)) == len(ways), "a block was copied twice into one group"
    used = [plan.blocks.capacity - plan.blocks.num_free(g) for g in range(len(groups))]
    assert max(used) <= num_blocks - 1
    assert used == [blocks_needed([r for r in requests if r.request_id in ids], BLOCK) for ids in groups]


def found_in(lanes, num_before, num_after):
    """The copies that lanes stand for: (source group, block, target group, block)."""
    num_lanes, num_homes = max(num_before, num_after), min(num_before, num_after)
    before, after, width = num_lanes // num_before, num_lanes // num_after, num_lanes // num_homes
    found = [
        (lane // before, int(source), lane // after, int(target))
        for lane in range(num_lanes)
        for source, target in zip(lanes.sources[lane], lanes.targets[lane], strict=True)
        if source >= 0
    ]
    for lane in range(num_lanes):
        for home in range(num_homes):
            end = home * width + lane % width  # a guest keeps its place within a home
            arrives = lanes.guest_targets[end, lane // width]
            np.testing.assert_array_equal(lanes.guest_sources[lane, home] < 0, arrives < 0)
            assert home != lane // width or np.all(arrives < 0), "a block that stays at home is no guest"
            pairs = zip(lanes.guest_sources[lane, home].tolist(), arrives.tolist(), strict=True)
            found += [(lane // before, source, end // after, target) for source, target in pairs if source >= 0]
    return found


@given(generations())
def test_lanes_say_the_same_as_the_copies(generation):
    requests, dp_before, groups = generation
    plan = plan_migration(requests, dp_before, groups, BlockManager(len(groups), 500, BLOCK))
    lanes = plan.lanes()
    num_lanes, num_homes = max(dp_before, len(groups)), min(dp_before, len(groups))
    assert (plan.num_lanes, plan.num_homes) == (num_lanes, num_homes)
    assert lanes.sources.shape == lanes.targets.shape == (num_lanes, lanes.sizes[0])
    assert lanes.guest_sources.shape == lanes.guest_targets.shape == (num_lanes, num_homes, lanes.sizes[1])
    np.testing.assert_array_equal(lanes.sources < 0, lanes.targets < 0)
    assert lanes.is_any == bool(plan.copies)
    found = found_in(lanes, dp_before, len(groups))
    assert sorted(found) == sorted(
        (c.source_group, c.source_block, c.target_group, c.target_block) for c in plan.copies
    )


def test_into_the_pools_of_another_worker():
    blocks = BlockManager(1, 8, BLOCK)
    blocks.allocate(1, 0, 10, "p", 9)
    blocks.publish(1, 9)
    plan = plan_migration([live(2, 0, 11, (5, 6, 7), "p", 9)], 1, [[2]], blocks)
    assert plan.blocks is blocks
    assert plan.placements[2].table == (1, 2, 4)
    assert [(c.source_block, c.target_block) for c in plan.copies] == [(7, 4)]
