"""The history of a simulated run, and what its responses draft from.

A simulated run keeps, drops and counts responses as a real one, and asks the same rule whether a plan verifies drafts.
Its tokens are fillers, in which nothing could be found: its indexes are blank. Instead `draft_acceptance` says at each
position how many tokens from there on a draft would have right. It is a pure function of (seed, identity) and the
options `simulate.tasks.NAME.history`: schedules, layouts and other rows do not change it.

Source: RhymeRL §5.1 and §5.4 with Fig. 8: responses of two epochs share stretches of equal tokens, short ones in number
and long ones in tokens; Fig. 6a and §7.2.2: stretches grow in the course of training.

Model: a response is a row of stretches, each after a gap. In a gap no draft is found. At each position of a stretch one
is found, and it is right up to the stretch's end. The token behind that is drafted wrong: one more draft is found and
rejected there. A stretch without a token is such a place alone. Lengths of stretches are lognormal, rounded down; those
of gaps are geometric.

Departures: a prompt's index takes no time and no bytes, so the bound of `rollout.speculation.max_bytes` counts
responses alone. How much of a draft is right does not depend on how many rollouts are kept. Programs are as wide as the
plan has rows, where a real executor's have room for the next larger number of rows. Drafts never reach beyond a
response's end, as if the response that they come from ended there too. A match begins with the shortest context, and is
a token longer with each position of its stretch, up to the longest.

Lengths are read off tables of their distributions, so they are integers on every machine; what is random about them is
a counter hash, many values at once (the finaliser of splitmix64, Steele et al. 2014), from one 64-bit word that
`jaxrl.sim.workload.word` makes of the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import NormalDist
from typing import Any

import numpy as np

from jaxrl.config import Config, SimulatedHistory
from jaxrl.mechanisms.speculation import Speculation, draft_config
from jaxrl.mechanisms.speculation.index import Building, DraftIndex, IndexBuilder
from jaxrl.mechanisms.speculation.rule import DraftConfig, DraftRule, StepCosts
from jaxrl.scheduling.rounds.history import PromptHistory
from jaxrl.sim.configured import PLATFORM
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.verification import Acceptance
from jaxrl.sim.workload import Workload, word
from jaxrl.types import SampleKey

_STRETCHES = 32  # what a random number is for; different from those of `jaxrl.sim.workload` and `jaxrl.sim.recorded`
_NORMAL = NormalDist()
_MOST_GROWTH = 20.0  # in the logarithm
_LONGEST = 4096  # tokens of a stretch or a gap: a window takes dozens of drafts to get through it
_BLANK = DraftIndex.build([], [])


class BlankIndexes(IndexBuilder):
    """Indexes in which nothing can be found, at once."""

    def begin(self, index: int, history: PromptHistory) -> Building:
        done: Future[DraftIndex] = Future()
        done.set_result(_BLANK)
        return Building(done, lambda: _BLANK)


@dataclass(frozen=True, slots=True)
class SimulatedDrafts:
    """How rows draft (`jaxrl.sim.verification.Proposals`). `model`: of how much of a draft is right."""

    model: Callable[[SampleKey, int], Acceptance]
    config: DraftConfig

    def acceptance(self, key: SampleKey, length: int) -> Acceptance:
        return self.model(key, length)

    @property
    def first_window(self) -> int:
        return self.config.window.least

    def width(self, rows: int) -> int:
        return self.config.width(rows)

    def next_window(self, window: Any, proposed: Any, accepted: Any) -> Any:
        return self.config.window.after(window, proposed, accepted)


def proposals(config: Config, workload: Workload) -> SimulatedDrafts | None:
    """The drafts of simulated devices; None where `rollout.speculation` is off."""
    drafts = draft_config(config, PLATFORM)
    return drafts and SimulatedDrafts(
        acceptance_model(config.trainer.seed, workload, config.rollout.speculation), drafts
    )


def acceptance_model(
    seed: int, workload: Workload, options: Speculation.Options
) -> Callable[[SampleKey, int], Acceptance]:
    """How much of a response's drafts is right, by its identity and its length."""

    def model(key: SampleKey, length: int) -> Acceptance:
        identity = word(_STRETCHES, seed, key.epoch, key.prompt_index, key.sample_index, key.attempt)
        history = workload.history(key.prompt_index)
        return draft_acceptance(history, identity, key.epoch, length, options.min_prefix, options.max_prefix)

    return model


def verify_rule(config: Config, cost: CostModel) -> Callable[[], DraftRule] | None:
    """Makes what says which plans of a worker verify, by what the cost model says that its steps take; None where
    `rollout.speculation` is off."""
    drafts, tp = draft_config(config, PLATFORM), config.rollout.tp
    if drafts is None:
        return None

    def verify_s(rows: int, context: float) -> float:
        return float(cost.verify_steps_s(tp, np.array([rows]), drafts.width(rows), np.array([context]))[0])

    costs = StepCosts(lambda rows, context: cost.decode_step_s(tp, rows, context), verify_s)
    return partial(DraftRule, replace(drafts, costs=costs))


def draft_acceptance(
    history: SimulatedHistory, word: int, epoch: int, length: int, min_prefix: int = 3, max_prefix: int = 7
) -> Acceptance:
    """The acceptance of drafts for a response of a length in tokens. Stretches grow from epoch 1 on. `word`: 64 bits
    that depend on the response's identity."""
    grown = math.exp(min(max(math.log1p(history.growth) * max(epoch - 1, 0), -_MOST_GROWTH), _MOST_GROWTH))
    stretches = _stretch_table(history.stretch_median * grown, history.stretch_sigma)
    gaps = _gap_table(history.gap_mean)
    right, matched = np.full(length, -1, np.int16), np.zeros(length, np.int8)
    count = max(length // 4, 16)  # drawn at a time
    at = drawn = 0
    while at < length:
        uniform_2N = _uniform(word, drawn, 2 * count).reshape(count, 2).T
        drawn += 2 * count
        gap_N = np.searchsorted(gaps, uniform_2N[0], side="right")
        stretch_N = np.searchsorted(stretches, uniform_2N[1], side="right")
        end_N = at + np.cumsum(gap_N + stretch_N + 1)  # behind the token that is drafted wrong
        parts = np.stack([gap_N, stretch_N + 1], axis=1).ravel()
        in_stretch = np.repeat(np.tile([False, True], count), parts)[: length - at]
        places = at + np.flatnonzero(in_stretch)
        last = np.repeat(end_N - 1, stretch_N + 1)[: len(places)]
        first = np.repeat(end_N - 1 - stretch_N, stretch_N + 1)[: len(places)]
        right[places] = np.minimum(last, length) - places
        matched[places] = np.minimum(places - first + min_prefix, max_prefix)
        at = int(end_N[-1])
    return Acceptance(right, matched)


def _uniform(word: int, first: int, count: int) -> np.ndarray:
    """`count` numbers in [0, 1), those from `first` on of the row that belongs to `word`; float64."""
    state = np.uint64(word) + np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@lru_cache(maxsize=64)
def _stretch_table(median: float, sigma: float) -> np.ndarray:
    """The probability of a stretch of at most 0, 1, 2, ... tokens; float64 [_LONGEST]."""
    if sigma == 0:
        return (np.arange(1, _LONGEST + 1) > median).astype(float)
    return np.array([_NORMAL.cdf(math.log(tokens / median) / sigma) for tokens in range(1, _LONGEST + 1)])


@lru_cache(maxsize=64)
def _gap_table(mean: float) -> np.ndarray:
    """The probability of a gap of at most 0, 1, 2, ... tokens; float64 [_LONGEST]."""
    return 1 - (mean / (1 + mean)) ** np.arange(1.0, _LONGEST + 1)
