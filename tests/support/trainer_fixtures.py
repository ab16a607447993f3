"""A tiny model, and batches of random samples with ragged lengths, as factories: fixtures, for the `conftest.py` of
folders that train."""

from __future__ import annotations

import dataclasses
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
from jaxrl.kernels.reference import MaskInputs, packed_attention
from jaxrl.models import decoder
from jaxrl.models.config import ModelConfig
from jaxrl.sharding.mesh import make_mesh
from jaxrl.training.packing import BatchShape, TokenBatch, microbatch_shapes, row_length
from jaxrl.training.programs import TrainPrograms
from jaxrl.training.trainer import MeshTrainer
from jaxrl.types import ENVIRONMENT, Group, Prompt, Sample, SampleKey, TrainBatch

WIDE: dict[str, Any] = {"actor__dtype": "float64", "actor__param_dtype": "float64"}
EVERYTHING_ON: dict[str, Any] = {
    "actor__use_kl_loss": True,
    "actor__entropy_coeff": 0.1,
    "actor__clip_ratio_c": 3.0,
    "actor__remat": "dots",
    "rollout__temperature": 0.8,
}
EXACT = WIDE | EVERYTHING_ON | {"actor__ratio_level": "sequence", "algorithm__loss_agg_mode": "seq-mean-token-mean"}
"""Tests share options, models and rows, because every other combination is compiled again."""
LONG = (BatchShape(1, row_length(96)),)
ODD = dataclasses.replace(TRAINED, num_heads=3, num_kv_heads=1, tie_word_embeddings=False)  # which no mesh splits


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
    found.microbatches = rows or microbatch_shapes(config, model, devices, found.decoder.attention)[-1:]
    found.is_warm, found.recompiles = False, 0
    return found


@pytest.fixture
def make_trainer() -> Callable[..., MeshTrainer]:
    """A trainer on the first `devices` devices; the same random weights every time. `rows` and `interpret` as in
    `programs_of`; with options that `TrainPrograms` has besides, its programs are its own."""

    def make(
        config: Config,
        devices: int = 1,
        model: ModelConfig = TRAINED,
        rows: Any = (),
        interpret: Any = False,
        **own: Any,
    ) -> MeshTrainer:
        if own:
            programs = TrainPrograms(config, model, make_mesh(jax.devices()[:devices]), **own)
        else:
            programs = programs_of(config, model, devices, rows, interpret)
        return MeshTrainer(programs, weights_of(model, config.actor.param_dtype))

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
        segments, positions = jnp.asarray(batch.segment_ids), jnp.asarray(batch.positions)
        first = positions - windows[kind[0] if kind else 0] + 1 if any(kind.window for kind in model.kinds) else None
        mask = MaskInputs(segments, positions, segments, first)
        return packed_attention(q, k, v, mask, model.attn_logit_softcapping, sinks)

    return decoder.forward_scan(
        params,
        jnp.asarray(batch.tokens),
        jnp.asarray(batch.positions),
        attend,
        model,
        dtype=params["embed"].dtype,
    )


def whole_log_p(params: Any, batch: TokenBatch, model: ModelConfig, temperature: float = 1.0) -> jax.Array:
    """Log-probabilities [R, T, V] of what may follow each token of padded samples."""
    return jax.nn.log_softmax(decoder.logits(params, whole_hidden(params, batch, model), model) / temperature, axis=-1)


def of_tokens(log_p: jax.Array, batch: TokenBatch) -> jax.Array:
    """[R, T]: of each token after those before it; 0 at the first."""
    chosen = jnp.take_along_axis(log_p[:, :-1], jnp.asarray(batch.tokens)[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


def assert_whole_logprobs(
    found: Sequence[np.ndarray], params: Any, batch: TrainBatch, model: ModelConfig, temperature: float = 0.8
) -> None:
    """`found`, of each response's tokens, is what a whole pass over padded samples says; 0 where nothing is learnt."""
    rows = padded(batch)

    @jax.jit
    def whole(params: Any) -> jax.Array:
        return of_tokens(whole_log_p(params, rows, model, temperature), rows) * rows.loss_mask

    expected = np.asarray(whole(jax.tree.map(np.asarray, params)))
    for values, prompt, own in zip(found, batch.prompts, expected, strict=True):
        start = len(prompt.token_ids)
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, own[start : start + len(values)], rtol=1e-6)


def distance(found: Any, expected: Any) -> float:
    a, b = (np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(tree)]) for tree in (found, expected))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def copied(tree: Any) -> Any:
    """As numpy: an update donates the arrays of a trainer."""
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)
