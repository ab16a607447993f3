"""Decode steps with the GPU kernels, interpreted on CPU, against what a CPU runs: the fused step, and single operations
where devices share key/value heads.

Float32: a response may take another token where two are all but tied, and from there on it is another response.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import train_shardings
from jaxrl.types import Sample, SampleKey, SamplingParams

VOCABULARY = 300
SIZES = ExecutorConfig(
    num_slots=4, num_blocks=14, block_size=8, max_length=48, max_prefill_tokens=16, decode_steps=4, dtype="float32"
)


@functools.cache
def model_of(family: str) -> ModelConfig:
    return ModelConfig(
        family=family,  # pyright: ignore[reportArgumentType]
        vocab_size=VOCABULARY,
        hidden_size=40,
        intermediate_size=56,
        num_layers=2,
        num_heads=12,
        num_kv_heads=4,
        head_dim=16,
        qkv_bias=family != "llama",
        qk_norm=family == "qwen3",
        tie_word_embeddings=family == "qwen2",
    )


@functools.cache
def weights_of(model: ModelConfig) -> Any:
    """Random weights, large enough for distributions that are far from flat; biases and norms that are not 0 and 1."""
    random = np.random.default_rng(1)

    def one(path: Any, x: jax.Array) -> np.ndarray:
        name = jax.tree_util.keystr(path)
        if "bias" in name or "norm" in name:
            return random.normal("norm" in name, 0.3, x.shape).astype(np.float32)
        return np.asarray(x) * np.float32(5)

    made = jax.jit(lambda key: decoder.init(model, key))(jax.random.key(0))
    return jax.tree_util.tree_map_with_path(one, made)


def generate(family: str, tp: int, **options: Any) -> tuple[list[Sample], MeshExecutor]:
    model, mesh = model_of(family), make_mesh(jax.devices()[:tp])
    executor = MeshExecutor(model, Layout(mesh, tp), replace(SIZES, max_tp=tp, **options))
    executor.sync_weights(jax.device_put(weights_of(model), train_shardings(model, mesh)), 0)
    executor.allocate()
    engine = Engine(executor, BatcherConfig(decode_steps=SIZES.decode_steps))
    return engine.generate(requests()), executor


def requests() -> list[Request]:
    """Three prompts with three samples each, which share the prompt's blocks; more than there are rows or blocks."""
    random = np.random.default_rng(0)
    made: list[Request] = []
    for p, length in enumerate((19, 3, 16)):
        prompt = tuple(random.integers(1, VOCABULARY, length).tolist())
        for s in range(3):
            params = SamplingParams(max_tokens=(20, 7, 13)[s], temperature=(1.0, 0.7, 0.0)[s], stop_token_ids=(7, 8))
            made.append(Request(len(made), SampleKey(0, p, s), prompt, params, share=p))
    return made


# the last: more devices than key/value heads
@pytest.mark.slow  # by default the test of codes runs the same step
@pytest.mark.parametrize(("family", "tp"), [("qwen3", 2), ("qwen2", 1), ("qwen2", 8)])
def test_it_draws_the_tokens_that_a_cpu_draws(family, tp):
    whole_groups = tp <= model_of(family).num_kv_heads
    gpu_form = {"fused_projections": whole_groups, "gathered": False, "attention": "pallas", "interpret": True}
    fused, executor = generate(family, tp, **gpu_form)
    plain, other = generate(family, tp)
    assert (executor._now.programs.fused, other._now.programs.fused) == (whole_groups, False)
    same = [np.array_equal(a.token_ids, b.token_ids) for a, b in zip(fused, plain, strict=True)]
    assert same.count(False) <= 1, "near-ties are rare"
    for a, b, equal in zip(fused, plain, same, strict=True):
        if equal:
            np.testing.assert_allclose(a.rollout_logprobs, b.rollout_logprobs, rtol=0, atol=1e-4)
    assert sum(map(len, fused)) > 60


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_it_reads_and_writes_codes_as_a_cpu_does(kind):
    """Of weights, and of keys and values: a float32 sum in another order may make the next code of a number."""
    gpu_form = {"fused_projections": True, "gathered": False, "attention": "pallas", "interpret": True}
    codes = {"quantization": kind, "kv_codes": kind}
    fused, executor = generate("qwen3", 2, **codes, **gpu_form)
    plain, _ = generate("qwen3", 2, **codes)
    assert executor._now.programs.fused
    assert executor._params["layers"][0]["qkv"].dtype == {"int8": np.int8, "fp8": jax.numpy.float8_e4m3fn}[kind]
    same = [np.array_equal(a.token_ids, b.token_ids) for a, b in zip(fused, plain, strict=True)]
    assert same.count(False) <= 1, "near-ties are rare"
    for a, b, equal in zip(fused, plain, same, strict=True):
        if equal:
            near = np.abs(a.rollout_logprobs - b.rollout_logprobs)
            assert np.median(near) < 1e-4
            assert near.max() < 0.05


@pytest.mark.parametrize(
    ("options", "fused"),
    [({}, True), ({"attention": "reference"}, False), ({"dtype": "float16"}, False)],
)
def test_what_a_step_needs(options, fused):
    """Merged weights, the kernels, and shapes and dtypes that they take; everything else goes by single operations."""
    sizes = replace(SIZES, **({"fused_projections": True, "gathered": False, "interpret": True} | options))
    executor = MeshExecutor(model_of("qwen2"), Layout(make_mesh(jax.devices()[:1]), 1), sizes)
    assert executor._now.programs.fused == fused
    assert not executor._now.programs.features_first
