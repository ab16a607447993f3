"""Losses of the policy and of the critic: pure functions of (log-probabilities or values, TokenBatch, options).

Each returns an unnormalised sum and its denominator; so do the metrics. Microbatches of a minibatch are added up and
the division happens once, which makes the result independent of how the minibatch was cut. docs/your-algorithm.md lists
published methods, with their equations and the settings that give them.

Conventions follow verl: log-ratios are clamped to ±20 before the exponential, the dual clip acts on negative advantages
only, the weights of `algorithm.rollout_correction` multiply the policy loss and neither KL nor entropy. Departures:
`seq-mean-*` divide by the number of sequences that have tokens to learn from; the dual clip is off at `clip_ratio_c =
0`; weights are not normalised over the batch, which would need all of it before the first gradient; tokens that
`rollout_rs` rejects are left out of losses, their denominators and metrics, but not of advantages, which are computed
before.

Source of the routers' loss: Fedus et al. 2021 (arXiv:2101.03961, §2.2), the number of experts times Σ (share of tokens
that chose an expert · its mean probability), on transformers' scale: an even load gives the number of experts per
token. Departures: means are over a microbatch's tokens, so the cut of a batch has a small influence; each layer has a
separate loss, where transformers multiplies means over all layers, in which uneven layers can cancel. Source of the
distillation loss: Agarwal et al. 2023 (arXiv:2306.13649), eq. 1, as in TRL's GKDTrainer; of the critic's: the squared
error with clipped values of Schulman et al.'s implementation of PPO (arXiv:2005.12729, §3), halved as in verl.

Dims: R rows, T tokens, L layers, X experts. All arrays [R, T] are about the token that a column predicts (see
`packing`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.config import ActorSection, Config, RolloutCorrectionSection
from jaxrl.training.advantages import kl_estimate
from jaxrl.training.packing import Array, TokenBatch

if TYPE_CHECKING:
    from jaxrl.models.experts import Routing


class Fraction(NamedTuple):
    """A mean in two parts: add up both over microbatches, divide once."""

    total: jax.Array
    denominator: jax.Array


class LossTerms(NamedTuple):
    """One microbatch's contribution."""

    total: jax.Array  # the objective's unnormalised sum; its gradient is what accumulates
    denominator: jax.Array  # divides the minibatch's sum (tokens or sequences, by `loss_agg_mode`)
    means: dict[str, Fraction]  # metrics as sums and denominators, under their public names
    maxima: dict[str, jax.Array]  # metrics for which the largest value counts


def compute(
    logprobs: jax.Array, entropy: jax.Array, batch: TokenBatch, config: Config, named: jax.Array | None = None
) -> LossTerms:
    """The objective of a microbatch: policy loss + KL loss + distillation loss - entropy bonus, with metrics.

    `logprobs`, `entropy`: [R, T] of the policy in training; the entropy is that of the temperature-scaled distribution
    before truncation, in nats. `named`: [R, T, K + 1], the policy's log-probabilities of `batch.teacher_ids`, and of
    all other tokens together.
    """
    actor, mode, correction = config.actor, config.algorithm.loss_agg_mode, config.algorithm.rollout_correction
    # With recorded log-probabilities as the ratio's denominator, the trainer's own are those of this very pass.
    ours = batch.old_logprobs if actor.old_logprobs == "recompute" else lax.stop_gradient(logprobs)
    ours = jnp.asarray(ours, logprobs.dtype)
    measured, maxima = rollout_mismatch(ours, batch)
    weights: jax.Array | None = None
    if correction.rollout_is != "none":
        weights, own, largest = rollout_weights(ours, batch, correction)
        measured, maxima = measured | own, maxima | largest
    if correction.rollout_rs:
        batch, own, largest = without_rejected(ours, batch, correction)
        measured, maxima = measured | own, maxima | largest
    per_token, means = policy_loss(logprobs, batch, actor)
    means = {name: Fraction(_masked_sum(value, batch), _num_tokens(batch)) for name, value in means.items()}
    if weights is not None:
        per_token *= weights.astype(per_token.dtype)
    denominator = aggregate_denominator(batch, mode)
    pg_loss = aggregate_sum(per_token, batch, mode)
    means["actor/pg_loss"] = Fraction(pg_loss, denominator)
    means["actor/entropy"] = Fraction(_masked_sum(entropy, batch), _num_tokens(batch))
    total = pg_loss
    if actor.entropy_coeff:
        total -= actor.entropy_coeff * aggregate_sum(entropy, batch, mode)
    if actor.use_kl_loss:
        kl_loss = aggregate_sum(kl_estimate(logprobs, batch.ref_logprobs, actor.kl_loss_type), batch, mode)
        means["actor/kl_loss"] = Fraction(kl_loss, denominator)
        total += actor.kl_loss_coef * kl_loss
    if named is not None:
        teacher = config.algorithm.teacher
        divergence = generalized_jsd(named, jnp.asarray(batch.teacher_logprobs, named.dtype), teacher.beta)
        distillation = aggregate_sum(divergence, batch, mode)
        means["actor/distillation_loss"] = Fraction(distillation, denominator)
        total += teacher.coef * distillation
    return LossTerms(total, denominator, lax.stop_gradient(means | measured), maxima)


def policy_loss(logprobs: jax.Array, batch: TokenBatch, actor: ActorSection) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss per token, and per-token metrics: [R, T] each.

    `loss_mode=vanilla`, the clipped surrogate: max(-A·r, -A·clip(r, 1-low, 1+high)), and with a dual clip at most -A·c
    where A < 0. r is the token's ratio, or the geometric mean of its sequence's (`ratio_level=sequence`). `cispo`: A
    times the log-probability, weighted by the clipped ratio, which has no gradient. `reinforce`: the same unweighted.
    """
    log_ratio = _masked(logprobs - batch.old_logprobs, batch)
    negative_kl = jnp.clip(log_ratio, -20.0, 20.0)
    if actor.ratio_level == "sequence":
        mean = sequence_sum(lax.stop_gradient(log_ratio), batch) / jnp.maximum(batch.sequence_length, 1)
        # value of the sequence's ratio, gradient of the token's own log-probability (GSPO, eq. 14); verl's cap of 10
        log_ratio = jnp.minimum(mean + log_ratio - lax.stop_gradient(log_ratio), 10.0)
    else:
        log_ratio = negative_kl
    ratio = jnp.exp(log_ratio)
    advantages = jnp.asarray(batch.advantages)
    metrics = {"actor/ppo_kl": -negative_kl}
    if actor.loss_mode == "reinforce":
        return -advantages * logprobs, metrics
    within = jnp.clip(ratio, 1.0 - actor.clip_ratio_low, 1.0 + actor.clip_ratio_high)
    if actor.loss_mode == "cispo":
        metrics["actor/pg_clipfrac"] = (ratio != within).astype(ratio.dtype)
        return -lax.stop_gradient(within) * advantages * logprobs, metrics
    plain, clipped = -advantages * ratio, -advantages * within
    loss = jnp.maximum(plain, clipped)
    metrics["actor/pg_clipfrac"] = (clipped > plain).astype(ratio.dtype)
    if actor.clip_ratio_c:
        bound = -advantages * actor.clip_ratio_c
        bounded = (advantages < 0) & (loss > bound)
        metrics["actor/pg_clipfrac_lower"] = bounded.astype(ratio.dtype)
        loss = jnp.where(bounded, bound, loss)
    return loss, metrics


def generalized_jsd(student: jax.Array, teacher: jax.Array, beta: float) -> jax.Array:
    """β KL(teacher || M) + (1 - β) KL(student || M) with M = β teacher + (1 - β) student; at β = 0 KL(teacher ||
    student) and at β = 1 KL(student || teacher), to which it tends when it is divided by β or 1 - β. Of finite
    log-probabilities [..., K] of the same K events, of which one occurs."""

    def kl(p: jax.Array, q: jax.Array) -> jax.Array:
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

    if beta in (0, 1):
        return kl(student, teacher) if beta else kl(teacher, student)
    mixture = jnp.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def compute_values(values: jax.Array, batch: TokenBatch, config: Config) -> LossTerms:
    """The critic's objective of a microbatch: half the squared error of `values` [R, T] to the returns, with metrics.

    Per token it is the larger of two errors: of the value, and of the value clipped to `cliprange_value` around what it
    was before the step's updates. So a value that has moved further than that towards the return has no gradient.
    `critic/vf_clipfrac`: the share of tokens where the clipped error is larger.
    """
    before, returns = jnp.asarray(batch.values), jnp.asarray(batch.returns)
    reach, mode = config.critic.cliprange_value, config.algorithm.loss_agg_mode
    plain = jnp.square(values - returns)
    clipped = jnp.square(jnp.clip(values, before - reach, before + reach) - returns)
    total = 0.5 * aggregate_sum(jnp.maximum(plain, clipped), batch, mode)
    denominator = aggregate_denominator(batch, mode)
    means = {
        "critic/vf_loss": Fraction(total, denominator),
        "critic/vf_clipfrac": Fraction(_masked_sum((clipped > plain).astype(values.dtype), batch), _num_tokens(batch)),
        "critic/vpred_mean": Fraction(_masked_sum(values, batch), _num_tokens(batch)),
    }
    return LossTerms(total, denominator, lax.stop_gradient(means), {})


def aggregate_sum(values: jax.Array, batch: TokenBatch, mode: str) -> jax.Array:
    """The scalar numerator of a `loss_agg_mode` over [R, T]."""
    if mode == "seq-mean-token-mean":
        values = values / jnp.maximum(batch.sequence_length, 1)
    return _masked_sum(values, batch)


def aggregate_denominator(batch: TokenBatch, mode: str) -> jax.Array:
    """The denominator of the minibatch: tokens for `token-mean`, else sequences. Scalar float."""
    if mode == "token-mean":
        return _num_tokens(batch)
    return jnp.sum(batch.num_sequences).astype(jnp.float32)


def rollout_weights(
    ours: Array, batch: TokenBatch, options: RolloutCorrectionSection
) -> tuple[jax.Array, dict[str, Fraction], dict[str, jax.Array]]:
    """min(π_ours / π_rollout, threshold) per token or per sequence, [R, T], and metrics (TIS in
    docs/your-algorithm.md).

    π_rollout sampled the token, so the weight also corrects for an earlier version where `old_logprobs` were
    recomputed. Where they are the recorded ones, `ours` come from the policy in training. Neither carries a gradient.

    `rollout_is_mean`: the mean over tokens of the weights. `rollout_is_max`: the largest before truncation, at most
    e^20. `rollout_is_ratio_fraction_high`: the share of tokens, or of sequences, with a truncated weight.
    """
    log_ratio = _masked(jnp.asarray(ours) - batch.rollout_logprobs, batch)
    if options.rollout_is == "sequence":
        log_ratio = sequence_sum(log_ratio, batch)
    ratio = jnp.exp(jnp.clip(log_ratio, -20.0, 20.0))
    weights = jnp.minimum(ratio, options.rollout_is_threshold)
    means = {
        "rollout_corr/rollout_is_mean": Fraction(_masked_sum(weights, batch), _num_tokens(batch)),
        "rollout_corr/rollout_is_ratio_fraction_high": _share(
            ratio > options.rollout_is_threshold, batch, options.rollout_is == "sequence"
        ),
    }
    return weights, means, {"rollout_corr/rollout_is_max": jnp.max(_masked(ratio, batch), initial=0.0)}


def without_rejected(
    ours: Array, batch: TokenBatch, options: RolloutCorrectionSection
) -> tuple[TokenBatch, dict[str, Fraction], dict[str, jax.Array]]:
    """The batch without the tokens, or whole sequences, that some criterion of `rollout_rs` rejects; and metrics.

    Source: Liu et al. 2025, "When Speed Kills Stability" (geometric and masked importance sampling), in verl's terms.
    With l = log(π_ours / π_rollout) of a token, clamped to ±20, its divergence is k1 = -l, k2 = l²/2 or k3 = e^l - 1 -
    l; a criterion looks at a token's own, or at the sum, mean or maximum over its sequence. k1 must lie between the
    logarithms of two ratios, k2 and k3 below a threshold (`RolloutCorrectionSection.criteria`).

    `rollout_rs_masked_fraction`: the share of tokens that are rejected. `rollout_rs_seq_masked_fraction`: that of
    sequences with such a token. Per criterion: its mean over tokens, its maximum, and the shares of tokens, or of
    sequences, above and (k1) below what is allowed.
    """
    log_ratio = jnp.clip(_masked(jnp.asarray(ours) - batch.rollout_logprobs, batch), -20.0, 20.0)
    length = jnp.maximum(batch.sequence_length, 1)
    kept = jnp.ones(log_ratio.shape, bool)
    means: dict[str, Fraction] = {}
    maxima: dict[str, jax.Array] = {}
    for name, (low, high) in options.criteria.items():
        over, _, kind = name.rpartition("_")
        value = {"k1": -log_ratio, "k2": 0.5 * jnp.square(log_ratio), "k3": jnp.expm1(log_ratio) - log_ratio}[kind]
        match over:
            case "seq_sum":
                value = sequence_sum(value, batch)
            case "seq_mean":
                value = sequence_sum(value, batch) / length
            case "seq_max":  # k2 and k3 are not negative
                value = jnp.max(jnp.where(_same_sequence(batch), _masked(value, batch)[:, None, :], 0.0), axis=-1)
        kept &= (value >= low) & (value <= high)
        metric = f"rollout_corr/rollout_rs_{name}"
        means[f"{metric}_mean"] = Fraction(_masked_sum(value, batch), _num_tokens(batch))
        means[f"{metric}_fraction_high"] = _share(value > high, batch, over != "token")
        if kind == "k1":
            means[f"{metric}_fraction_low"] = _share(value < low, batch, over != "token")
        maxima[f"{metric}_max"] = jnp.max(jnp.where(jnp.asarray(batch.loss_mask) > 0, value, -jnp.inf))
    left = sequence_sum(kept.astype(jnp.float32), batch)
    means["rollout_corr/rollout_rs_masked_fraction"] = _share(~kept, batch, False)
    means["rollout_corr/rollout_rs_seq_masked_fraction"] = _share(left < batch.sequence_length, batch, True)
    each = _masked(kept / jnp.maximum(left, 1), batch)  # of the n tokens that a sequence still has 1 / n
    smaller = dataclasses.replace(
        batch,
        loss_mask=jnp.where(kept, batch.loss_mask, 0),
        sequence_length=jnp.round(left).astype(jnp.int32),
        num_sequences=jnp.round(jnp.sum(each, axis=1)).astype(jnp.int32),
    )
    return smaller, means, maxima


def rollout_mismatch(ours: Array, batch: TokenBatch) -> tuple[dict[str, Fraction], dict[str, jax.Array]]:
    """How far the rollout's log-probabilities are from the trainer's (`ours`), same weights or not.

    `kl`: mean of rollout - ours, the k1 estimate of KL(rollout || trainer). `k3_kl`: its low-variance estimate.
    `log_ppl_abs_diff`: the mean over sequences of the absolute value of (mean over tokens of rollout - ours).
    `logprob_abs_diff_max`: the largest difference at one token.
    """
    gap = _masked(batch.rollout_logprobs - ours, batch)
    count = _num_tokens(batch)
    by_sequence = jnp.abs(sequence_sum(gap, batch)) / jnp.square(jnp.maximum(batch.sequence_length, 1))
    back = jnp.clip(-gap, -20.0, 20.0)
    means = {
        "rollout_corr/kl": Fraction(_masked_sum(gap, batch), count),
        "rollout_corr/k3_kl": Fraction(_masked_sum(jnp.expm1(back) - back, batch), count),
        "rollout_corr/log_ppl_abs_diff": Fraction(
            _masked_sum(by_sequence, batch), jnp.sum(batch.num_sequences).astype(jnp.float32)
        ),
    }
    return means, {"rollout_corr/logprob_abs_diff_max": jnp.max(jnp.abs(gap), initial=0.0)}


def sequence_sum(values: jax.Array, batch: TokenBatch) -> jax.Array:
    """The sum of masked `values` over each token's own sample, at every token: [R, T] -> [R, T].

    A comparison and a reduction that XLA fuses, instead of a scatter-add: on GPUs that would add up in any order.
    """
    return jnp.sum(jnp.where(_same_sequence(batch), _masked(values, batch)[:, None, :], 0.0), axis=-1)


def _same_sequence(batch: TokenBatch) -> jax.Array:
    """bool [R, T, T]: whether two tokens are of one sample."""
    return jnp.asarray(batch.segment_ids)[:, :, None] == jnp.asarray(batch.segment_ids)[:, None, :]


def _share(found: jax.Array, batch: TokenBatch, of_sequences: bool) -> Fraction:
    """The share of tokens with `found` [R, T], or of sequences, whose tokens all have it or none."""
    found = found.astype(jnp.float32)
    if of_sequences:
        total = _masked_sum(found / jnp.maximum(batch.sequence_length, 1), batch)
        return Fraction(total, jnp.sum(batch.num_sequences).astype(jnp.float32))
    return Fraction(_masked_sum(found, batch), _num_tokens(batch))


def _masked(values: Array, batch: TokenBatch) -> jax.Array:
    # where, not a product: masked entries may be anything
    return jnp.where(jnp.asarray(batch.loss_mask) > 0, values, 0.0)


def _masked_sum(values: jax.Array, batch: TokenBatch) -> jax.Array:
    return jnp.sum(_masked(values, batch))


def _num_tokens(batch: TokenBatch) -> jax.Array:
    return jnp.sum(jnp.asarray(batch.loss_mask) > 0).astype(jnp.float32)


# ---------------------------------------------------------------- how evenly a microbatch's routers load experts

LOAD = "moe/load"


class Load(NamedTuple):
    """Sums over tokens: how many chose each expert, and the probabilities of each, [X] (or of all layers [L, X]);
    and the number of tokens."""

    chosen: jax.Array
    probabilities: jax.Array
    tokens: jax.Array


def load_of(routing: Routing, is_token: jax.Array) -> Load:
    """The load of one layer; `is_token` [R, T]: padding is not counted."""
    assert routing.probabilities is not None
    probabilities = routing.probabilities
    each, dtype = is_token.astype(jnp.int32), probabilities.dtype
    hits = jnp.zeros(probabilities.shape[-1], jnp.int32).at[routing.experts].add(each[..., None])
    mean = jnp.einsum("rt,rtx->x", each.astype(dtype), probabilities)
    return Load(hits.astype(dtype), mean, jnp.sum(each).astype(dtype))


def with_load(terms: LossTerms, load: Load, coef: float) -> LossTerms:
    """The loss with the mean over layers of the load's loss times `coef` (`actor.router_aux_loss_coef`), and the
    metrics."""
    shares, means = load.chosen / load.tokens[:, None], load.probabilities / load.tokens[:, None]
    own = {LOAD: Fraction(load.chosen, jnp.sum(load.tokens) / load.tokens.size)}
    total = terms.total
    if coef:
        uneven = jnp.mean(jnp.sum(shares * means, axis=-1)) * shares.shape[-1]
        total += coef * uneven * terms.denominator
        own["moe/aux_loss"] = Fraction(uneven * terms.denominator, terms.denominator)
    return terms._replace(total=total, means=terms.means | lax.stop_gradient(own))


def load_metrics(load: jax.Array, per_token: int) -> dict[str, jax.Array]:
    """`moe/*` of an update, from the share of tokens that chose each expert, [L, X].

    `load_max`: the most loaded expert of any layer, over the mean of all. `load_cv`: standard deviation over mean of
    the experts' loads, averaged over layers. `dropped`: the share of choices that no expert computed; always 0.
    """
    mean = jnp.mean(load, axis=-1)
    return {
        "moe/load_max": jnp.max(load / mean[:, None]),
        "moe/load_cv": jnp.mean(jnp.std(load, axis=-1) / mean),
        "moe/dropped": jnp.round(1 - jnp.mean(jnp.sum(load, axis=-1)) / per_token, 6),
    }
