"""Losses against numpy loops that follow the equations token by token: terms, gradients and metrics that
`test_verl.py` does not have."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import Config, from_mapping
from jaxrl.training import losses
from jaxrl.training.packing import TokenBatch

# one row: a sequence of 2 prompt + 3 response tokens, one of 1 + 2, two of padding
MASK = np.array([[0, 0, 1, 1, 1, 0, 1, 1, 0, 0]], np.float32)
SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 0, 0]], np.int32)
SEQUENCES = [[2, 3, 4], [6, 7]]
NEW = np.array([[9, 9, -1.0, -0.5, -2.0, 9, -0.2, -3.0, 9, 9]], np.float32)
OLD = np.array([[7, 7, -1.5, -0.4, -2.0, 7, -0.9, -2.0, 7, 7]], np.float32)
REF = np.array([[5, 5, -1.1, -0.9, -1.5, 5, -0.2, -2.5, 5, 5]], np.float32)
ROLLOUT = np.array([[3, 3, -1.4, -0.4, -2.2, 3, -0.8, -2.0, 3, 3]], np.float32)
ENTROPY = np.array([[4, 4, 1.0, 2.0, 0.5, 4, 1.5, 0.1, 4, 4]], np.float32)
ADVANTAGES = np.array([[8, 8, 1.0, 1.0, 1.0, 8, -2.0, -2.0, 8, 8]], np.float32)


@pytest.fixture
def batch() -> TokenBatch:
    return dataclasses.replace(
        TokenBatch.zeros(1, 10),
        segment_ids=SEGMENTS,
        loss_mask=MASK,
        advantages=ADVANTAGES,
        rollout_logprobs=ROLLOUT,
        old_logprobs=OLD,
        ref_logprobs=REF,
        sequence_length=np.array([[3] * 5 + [2] * 3 + [0] * 2], np.int32),
        num_sequences=np.array([2], np.int32),
    )


def config_of(actor=None, algorithm=None) -> Config:
    return from_mapping({"model": {"path": "x"}, "actor": actor or {}, "algorithm": algorithm or {}})


def by_hand(per_token, mode):
    """(sum, denominator) of {column: value}."""
    if mode == "token-mean":
        return sum(per_token.values()), len(per_token)
    sums = [sum(per_token[t] for t in s) / (len(s) if mode == "seq-mean-token-mean" else 1) for s in SEQUENCES]
    return sum(sums), len(sums)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_kl_and_entropy_terms(batch, mode):
    actor = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "mse", "entropy_coeff": 0.2}
    plain = losses.compute(NEW, ENTROPY, batch, config_of({}, {"loss_agg_mode": mode}))
    terms = losses.compute(NEW, ENTROPY, batch, config_of(actor, {"loss_agg_mode": mode}))
    columns = [t for s in SEQUENCES for t in s]
    kl, _ = by_hand({t: 0.5 * (NEW[0, t] - REF[0, t]) ** 2 for t in columns}, mode)
    entropy, _ = by_hand({t: ENTROPY[0, t] for t in columns}, mode)
    np.testing.assert_allclose(terms.total, plain.total + 0.3 * kl - 0.2 * entropy, rtol=1e-5)
    np.testing.assert_allclose(terms.means["actor/kl_loss"].total, kl, rtol=1e-5)
    np.testing.assert_allclose(terms.means["actor/entropy"].total, ENTROPY[MASK > 0].sum(), rtol=1e-6)


def test_gspo_gradient(batch, x64):
    """With one advantage per sequence, the gradient is that of s(θ)·A with s differentiated as a whole."""
    batch = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, batch)
    actor = {"ratio_level": "sequence", "clip_ratio_low": 0.9, "clip_ratio_high": 9.0}
    config = config_of(actor, {"loss_agg_mode": "seq-mean-token-mean"})

    def direct(new):
        ratios = [jnp.exp(jnp.mean(new[0, jnp.array(s)] - OLD.astype(float)[0, s])) for s in SEQUENCES]
        return sum(-ADVANTAGES[0, s[0]] * ratio for s, ratio in zip(SEQUENCES, ratios, strict=True))

    new = jnp.asarray(NEW, jnp.float64)
    found = jax.jit(jax.grad(lambda new: losses.compute(new, jnp.asarray(ENTROPY), batch, config).total))(new)
    np.testing.assert_allclose(found, jax.jit(jax.grad(direct))(new), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("old", ["recompute", "rollout"])
def test_metrics_of_the_mismatch_and_of_its_weights(batch, old):
    correction = {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 1.05}}
    mode = "vanilla" if old == "recompute" else "reinforce"
    terms = losses.compute(NEW, ENTROPY, batch, config_of({"old_logprobs": old, "loss_mode": mode}, correction))
    gap = (ROLLOUT - (OLD if old == "recompute" else NEW))[0]
    columns = [t for s in SEQUENCES for t in s]
    means = {
        "kl": (gap[columns].sum(), 5),
        "log_ppl_abs_diff": (sum(abs(gap[s].mean()) for s in SEQUENCES), 2),
        "k3_kl": (sum(np.exp(-gap[t]) - 1 + gap[t] for t in columns), 5),
        "rollout_is_mean": (sum(min(np.exp(-gap[t]), 1.05) for t in columns), 5),
        "rollout_is_ratio_fraction_high": (sum(np.exp(-gap[t]) > 1.05 for t in columns), 5),
    }
    for name, expected in means.items():
        np.testing.assert_allclose(terms.means[f"rollout_corr/{name}"], expected, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(terms.maxima["rollout_corr/logprob_abs_diff_max"], abs(gap[columns]).max(), rtol=1e-5)
    np.testing.assert_allclose(terms.maxima["rollout_corr/rollout_is_max"], np.exp(-gap[columns]).max(), rtol=1e-5)


@pytest.mark.parametrize("mode", ["vanilla", "cispo", "reinforce", "bypass"])
def test_gradients_of_the_losses(batch, mode, x64):
    """Per token: A·r where the clip is not active, A·clip(r), A, and A·w, where the weight w has no gradient."""
    batch = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, batch)
    actor, algorithm = {"loss_mode": mode, "clip_ratio_low": 0.3, "clip_ratio_high": 0.4}, {}
    if mode == "bypass":
        actor |= {"loss_mode": "reinforce", "old_logprobs": "rollout"}
        algorithm = {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 1.5}}
    config = config_of(actor, algorithm)
    found = jax.jit(jax.grad(lambda new: losses.compute(new, jnp.asarray(ENTROPY), batch, config).total))(
        np.asarray(NEW, float)
    )
    expected = np.zeros((1, 10))
    clipped = 0
    for t in (t for sequence in SEQUENCES for t in sequence):
        advantage, ratio = float(ADVANTAGES[0, t]), np.exp(float(NEW[0, t]) - float(OLD[0, t]))
        within = min(max(ratio, 0.7), 1.4)
        clipped += ratio != within
        beyond = ratio > 1.4 if advantage > 0 else ratio < 0.7
        weights = {"vanilla": 0.0 if beyond else ratio, "cispo": within, "reinforce": 1.0}
        weight = (weights | {"bypass": min(np.exp(float(NEW[0, t]) - float(ROLLOUT[0, t])), 1.5)})[mode]
        expected[0, t] = -advantage * weight
    assert clipped == 3, "of both signs"
    np.testing.assert_allclose(found, expected, rtol=1e-12)
