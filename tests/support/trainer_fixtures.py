"""A tiny model, and batches of random samples with ragged lengths, as factories: fixtures, for the `conftest.py` of
folders that train."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from keyword_options import with_options
from small_models import TRAINED

from jaxrl.config import Config
from jaxrl.kernels.reference import packed_attention
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.sharding.mesh import make_mesh
from jaxrl.training.packing import BatchShape, TokenBatch, microbatch_shapes
from jaxrl.training.programs import TrainPrograms
from jaxrl.training.trainer import MeshTrainer
from jaxrl.types import ENVIRONMENT, Group, Prompt, Sample, SampleKey, TrainBatch


@pytest.fixture
def model_config() -> ModelConfig:
    return TRAINED


@pytest.fixture
def make_config() -> Callable[..., Config]:
    """Options as `section__option=value` on top of small defaults."""

    def make(**options: Any) -> Config:
        values: dict[str, Any] = {
            "model": {"path": "unused"},
            "data": {"max_prompt_length": 16, "max_response_length": 32},
            "actor": {"ppo_max_token_len_per_gpu": 96, "logprob_chunk_tokens": 16, "optim": {"lr": 1e-2}},
        }
        return with_options(values, options)

    return make


@pytest.fixture
def make_batch() -> Callable[..., TrainBatch]:
    """`size` samples, four per prompt, with responses of 1 to `longest` tokens and random everything.

    The first response of each prompt is as long as allowed, which keeps the number of shapes, so of compilations, low.
    `same` makes the prompts of a group the same, as they are outside of tests; else each sample has tokens of its own.
    `turns`: with what an environment has answered here and there.
    """

    def make(size: int = 12, longest: int = 32, seed: int = 0, same: bool = False, turns: bool = False) -> TrainBatch:
        random = np.random.default_rng(seed)
        prompts, samples, advantages, old, ref = [], [], [], [], []
        for i in range(size):
            length = int(random.integers(1, longest + 1)) if i % 4 else longest
            tokens = random.integers(0, TRAINED.vocab_size, int(random.integers(1, 17)))
            prompt = Prompt(0, i // 4, tuple(tokens.tolist()), "", "test")
            prompts.append(prompts[-1] if same and i % 4 else prompt)
            logprobs = (np.log(1 / TRAINED.vocab_size) + 0.3 * random.normal(size=(3, length))).astype(np.float32)
            sample = Sample.empty(SampleKey(0, i // 4, i % 4))
            sample.token_ids = random.integers(0, TRAINED.vocab_size, length).astype(np.int32)
            sample.rollout_logprobs, sample.sampled_logprobs = logprobs[0], logprobs[0]
            sample.versions = np.zeros(length, np.int32)
            if turns:
                answered = np.repeat(random.random(length // 4 + 1) < 0.4, 4)[: length - 2]
                sample.versions[1 : length - 1][answered] = ENVIRONMENT
            sample.reward = float(random.random())
            samples.append(sample)
            advantages.append(random.normal(size=length).astype(np.float32))
            old.append(logprobs[1])
            ref.append(logprobs[2])
        return TrainBatch(prompts, samples, advantages, old, ref, turn_masks(samples) if turns else None)

    return make


def turn_masks(samples: Sequence[Sample]) -> list[np.ndarray]:
    """What `batch_preparation.loss_masks` makes of samples with turns."""
    return [(sample.versions >= 0).astype(np.float32) for sample in samples]


@functools.cache
def weights_of(model: ModelConfig, dtype: str) -> Any:
    """The same random weights every time, as numpy."""
    return jax.tree.map(np.asarray, jax.jit(lambda key: decoder.init(model, key, dtype))(jax.random.key(0)))


_PROGRAMS: dict[Any, TrainPrograms] = {}
"""By all that decides them. A trainer has its own weights and sums, and programs keep nothing of who ran them."""


def programs_of(
    config: Config, model: ModelConfig, devices: int, rows: Sequence[BatchShape] = (), interpret: bool = False
) -> TrainPrograms:
    """Those of an earlier trainer of the same options, model and devices, as if they were new.

    Args:
      rows: the shapes of a microbatch; by default the largest alone, because each is a program.
    """
    key = (repr(config), model, devices, interpret, jax.config.jax_enable_x64)  # pyright: ignore
    if key not in _PROGRAMS:
        _PROGRAMS[key] = TrainPrograms(config, model, make_mesh(jax.devices()[:devices]), interpret=interpret)
    found = _PROGRAMS[key]
    found.microbatches = rows or microbatch_shapes(config, model, devices, found.packed_attention)[-1:]
    found.is_warm, found.recompiles = False, 0
    return found


@pytest.fixture
def make_trainer() -> Callable[..., MeshTrainer]:
    """A trainer on the first `devices` devices; the same random weights every time. `rows` and `interpret` as in
    `programs_of`; with options that `MeshTrainer` has besides, its programs are its own."""

    def make(
        config: Config,
        devices: int = 1,
        model: ModelConfig = TRAINED,
        rows: Any = (),
        interpret: Any = False,
        **own: Any,
    ) -> MeshTrainer:
        if not {"programs", "trainable", "total_updates"} & set(own):
            own["programs"] = programs_of(config, model, devices, rows, interpret)
        weights = weights_of(model, config.actor.param_dtype)
        return MeshTrainer(config, model, weights, make_mesh(jax.devices()[:devices]), **own)

    return make


def group_of(lengths: Sequence[int], rewards: Sequence[float | None], index: int = 0) -> Group:
    """Samples of these lengths and rewards, of a prompt of one token."""
    samples = [Sample.empty(SampleKey(0, index, i)) for i in range(len(lengths))]
    for sample, length, reward in zip(samples, lengths, rewards, strict=True):
        sample.token_ids, sample.versions, sample.reward = (
            np.zeros(length, np.int32),
            np.zeros(length, np.int32),
            reward,
        )
    return Group(Prompt(0, index, (1,), "", ""), samples)


def padded(batch: TrainBatch, width: int = 48) -> TokenBatch:
    """One sample per row, written independently of `pack`."""
    out = TokenBatch.zeros(len(batch), width)
    for i, (prompt, sample) in enumerate(zip(batch.prompts, batch.samples, strict=True)):
        start, stop = len(prompt.token_ids), len(prompt.token_ids) + len(sample)
        out.tokens[i, :stop] = [*prompt.token_ids, *sample.token_ids]
        out.segment_ids[i, :stop] = 1
        out.positions[i, :stop] = range(stop)
        mask = np.ones(len(sample)) if batch.loss_masks is None else batch.loss_masks[i]
        out.loss_mask[i, start:stop] = mask
        out.rollout_logprobs[i, start:stop] = sample.rollout_logprobs
        for name in ("advantages", "old_logprobs", "ref_logprobs", "values", "returns"):
            if (of_samples := getattr(batch, name)) is not None:
                getattr(out, name)[i, start:stop] = of_samples[i]
        out.sequence_length[i, :stop] = mask.sum()
        out.num_sequences[i] = 1
    return out


def whole_hidden(params: Any, batch: TokenBatch, model: ModelConfig) -> jax.Array:
    """Final hidden states [R, T, E] of padded samples, each layer over all of them at once."""
    windows = jnp.asarray([kind.window or 10**6 for kind in model.kinds])

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *more: Any) -> jax.Array:
        *kind, sinks = more if model.attention_sinks else (*more, None)
        rows = (jnp.asarray(batch.segment_ids), jnp.asarray(batch.positions), None)
        first = rows[1] - windows[kind[0] if kind else 0] + 1 if any(kind.window for kind in model.kinds) else None
        return packed_attention(q, k, v, *rows, first, model.attn_logit_softcapping, sinks)

    return decoder.forward_scan(
        params,
        jnp.asarray(batch.tokens),
        jnp.asarray(batch.positions),
        attend,
        model,
        dtype=params["embed"].dtype,
    )
