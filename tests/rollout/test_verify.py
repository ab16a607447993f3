"""Verification of drafts: the tokens of plain decoding, whatever the drafts are, in as many steps as they save.

Indexes are forged: from the very response that will be drawn, from nothing of it, and from it with a token changed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_lookup import draft, find
from recorder import Recorder
from small_models import VOCABULARY, engine_over, mixed, model_of, ready, requests
from whole_pass import check

from jaxrl.mechanisms.speculation.index import START, DraftIndex, DraftLengths
from jaxrl.mechanisms.speculation.proposer import DeviceIndexes, Drafting, IndexArrays
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request, VerifyCounts, resume
from jaxrl.scheduling.tokens.progress import Counters
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.types import Sample, SampleKey, SamplingParams

LENGTHS = DraftLengths(min_prefix=3, max_prefix=7, max_draft=32)
SIZES = ExecutorConfig(
    num_slots=4,
    block_size=8,
    max_length=72,
    max_prefill_tokens=16,
    decode_steps=4,
    dtype=jnp.float64,
    proposer=Drafting(num_responses=3, num_tokens=240, verify_tokens=48, lengths=LENGTHS),
)


# ---------------------------------------------------------------- looking drafts up


def indexes(rng: np.random.Generator, count: int) -> list[DraftIndex]:
    """Of texts over few tokens, so that contexts are found at every length, and collide."""
    made = []
    for i in range(count):
        responses = [rng.integers(0, 3 + i, rng.integers(0, 60)) for _ in range(3)]
        made.append(DraftIndex.build(responses, rng.normal(size=3).tolist(), LENGTHS))
    return made


def blank(drafting: Drafting, *dims: int) -> IndexArrays:
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype)), drafting.array_shapes(*dims))


def test_a_device_finds_the_drafts_that_the_index_finds():
    rng = np.random.default_rng(0)
    drafting, rows, width = Drafting(3, 180, 0, LENGTHS), 300, 6
    held = [*indexes(rng, 4), DraftIndex.build([], [], LENGTHS)]
    books = DeviceIndexes(drafting, blank(drafting, 1, 5))
    write = jax.jit(drafting.upload, donate_argnums=0)
    places = books.place([(0, index) for index in held], write)
    assert places == [0, 1, 2, 3, 4]
    own = IndexArrays(*(np.asarray(x)[0] for x in books.arrays))
    which = rng.integers(0, 6, rows)  # 5: none
    contexts = [rng.integers(0, 3 + min(i, 3), rng.integers(0, 12)).tolist() for i in which]
    recent = np.array([([START] * 7 + context)[-7:] for context in contexts], np.int32)
    found = jax.tree.map(np.asarray, jax.jit(functools.partial(drafting.propose, width=width))(own, which, recent))
    lengths: set[int] = set()
    for row, (i, context) in enumerate(zip(which, contexts, strict=True)):
        expected = draft(held[i], context, width) if i < 5 else []
        assert found.tokens[row, : found.length[row]].tolist() == expected, (i, context)
        assert found.matched[row] == (find(held[i], context)[1] if i < 5 else 0)
        lengths.add(int(found.matched[row]))
    assert lengths == {0, 3, 4, 5, 6, 7}


def test_the_index_named_longest_ago_gives_way_and_none_that_the_plan_names():
    drafting = Drafting(3, 180, 0, LENGTHS)
    a, b, c, d = indexes(np.random.default_rng(1), 4)
    books = DeviceIndexes(drafting, blank(drafting, 2, 2))
    write = jax.jit(drafting.upload, donate_argnums=0)
    assert books.place([(0, a), (1, c), (0, b), (0, a)], write) == [0, 0, 1, 0]
    assert (books.uploads, books.unplaced) == (3, 0)
    assert books.place([(0, b)], write) == [1], "there already"
    assert books.place([(0, c), (0, b)], write) == [0, 1], "a gave way"
    assert books.uploads == 4
    texts = np.asarray(books.arrays.texts)[0]
    np.testing.assert_array_equal(texts[0, : len(c.text)], c.text)
    np.testing.assert_array_equal(texts[1, : len(b.text)], b.text)
    assert books.place([(0, d), (0, c), (0, a), (1, c)], write) == [1, 0, 2, 0], "two places: a has none"
    assert (books.uploads, books.unplaced) == (5, 1)
    books.forget()
    assert books.place([(0, c)], write) == [0]
    assert books.uploads == 6
    assert sum(x.nbytes for x in books.arrays) == 2 * replace(drafting, num_indexes=2).num_bytes(99)


def test_an_index_that_has_no_room_is_refused_before_it_waits():
    executor = MeshExecutor(model_of("llama"), make_layout(1, 1), SIZES)
    long, request = DraftIndex.build([np.arange(241)], [1.0], LENGTHS), requests(1, 1, 40)[0]
    with pytest.raises(ValueError, match=r"its history has no room on the devices: it has 241 tokens, and there is"):
        executor.check(replace(request, history=long))


# ---------------------------------------------------------------- counts, worked out by hand


def make_layout(num_devices: int, tp: int) -> Layout:
    return Layout(make_mesh(jax.devices()[:num_devices]), tp)


@functools.cache
def executor_of(name: str, num_devices: int, tp: int, **options: Any) -> MeshExecutor:
    return ready(name, make_layout(num_devices, tp), replace(SIZES, max_tp=tp, **options))


def counted(counters: Counters) -> VerifyCounts:
    tokens = (counters.proposed_tokens, counters.accepted_tokens)
    return VerifyCounts(counters.verifying_row_steps, *tokens, counters.proposed_row_steps, counters.matched_tokens)


def the_response(engine: Engine, stops: tuple[int, ...] = ()) -> tuple[Request, Sample]:
    """Of 41 tokens, all of whose contexts of three tokens differ."""
    request = Request(1, SampleKey(0, 3, 0), (5, 17, 250), SamplingParams(max_tokens=41, stop_token_ids=stops))
    return request, engine.generate([request])[0]


ROOMY = Drafting(41, 500, 4 * 32, LENGTHS)


def always_wrong(tokens: Sequence[int]) -> DraftIndex:
    """Every context of seven tokens is in one response, and goes on with another token there; the first contexts, which
    are in several, are heaviest in that one."""
    wrong = [[*tokens[max(i - 7, 0) : i], *[(tokens[i] + 1) % VOCABULARY] * 3] for i in range(len(tokens))]
    weights = [100.0 ** max(7 - i, 0) for i in range(len(tokens))]
    return DraftIndex.build([np.array(each) for each in wrong], weights, LENGTHS)


def test_forged_drafts_cost_the_steps_that_the_rule_says(x64: None):
    """One row; the prefill draws token 0, and 40 are left. A step gains what it accepts, and one more."""
    executor = executor_of("llama", 1, 1, gathered=True, decode_steps=16, proposer=ROOMY)
    request, plain = the_response(engine_over(executor, drafts=False))
    tokens = plain.token_ids.tolist()
    assert len({tuple(tokens[i : i + 3]) for i in range(39)}) == 39, "contexts differ"
    changed = np.array([*tokens[:20], (tokens[20] + 1) % VOCABULARY, *tokens[21:]])
    cases = {
        # windows 2, 4, 6, 8, 10 gain 35 tokens; of a window of 12 only 4 fit, because a fifth comes anyhow
        "always right": (DraftIndex.build([plain.token_ids], [1.0], LENGTHS), VerifyCounts(6, 34, 34, 6, 42)),
        # 38 drafts of 2, one of 1, and no room for one in the last step
        "always wrong": (always_wrong(tokens), VerifyCounts(40, 77, 0, 39, 39 * 7)),
        # 2, 4, 6, then 8 of which 4 are right; token 20 is not in the history, nor what it is in, for three steps; then
        # contexts of 3, 6, 7 and 7 tokens bring drafts of 2, 4, 6, and 1 where 2 tokens are left
        "one wrong in the middle": (DraftIndex.build([changed], [1.0], LENGTHS), VerifyCounts(11, 33, 29, 8, 51)),
        "none": (DraftIndex.build([], [], LENGTHS), VerifyCounts(40, 0, 0, 0, 0)),
    }
    for case, (history, expected) in cases.items():
        engine = engine_over(executor)
        drawn = engine.generate([replace(request, history=history)])[0]
        assert drawn.token_ids.tolist() == tokens, case
        assert counted(engine.counters) == expected, case
        assert engine.counters.busy_row_steps == expected.steps, case
        np.testing.assert_allclose(drawn.rollout_logprobs, plain.rollout_logprobs, rtol=0, atol=1e-6)


def test_a_stop_token_inside_a_draft_ends_the_row_there(x64: None):
    executor = executor_of("llama", 1, 1, gathered=True, decode_steps=16, proposer=ROOMY)
    _, whole = the_response(engine_over(executor, drafts=False))
    tokens = whole.token_ids.tolist()
    at = next(i for i in range(9, 15) if tokens.index(tokens[i]) == i)
    request, plain = the_response(engine_over(executor, drafts=False), stops=(tokens[at],))
    engine = engine_over(executor)
    drawn = engine.generate([replace(request, history=DraftIndex.build([whole.token_ids], [1.0], LENGTHS))])[0]
    assert drawn.token_ids.tolist() == plain.token_ids.tolist() == tokens[: at + 1]
    assert drawn.finish_reason == "stop"
    # drafts of 2 and 4 bring it to token 8; of 6 more, those behind the stop token count as not accepted
    assert counted(engine.counters) == VerifyCounts(3, 12, 6 + at - 8, 3, 21)


# ---------------------------------------------------------------- whole engines


def with_history(asked: Sequence[Request], drawn: Sequence[Sample]) -> list[Request]:
    """Each request with responses of its prompt as history: its own with some tokens changed, and another's; one in
    five has none."""
    rng = np.random.default_rng(7)
    made = []
    for i, (request, sample) in enumerate(zip(asked, drawn, strict=True)):
        near = np.where(rng.random(len(sample)) < 0.06, rng.integers(0, VOCABULARY, len(sample)), sample.token_ids)
        other = drawn[i - 1 if i % 3 else i]
        history = DraftIndex.build([other.token_ids, near], [0.5, 1.0], LENGTHS)
        made.append(replace(request, history=history if i % 5 else None))
    return made


WORLDS = {  # model, devices, tp, options
    "paged on four devices": ("llama", 4, 2, {"gathered": False, "features_first": False}),
    "fused_projections": ("qwen2", 2, 2, {"gathered": False, "fused_projections": True, "features_first": False}),
    "padded heads, gathered": ("smollm2", 4, 4, {}),
    "one place for indexes": ("llama", 1, 1, {"proposer": Drafting(3, 240, 48, LENGTHS, num_indexes=1)}),
}
FAST = "paged on four devices"


def executor_in(world: str) -> MeshExecutor:
    name, num_devices, tp, options = WORLDS[world]
    return executor_of(name, num_devices, tp, truncate=True, num_blocks=17, **options)


@pytest.mark.parametrize("world", [w if w == FAST else pytest.param(w, marks=pytest.mark.slow) for w in WORLDS])
def test_drafts_change_no_token_and_no_log_probability(world: str, x64: None):
    executor = executor_in(world)
    recorder = Recorder(executor)
    asked = mixed(3 * executor.sizes.num_groups, 3)
    plain = engine_over(executor, drafts=False).generate(asked)
    engine = engine_over(recorder)
    drawn = engine.generate(with_history(asked, plain))
    check(WORLDS[world][0], asked, drawn, recorder)
    counters = engine.counters
    assert counters.preemptions > 0, "the pool was to be too small"
    assert 0 < counters.accepted_tokens < counters.proposed_tokens
    assert counters.busy_row_steps < sum(map(len, drawn)) - len(asked), "steps were to be saved"
    assert {one.finish_reason for one in drawn} == {"stop", "length"}
    assert executor._histories is not None
    assert (executor._histories.unplaced > 0) == (world == "one place for indexes")


def test_an_abort_and_a_new_start_go_on_with_drafts(x64: None):
    executor = executor_in(FAST)
    asked = mixed(4, 3)
    plain = engine_over(executor, drafts=False).generate(asked)
    engine, drafted = engine_over(executor), with_history(asked, plain)
    finished: dict[SampleKey, Sample] = {}
    for request in drafted:
        engine.add(request)
    while engine.counters.plans < 6:
        finished |= {one.sample.key: one.sample for one in engine.step()}
    finished |= {one.sample.key: one.sample for one in engine.drain()}
    by_id = {request.request_id: request for request in drafted}
    some = engine.unfinished()
    kept = engine.abort(some)
    assert any(len(one) > 7 for one in kept), "some were to be in the middle"
    before = engine.counters.accepted_tokens
    for request_id, one in zip(some, kept, strict=True):
        engine.add(replace(resume(by_id[request_id], one), request_id=1000 + request_id))
    while not engine.is_idle:
        finished |= {one.sample.key: one.sample for one in engine.step()}
    check(WORLDS[FAST][0], asked, [finished[request.key] for request in asked])
    assert engine.counters.accepted_tokens > before


def test_nothing_is_compiled_after_warm_up_and_books_come_back_after_a_release(x64: None):
    executor = executor_of("llama", 1, 1, gathered=True, decode_steps=16, proposer=ROOMY)
    executor.warm_up()
    asked = requests(2, 3, 30)
    plain = engine_over(executor, drafts=False).generate(asked)
    drafted = [
        replace(request, history=DraftIndex.build([sample.token_ids], [1.0], LENGTHS))
        for request, sample in zip(asked, plain, strict=True)
    ]
    engine = engine_over(executor)
    engine.generate(drafted)
    assert engine.counters.accepted_tokens > 0
    books = executor._histories
    assert books is not None
    executor.release()
    assert executor._histories is None
    assert books.arrays.texts.is_deleted()
    executor.allocate()
    engine = engine_over(executor)
    again = engine.generate(drafted)
    assert engine.counters.accepted_tokens > 0
    assert [s.token_ids.tolist() for s in again] == [s.token_ids.tolist() for s in plain]
    assert executor.recompiles == 0
    for shape in executor.shapes():
        if shape[0] == "decode":
            executor._now._compiled.pop(shape)
    engine_over(executor, drafts=False).generate(asked)
    assert executor.recompiles > 0
