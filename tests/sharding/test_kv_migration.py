"""Live KV between layouts: every request's positions are in its new blocks, number by number.

Transitions run in processes of their own. `tests/rollout/test_switch.py` draws tokens over KV that has moved.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checked_blocks import check_blocks
from live_arrays import Watched, live_bytes
from own_process import alone, call

from jaxrl.rollout import kv_cache
from jaxrl.scheduling.layouts.batch_state import LiveRow
from jaxrl.scheduling.layouts.kv_plan import KvPlan, LiveBlocks, plan_migration
from jaxrl.scheduling.layouts.regroup import regroup
from jaxrl.scheduling.tokens.blocks import BlockManager
from jaxrl.sharding import kv_migration
from jaxrl.sharding.kv_migration import migrate, migrate_across
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import pad_heads

CHAIN = (1, 2, 4, 8, 4, 2, 1)
MODELS = {"llama": (8, 4), "qwen2": (14, 2), "smollm2": (9, 3)}
LAYERS, HEAD_DIM, BLOCK = 2, 4, 4
PROMPT_LENS = {"a": 9, "b": 6}


class Batch:
    """Requests in the middle of a generation, and a pool of random numbers, of which each knows its own."""

    def __init__(self, layout: Layout, kv_heads: int, dtype: str, num_blocks: int, ids: range, crowded: bool) -> None:
        """`crowded`: over the first half of the groups, so that some have to go far at the next switch."""
        self.layout, self.num_blocks = layout, num_blocks
        self.blocks, self.requests = BlockManager(layout.dp, num_blocks, BLOCK), dict[int, LiveBlocks]()
        num_groups = max(layout.dp // 2, 1) if crowded else layout.dp
        for i in ids:
            share, group = "a" if i % 3 else "b", i % num_groups
            count = PROMPT_LENS[share] + 1 + i % 5
            self.blocks.allocate(i, group, count + 1, share, PROMPT_LENS[share])
            self.blocks.publish(i, PROMPT_LENS[share])
            self.requests[i] = LiveBlocks(i, group, self.blocks.table(i), count, count + 1, share, PROMPT_LENS[share])
        shape = kv_cache.CacheShape(LAYERS, kv_heads, HEAD_DIM, num_blocks, BLOCK, jnp.dtype(dtype))
        random, sharding = np.random.default_rng(ids.start), kv_cache.pool_sharding(layout, shape)
        size = (LAYERS, 2, layout.dp, kv_heads, num_blocks, BLOCK, HEAD_DIM)
        host = random.normal(size=size).astype(dtype)
        for request in self.requests.values():  # the same numbers of a prompt in every group
            for at in range(request.prompt_len):
                own = np.random.default_rng([ord(str(request.share)), at])
                block = request.table[at // BLOCK]
                host[:, :, request.group, :, block, at % BLOCK] = own.normal(size=(LAYERS, 2, kv_heads, HEAD_DIM))
        self.pool: Any = [tuple(jax.device_put(array, sharding) for array in layer) for layer in host]
        self.written = {i: self.of(i, host) for i in ids}

    def of(self, i: int, pool: np.ndarray) -> np.ndarray:
        """[layers, keys and values, K, positions, D] of a request in a whole pool."""
        request = self.requests[i]
        rows = pool[:, :, request.group][:, :, :, list(request.table)]
        return rows.reshape(*rows.shape[:3], -1, HEAD_DIM)[:, :, :, : request.num_written]

    def plan(self, blocks: BlockManager) -> KvPlan:
        rows: list[list[LiveRow]] = [[] for _ in range(self.layout.dp)]
        for i, request in self.requests.items():
            rows[request.group].append(LiveRow(i, request.num_written, 10_000))
        groups = [
            [row.request_id for row in group] for group in regroup([tuple(each) for each in rows], blocks.num_groups)
        ]
        return plan_migration([*self.requests.values()], self.layout.dp, groups, blocks)

    def take(self, plan: KvPlan, layout: Layout, num_blocks: int, pool: Any) -> None:
        self.layout, self.blocks, self.num_blocks, self.pool = layout, plan.blocks, num_blocks, pool
        check_blocks(self.blocks)
        for i, placed in plan.placements.items():
            self.requests[i] = replace(self.requests[i], group=placed.group, table=self.blocks.table(i))
        whole = np.asarray([[np.asarray(array) for array in layer] for layer in pool])
        for i, written in self.written.items():
            np.testing.assert_array_equal(self.of(i, whole), written)

    def switch(self, tp: int, num_blocks: int, max_extra_bytes: int = 1 << 20) -> int:
        """To another layout; returns how many guests a lane has."""
        after, old = Layout(self.layout.mesh, tp), jax.tree.leaves(self.pool)
        plan = self.plan(BlockManager(after.dp, num_blocks, BLOCK))
        pool = migrate(self.pool, self.layout, after, plan.lanes(), num_blocks, max_extra_bytes=max_extra_bytes)
        assert all(array.is_deleted() for array in old)
        self.take(plan, after, num_blocks, pool)
        return plan.lanes().sizes[1]

    def end(self, group: int) -> None:
        for i in [i for i, request in self.requests.items() if request.group == group]:
            self.blocks.free(i)
            del self.requests[i], self.written[i]


# ---------------------------------------------------------------- what runs in a process of its own


def walk(degrees: tuple[int, ...], model: str, dtype: str) -> None:
    """Switches through these degrees, and once more: then nothing is compiled. On the way up and on the way down a dp
    group's requests end, so that others have to take its place."""
    kv_heads, mesh = pad_heads(*MODELS[model], 8)[1], make_mesh()
    small = 6 * np.dtype(dtype).itemsize << 10
    misses, with_guests = [], set()
    for _ in range(2):
        batch = Batch(Layout(mesh, degrees[0]), kv_heads, dtype, 48, range(11), crowded=True)
        for i, (before, after) in enumerate(itertools.pairwise(degrees)):
            if batch.switch(after, 40 + 7 * after, small if i % 2 else 1 << 20):
                with_guests.add((before, after))
            if len(degrees) > 2 and (before, after) in ((1, 2), (8, 4)):
                batch.end(0)
        misses.append(kv_migration._move.cache_info().misses)
    assert misses[1] == misses[0], "the second pass compiled"
    pairs = {(1, 2), (2, 4), (4, 2)} if len(degrees) > 2 else {degrees} if max(degrees) < 8 else set()
    assert with_guests == pairs, "from a crowded half some go to another home, where there is one"


def across(tp_before: int, tp_after: int, model: str, dtype: str) -> None:
    """Half of the devices hands its requests to the other half, which keeps its own; and to an empty half, and back."""
    kv_heads = pad_heads(*MODELS[model], 4)[1]
    left, right = make_mesh(jax.devices()[:4]), make_mesh(jax.devices()[4:])
    giver = Batch(Layout(left, tp_before), kv_heads, dtype, 40, range(5), crowded=True)
    taker = Batch(Layout(right, tp_after), kv_heads, dtype, 60, range(50, 53), crowded=False)
    old, own = jax.tree.leaves(giver.pool), jax.tree.leaves(taker.pool)
    plan = giver.plan(taker.blocks)
    ends = giver.layout, taker.layout
    pool = migrate_across(giver.pool, *ends, plan.lanes(), taker.pool, max_extra_bytes=4 << 10)
    assert all(array.is_deleted() for array in own)
    assert all(array._npy_value is None for array in old), "a host copy was made"
    taker.requests |= giver.requests
    taker.written |= giver.written
    taker.take(plan, taker.layout, 60, pool)
    # to the empty left half, in another layout
    after, back = Layout(left, 4), taker.plan(BlockManager(1, 90, BLOCK))
    empty = Batch(after, kv_heads, dtype, 90, range(0), crowded=False)
    taker.take(back, after, 90, migrate_across(taker.pool, taker.layout, after, back.lanes(), empty.pool))


def memory(before: int, after: int) -> None:
    """Live buffers are counted when a chunk has been dispatched and nothing of it deleted yet."""
    batch = Batch(Layout(make_mesh(), before), 8, "float32", 64, range(11), crowded=False)
    bound, watched = 24 << 10, Watched(kv_migration._move)
    batch.switch(after, 64, bound)
    batch.switch(before, 64, bound)
    start = live_bytes()
    kv_migration._move = watched
    batch.switch(after, 64, bound)
    end = live_bytes()
    extra = max(now[device] - max(start[device], end[device]) for now in watched.seen for device in now)
    assert len(watched.seen) == 4, "chunks"
    assert 0 < extra <= extra + max(watched.temporaries) <= bound


# ---------------------------------------------------------------- tests


def test_a_chain_up_and_down_and_between_submeshes():
    alone(__file__, f"walk({CHAIN}, 'smollm2', 'float64'); across(1, 2, 'llama', 'float64')")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), [("llama", "float64"), ("qwen2", "float32"), ("smollm2", "float64")])
def test_every_transition(model, dtype):
    pairs = itertools.permutations((1, 2, 4, 8), 2)
    alone(__file__, "; ".join(f"walk({pair}, {model!r}, {dtype!r})" for pair in (*pairs, CHAIN)))


@pytest.mark.slow
def test_between_submeshes_and_memory_within_the_bound():
    walks = zip(((1, 4), (4, 1), (2, 2)), MODELS, strict=True)
    both = ("memory(1, 4)", "memory(4, 1)")
    alone(__file__, "; ".join([*(f"across(*{pair}, {model!r}, 'float32')" for pair, model in walks), *both]))


def test_compiled_ahead_there_is_nothing_left_to_compile():
    """No layout changes here (a pool of another size is not one), so it can run in this process."""
    layout = Layout(make_mesh(), 2)
    shape = kv_cache.CacheShape(2, 2, 4, 12, 4, jnp.dtype("float32"))
    abstract = jax.ShapeDtypeStruct((4, 2, 12, 4, 4), jnp.float32, sharding=kv_cache.pool_sharding(layout, shape))
    before = kv_migration._move.cache_info().misses
    for sizes in itertools.product(range(1, 12), range(12)):
        kv_migration.precompile(layout, layout, [(abstract, abstract)] * 2, 30, sizes)
    misses = kv_migration._move.cache_info().misses
    assert misses == before + 6, "lanes of 8 and of 11, each with no guests, with 8 and with 11"
    for size, guests in ((0, 0), (3, 0), (8, 9), (9, 0), (11, 8), (0, 1)):
        pool = kv_cache.allocate(layout, shape)
        sources = np.tile(np.arange(1, size + 1, dtype=np.int32), (4, 1))
        around = np.full((2, 4, 4, guests), -1, np.int32)
        for home in range(4):  # each sends its first blocks to the next
            next_home = (home + 1) % 4
            around[0, home, next_home] = around[1, next_home, home] = np.arange(1, guests + 1)
        lanes = (sources, sources + 3, around[0], around[1] + 15 * (around[1] > 0))
        pool = migrate(pool, layout, layout, lanes, 30)
        assert pool[1][0].shape == (4, 2, 30, 4, 4)
    assert kv_migration._move.cache_info().misses == misses


if __name__ == "__main__":
    call(globals())
