"""A KV cache of codes: what stands in it follows from a position's own key and value, whatever wrote or reads it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import VOCABULARY, model_of, requests, weights_of

from jaxrl.kernels.attention import choose_paged
from jaxrl.kernels.reference import Codes, numbers, packed_attention
from jaxrl.mechanisms.speculation.index import DraftIndex
from jaxrl.mechanisms.speculation.proposer import Drafting
from jaxrl.mechanisms.speculation.rule import DraftConfig, DraftRule
from jaxrl.rollout import kv_cache
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import train_shardings

SIZES = ExecutorConfig(
    num_slots=6, num_blocks=60, block_size=8, max_length=64, max_prefill_tokens=32, decode_steps=4, dtype=jnp.float64
)
PAGED: dict[str, Any] = {"gathered": False, "features_first": False}
DRAFTING = Drafting(num_responses=1, num_tokens=64, verify_tokens=18)
ASKED = requests(4, 2, 30)


def drawn(asked: Any = ASKED, name: str = "llama", **options: Any) -> tuple[list[list[int]], Engine]:
    layout = Layout(make_mesh(jax.devices()[:1]), 1)
    params = jax.device_put(weights_of(name, "float64"), train_shardings(model_of(name), layout.mesh))
    sizes = replace(SIZES, **options)
    executor = MeshExecutor(model_of(name), layout, sizes)
    executor.sync_weights(params, 0)
    executor.allocate()
    rule = None
    if sizes.proposer is not None:
        rule = partial(DraftRule, DraftConfig(sizes.proposer.window, sizes.proposer.verify_tokens))
    engine = Engine(executor, BatcherConfig(decode_steps=sizes.decode_steps, verify_rule=rule))
    return [sample.token_ids.tolist() for sample in engine.generate(asked)], engine


def drafts(responses: list[list[int]]) -> list[Any]:
    """The requests with their responses as history, every fifth token another one."""
    made = []
    for request, response in zip(ASKED, responses, strict=True):
        text = np.array(response)
        text[2::5] = (text[2::5] + 1) % VOCABULARY
        made.append(replace(request, history=DraftIndex.build([text], [1.0])))
    return made


def test_windows_hold_what_blocks_do(x64):
    few = ASKED[:2]
    coded, _ = drawn(few, kv_codes="int8")
    assert drawn(few, kv_codes="int8", **PAGED)[0] == coded


@pytest.mark.slow
def test_no_path_changes_a_token(x64):
    """Windows and blocks, chunks of prompts, preemption, drafts: in float64 the tokens are the same."""
    plain, _ = drawn()
    coded, _ = drawn(kv_codes="int8")
    assert coded != plain, "in so few bits"
    paths: dict[str, dict[str, Any]] = {
        "blocks and chunks": PAGED | {"max_prefill_tokens": 16},
        "preempted": {"num_blocks": 17},
    }
    for path, options in paths.items():
        found, engine = drawn(kv_codes="int8", **options)
        assert found == coded, path
        assert (engine.counters.preemptions > 0) == (path == "preempted")
    found, engine = drawn(drafts(coded), kv_codes="int8", proposer=DRAFTING)
    assert found == coded
    assert 0 < engine.counters.accepted_tokens < engine.counters.proposed_tokens


@pytest.mark.slow
def test_windows_of_layers_and_quantised_weights_go_with_it(x64):
    """Gemma 2: stacks of layers share the arrays, and blocks behind windows are freed."""
    both = {"kv_codes": "int8", "quantization": "int8"}
    once, _ = drawn(name="gemma2:1", **both)
    assert drawn(name="gemma2:1", **both, **PAGED)[0] == once


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_position_depends_on_its_own_key_and_value(kind):
    """Attention over codes is that over the numbers that they stand for, each position's of its own maximum."""
    random, layout = np.random.default_rng(0), Layout(make_mesh(jax.devices()[:1]), 1)
    shape = kv_cache.CacheShape(1, 2, 16, 5, 8, jnp.dtype(jnp.float32), kind)
    ((pool_k, pool_v),) = kv_cache.allocate(layout, shape)
    assert isinstance(pool_k, Codes)
    assert (pool_k.codes.dtype.itemsize, pool_k.scales.shape) == (1, (1, 2, 5, 8, 1))
    q, k, v = (jnp.asarray(random.normal(size=(1, 1, 20, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    k = k.at[0, 0, 3].multiply(100)
    k = k.at[0, 0, 4].set(0)
    at = jnp.arange(20, dtype=jnp.int32)[None, None]
    rows = jnp.array([[[4, 2, 3]]], jnp.int32), at, jnp.ones(at.shape, bool)
    how = choose_paged("auto", "cpu")
    attend = jax.jit(partial(kv_cache.attend, layout, how=how))
    out, (pool_k, _) = attend(q, k, v, (pool_k, pool_v), *rows)
    known_k, known_v = (numbers(kv_cache.coded(x, pool_k), jnp.float32) for x in (k, v))
    off = np.abs(known_k - k).max(-1) / np.maximum(np.abs(k).max(-1), 1e-30)
    assert 1e-4 < off.max() < {"int8": 0.5 / 127, "fp8": 2**-4}[kind] * 1.01
    wanted = packed_attention(q[0], known_k[0], known_v[0], jnp.ones((1, 20), jnp.int32), at[0])
    np.testing.assert_allclose(out[0], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(numbers(pool_k, jnp.float32)[0, :, 4], np.swapaxes(known_k[0, 0, :8], 0, 1))
