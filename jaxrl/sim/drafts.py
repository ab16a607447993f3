"""Drafts on modelled devices: how much of them is right, what a plan that verifies gains, and which plans do.

A simulated run keeps, drops and counts responses as a real one, and asks the same rule whether a plan verifies drafts.
Its tokens are fillers, in which nothing could be found: its indexes are blank. Instead `draft_acceptance` says at each
position how many tokens from there on a draft would have right. It is a pure function of (seed, identity) and the
options `simulate.tasks.NAME.history`: schedules, layouts and other rows do not change it. `verify` plays the decode
loop for all rows at once, by the rules that devices follow (`jaxrl.rollout.verify`).

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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import NormalDist

import numpy as np

from jaxrl.config import Config, SimulatedHistory
from jaxrl.mechanisms.speculation import draft_config
from jaxrl.mechanisms.speculation.index import DraftIndex, DraftLengths, IndexBuilder
from jaxrl.mechanisms.speculation.rule import DraftConfig, DraftRule, StepCosts
from jaxrl.scheduling.rounds.history import PromptHistory
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.hardware import PLATFORM
from jaxrl.sim.workload import ModelledWorkload, word, words
from jaxrl.types import SampleKey

_STRETCHES = 32  # what a random number is for; different from those of `jaxrl.sim.workload` and `jaxrl.sim.recorded`
_NORMAL = NormalDist()
_MOST_GROWTH = 20.0  # in the logarithm
_LONGEST = 4096  # tokens of a stretch or a gap: a window takes dozens of drafts to get through it
_BLANK = DraftIndex.build([], [])
_LENGTHS = DraftLengths()


class BlankIndexes(IndexBuilder):
    """Indexes in which nothing can be found, at once."""

    def begin(self, index: int, history: PromptHistory) -> Future[DraftIndex]:
        done: Future[DraftIndex] = Future()
        done.set_result(_BLANK)
        return done


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """By position of a response, each [tokens]:

    Attributes:
      right: int16, tokens from here on that a proposal would have right; -1: nothing is proposed.
      matched: int8, tokens of context by which the proposal is found; 0: none is.
    """

    right: np.ndarray
    matched: np.ndarray


@dataclass(frozen=True, slots=True)
class SimulatedDrafts:
    """How rows draft; `seed`: of the run."""

    config: DraftConfig
    workload: ModelledWorkload
    seed: int

    @classmethod
    def configured(cls, config: Config, workload: ModelledWorkload) -> SimulatedDrafts | None:
        """None where `rollout.speculation` is off."""
        drafts = draft_config(config, PLATFORM)
        return None if drafts is None else cls(drafts, workload, config.trainer.seed)

    def acceptance(self, key: SampleKey, length: int) -> Acceptance:
        """How many tokens of a draft are right, by position of a response of `length` tokens."""
        identity = word(_STRETCHES, self.seed, *words(key))
        return draft_acceptance(self.workload.history(key.prompt_index), identity, key.epoch, length)


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


def draft_acceptance(history: SimulatedHistory, word: int, epoch: int, length: int) -> Acceptance:
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
        matched[places] = np.minimum(places - first + _LENGTHS.min_prefix, _LENGTHS.max_prefix)
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


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """The outcome of a plan's steps, by row.

    Attributes:
      gained, windows: tokens, and the windows afterwards, int64 [R].
      active: which rows gained something in a step; before: tokens that they had gained before it; [num_steps, R].
      counts: the fields of `VerifyCounts`, int64 [5, R].
    """

    num_steps: int
    gained: np.ndarray
    windows: np.ndarray
    active: np.ndarray
    before: np.ndarray
    counts: np.ndarray


def verify(
    acceptance: Sequence[Acceptance | None],
    generated: np.ndarray,
    left: np.ndarray,
    max_new: np.ndarray,
    windows: np.ndarray,
    *,
    next_window: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    width: int,
    num_steps: int,
    num_stops: int,
) -> Verified:
    """Up to `num_steps` steps of R rows, each of `width` proposed tokens at most.

    Args:
      acceptance: of each row; None: it has no history.
      generated, left, max_new: of each row, tokens that it has, tokens until it stops, and the most that it may gain;
        int64 [R].
      num_stops: rows that must stop before the loop is left.
    """
    count = len(generated)
    room = np.minimum(left, max_new)
    right, matched = _ahead(acceptance, generated, room)
    gained, now, counts = np.zeros(count, np.int64), windows.copy(), np.zeros((5, count), np.int64)
    actives, befores = [], []
    for _ in range(num_steps):
        active = gained < room
        if not active.any() or np.count_nonzero(gained == left) >= num_stops:
            break
        actives.append(active)
        befores.append(gained.copy())
        rows = np.flatnonzero(active)
        at = gained[rows]
        known = right[rows, at]
        most = np.minimum(np.minimum(now[rows], width), room[rows] - at - 1)
        proposed = np.where(known >= 0, most, 0)
        accepted = np.minimum(proposed, np.maximum(known, 0))
        now[rows] = next_window(now[rows], proposed, accepted)
        gained[rows] = at + accepted + 1
        proposes = proposed > 0
        counts[:, rows] += (np.ones_like(at), proposed, accepted, proposes, matched[rows, at] * proposes)
    shape = (len(actives), count)
    return Verified(
        len(actives), gained, now, np.array(actives, bool).reshape(shape), np.array(befores).reshape(shape), counts
    )


def _ahead(acceptance: Sequence[Acceptance | None], generated: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, ...]:
    """`Acceptance` over the tokens that a plan may bring: `right` and `matched`, each [R, most tokens]."""
    shape = len(acceptance), int(room.max(initial=0))
    right, matched = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    for row, (each, first, tokens) in enumerate(zip(acceptance, generated.tolist(), room.tolist(), strict=True)):
        if each is not None and tokens:
            right[row, :tokens] = each.right[first : first + tokens]
            matched[row, :tokens] = each.matched[first : first + tokens]
    return right, matched
