"""Ranks prompts by the lengths of their last responses, and deals them to workers in turn from the short and the long
end. Also decides which responses leave their worker.

Source: RhymeRL §6.2 (HistoPipe). The prompts of a step are ranked by the median length of their last responses and cut
into N equal groups. Odd steps deal the groups to the workers in ascending order, even steps in descending order. So two
steps together load all workers alike, if an idle worker may begin with the next step (`next_round_prefetch`).
`two_tier` decides how many workers a group gets (§6.4).

A response is an outlier (§6.3) on two conditions. It is among the last alpha = 10 % of its group's responses, *and* it
is longer than beta times the largest historical length of the group's prompts. Here beta = max(1.1, the 75th percentile
of the growth of response lengths over the last epoch). A prompt's historical length is the median of its last responses
(§6.2).

Departures:

- A step's prompts are ranked among themselves, as in the paper; which prompts a step has stays the order of the data.
- Equal groups: sizes differ by one prompt at most, and the shortest groups have one more. Prompts of equal medians are
  ranked by (index, epoch).
- A prompt without history is ranked as if it had the middle of the known medians. A round without any history (the
  first epoch) is not ranked.
- In a group with several workers, prompts go to them in snake order (1 2 3 3 2 1), so that each has short and long
  ones; with fewer prompts than workers their samples go in equal shares, neighbours together.
- Only what a round launches at its start is ranked, not prompts that dynamic sampling brings in later.
- t_train comes from the last step whose metrics are written, the step before the paper's if the update has just ended.
  A batch that depends on which responses end first has none, since a clock may not decide what is in a batch.
- The paper does not say how many "the last 10 %" are of a small group: here the share is rounded up, so that the last
  response of any group can be an outlier. "Short" groups, whose outliers stay in the step, are those with a longer one
  still running in it. The outliers of the longest group stay where they are: the paper defers them to the next step,
  because its batches are oversampled; here that is partial rollout's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.mechanisms.ranking_groups.two_tier import (
    Allotment,
    ExpectedLoad,
    StepSeconds,
    WorkerAllocation,
    allocate,
    rollout_s,
)
from jaxrl.scheduling.rounds.events import Command, Launch
from jaxrl.scheduling.rounds.history import HistoryStore
from jaxrl.types import SampleKey, check_schema

if TYPE_CHECKING:
    from jaxrl.mechanisms.ranking_groups import RankingGroups

SCHEMA = 1
MIN_GROWTH = 1.1
"""An outlier is longer by this factor at least than the largest median of its group's prompts in their last rollout."""


@dataclass(frozen=True, slots=True)
class RankedGroup:
    rank: int  # from 0, the shortest
    keys: tuple[SampleKey, ...]
    longest: float | None  # historical length of its prompts, in tokens; None: unknown, so that none is an outlier


class Outliers:
    """The outliers of one round with the given ranking groups; `share`: alpha, `factor`: beta."""

    def __init__(self, groups: Iterable[RankedGroup], share: float, factor: float) -> None:
        groups = list(groups)
        self._rank_of = {key: group.rank for group in groups for key in group.keys}
        self._running = {group.rank: dict.fromkeys(group.keys) for group in groups}
        self._last = {group.rank: math.ceil(share * len(group.keys)) for group in groups}
        self._limit = {g.rank: math.inf if g.longest is None else factor * g.longest for g in groups}
        self._named: set[SampleKey] = set()

    def rank(self, key: SampleKey) -> int:
        """The ranking group of a response that is in one."""
        return self._rank_of[key]

    def ended(self, key: SampleKey) -> None:
        """A response has ended or was aborted; ignored if it is in no group."""
        if key in self._rank_of:
            self._running[self._rank_of[key]].pop(key, None)

    def take(self, num_tokens: Callable[[SampleKey], int]) -> list[SampleKey]:
        """The outliers that were not named before, by groups and in the order of launching. `num_tokens`: of a running
        response, so far."""
        found: list[SampleKey] = []
        for rank, running in self._running.items():
            if 0 < len(running) <= self._last[rank]:
                longer = (key for key in running if key not in self._named and num_tokens(key) > self._limit[rank])
                found.extend(longer)
        self._named.update(found)
        return found


def ranked(launches: Sequence[Launch], history: HistoryStore) -> list[Launch] | None:
    """Launches in the order of the median lengths of their prompts' last responses; None where none is known."""
    medians = {each.prompt.key: history.lengths(each.prompt.index) for each in launches}
    known = {key: lengths.median for key, lengths in medians.items() if lengths is not None}
    if not known:
        return None
    middle = median(known.values())

    def place(launch: Launch) -> tuple[float, int, int]:
        return known.get(launch.prompt.key, middle), launch.prompt.index, launch.prompt.epoch

    return sorted(launches, key=place)


def equal_groups(count: int, num_groups: int) -> list[range]:
    """`count` places in at most `num_groups` ranges, one after another: sizes differ by one at most, and the first are
    the larger."""
    num_groups = min(num_groups, count)
    each, over = divmod(count, num_groups)
    return [range(first, end) for first, end in pairwise(i * each + min(i, over) for i in range(num_groups + 1))]


def shares(launches: Sequence[Launch], num_workers: int) -> list[list[SampleKey]]:
    """The responses of each worker: whole prompts in snake order, or, with fewer prompts than workers, samples in
    equal shares."""
    if len(launches) < num_workers:
        keys = [key for launch in launches for key in launch.keys]
        bounds = [len(keys) * i // num_workers for i in range(num_workers + 1)]
        return [keys[first:end] for first, end in pairwise(bounds)]
    dealt: list[list[SampleKey]] = [[] for _ in range(num_workers)]
    for place, launch in enumerate(launches):
        turn, at = divmod(place, num_workers)
        dealt[num_workers - 1 - at if turn % 2 else at] += launch.keys
    return dealt


def worker_order(num_workers: int, step: int) -> list[int]:
    """The workers in the order in which they get groups, the shortest first."""
    return list(range(num_workers)) if step % 2 else list(reversed(range(num_workers)))


@dataclass(frozen=True, slots=True)
class RankedRound:
    step: int  # the training step that it is for
    worker_of: Mapping[SampleKey, int]
    groups: tuple[RankedGroup, ...]  # the shortest first
    ranks: Mapping[int, int]  # by worker, the longest ranking group that it serves
    allocation: WorkerAllocation

    def placed(self, launch: Launch) -> Launch:
        """The launch with its workers; one that came later stays as it is."""
        if not all(key in self.worker_of for key in launch.keys):
            return launch
        return replace(launch, workers=tuple(self.worker_of[key] for key in launch.keys))

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/ranking/groups": float(len(self.groups)),
            "rollout/ranking/feasible": float(self.allocation.is_feasible),
        }


class Ranking:
    """Gives every response that a round starts a worker (`Launch.workers`).

    Args:
      step_s: predicts a decode step of a worker; None: workers in equal shares.
      is_timed: whether the share of workers may depend on how long the last update took.
    """

    def __init__(
        self,
        options: RankingGroups.Options,
        num_workers: int,
        history: HistoryStore,
        step_s: StepSeconds | None = None,
        *,
        is_timed: bool = True,
    ) -> None:
        self.options, self._num_workers, self._history = options, num_workers, history
        self._step_s, self._is_timed = step_s if options.two_tier else None, is_timed
        self.now: RankedRound | None = None  # the round under way, if it is ranked
        self._train_s, self._tokens_per_step = 0.0, 1.0
        self._next: RankedRound | None = None  # began ahead

    def begin(self, commands: Sequence[Command], step: int) -> list[Command]:
        """The first commands of a round, with workers for their launches."""
        launches = [command for command in commands if isinstance(command, Launch)]
        self.now, self._next = self._next, None
        if self.now is None or self.now.step != step:
            self.now = self._ranked(launches, step)
        now = self.now
        return [now.placed(c) if now is not None and isinstance(c, Launch) else c for c in commands]

    def ahead(self, launches: Sequence[Launch], step: int) -> list[Launch]:
        """All launches of the round after the current one, with their workers; none where they are not ranked."""
        self._next = self._ranked(launches, step)
        return [] if self._next is None else [self._next.placed(launch) for launch in launches]

    def end(self) -> None:
        self.now = None

    def outliers(self) -> Outliers | None:
        """Watches for outliers of the current round; None where it is not ranked."""
        if self.now is None:
            return None
        growths = self._history.growths()
        grown = float(np.percentile(growths, 75)) if len(growths) else 0.0
        return Outliers(self.now.groups, self.options.outlier_share, max(MIN_GROWTH, grown))

    def learned(self, train_s: float, tokens_per_step: float = 1.0) -> None:
        """A step has ended: how long its update took, and the tokens that a response gained per decode step."""
        self._train_s, self._tokens_per_step = train_s, tokens_per_step

    def state_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "train_s": self._train_s, "tokens_per_step": self._tokens_per_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_schema("ranking groups", state, SCHEMA)
        self._train_s, self._tokens_per_step = float(state["train_s"]), float(state["tokens_per_step"])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _ranked(self, launches: Sequence[Launch], step: int) -> RankedRound | None:
        launches = [launch for launch in launches if launch.keys]
        ordered = ranked(launches, self._history)
        if ordered is None:
            return None
        cut = equal_groups(len(ordered), self.options.num_groups)
        members = [[ordered[place] for place in places] for places in cut]
        loads = [self._loads(each) for each in members]
        tau = None
        if self._step_s is not None:
            tokens_per_step = self._tokens_per_step if self._is_timed else 1.0
            tau = partial(rollout_s, step_s=self._step_s, tokens_per_step=tokens_per_step)
        allocation = allocate(loads, self._num_workers, tau, self._train_s if self._is_timed else 0.0)
        groups: list[RankedGroup] = []
        for rank, each in enumerate(members):
            past = (self._history.lengths(launch.prompt.index) for launch in each)
            longest = max((lengths.median for lengths in past if lengths is not None), default=None)
            groups.append(RankedGroup(rank, tuple(key for launch in each for key in launch.keys), longest))
        worker_of, ranks = _dealt(members, allocation.parts, worker_order(self._num_workers, step))
        return RankedRound(step, worker_of, tuple(groups), ranks, allocation)

    def _loads(self, launches: Sequence[Launch]) -> list[ExpectedLoad]:
        """The expected load of a group: of each prompt one response as long as its longest was, and the others of its
        historical length. Prompts without history are left out."""
        loads: list[ExpectedLoad] = []
        for launch in launches:
            if (lengths := self._history.lengths(launch.prompt.index)) is not None:
                loads += [ExpectedLoad(lengths.median, len(launch.keys) - 1), ExpectedLoad(float(lengths.longest), 1)]
        return loads


def _dealt(
    members: Sequence[Sequence[Launch]], parts: Collection[Allotment], order: Sequence[int]
) -> tuple[dict[SampleKey, int], dict[int, int]]:
    """The worker of each response, and each worker's longest ranking group."""
    worker_of: dict[SampleKey, int] = {}
    ranks: dict[int, int] = {}
    taken = 0
    for part in parts:
        workers = order[taken : taken + part.num_workers]
        taken += part.num_workers
        launches = [launch for group in members[part.first : part.last + 1] for launch in group]
        for worker, keys in zip(workers, shares(launches, part.num_workers), strict=True):
            ranks[worker] = part.last
            worker_of |= dict.fromkeys(keys, worker)
    return worker_of, ranks
