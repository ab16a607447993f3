"""The engine on a mesh against whole float64 passes.

A token may depend on what is sampled and on nothing else: not on its row, its batch, chunks of its prompt, preemption,
an abort and a new start, nor on the mesh. In float64 that is exact, so tokens are compared for equality.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from recorder import Recorder
from small_models import engine_over, mixed, model_of, ready, weights_of
from whole_pass import check

from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.rollout.programs import MAX_STOP_IDS
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import train_shardings
from jaxrl.types import Sample, SampleKey

pytestmark = pytest.mark.usefixtures("x64")

SIZES = ExecutorConfig(
    num_slots=8,
    num_blocks=7,  # 48 positions of rows that may want 40 each: preemption
    block_size=8,
    max_length=40,
    max_prefill_tokens=16,
    decode_steps=4,
    dtype=jnp.float64,
    truncate=True,
)


def start(name: str, devices: int = 1, tp: int = 1, **options: Any) -> tuple[Engine, Recorder]:
    layout = Layout(make_mesh(jax.devices()[:devices]), tp)
    recorder = Recorder(ready(name, layout, replace(SIZES, max_tp=tp, **options)))
    return engine_over(recorder), recorder


OTHER_FORM = {"features_first": False, "fused_projections": False, "gathered": False}
"""Of the programs on a GPU; a CPU has features first, and decodes over gathered windows."""


@pytest.mark.parametrize(
    ("name", "devices", "tp", "form"), [("llama", 1, 1, {}), ("smollm2", 8, 2, {}), ("qwen2", 4, 4, OTHER_FORM)]
)
def test_tokens_and_log_probabilities_are_those_of_whole_passes(name: str, devices: int, tp: int, form: Any):
    engine, recorder = start(name, devices, tp, **form)
    asked = mixed(6 * max(1, devices // tp // 2), 3, 16)
    samples = engine.generate(asked)
    check(name, asked, samples, recorder)
    assert engine.counters.preemptions > 0, "the pool was to be too small"
    assert engine.counters.shared_tokens > 0, "samples of a prompt were to share its blocks"
    assert len({len(one) for one in samples}) > 4, "lengths were to be mixed"
    assert {one.finish_reason for one in samples} == {"stop", "length"}


def test_every_token_carries_the_version_of_its_weights():
    engine, recorder = start("llama")
    asked = mixed(6, 3, 16)
    for request in asked:
        engine.add(request)
    finished: dict[SampleKey, Sample] = {}
    for _ in range(3):
        finished |= {one.sample.key: one.sample for one in engine.step()}
    finished |= {one.sample.key: one.sample for one in engine.drain()}
    running = [engine.batcher.progress(i) for i in engine.unfinished()]
    before = {each.request.key: len(each.tokens) for each in running} | {k: len(one) for k, one in finished.items()}
    shardings = train_shardings(recorder.model, recorder.layout.mesh)
    # equal weights: equal tokens
    recorder.inner.sync_weights(jax.device_put(weights_of("llama", "float64"), shardings), 1)
    while not engine.is_idle:
        finished |= {one.sample.key: one.sample for one in engine.step()}
    check("llama", asked, [finished[request.key] for request in asked])
    for key, one in finished.items():
        assert one.versions.tolist() == [0] * before[key] + [1] * (len(one) - before[key])
    assert any(len(set(one.versions.tolist())) == 2 for one in finished.values())


def test_memory_phases():
    engine, recorder = start("llama")
    executor, asked = recorder.inner, mixed(2, 2, 16)
    arrays = jax.tree.leaves((executor._pool, executor._state))
    executor.release(weights=True)
    assert all(array.is_deleted() for array in arrays)
    engine.add(asked[0])
    with pytest.raises(RuntimeError, match="no weights or no KV pool"):
        engine.step()


def test_requests_that_cannot_run_are_refused_before_they_wait():
    executor = MeshExecutor(model_of("llama"), Layout(make_mesh(jax.devices()[:1]), 1), replace(SIZES, truncate=False))
    engine, request = Engine(executor, BatcherConfig(decode_steps=4)), mixed(6, 3, 16)[1]
    for words, changes in (
        ("need an engine built with truncate=True", {"top_p": 0.5}),
        (f"has {MAX_STOP_IDS + 1} ids; a row holds {MAX_STOP_IDS}", {"stop_token_ids": tuple(range(MAX_STOP_IDS + 1))}),
        (r"must be at most max_length \(40\)", {"max_tokens": 30}),
    ):
        with pytest.raises(ValueError, match=words):
            engine.add(replace(request, params=replace(request.params, **changes)))
        assert engine.is_idle
    engine.add(request)
