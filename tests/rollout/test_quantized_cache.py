"""A KV cache of codes: what stands in it follows from a position's own key and value, whatever wrote or reads it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import engine_over, ready, requests

from jaxrl.kernels.attention import choose_paged
from jaxrl.kernels.reference import Codes, MaskInputs, numbers, packed_attention
from jaxrl.rollout import kv_cache
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.types import Sample

SIZES = ExecutorConfig(
    num_slots=6, num_blocks=60, block_size=8, max_length=64, max_prefill_tokens=32, decode_steps=4, dtype=jnp.float64
)
PAGED: dict[str, Any] = {"gathered": False, "features_first": False}
ASKED = requests(4, 2, 30)


def drawn(asked: list[Request] = ASKED, name: str = "llama", **options: Any) -> tuple[list[Sample], Engine]:
    engine = engine_over(ready(name, Layout(make_mesh(jax.devices()[:1]), 1), replace(SIZES, **options)))
    return engine.generate(asked), engine


def tokens(samples: list[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


def test_windows_hold_what_blocks_do(x64):
    windows, blocks = (drawn(ASKED[:2], kv_codes="int8", **form)[0] for form in ({}, PAGED))
    assert tokens(windows) == tokens(blocks)


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
    ones = jnp.ones((1, 20), jnp.int32)
    wanted = packed_attention(q[0], known_k[0], known_v[0], MaskInputs(ones, at[0], ones))
    np.testing.assert_allclose(out[0], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(numbers(pool_k, jnp.float32)[0, :, 4], np.swapaxes(known_k[0, 0, :8], 0, 1))
