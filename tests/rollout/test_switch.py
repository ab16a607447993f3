"""The engine changes its layout in the middle of a batch, and no token changes.

Walks run in processes of their own, in float64; one of them by default.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from checked_blocks import check_blocks
from own_process import alone, call
from small_models import engine_over, model_of, ready, requests, with_drafts
from whole_pass import check

from jaxrl.mechanisms.speculation.proposer import Drafting
from jaxrl.models.kv_layers import kv_layers
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.programs import ExecutorConfig, LayoutSizes
from jaxrl.scheduling.layouts.relayout import SwitchFailed, migrate_requests
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding import kv_migration, reshard
from jaxrl.sharding.compiled import CompileAhead
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.types import Sample

ROOT = Path(__file__).resolve().parents[2]
MAX_LENGTH = 96
DRAFTING = Drafting(num_responses=1, num_tokens=MAX_LENGTH, verify_tokens=64)
CHAIN = (1, 8, 2)
EVERY_PAIR = (1, 2, 1, 4, 1, 8, 2, 4, 2, 8, 4, 8, 1)  # all twelve ordered pairs of 1, 2, 4, 8
SIZES = ExecutorConfig(
    num_slots=3,
    num_blocks=40,
    block_size=8,
    max_length=MAX_LENGTH,
    max_prefill_tokens=16,
    decode_steps=2,
    max_tp=8,
    layouts=(LayoutSizes(2, 6, 70), LayoutSizes(4, 12, 110), LayoutSizes(8, 20, 150)),
)


def start(name: str, dtype: str, tp: int = 1, devices: Any = None, **options: Any) -> tuple[Engine, MeshExecutor]:
    sizes = replace(SIZES, dtype=jnp.dtype(dtype), **options)
    stacks = len(kv_layers(model_of(name), MAX_LENGTH, sizes.max_prefill_tokens, sizes.decode_steps).stacks)
    layouts = tuple(replace(each, num_blocks=each.num_blocks * stacks) for each in sizes.layouts)
    sizes = replace(sizes, num_blocks=sizes.num_blocks * stacks, layouts=layouts)
    executor = ready(name, Layout(make_mesh(devices), tp), sizes)
    return engine_over(executor), executor


def run(engine: Engine, asked: list[Request], degrees: tuple[int, ...], how: str) -> list[Sample]:
    """Runs requests; at least two steps lie between one change of layout and the next, and four rows are there."""
    for request in asked:
        engine.add(request)
    samples: dict[int, Sample] = {}
    due, step, ready = list(degrees), 0, 12
    while not engine.is_idle:
        decoded = how == "migrate" or all(progress.is_resident for progress in engine.batcher.running())
        if due and step >= ready and decoded and engine.batcher.num_running > 5:
            switched = engine.switch(due.pop(0), how)  # pyright: ignore[reportArgumentType]
            ready = step + 2
            assert switched.num_live > 1, "the batch was to be in the middle"
            assert (switched.num_moved > 0) == (how == "migrate")
            check_blocks(engine.batcher.blocks)
        for finished in engine.step():
            assert finished.request_id not in samples, "told twice"
            samples[finished.request_id] = finished.sample
        step += 1
    assert not due, f"the batch ended before {due}"
    return [samples[request.request_id] for request in asked]


# ---------------------------------------------------------------- what runs in a process of its own


def drafting_walk(how: str, degrees: tuple[int, ...]) -> None:
    """Layouts change while rows draft; every layout has places for indexes of its own."""
    engine, executor = start("smollm2", "float64", degrees[0], proposer=DRAFTING)
    asked = requests(18, 3)
    drafted = with_drafts(asked, engine.generate(asked))
    check("smollm2", asked, run(engine, drafted, degrees[1:], how))
    assert executor.tp == degrees[-1]
    assert executor._histories is not None
    assert executor._histories.uploads > 0, "in the last layout"
    assert 0.3 < engine.counters.accepted_tokens / engine.counters.proposed_tokens < 1


def walk(name: str, how: str, degrees: tuple[int, ...], **options: Any) -> None:
    engine, executor = start(name, "float64", degrees[0], **options)
    asked = requests()
    still = engine.generate(asked) if options else []  # codes are not what a whole pass has
    moved = run(engine, asked, degrees[1:], how)
    if options:
        assert [x.token_ids.tolist() for x in moved] == [x.token_ids.tolist() for x in still]
    else:
        check(name, asked, moved)
    flags = {(each.programs.features_first, each.programs.gathered) for each in executor._layouts.values()}
    assert flags == {(True, True)}, "on CPU"
    assert executor.tp == degrees[-1]
    assert engine.batcher.blocks.num_free(0) == executor.sizes.num_blocks - 1


def other_programs(how: str) -> None:
    """The forms of the programs that a GPU runs."""
    for first, fused in ((False, True), (True, False)):
        # padded for tp 4, 9/3 heads are 12/4: whole groups everywhere
        engine, executor = start(
            "smollm2", "float64", features_first=first, fused_projections=fused, gathered=False, max_tp=4
        )
        asked = requests(6, 3, 40)
        check("smollm2", asked, run(engine, asked, (4, 2), how))
        each = [layout.programs for layout in executor._layouts.values()]
        assert {(one.features_first, one.fused_projections, one.gathered) for one in each} == {(first, fused, False)}


def nothing_compiles(name: str) -> None:
    """Compiled ahead in the background, a walk up compiles nothing; nor do weights and KV move through the host."""
    engine, executor = start(name, "float32")
    executor.warm_up()
    CompileAhead(executor.programs_of((2, 4, 8))).wait()
    run(engine, requests(), (2, 4, 8), "migrate")
    assert executor.recompiles == 0


def failures(name: str) -> None:
    """A switch that fails: before anything has moved, halfway with a source of weights, and without one."""
    engine, executor = start(name, "float64", 2)
    asked = requests(5, 2, 40)
    halfway = pytest.raises(SwitchFailed, match=r"the switch from tp 2 failed halfway \(MemoryError: no room\)")
    for module, function, failure in (
        (reshard, "precompile", pytest.raises(MemoryError)),
        (kv_migration, "migrate", halfway),
        (reshard, "reshard", halfway),
    ):
        for request in asked:
            engine.add(request)
        samples = {}
        for _ in range(8):
            samples |= {one.request_id: one.sample for one in engine.step()}
        before = executor._params
        with _broken(module, function), failure as raised:
            engine.switch(4)
        if isinstance(raised.value, SwitchFailed):
            assert raised.value.is_usable
        else:
            assert executor._params is before, "nothing has moved"
        assert executor.tp == 2
        while not engine.is_idle:
            samples |= {one.request_id: one.sample for one in engine.step()}
        check(name, asked, [samples[request.request_id] for request in asked])
    for request in asked:
        engine.add(request)
    engine.step()
    executor.way_back = None
    with _broken(reshard, "reshard"), pytest.raises(SwitchFailed, match="no source of weights") as without:
        engine.switch(4)
    assert not without.value.is_usable


def _broken(module: Any, function: str) -> Any:
    return mock.patch.object(module, function, side_effect=MemoryError("no room"))


def across(name: str, left_tp: int, right_tp: int, drafting: Drafting | None = None, **more: Any) -> None:
    """Two workers; half of the first one's requests go on in the second, beside its own, in the middle of a batch."""
    halves = jax.devices()[:4], jax.devices()[4:]
    sizes: dict[str, Any] = {"max_tp": 4, "num_slots": 12, "num_blocks": 90, "layouts": (), "proposer": drafting}
    sizes |= more
    (left, left_executor), (right, right_executor) = (
        start(name, "float64", tp, half, **sizes) for tp, half in zip((left_tp, right_tp), halves, strict=True)
    )
    asked, own = requests(6, 3, 40), requests(2, 2, 40, first_id=100)
    expected = left.generate(asked) + right.generate(own)
    both = [*asked, *own] if drafting is None else with_drafts([*asked, *own], expected)
    for engine, theirs in ((left, both[: len(asked)]), (right, both[len(asked) :])):
        for request in theirs:
            engine.add(request)
    samples: dict[int, Sample] = {}
    for step in range(400):
        if step == 8:
            leaving = left.unfinished()[1::2]
            assert migrate_requests(left, right, leaving) > 0
            assert not set(leaving) & set(left.unfinished())
            check_blocks(left.batcher.blocks)
            check_blocks(right.batcher.blocks)
        for engine in (left, right):
            for finished in engine.drain() + engine.step() + engine.drain():  # programs of the halves, one at a time
                assert finished.request_id not in samples
                samples[finished.request_id] = finished.sample
        if left.is_idle and right.is_idle:
            break
    assert [samples[x.request_id].token_ids.tolist() for x in both] == [x.token_ids.tolist() for x in expected]
    assert (left_executor.tp, right_executor.tp) == (left_tp, right_tp)
    assert all((engine.counters.accepted_tokens > 0) == (drafting is not None) for engine in (left, right))


# ---------------------------------------------------------------- tests


def test_a_chain_in_the_middle_of_a_batch():
    alone(__file__, f"walk('smollm2', 'migrate', {CHAIN}) # float64")


WALKS = [
    # every pair of degrees, three shapes of heads
    ("llama", "migrate", EVERY_PAIR, {}),
    ("qwen2", "migrate", EVERY_PAIR, {}),
    ("smollm2", "recompute", EVERY_PAIR, {}),
    # windows, norms over all heads, head counts that no degree divides, experts
    *((f"{family}:1", "migrate", CHAIN, {}) for family in ("gemma2", "olmo2", "phi3", "gpt_oss", "mistral")),
    # codes of weights, and codes of keys and values, which move with their scales
    ("qwen3_moe:1", "recompute", (1, 2, 8, 4), {"quantization": "fp8"}),
    ("smollm2", "migrate", (1, 2, 8, 4, 1), {"quantization": "int8", "kv_codes": "int8"}),
    ("gemma2:1", "migrate", (1, 2, 8, 4, 1), {"kv_codes": "fp8"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how", "degrees", "options"), WALKS)
def test_walks(name: str, how: str, degrees: tuple[int, ...], options: dict[str, str]):
    alone(__file__, f"walk({name!r}, {how!r}, {degrees}, **{options}) # float64")


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "other_programs('migrate')",
        "nothing_compiles('smollm2')",
        "failures('llama')",
        "drafting_walk('migrate', (1, 4, 2))",
        "across('llama', 2, 2)",
        "across('gemma3_text:4', 1, 4, DRAFTING)",
        "across('qwen2', 4, 1, kv_codes='int8', quantization='int8')",
    ],
)
def test_what_else_may_happen_in_the_middle_of_a_batch(call: str):
    alone(__file__, f"{call} # {'float32' if 'nothing' in call else 'float64'}")


if __name__ == "__main__":
    call(globals())
