"""A synchronous step in closed form: drawn lengths, and seconds of rollout and training from a cost model alone.

Source: a synchronous rollout is drained without a queue: every row starts at once, and a dp group decodes on with the
rows that are left (RollPacker §2.2, PAT §2.3).

Departures: no queue, since all rows of all set-ups fit the devices' KV pools; dp groups run at a pace of their own
within a rollout, as the baselines' engines do, where jaxrl's go in lockstep. Lengths come from a few batches of a fixed
seed, so a value predicted from them carries their sampling noise (a few per cent), the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

from jaxrl.config import SimulatedLengths
from jaxrl.models.shapes import named_shape
from jaxrl.scheduling.layouts.latency import causal_pairs
from jaxrl.sim.cost_model import CostModel, TrainLoad
from jaxrl.sim.hardware import HARDWARE
from jaxrl.sim.workload import length_of_score, normal, share_above, tail_start
from papers.calibration import Values, efficiency_of
from papers.facts import Setup

PROMPT_TOKENS = 200  # of every prompt: the papers do not say
SEED = 20260504
NORMAL = NormalDist()

Batch = Sequence[Sequence[int]]  # response lengths, [prompts][group]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# ---------------------------------------------------------------- lengths


def lengths_of(values: Values) -> SimulatedLengths:
    """A length distribution from the constants named `lengths.*`."""
    own: dict[str, Any] = {k.removeprefix("lengths."): v for k, v in values.items() if k.startswith("lengths.")}
    return SimulatedLengths(**own)


def survival(lengths: SimulatedLengths, tokens: float) -> float:
    """The share of responses that would be longer than `tokens` were there no limit."""
    z = math.log(tokens / lengths.median) / lengths.sigma
    if lengths.tail_from < 1 and z > NORMAL.inv_cdf(lengths.tail_from):
        return (1 - lengths.tail_from) * (tokens / tail_start(lengths)) ** -lengths.tail_index
    return share_above(z)


def spreads(batches: Sequence[Batch]) -> tuple[float, float]:
    """Standard deviations of lengths, in tokens: over all responses of a batch, and within a prompt (APRIL §3.2.3,
    Fig. 5); the mean over batches."""
    lengths = np.asarray(batches, float)
    return float(lengths.std((1, 2)).mean()), float(lengths.std(2).mean())


def batches_of(setup: Setup, lengths: SimulatedLengths, correlation: float, num_batches: int) -> list[list[list[int]]]:
    """Response lengths of a set-up's batches, [batches][prompts][group], as `ModelledWorkload` models them."""
    common, own = math.sqrt(correlation), math.sqrt(1 - correlation)
    return [
        [
            [length_of_score(lengths, setup.max_tokens, common * prompt + own * z) for z in each]
            for prompt, each in batch
        ]
        for batch in _scores(setup.num_prompts, setup.group_size, num_batches)
    ]


def mixed_batches(
    setup: Setup, tasks: Sequence[SimulatedLengths], correlation: float, num_batches: int
) -> list[list[list[int]]]:
    """The same of tasks in equal shares: prompts have them in rotation."""
    drawn = [batches_of(setup, lengths, correlation, num_batches) for lengths in tasks]
    prompts = range(setup.num_prompts)
    return [[drawn[prompt % len(tasks)][batch][prompt] for prompt in prompts] for batch in range(num_batches)]


def responses_of(
    setup: Setup, lengths: SimulatedLengths, correlation: float, prompt: int, attempt: int = 0
) -> list[int]:
    """The same for one prompt of an endless row of them; another attempt draws other responses."""
    common, own = math.sqrt(correlation), math.sqrt(1 - correlation)
    shared, each = _prompt_scores(prompt, attempt, setup.group_size)
    return [length_of_score(lengths, setup.max_tokens, common * shared + own * z) for z in each]


@lru_cache(maxsize=1 << 14)
def _prompt_scores(prompt: int, attempt: int, group_size: int) -> tuple[float, list[float]]:
    return normal(SEED, prompt), [normal(SEED, prompt, attempt, i) for i in range(group_size)]


@lru_cache(maxsize=16)
def _scores(num_prompts: int, group_size: int, num_batches: int) -> list[list[tuple[float, list[float]]]]:
    """Standard normal parts of scores: a prompt's, and its responses'. Drawn once: a fit asks for them many times."""
    return [
        [(normal(SEED, batch, p), [normal(SEED, batch, p, i) for i in range(group_size)]) for p in range(num_prompts)]
        for batch in range(num_batches)
    ]


# ---------------------------------------------------------------- seconds


def cost_of(setup: Setup, values: Mapping[str, float]) -> CostModel:
    """The cost model of a published set-up."""
    return CostModel(named_shape(setup.model), HARDWARE[setup.hardware], efficiency_of(values))


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


def drained(cost: CostModel, tp: int, lengths: Sequence[int]) -> list[float]:
    """The same for prompts of `PROMPT_TOKENS`."""
    return drain(cost, tp, [PROMPT_TOKENS] * len(lengths), lengths)


def rollout_ends(cost: CostModel, setup: Setup, batch: Batch) -> list[list[float]]:
    """Seconds after which each response of a synchronous rollout ends, ascending; [dp groups][responses]."""
    groups = setup.num_devices // setup.tp
    return [drained(cost, setup.tp, [n for prompt in batch[i::groups] for n in prompt]) for i in range(groups)]


def rollout_s(cost: CostModel, setup: Setup, batch: Batch) -> float:
    """Seconds of a synchronous rollout."""
    return max(ends[-1] for ends in rollout_ends(cost, setup, batch))


def train_s(cost: CostModel, num_devices: int, batch: Batch, forwards: int) -> float:
    """Seconds of training on a batch: one update, and so many forward passes besides."""
    whole = [length + PROMPT_TOKENS for prompt in batch for length in prompt]
    load = TrainLoad(sum(whole), sum(causal_pairs(tokens) for tokens in whole), extra_forwards=forwards)
    return cost.train_step_s(load, num_devices)
