"""What the benchmarks of the engine share: weights, executors, requests."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bench.harness import Model, model_of
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import init
from jaxrl.models.loading import load_model
from jaxrl.rollout import kv_cache
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.rules import train_shardings
from jaxrl.types import SampleKey, SamplingParams

BLOCK = 16
"""Positions per block of the engine's cache."""


def build_params(model: Model, config: ModelConfig, mesh: Any, dtype: str, seed: int) -> Any:
    """Weights in training form on the mesh: those of a path, or random ones of a shape."""
    if model.path:
        return load_model(model.resolved(), mesh, dtype)[1]
    make = jax.jit(lambda key: init(config, key, dtype), out_shardings=train_shardings(config, mesh))
    return make(jax.random.key(seed))


def layout_of(options: argparse.Namespace) -> Layout:
    return Layout(make_mesh(jax.devices()[: options.devices]), vars(options).get("tp", 1))


def build_executor(options: argparse.Namespace, params: Any, *, is_filled: bool = False, **sizes: Any) -> MeshExecutor:
    """An executor with weights and a pool.

    Args:
      is_filled: the pool holds random keys and values. Zeros would flatter: constant operands draw less power.
      sizes: of `ExecutorConfig`.
    """
    how = {"block_size": BLOCK, "decode_steps": options.decode_steps, "seed": options.seed}
    layout = layout_of(options)
    executor = MeshExecutor(model_of(options).config(), layout, ExecutorConfig(**how, max_tp=layout.tp, **sizes))
    executor.sync_weights(params, 0)
    executor.allocate(_random_pool(executor) if is_filled else None)
    return executor


def _random_pool(executor: MeshExecutor) -> kv_cache.Pool:
    shape, layout = executor.cache_shape, executor.layout
    draw = jax.jit(
        lambda key: jax.random.normal(key, shape.dims(layout), shape.dtype),
        out_shardings=kv_cache.pool_sharding(layout, shape),
    )
    keys = jax.random.split(jax.random.key(executor.config.seed, impl="rbg"), (shape.num_layers, 2))
    return [(draw(pair[0]), draw(pair[1])) for pair in keys]


def random_prompts(options: argparse.Namespace, count: int) -> list[tuple[int, ...]]:
    """Of `--prompt` tokens each."""
    vocab = model_of(options).config().vocab_size
    drawn = np.random.default_rng(options.seed).integers(vocab, size=(count, options.prompt))
    return [tuple(row) for row in drawn.tolist()]


def requests(prompts: Sequence[tuple[int, ...]], length: int) -> list[Request]:
    """One per prompt, of so many tokens, without a stop token."""
    params = SamplingParams(max_tokens=length)
    return [Request(i, SampleKey(0, i, 0), prompt, params) for i, prompt in enumerate(prompts)]
