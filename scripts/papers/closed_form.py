"""A synchronous step in closed form: seconds of a rollout and of training from lengths and a cost model alone.

Source: a synchronous rollout is drained without a queue: every row starts at once, and a dp group decodes on with the
rows that are left (RollPacker §2.2, PAT §2.3).

Departures: no queue, since all rows of all set-ups fit the devices' KV pools; dp groups do not wait for one another
within a rollout (the baselines run one engine per group).
"""

from __future__ import annotations

from collections.abc import Sequence

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
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    now = cost.prefill_s(tp, sum(prompts), sum(causal_pairs(tokens) for tokens in prompts))
    context = float(sum(prompts))
    done, ends = 0, []
    for position, i in enumerate(order):
        batch, steps = len(order) - position, lengths[i] - done
        if steps:
            first = cost.decode_step_s(tp, batch, context)
            last = cost.decode_step_s(tp, batch, context + batch * (steps - 1))
            now += steps * (first + last) / 2
        done = lengths[i]
        context += batch * steps - (prompts[i] + done)
        ends.append(now)
    return ends


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
