"""Losses of pairs of responses of which one was preferred, and how they weigh the log-likelihoods of both. numpy only.

Source: DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7; label smoothing as its authors' conservative DPO), robust
DPO (Chowdhury et al. 2024, arXiv:2403.00409, eq. 12), and IPO (Azar et al. 2024, arXiv:2310.12036, eq. 17). As in TRL,
IPO takes means over a response's tokens where DPO takes sums, and robust DPO is as TRL has it. Names of metrics are
TRL's.

A pair's loss is a function of one number h, the difference of the two log-ratios to the reference. So its gradient is
dL/dh times the gradients of the two log-likelihoods, and each response's tokens have one weight in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxrl.config.supervised import DpoSection


@dataclass(frozen=True, slots=True)
class Pairs:
    """What was found of N pairs; arrays are float64 [N, 2], the preferred response first.

    Attributes:
      logps: log-likelihoods under the policy, summed over tokens.
      ref_logps: under the reference; 0 where there is none.
      lengths: tokens that are learnt from.
    """

    logps: np.ndarray
    ref_logps: np.ndarray
    lengths: np.ndarray


def preference_losses(pairs: Pairs, options: DpoSection) -> tuple[np.ndarray, np.ndarray]:
    """(losses [N], weights [N, 2]): the loss of each pair, and what each response's tokens weigh in its gradient.

    -Σ weights · (log-likelihoods per token) has the gradient of the loss.
    """
    ratios = pairs.logps - pairs.ref_logps
    if options.loss_type == "ipo":
        per_token = 1.0 / pairs.lengths
        distance = (ratios * per_token) @ [1.0, -1.0] - 1.0 / (2.0 * options.beta)
        return distance**2, 2.0 * distance[:, None] * per_token * [-1.0, 1.0]
    h, smoothing = options.beta * (ratios @ [1.0, -1.0]), options.label_smoothing
    right, wrong = 1.0 - smoothing, smoothing
    if options.loss_type == "robust":
        right, wrong = right / (1.0 - 2.0 * smoothing), -wrong / (1.0 - 2.0 * smoothing)
    losses = right * np.logaddexp(0.0, -h) + wrong * np.logaddexp(0.0, h)
    doubt = np.exp(-np.logaddexp(0.0, h))  # that the preferred response is the better one
    slope = wrong * (1.0 - doubt) - right * doubt  # of the loss, by h
    return losses, options.beta * slope[:, None] * [-1.0, 1.0]


def preference_metrics(pairs: Pairs, losses: np.ndarray, options: DpoSection) -> dict[str, float]:
    """Means over pairs. `rewards/*` are the implicit rewards, beta times the log-ratios; `rewards/accuracies` the share
    of pairs of which the preferred response has the higher one."""
    rewards = options.beta * (pairs.logps - pairs.ref_logps)
    chosen, rejected = rewards.mean(axis=0)
    return {
        "loss": float(losses.mean()),
        "rewards/chosen": float(chosen),
        "rewards/rejected": float(rejected),
        "rewards/margins": float(chosen - rejected),
        "rewards/accuracies": float((rewards[:, 0] > rewards[:, 1]).mean()),
        "logps/chosen": float(pairs.logps[:, 0].mean()),
        "logps/rejected": float(pairs.logps[:, 1].mean()),
    }
