"""A synchronous step in closed form: seconds of a rollout and of training from lengths and a cost model alone.

Source: a synchronous rollout is drained without a queue: every row starts at once, and a dp group decodes on with the
rows that are left (RollPacker §2.2, PAT §2.3).

Departures: no queue, since all rows of all set-ups fit the devices' KV pools; dp groups do not wait for one another
within a rollout (the baselines run one engine per group).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl.sim.cost_model import CostModel, TrainLoad, causal_pairs
from papers.facts import Setup

PROMPT_TOKENS = 200  # of every prompt: the papers do not say


def drain(cost: CostModel, tp: int, prompts: Sequence[int], lengths: Sequence[int]) -> list[float]:
    """Seconds after which each response of one dp group ends, all started at once; ascending.

    Args:
      prompts: tokens of each response's prompt; they are prefilled one after another, each once per response.
      lengths: tokens of each response.

    Between two ends the context grows linearly: the step's mean of the first and last step is exact wherever the cost
    is linear in the context.
    """
    order = np.argsort(lengths, kind="stable")
    lengths_R, prompts_R = np.asarray(lengths)[order], np.asarray(prompts)[order]
    done_R = np.concatenate([[0], lengths_R[:-1]])  # decode steps when the row before ended
    batch_R, steps_R = np.arange(len(order), 0, -1), lengths_R - done_R
    context_R = np.cumsum(prompts_R[::-1])[::-1] + batch_R * done_R
    last_R = context_R + batch_R * np.maximum(steps_R - 1, 0)
    step_R = (cost.decode_steps_s(tp, batch_R, context_R) + cost.decode_steps_s(tp, batch_R, last_R)) / 2
    now = cost.prefill_s(tp, sum(prompts), sum(causal_pairs(tokens) for tokens in prompts))
    return (now + np.cumsum(steps_R * step_R)).tolist()


def rollout_ends(cost: CostModel, setup: Setup, batch: Sequence[Sequence[int]], prompt_tokens: int) -> list[float]:
    """Seconds after which each response of a synchronous rollout ends, ascending; [prompts][group] lengths."""
    groups = setup.num_devices // setup.tp
    ends: list[float] = []
    for group in range(groups):
        lengths = [length for prompt in batch[group::groups] for length in prompt]
        ends.extend(drain(cost, setup.tp, [prompt_tokens] * len(lengths), lengths))
    return sorted(ends)


def train_s(cost: CostModel, setup: Setup, batch: Sequence[Sequence[int]], prompt_tokens: int, forwards: int) -> float:
    """Seconds of training on a batch: one update, and so many forward passes besides."""
    whole = [length + prompt_tokens for prompt in batch for length in prompt]
    load = TrainLoad(sum(whole), sum(causal_pairs(tokens) for tokens in whole), extra_forwards=forwards)
    return cost.train_step_s(load, setup.num_devices)
