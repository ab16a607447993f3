"""Response lengths of the papers' set-ups: drawn batches, and quantities of a length distribution without draws.

Departures: drawn lengths come from a few batches of a fixed seed, so a value predicted from them carries their sampling
noise (a few per cent), the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from jaxrl.config import SimulatedLengths
from jaxrl.sim.workload import length_of_score, normal, share_above, tail_start
from papers.facts import Setup

SEED = 20260504
_NORMAL = NormalDist()


def lengths_of(values: Mapping[str, float]) -> SimulatedLengths:
    """A length distribution from the constants named `lengths.*`."""
    return SimulatedLengths(
        median=values["lengths.median"],
        sigma=values["lengths.sigma"],
        tail_from=values.get("lengths.tail_from", 1.0),
        tail_index=values.get("lengths.tail_index", 2.0),
        growth=values.get("lengths.growth", 0.0),
    )


def quantile(lengths: SimulatedLengths, longest: int, share: float) -> int:
    """The length that `share` of the responses do not exceed, of those at most `longest` tokens; 0 < share < 1."""
    return length_of_score(lengths, longest, _NORMAL.inv_cdf(share))


def survival(lengths: SimulatedLengths, tokens: float) -> float:
    """The share of responses that would be longer than `tokens` were there no limit."""
    if lengths.sigma == 0:
        return float(tokens < lengths.median)
    z = math.log(tokens / lengths.median) / lengths.sigma
    if lengths.tail_from < 1 and z > _NORMAL.inv_cdf(lengths.tail_from):
        return (1 - lengths.tail_from) * (tokens / tail_start(lengths)) ** -lengths.tail_index
    return share_above(z)


def spreads(batches: Sequence[Sequence[Sequence[int]]]) -> tuple[float, float]:
    """Standard deviations of lengths, in tokens: over all responses of a batch, and within a prompt (APRIL §3.2.3,
    Fig. 5); the mean over batches, which are [batches][prompts][group]."""
    lengths = np.asarray(batches, float)
    return float(lengths.std((1, 2)).mean()), float(lengths.std(2).mean())


def batches_of(
    setup: Setup, lengths: SimulatedLengths, correlation: float, num_batches: int, longest: int = 0
) -> list[list[list[int]]]:
    """Response lengths of a set-up's batches, [batches][prompts][group], as `ModelledWorkload` models them.

    Args:
      longest: tokens at which they are cut; 0: the set-up's.
    """
    cap = longest or setup.max_tokens
    common, own = math.sqrt(correlation), math.sqrt(1 - correlation)
    return [
        [[length_of_score(lengths, cap, common * prompt + own * z) for z in responses] for prompt, responses in batch]
        for batch in _scores(setup.num_prompts, setup.group_size, num_batches)
    ]


def mixed_batches(
    setup: Setup, tasks: Sequence[SimulatedLengths], correlation: float, num_batches: int
) -> list[list[list[int]]]:
    """The same of tasks in equal shares: prompts have them in rotation."""
    drawn = [batches_of(setup, lengths, correlation, num_batches) for lengths in tasks]
    return [
        [drawn[prompt % len(tasks)][batch][prompt] for prompt in range(setup.num_prompts)]
        for batch in range(num_batches)
    ]


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
        [
            (normal(SEED, batch, prompt), [normal(SEED, batch, prompt, i) for i in range(group_size)])
            for prompt in range(num_prompts)
        ]
        for batch in range(num_batches)
    ]
