"""Live KV between layouts: attention over it is what it was before.

Transitions run in processes of their own.

A walk decodes for a few requests with random queries, keys and values: at each layout every request writes one position
and attends, through `kv_cache.attend`; a plain computation over all that it ever wrote gives the expected result.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checked_blocks import check_blocks
from live_arrays import Watched, live_bytes
from own_process import alone, call

from jaxrl.kernels.attention import choose_paged
from jaxrl.rollout import kv_cache
from jaxrl.scheduling.layouts.batch_state import LiveRow
from jaxrl.scheduling.layouts.kv_plan import LiveBlocks, plan_migration
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
ROWS, WIDTH = 12, 10  # of a decode step, so that each layout compiles one
PROMPT_LENS = {"a": 9, "b": 6}


@dataclass
class Walk:
    """Requests in the middle of a generation, and everything that each has ever written."""

    layout: Layout
    heads: tuple[int, int]
    dtype: Any
    num_blocks: int
    seed: int = 0
    requests: dict[int, dict[str, Any]] = field(default_factory=dict)
    pool: Any = None
    blocks: Any = None
    guests: int = 0  # places for them in a lane of the last switch

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.prompts = {name: self._kv(length) for name, length in PROMPT_LENS.items()}

    def _kv(self, count: int) -> np.ndarray:
        """[layers, keys and values, positions, K, D]"""
        return self.random.normal(size=(LAYERS, 2, count, self.heads[1], HEAD_DIM)).astype(self.dtype)

    def shape(self, num_blocks: int) -> kv_cache.CacheShape:
        return kv_cache.CacheShape(LAYERS, self.heads[1], HEAD_DIM, num_blocks, BLOCK, jnp.dtype(self.dtype))

    def start(self, count: int, first_id: int = 0, crowded: bool = False) -> None:
        """Requests with prompts and a few tokens, dealt over the dp groups, their KV written from the host.

        `crowded`: over the first half of the groups, so that some have to go far at the next switch."""
        num_groups = max(self.layout.dp // 2, 1) if crowded else self.layout.dp
        self.blocks = BlockManager(self.layout.dp, self.num_blocks, BLOCK)
        host = np.zeros((LAYERS, 2, self.layout.dp, self.heads[1], self.num_blocks, BLOCK, HEAD_DIM), dtype=self.dtype)
        for request_id in range(first_id, first_id + count):
            share = "a" if request_id % 3 else "b"
            written = np.concatenate([self.prompts[share], self._kv(1 + request_id % 5)], axis=2)
            group, num_tokens = request_id % num_groups, written.shape[2]
            self.blocks.allocate(request_id, group, num_tokens + 1, share, PROMPT_LENS[share])
            self.blocks.publish(request_id, PROMPT_LENS[share])
            self.requests[request_id] = {"share": share, "written": written, "group": group}
            for position in range(num_tokens):
                block = self.blocks.table(request_id)[position // BLOCK]
                host[:, :, group, :, block, position % BLOCK] = written[:, :, position]
        sharding = kv_cache.pool_sharding(self.layout, self.shape(self.num_blocks))
        self.pool = [tuple(jax.device_put(host[layer, i], sharding) for i in range(2)) for layer in range(LAYERS)]

    def decode(self) -> None:
        """Every request writes a position and attends; the outcome is compared with a computation of its own."""
        H, K = self.heads
        shape, width = (self.layout.dp, ROWS), WIDTH
        tables, positions = np.zeros((*shape, width), np.int32), np.zeros((*shape, 1), np.int32)
        valid = np.zeros((*shape, 1), np.bool_)
        q = self.random.normal(size=(LAYERS, *shape, 1, H, HEAD_DIM)).astype(self.dtype)
        kv = np.zeros((LAYERS, 2, *shape, 1, K, HEAD_DIM), self.dtype)
        at, filled = {}, [0] * self.layout.dp
        for request_id, request in self.requests.items():
            here = at[request_id] = (request["group"], filled[request["group"]])
            filled[request["group"]] += 1
            position = request["written"].shape[2]
            assert self.blocks.extend(request_id, position + 1)
            table = self.blocks.table(request_id)
            tables[here][: len(table)], positions[here], valid[here] = table, position, True
            new = self._kv(1)
            request["written"] = np.concatenate([request["written"], new], axis=2)
            kv[(slice(None), slice(None), *here)] = new
        for layer in range(LAYERS):
            cached = (self.pool[layer], tables, positions, valid)
            out, self.pool[layer] = _attend(self.layout)(q[layer], *kv[layer], *cached)
            out = np.asarray(out)
            for request_id, request in self.requests.items():
                expected = _dense(q[layer][at[request_id]][0], *request["written"][layer])
                tolerance = 1e-12 if self.dtype == "float64" else 1e-5
                np.testing.assert_allclose(out[at[request_id]][0], expected, rtol=tolerance, atol=tolerance)

    def end(self, group: int) -> None:
        """The requests of a dp group end."""
        for request_id in [i for i, request in self.requests.items() if request["group"] == group]:
            del self.requests[request_id]
            self.blocks.free(request_id)

    def live(self) -> list[LiveBlocks]:
        found = []
        for request_id, request in self.requests.items():
            count, share, table = request["written"].shape[2], request["share"], self.blocks.table(request_id)
            found.append(LiveBlocks(request_id, request["group"], table, count, count + 1, share, PROMPT_LENS[share]))
        return found

    def groups(self, dp: int) -> list[list[int]]:
        rows: list[list[LiveRow]] = [[] for _ in range(self.layout.dp)]
        for request_id, request in self.requests.items():
            rows[request["group"]].append(LiveRow(request_id, request["written"].shape[2], 10_000))
        return [[row.request_id for row in group] for group in regroup([tuple(each) for each in rows], dp)]

    def switch(self, tp: int, num_blocks: int, max_extra_bytes: int = 1 << 20) -> None:
        after = Layout(self.layout.mesh, tp)
        plan = plan_migration(self.live(), self.layout.dp, self.groups(after.dp), num_blocks, BLOCK)
        old = jax.tree.leaves(self.pool)
        self.guests = plan.lanes().sizes[1]
        self.pool = migrate(self.pool, self.layout, after, plan.lanes(), num_blocks, max_extra_bytes=max_extra_bytes)
        assert all(array.is_deleted() for array in old)
        self._take(plan, after, num_blocks)

    def _take(self, plan: Any, after: Layout, num_blocks: int) -> None:
        self.layout, self.blocks, self.num_blocks = after, plan.blocks, num_blocks
        for request_id, placed in plan.placements.items():
            self.requests[request_id]["group"] = placed.group
        check_blocks(self.blocks)


@lru_cache
def _attend(layout):
    return jax.jit(partial(kv_cache.attend, layout, how=choose_paged("auto", "cpu")))


def _dense(q_HD, k_TKD, v_TKD):
    k, v = (np.repeat(x, q_HD.shape[0] // x.shape[1], axis=1) for x in (k_TKD, v_TKD))
    scores = np.einsum("hd,thd->ht", q_HD, k) / np.sqrt(HEAD_DIM)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)


# ---------------------------------------------------------------- what runs in a process of its own


def walk(degrees: tuple[int, ...], model: str, dtype: str) -> None:
    """Decodes and switches through these degrees, and once more: then nothing is compiled. On the way up and on the way
    down a dp group's requests end, so that others have to take its place."""
    heads, mesh = pad_heads(*MODELS[model], 8), make_mesh()
    small = 6 * np.dtype(dtype).itemsize << 10
    misses, moves = [], []
    for lap in range(2):
        state = Walk(Layout(mesh, degrees[0]), heads, dtype, num_blocks=48)
        state.start(11, crowded=True)
        state.decode()
        for i, (before, after) in enumerate(itertools.pairwise(degrees)):
            state.switch(after, num_blocks=40 + 7 * after, max_extra_bytes=small if i % 2 else 1 << 20)
            moves.append((before, after, state.guests > 0))
            state.decode()
            if len(degrees) > 2 and (before, after) in ((1, 2), (8, 4)):
                state.end(0)
            state.decode()
            assert before != after
        misses.append(kv_migration._move.cache_info().misses)
        assert misses[lap] == misses[0], "the second pass compiled"
    if len(degrees) == 2:
        assert moves[0][2] == (max(degrees) < 8), "from a crowded half some go to another home, where there is one"
    else:
        assert {move[:2] for move in moves if move[2]} == {(1, 2), (2, 4), (4, 2)}, moves


def across(tp_before: int, tp_after: int, model: str, dtype: str) -> None:
    """Half of the devices hands its requests to the other half, which keeps its own; and to an empty half, and back."""
    heads = pad_heads(*MODELS[model], 4)
    left, right = make_mesh(jax.devices()[:4]), make_mesh(jax.devices()[4:])
    giver = Walk(Layout(left, tp_before), heads, dtype, num_blocks=40)
    giver.start(5, crowded=True)
    giver.decode()
    taker = Walk(Layout(right, tp_after), heads, dtype, num_blocks=60)
    taker.start(3, first_id=50)
    taker.decode()
    old, own = giver.pool, jax.tree.leaves(taker.pool)
    groups = giver.groups(taker.layout.dp)
    plan = plan_migration(giver.live(), giver.layout.dp, groups, 60, BLOCK, into=taker.blocks)
    ends, small = (giver.layout, taker.layout), 4 << 10
    taker.pool = migrate_across(old, *ends, plan.lanes(), 60, into=taker.pool, max_extra_bytes=small)
    assert all(array.is_deleted() for array in own)
    assert all(array._npy_value is None for array in jax.tree.leaves(old)), "a host copy was made"
    taker.requests |= giver.requests
    taker._take(plan, taker.layout, 60)
    taker.decode()
    # to the empty left half, in another layout
    after = Layout(left, 4)
    back = plan_migration(taker.live(), taker.layout.dp, taker.groups(1), 90, BLOCK)
    taker.pool = migrate_across(taker.pool, taker.layout, after, back.lanes(), 90)
    taker._take(back, after, 90)
    taker.decode()


def memory(before: int, after: int) -> None:
    """Live buffers are counted when a chunk has been dispatched and nothing of it deleted yet."""
    state = Walk(Layout(make_mesh(), before), (8, 8), "float32", num_blocks=64)
    state.start(11)
    watched = Watched(kv_migration._move)
    state.switch(after, 64, max_extra_bytes=24 << 10)
    state.switch(before, 64, max_extra_bytes=24 << 10)
    start = live_bytes()
    kv_migration._move = watched
    state.switch(after, 64, max_extra_bytes=24 << 10)
    end = live_bytes()
    extra = max(now[device] - max(start[device], end[device]) for now in watched.seen for device in now)
    assert len(watched.seen) == 4, "chunks"
    assert 0 < extra <= extra + max(watched.temporaries) <= 24 << 10


# ---------------------------------------------------------------- tests


def test_a_chain_up_and_down_and_between_submeshes():
    alone(__file__, f"walk({CHAIN}, 'smollm2', 'float64'); across(1, 2, 'llama', 'float64')")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), [("llama", "float64"), ("qwen2", "float32"), ("smollm2", "float64")])
def test_every_transition(model, dtype):
    pairs = itertools.permutations((1, 2, 4, 8), 2)
    alone(__file__, "; ".join(f"walk({pair}, {model!r}, {dtype!r})" for pair in (*pairs, CHAIN)))


@pytest.mark.slow
def test_between_submeshes_of_other_layouts():
    walks = zip(((1, 4), (4, 1), (2, 2)), MODELS, strict=True)
    alone(__file__, "; ".join(f"across(*{pair}, {model!r}, 'float32')" for pair, model in walks))


@pytest.mark.slow
def test_memory_stays_within_the_bound():
    alone(__file__, "memory(1, 4); memory(4, 1)")


def test_compiled_ahead_there_is_nothing_left_to_compile():
    """No layout changes here (a pool of another size is not one), so it can run in this process."""
    layout = Layout(make_mesh(), 2)
    shape = kv_cache.CacheShape(2, 2, 4, 12, 4, jnp.dtype("float32"))
    abstract = jax.ShapeDtypeStruct((4, 2, 12, 4, 4), jnp.float32, sharding=kv_cache.pool_sharding(layout, shape))
    sizes = [(own, guests) for own in range(1, 12) for guests in range(12)]
    programs = kv_migration.precompile(layout, layout, [(abstract, abstract)] * 2, 30, sizes)
    assert len(programs) == 6, "lanes of 8 and of 11, each with no guests, with 8 and with 11"
    misses = kv_migration._move.cache_info().misses
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


def test_what_does_not_fit_is_refused():
    mesh = make_mesh()
    before, after = Layout(mesh, 2), Layout(mesh, 4)
    shape = kv_cache.CacheShape(1, 2, 4, 6, 4, jnp.dtype("float32"))
    pool = kv_cache.allocate(before, shape)
    ok, none = np.full((4, 1), -1, np.int32), np.full((4, 2, 0), -1, np.int32)
    one = np.array([[1], [-1], [-1], [-1]], np.int32)
    pair = (ok, ok)

    def refuses(words: str, own: Any = pair, guests: Any = (none, none), number: int = 9, **options: Any) -> None:
        source, target = options.pop("layouts", (before, after))
        with pytest.raises(ValueError, match=words):
            migrate(pool, source, target, (*own, *guests), number, **options)

    refuses(r"sources \(2, 1\) and targets \(4, 1\) must both be \[4, 'M'\] for dp 4 to dp 2: lanes", (ok[:2], ok))
    refuses(r"sources must be in \[0, 6\) and targets in \[1, 9\), each -1 where the other is", (one, ok))
    refuses(r"these pools have 6 and 9 blocks \(rollout.num_blocks\)", (6 * one, one))
    half = Layout(make_mesh(jax.devices()[:4]), 2)
    refuses(r"the layouts are of two meshes", layouts=(before, half))
    for target, common in ((half, 4), (after, 8)):
        with pytest.raises(ValueError, match=rf"meshes of equal shape without a common device, and have {common}"):
            migrate_across(pool, before, target, (ok, ok, none, none), 9)
    assert not any(array.is_deleted() for array in jax.tree.leaves(pool))


if __name__ == "__main__":
    call(globals())
