"""What the benchmarks of the engine share: weights, prompts, executors, and the engine as a case."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxrl.models.config import ModelConfig
from jaxrl.rollout import kv_cache
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sharding.layout import Layout
from jaxrl.types import SampleKey, SamplingParams

from .jax_cases import build_params
from .measure import Bench, Values
from .records import Model

BLOCK = 16
"""Positions per block of the engine's cache."""


@dataclass(slots=True)
class Setting:
    """What all cases of a benchmark share."""

    options: argparse.Namespace
    model: Model
    config: ModelConfig
    layout: Layout
    bench: Bench

    def params(self, dtype: str) -> Any:
        """Weights in training form on the layout's mesh."""
        return build_params(self.model, self.config, self.layout.mesh, dtype, self.options.seed)

    def prompts(self, count: int) -> np.ndarray:
        """int32 [count, prompt] of random tokens."""
        shape = (count, self.options.prompt)
        return np.random.default_rng(self.options.seed).integers(self.config.vocab_size, size=shape, dtype=np.int32)


def build_executor(
    setting: Setting,
    params: Any,
    dtype: str,
    *,
    slots: int,
    length: int,
    prefill_tokens: int,
    num_blocks: int = 0,
    is_filled: bool = False,
    numerics: str = "fast",
) -> MeshExecutor:
    """An executor with weights and a pool that holds `slots` sequences of `length` tokens per dp group.

    Args:
      num_blocks: of the pool instead, per dp group.
      is_filled: the pool holds random keys and values, not zeros.
      numerics: `actor.numerics`.
    """
    options = setting.options
    executor = MeshExecutor(
        setting.config,
        setting.layout,
        ExecutorConfig(
            num_slots=slots,
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_length=length,
            max_prefill_tokens=prefill_tokens,
            decode_steps=options.decode_steps,
            dtype=dtype,
            seed=options.seed,
            max_tp=options.tp,
            is_invariant=numerics == "invariant",
        ),
    )
    executor.sync_weights(params, 0)
    executor.allocate(_random_pool(executor) if is_filled else None)
    return executor


def _random_pool(executor: MeshExecutor) -> kv_cache.Pool:
    """Zeros would flatter: constant operands draw less power."""
    shape, layout = executor.cache_shape, executor.layout
    draw = jax.jit(
        lambda key: jax.random.normal(key, shape.dims(layout), shape.dtype),
        out_shardings=kv_cache.pool_sharding(layout, shape),
    )
    keys = jax.random.split(jax.random.key(executor.config.seed, impl="rbg"), (shape.num_layers, 2))
    return [(draw(pair[0]), draw(pair[1])) for pair in keys]


class EngineCase:
    """The real engine. No row decodes before all prompts are there: a plan that lacks prefill budget has no decode."""

    def __init__(self, setting: Setting, params: Any, prompts: np.ndarray, dtype: str) -> None:
        options, rows = setting.options, len(prompts)
        slots = -(-rows // setting.layout.dp)
        length, prefill_tokens = options.prompt + options.new, min(slots * options.prompt, options.prefill_tokens)
        sizes = {"slots": slots, "length": length, "prefill_tokens": prefill_tokens}
        self.executor = build_executor(setting, params, dtype, **sizes, numerics=options.numerics)
        self.engine = Engine(self.executor, BatcherConfig(decode_steps=options.decode_steps))
        self._first = requests(prompts, [1] * rows)
        self._all = requests(prompts, [options.new] * rows)
        self.tokens: list[np.ndarray] = []

    def __call__(self) -> Values:
        prefill_s = self._timed(self._first)
        seconds = self._timed(self._all)
        return {"seconds": seconds, "prefill_s": prefill_s, "decode_s": seconds - prefill_s}

    def _timed(self, wanted: list[Request]) -> float:
        began = time.perf_counter()
        samples = self.engine.generate(wanted)
        seconds = time.perf_counter() - began
        self.tokens = [sample.token_ids for sample in samples]
        assert [len(ids) for ids in self.tokens] == [request.params.max_tokens for request in wanted]
        return seconds

    def close(self) -> None:
        self.executor.release(weights=True)


def requests(prompts: np.ndarray, lengths: Sequence[int]) -> list[Request]:
    """One request per prompt, with its own number of tokens and no stop token."""
    return [
        Request(i, SampleKey(0, i, 0), tuple(prompt.tolist()), SamplingParams(max_tokens=int(length)))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
