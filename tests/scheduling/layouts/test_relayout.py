"""Changes of layout in the middle of a batch, on the books: no request is lost, and only what was written is read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from checked_blocks import check_blocks
from checking import assert_empty, assert_whole, engine_in, make_request, stacks_of
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.scheduling.layouts.relayout import plan_relayout, rows_of
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Capacity, Request
from jaxrl.types import Sample, SampleKey

DEVICES = 8


def layouts(num_slots: int = 4, num_blocks: int = 40, windows: tuple[int, ...] = (0,)) -> dict[int, Capacity]:
    """A larger tp has fewer dp groups and larger pools."""
    stacks = stacks_of(windows, max_prefill_tokens=16, decode_steps=4)
    return {
        tp: Capacity(DEVICES // tp, num_slots * tp, (num_blocks - 1) * tp + 1, 4, max_prefill_tokens=16, stacks=stacks)
        for tp in (1, 2, 4, 8)
    }


def engine_of(lengths: dict[SampleKey, int], tp: int, offered: dict[int, Capacity]) -> Engine:
    return engine_in(tp, lengths, offered)[0]


def started(
    requests: Sequence[Request], length: int, tp: int, offered: dict[int, Capacity], steps: int | None = None
) -> Engine:
    """Has made so many steps, or as many as it takes until all requests have a token; each will have `length`."""
    engine = engine_of({request.key: length for request in requests}, tp, offered)
    for request in requests:
        engine.add(request)
    for _ in range(steps or 0):
        engine.step()
    while steps is None and not all(engine.batcher.progress(i).tokens for i in engine.unfinished()):
        engine.step()
    return engine


def run(engine: Engine, requests: Sequence[Request], switches: dict[int, tuple[int, str]]) -> dict[int, Sample]:
    """Runs requests, switching before the steps that `switches` names: step -> (tp, how)."""
    for request in requests:
        engine.add(request)
    samples: dict[int, Sample] = {}
    step = 0
    while not engine.is_idle:
        if step in switches:
            tp, how = switches[step]
            if tp != engine.executor.tp:  # pyright: ignore[reportAttributeAccessIssue]
                switched = engine.switch(tp, how)  # pyright: ignore[reportArgumentType]
                assert switched.num_live <= len(engine.unfinished())
                check_blocks(engine.batcher.blocks)
        for finished in engine.step():
            assert finished.request_id not in samples, "told twice"
            samples[finished.request_id] = finished.sample
        step += 1
    return samples


@given(data=st.data())
def test_any_switches_at_any_time(data: st.DataObject):
    """Long prompts (prefills are cut), small pools (rows are evicted), several switches; with windows and without."""
    windows = data.draw(st.sampled_from([(0,), (0,), (5,), (0, 9), (0, 4, 4)]), "windows")
    least = stacks_of(windows, 16, 4).most_blocks(24 + 20, 4) + 1
    slots, blocks = data.draw(st.integers(1, 4), "slots"), data.draw(st.integers(least + 1, 2 * least), "blocks")
    offered = layouts(slots, blocks, windows)
    count = data.draw(st.integers(1, 24), "requests")
    requests = [
        make_request(
            i,
            num_prompt=3 + 7 * ((i // 3) % 4),
            prompt=i // 3,
            sample=i % 3,
            share=data.draw(st.booleans()) if i % 3 == 0 else True,
        )
        for i in range(count)
    ]
    lengths = {request.key: data.draw(st.integers(1, 20), "length") for request in requests}
    ways = st.tuples(st.sampled_from((1, 2, 4, 8)), st.sampled_from(("migrate", "recompute")))
    switches = data.draw(st.dictionaries(st.integers(0, 12), ways, max_size=6), "switches")
    engine = engine_of(lengths, data.draw(st.sampled_from((1, 2, 4, 8)), "tp"), offered)
    samples = run(engine, requests, switches)
    for request in requests:
        assert_whole(samples[request.request_id], request, lengths[request.key])
    assert_empty(engine)


def test_the_youngest_give_way_where_the_pool_shrinks():
    requests = [make_request(i, num_prompt=8, max_tokens=20, prompt=i) for i in range(8)]
    engine = started(requests, 20, 8, layouts(num_blocks=9))
    before = engine.counters.preemptions
    switched = engine.switch(1)
    rows = rows_of(engine.batcher)
    assert switched.num_live == 8
    assert [len(each) for each in rows] == [1] * 8, "a pool of eight blocks holds one request with what it grows by"
    assert not switched.evicted
    engine.switch(8, "recompute")
    while len([row for each in rows_of(engine.batcher) for row in each]) < 8:
        engine.step()
    small = engine.executor.capacity(1)  # pyright: ignore[reportAttributeAccessIssue]
    engine.drain()
    one_group = Capacity(1, 3, 20, small.block_size, small.max_prefill_tokens)
    move = plan_relayout(engine.batcher, 8, 8, one_group, "migrate")
    assert move.evicted == (7, 6, 5, 4, 3), "three rows fit, the oldest"
    assert engine.counters.preemptions == before
    move.apply(engine.batcher)
    assert engine.counters.preemptions == before + 5


def test_a_request_that_fits_no_pool_is_refused_before_anything_moves():
    request = make_request(0, num_prompt=8, max_tokens=60)
    offered = layouts(num_blocks=20)
    offered[1] = Capacity(8, 4, 9, block_size=4, max_prefill_tokens=16)
    engine = started([request], 50, 8, offered, steps=1)
    with pytest.raises(ValueError, match=r"may grow to 68 tokens, which take 17 blocks of 4, and a pool .* has 8"):
        engine.switch(1)
    assert engine.executor.sizes.num_groups == 1
    (sample,) = run(engine, [], {}).values()
    assert_whole(sample, request, 50)
