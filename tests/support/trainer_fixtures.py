"""A tiny model, and batches of random samples with ragged lengths, as factories: fixtures, for the `conftest.py` of
folders that train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from keyword_options import with_options
from small_models import TRAINED

from jaxrl.config import Config
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.sharding.mesh import make_mesh
from jaxrl.train.step import Trainer
from jaxrl.types import Prompt, Sample, SampleKey, TrainBatch


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
    """

    def make(size: int = 12, longest: int = 32, seed: int = 0, same: bool = False) -> TrainBatch:
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
            sample.reward = float(random.random())
            samples.append(sample)
            advantages.append(random.normal(size=length).astype(np.float32))
            old.append(logprobs[1])
            ref.append(logprobs[2])
        return TrainBatch(prompts, samples, advantages, old, ref)

    return make


@pytest.fixture
def make_trainer() -> Callable[..., Trainer]:
    """A trainer on the first `devices` devices; the same random weights every time."""

    def make(config: Config, devices: int = 1, model: ModelConfig = TRAINED, **options: Any) -> Trainer:
        params = decoder.init(model, jax.random.key(0), config.actor.param_dtype)
        return Trainer(config, model, params, make_mesh(jax.devices()[:devices]), **options)

    return make
