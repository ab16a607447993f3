"""Rewards -> advantages: one float32 per response token. numpy only; pure functions of groups.

Sources:

- GRPO: Shao et al. 2024, DeepSeekMath, §4.1.
- GRPO over turns: the same, §4.1.3 (process supervision), with turns as its steps.
- Dr. GRPO: Liu et al. 2025, §3.2: no division by the standard deviation.
- RLOO: Ahmadian et al. 2024, §3.
- REINFORCE++: Hu 2025, §3: per-token returns, whitened over the batch.
- GAE: Schulman et al. 2016 (arXiv:1506.02438), eq. 11, 12 and 16, with the values of a critic; whitened over the batch.
- GDPO: Liu et al. 2026 (arXiv:2601.05242), §3: each of several rewards as by GRPO, their sum whitened over the batch
  (over tokens, as the authors' code for verl does).
- A teacher: see `jaxrl.training.teacher`.
- KL in the reward: Ouyang et al. 2022, eq. 2. Its estimates: Schulman 2020, "Approximating KL Divergence".

Constants and conventions follow verl (unbiased standard deviation, ε = 1e-6 after the root; whitening with ε = 1e-8
under it, over the tokens with loss mask 1: `masked_whiten`). Departures: statistics are taken in float64. A sample
without a partner in its group gets advantage 0 (verl: its raw score), because there is nothing to compare it with. In
REINFORCE++ a token before a masked one keeps the return of what follows (verl starts again behind each masked token,
which is meant for padding). An environment's tokens have no KL penalty.

All estimators except those in `config.checks.NEEDS_WHOLE_BATCH` use one group at a time. So a group's advantages are
known as soon as its last reward is, and its gradient can be streamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import numpy as np

from jaxrl.config import AlgorithmSection
from jaxrl.config.updates import KlEstimate
from jaxrl.scheduling.rounds.events import named_values
from jaxrl.types import Group, Sample

_STD_EPS = 1e-6
_WHITEN_EPS = 1e-8


def compute(
    groups: Sequence[Group],
    algorithm: AlgorithmSection,
    logprobs: Sequence[np.ndarray] | None = None,
    ref_logprobs: Sequence[np.ndarray] | None = None,
    loss_masks: Sequence[np.ndarray] | None = None,
    values: Sequence[np.ndarray] | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Advantages of all samples, in the order of the groups and of the samples in them; and returns, for a critic.

    Twice per sample float32 [T], for all response tokens, masked ones included.

    Args:
      groups: scored groups; with an estimator of `config.checks.NEEDS_WHOLE_BATCH`, all groups of the batch.
      logprobs, ref_logprobs: per sample float [T] under policy and reference; only with `use_kl_in_reward`.
      loss_masks: per sample [T], 1 at tokens to learn from; None: all. Statistics over tokens leave the others out.
      values: per sample float [T], the critic's; only with `gae`.
    """
    samples = [sample for group in groups for sample in group.samples]
    penalties = _kl_penalties(samples, algorithm, logprobs, ref_logprobs)
    if algorithm.adv_estimator == "gae":
        if values is None:
            raise ValueError("algorithm.adv_estimator=gae needs the values of a critic")
        return gae(samples, penalties, values, algorithm.gamma, algorithm.lam, loss_masks)
    if algorithm.adv_estimator == "reinforce_plus_plus":
        return reinforce_plus_plus(samples, penalties, loss_masks), None
    if algorithm.adv_estimator == "gdpo":
        return gdpo(groups, algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights, loss_masks), None
    out: list[np.ndarray] = []
    start = 0
    for group in groups:
        stop = start + len(group.samples)
        scores = np.array(
            [_reward(s) - p.sum() for s, p in zip(group.samples, penalties[start:stop], strict=True)], np.float64
        )
        match algorithm.adv_estimator:
            case "grpo_turns":
                out += grpo_turns(group.samples, scores)
                start = stop
                continue
            case "grpo":
                own = grpo(scores, norm_by_std=algorithm.norm_adv_by_std_in_grpo)
            case "dr_grpo":
                own = grpo(scores, norm_by_std=False)
            case "rloo":
                own = rloo(scores)
            case "none":
                own = np.zeros_like(scores)
            case missing:
                assert_never(missing)
        out += [np.full(len(s), value, np.float32) for s, value in zip(group.samples, own, strict=True)]
        start = stop
    return out, None


def with_teacher(
    advantages: Sequence[np.ndarray],
    samples: Sequence[Sample],
    logprobs: Sequence[np.ndarray],
    teacher_logprobs: Sequence[np.ndarray],
    coef: float,
) -> list[np.ndarray]:
    """Advantages less `coef` times the KL to a teacher, at each of the policy's own tokens: log π_old - log π_teacher,
    the k1 estimate of the reverse KL. `logprobs` are the denominators of the ratios.
    """
    return [
        np.where(sample.drawn, own - coef * (ours.astype(np.float64) - theirs), own).astype(np.float32)
        for own, sample, ours, theirs in zip(advantages, samples, logprobs, teacher_logprobs, strict=True)
    ]


def grpo(scores: np.ndarray, *, norm_by_std: bool = True) -> np.ndarray:
    """(score - mean) / (std + 1e-6) of one group's scores, float64 [G], with the unbiased standard deviation, or
    without the division (Dr. GRPO); zeros for a group of one."""
    if len(scores) < 2:
        return np.zeros_like(scores)
    centred = scores - scores.mean()
    return centred / (scores.std(ddof=1) + _STD_EPS) if norm_by_std else centred


def grpo_turns(samples: Sequence[Sample], scores: np.ndarray) -> list[np.ndarray]:
    """The rewards of all turns of a group, minus their mean and divided by their standard deviation; a token's
    advantage is the sum of those from its turn on (DeepSeekMath §4.1.3).

    A sample without turns is one turn, and the part of its score beyond its turns' rewards belongs to the last one. An
    environment's tokens have the value of the turn behind them. Per sample float32 [T].
    """
    rewards: list[np.ndarray] = []
    ends: list[list[int]] = []
    for sample, score in zip(samples, scores, strict=True):
        turns = () if sample.episode is None else sample.episode.turns
        own = np.array([turn.reward * (not sample.failure) for turn in turns] or [0.0], np.float64)
        own[-1] += score - own.sum()
        rewards.append(own)
        ends.append([*(turn.end for turn in turns[:-1]), len(sample)])
    each = np.concatenate(rewards)
    deviation = each.std(ddof=1) if len(each) > 1 else 0.0
    found: list[np.ndarray] = []
    for own, stops in zip(rewards, ends, strict=True):
        values = np.cumsum(((own - each.mean()) / (deviation + _STD_EPS))[::-1])[::-1]
        found.append(np.repeat(values, np.diff([0, *stops])).astype(np.float32))
    return found


def rloo(scores: np.ndarray) -> np.ndarray:
    """Score minus the mean of the other samples' scores (leave-one-out baseline), of one group's scores, float64 [G];
    zeros for a group of one."""
    n = len(scores)
    return (scores - scores.mean()) * (n / (n - 1)) if n > 1 else np.zeros_like(scores)


def reinforce_plus_plus(
    samples: Sequence[Sample], penalties: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray] | None = None
) -> list[np.ndarray]:
    """Undiscounted return from each token on, whitened over all tokens of the batch with loss mask 1; 0 at the others.

    A sample's reward falls on its last token; `penalties`, per sample float [T], are subtracted token by token.
    """
    returns = [np.cumsum(rewards[::-1])[::-1] for rewards in _token_rewards(samples, penalties)]
    return _whitened(returns, _masks(samples, loss_masks))


def gdpo(
    groups: Sequence[Group],
    keys: Sequence[str],
    weights: Sequence[float] = (),
    loss_masks: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """The sum of several rewards, each normalised in its group as by `grpo`, whitened over all tokens of the batch with
    loss mask 1; 0 at the others.

    `keys`: names of rewards in `Sample.reward_info`, or in its `parts`; a sample that could not be scored has 0.
    `weights`: of each normalised reward; none: 1.
    """
    values: list[np.ndarray] = []
    for group in groups:
        scores = np.array(
            [[0.0 if s.failure else float(named_values(s.reward_info)[key]) for s in group.samples] for key in keys]
        )
        total = sum(w * grpo(own) for w, own in zip(weights or [1.0] * len(keys), scores, strict=True))
        values += [np.full(len(sample), each) for sample, each in zip(group.samples, np.asarray(total), strict=True)]
    return _whitened(values, _masks([sample for group in groups for sample in group.samples], loss_masks))


def gae(
    samples: Sequence[Sample],
    penalties: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    gamma: float,
    lam: float,
    loss_masks: Sequence[np.ndarray] | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Advantages against a critic, whitened over the tokens with loss mask 1, and the critic's targets.

    A token's TD error is its reward + `gamma` times the next token's value - its own; its advantage is the sum of the
    errors from it on, each weighted by `gamma` · `lam` per token; its return is advantage + value, before whitening.
    Masked tokens are skipped, with their rewards: the next token is the next unmasked one.

    `samples`, `penalties`: as in `reinforce_plus_plus`; what follows the last token has value 0. `values`: per sample
    float [T], expected from each token on, before it is sampled. Results are 0 at masked tokens.
    """
    masks = _masks(samples, loss_masks)
    longest = max((len(sample) for sample in samples), default=0)

    def rows(each: Sequence[np.ndarray]) -> np.ndarray:
        out = np.zeros((len(samples), longest))
        for row, own in zip(out, each, strict=True):
            row[: len(own)] = own
        return out

    rewards, expected, learnt = rows(_token_rewards(samples, penalties)), rows(values), rows(masks) > 0
    found = np.zeros_like(rewards)
    advantage, following = np.zeros(len(samples)), np.zeros(len(samples))
    for t in reversed(range(longest)):
        error = rewards[:, t] + gamma * following - expected[:, t]
        advantage = np.where(learnt[:, t], error + gamma * lam * advantage, advantage)
        following = np.where(learnt[:, t], expected[:, t], following)
        found[:, t] = advantage
    raw = [row[: len(sample)] for row, sample in zip(found, samples, strict=True)]
    returns = [
        np.where(mask, own + value, 0).astype(np.float32) for own, value, mask in zip(raw, values, masks, strict=True)
    ]
    return _whitened(raw, masks), returns


def _token_rewards(samples: Sequence[Sample], penalties: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Per sample float64 [T]: its reward on the last token, less the penalties."""
    out: list[np.ndarray] = []
    for sample, penalty in zip(samples, penalties, strict=True):
        rewards = -np.asarray(penalty, np.float64)
        if len(sample):
            rewards[-1] += _reward(sample)
        out.append(rewards)
    return out


def _masks(samples: Sequence[Sample], loss_masks: Sequence[np.ndarray] | None) -> list[np.ndarray]:
    """The loss masks as bool [T] per sample."""
    if loss_masks is None:
        return [np.ones(len(sample), bool) for sample in samples]
    return [np.asarray(mask) > 0 for mask in loss_masks]


def _whitened(values: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Mean 0 and variance 1 over the tokens with loss mask 1, float32; 0 at the others."""
    learnt = np.concatenate([v[m] for v, m in zip(values, masks, strict=True)]) if values else np.zeros(0)
    if not learnt.size:
        return [np.zeros(len(v), np.float32) for v in values]
    variance = learnt.var(ddof=1) if learnt.size > 1 else 0.0
    scale = 1.0 / np.sqrt(variance + _WHITEN_EPS)
    return [np.where(m, (v - learnt.mean()) * scale, 0).astype(np.float32) for v, m in zip(values, masks, strict=True)]


def _kl_penalties(
    samples: Sequence[Sample],
    algorithm: AlgorithmSection,
    logprobs: Sequence[np.ndarray] | None,
    ref_logprobs: Sequence[np.ndarray] | None,
) -> list[np.ndarray]:
    if not algorithm.use_kl_in_reward:
        return [np.zeros(len(sample)) for sample in samples]
    assert logprobs is not None, "computed, because of the KL"
    assert ref_logprobs is not None, "computed, because of the KL"
    found: list[np.ndarray] = []
    for sample, ours, ref in zip(samples, logprobs, ref_logprobs, strict=True):
        kl = kl_estimate(np.asarray(ours, np.float64), np.asarray(ref, np.float64), algorithm.kl_penalty)
        found.append(algorithm.kl_coef * np.where(sample.drawn, kl, 0.0))
    return found


def _reward(sample: Sample) -> float:
    assert sample.reward is not None, f"sample {sample.key} has no reward: advantages come after scoring"
    return float(sample.reward)


def kl_estimate(logprobs: Any, ref_logprobs: Any, kind: KlEstimate) -> Any:
    """An estimate of KL(policy || reference) per token, for arrays of numpy or jax.

    `kl` is Schulman's k1, `mse` k2, `low_var_kl` k3. As in verl's `kl_penalty`, `abs` is k1's absolute value; k3 takes
    the log-ratio clamped to ±20 and is clamped to ±10.
    """
    diff = logprobs - ref_logprobs
    match kind:
        case "kl":
            return diff
        case "abs":
            return abs(diff)
        case "mse":
            return 0.5 * diff**2
        case "low_var_kl":
            library = diff.__array_namespace__()
            back = library.clip(-diff, -20.0, 20.0)
            return library.clip(library.exp(back) - back - 1.0, -10.0, 10.0)
    assert_never(kind)
