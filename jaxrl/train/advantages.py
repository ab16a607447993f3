"""Rewards -> advantages: one float32 per response token. numpy only; pure functions of groups.

Sources:

- GRPO: Shao et al. 2024, DeepSeekMath, §4.1.
- Dr. GRPO: Liu et al. 2025, §3.2: no division by the standard deviation.
- RLOO: Ahmadian et al. 2024, §3.
- REINFORCE++: Hu 2025, §3: per-token returns, whitened over the batch.
- KL in the reward: Ouyang et al. 2022, eq. 2.

Constants and conventions follow verl (unbiased standard deviation, ε = 1e-6
after the root; whitening with ε = 1e-8 under it, over the tokens that are learnt from: `masked_whiten`). Departures:
statistics are taken in float64; a sample without a partner in its group gets advantage 0 (verl: its raw score), because
there is nothing to compare it with; a token before a masked one keeps the return of what follows (verl starts again
behind each masked token, which is meant for padding).

All estimators except those in `config.checks.NEEDS_WHOLE_BATCH` use one group at a time, so a group's advantages are
known as soon as its last reward is, and its gradient can be streamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np

from jaxrl.config import AlgorithmSection
from jaxrl.train.kl import kl_estimate
from jaxrl.types import Group, Sample

_STD_EPS = 1e-6
_WHITEN_EPS = 1e-8


def compute(
    groups: Sequence[Group],
    algorithm: AlgorithmSection,
    logprobs: Sequence[np.ndarray] | None = None,
    ref_logprobs: Sequence[np.ndarray] | None = None,
    loss_masks: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Advantages of all samples, in the order of the groups and of the samples in them.

    Args:
      groups: scored groups; with an estimator of `config.checks.NEEDS_WHOLE_BATCH`, all groups of the batch.
      algorithm: `adv_estimator` and its options.
      logprobs: per sample float [T] under the policy; only with `use_kl_in_reward`, flat in the same order.
      ref_logprobs: the same under the reference model.
      loss_masks: per sample [T], 1 at tokens to learn from; None: all. Statistics over tokens leave the others out.

    Returns:
      Per sample float32 [T], T its response tokens, those that a mask keeps from being learnt included.

    Raises:
      ValueError: a sample has no reward, or KL in the reward is asked for without log-probabilities.
    """
    samples = [sample for group in groups for sample in group.samples]
    penalties = _kl_penalties(samples, algorithm, logprobs, ref_logprobs)
    if algorithm.adv_estimator == "reinforce_plus_plus":
        return reinforce_plus_plus(samples, penalties, loss_masks)
    out: list[np.ndarray] = []
    start = 0
    for group in groups:
        stop = start + len(group.samples)
        scores = np.array(
            [_reward(s) - p.sum() for s, p in zip(group.samples, penalties[start:stop], strict=True)], np.float64
        )
        match algorithm.adv_estimator:
            case "grpo":
                values = grpo(scores, norm_by_std=algorithm.norm_adv_by_std_in_grpo)
            case "dr_grpo":
                values = grpo(scores, norm_by_std=False)
            case "rloo":
                values = rloo(scores)
            case missing:
                assert_never(missing)
        out += [np.full(len(s), value, np.float32) for s, value in zip(group.samples, values, strict=True)]
        start = stop
    return out


def grpo(scores: np.ndarray, *, norm_by_std: bool = True) -> np.ndarray:
    """(score - mean) / (std + 1e-6) within one group, or without the division (Dr. GRPO).

    Args:
      scores: float [G], one per sample of the group.
      norm_by_std: divide by the unbiased standard deviation.

    Returns:
      float64 [G]; zeros for a group of one.
    """
    scores = np.asarray(scores, np.float64)
    if len(scores) < 2:
        return np.zeros_like(scores)
    centred = scores - scores.mean()
    return centred / (scores.std(ddof=1) + _STD_EPS) if norm_by_std else centred


def rloo(scores: np.ndarray) -> np.ndarray:
    """Score minus the mean of the other samples of its group (leave-one-out baseline).

    Args:
      scores: float [G].

    Returns:
      float64 [G]; zeros for a group of one.
    """
    scores = np.asarray(scores, np.float64)
    n = len(scores)
    if n < 2:
        return np.zeros_like(scores)
    return (scores - scores.mean()) * (n / (n - 1))


def reinforce_plus_plus(
    samples: Sequence[Sample], penalties: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray] | None = None
) -> list[np.ndarray]:
    """Undiscounted return from each token on, whitened over all tokens of the batch that are learnt from.

    Args:
      samples: the whole batch; a sample's reward falls on its last token.
      penalties: per sample float [T], subtracted from the reward token by token (zeros without KL in the reward).
      loss_masks: per sample [T], 1 at tokens to learn from; None: all. The others enter neither mean nor variance.

    Returns:
      Per sample float32 [T]; 0 at tokens that are not learnt from.
    """
    returns: list[np.ndarray] = []
    for sample, penalty in zip(samples, penalties, strict=True):
        rewards = -np.asarray(penalty, np.float64)
        if len(sample):
            rewards[-1] += _reward(sample)
        returns.append(np.cumsum(rewards[::-1])[::-1])
    masks = [np.ones(len(s), bool) for s in samples] if loss_masks is None else [np.asarray(m) > 0 for m in loss_masks]
    learnt = np.concatenate([r[m] for r, m in zip(returns, masks, strict=True)]) if returns else np.zeros(0)
    if not learnt.size:
        return [np.zeros(len(sample), np.float32) for sample in samples]
    variance = learnt.var(ddof=1) if learnt.size > 1 else 0.0
    scale = 1.0 / np.sqrt(variance + _WHITEN_EPS)
    return [np.where(m, (r - learnt.mean()) * scale, 0).astype(np.float32) for r, m in zip(returns, masks, strict=True)]


def _kl_penalties(
    samples: Sequence[Sample],
    algorithm: AlgorithmSection,
    logprobs: Sequence[np.ndarray] | None,
    ref_logprobs: Sequence[np.ndarray] | None,
) -> list[np.ndarray]:
    if not algorithm.use_kl_in_reward:
        return [np.zeros(len(sample)) for sample in samples]
    if logprobs is None or ref_logprobs is None:
        raise ValueError("algorithm.use_kl_in_reward needs the policy's and the reference model's log-probabilities")
    return [
        algorithm.kl_coef * kl_estimate(np.asarray(ours, np.float64), np.asarray(ref, np.float64), algorithm.kl_penalty)
        for _, ours, ref in zip(samples, logprobs, ref_logprobs, strict=True)
    ]


def _reward(sample: Sample) -> float:
    if sample.reward is None:
        raise ValueError(f"sample {sample.key} has no reward: advantages come after scoring")
    return float(sample.reward)
