"""How many workers each ranking group gets, so that the groups' times lie on a line.

Source: RhymeRL §6.4, Fig. 12. l is the mean historical length of a group, and tau(l, k) the time of a group on k
workers. Group i has the target t0 + i·d, where t0 = max(tau(l0, MAX), t_train). The bisection for d searches [0,
(tau(l_{N-1}, MIN) - t0) / (N - 1)]. Each group takes the fewest workers that meet its target; d is feasible if there
are enough workers for all groups. MIN is 1 worker, MAX what is left if every other group has one.

Departures:

- With tau(l0, MAX) as t0 the shortest group takes all spare workers, unless t_train is longer than it needs. Here
  t0 = max(tau(l0, k), t_train) is tried for every k.
- Groups on a line balance two steps if each has as many workers as its counterpart from the other end. With more for
  the long ones some workers of the longest group have had a middling one before. The search for the smallest d finds
  several allocations. Of these, and of equal shares, the one with the shortest two steps is taken (`pair_s`). From
  there workers move from one group to another, any number at once, while two steps get shorter (`_climbed`): two steps
  do not get shorter with every smaller d, and the best shares need not lie on a line. Of 2,000 random cases, in which
  the best shares are known, 95 % are then within 0.1 % of them, and within 32 % without
  (`tests/mechanisms/ranking_groups`).
- The paper leaves the unit of its precision open: here tau is in seconds, and d is known to `PRECISION_S`.
- Fig. 12 never tries the upper end of the interval, nor an empty interval: both are tried here.
- Where nothing is feasible (the figure leaves it open), the groups get equal shares, the longest the remainder.
- Workers that no target needs go, one by one, to the group that is predicted to take longest.
- With fewer workers than groups, the figure has no answer. Here each worker then serves a run of neighbouring groups,
  all at once, and worker j has the target t0 + j·d: it takes as many of the next groups as meet it. Equal shares are
  runs of equal length, and groups move in place of workers.
- tau is worked out from the time of a decode step (`rollout_s`): a step has as many rows as have not ended. The paper
  looks it up in a table of whole rollouts, by the mean length of the group. What a worker waits for is its longest
  response, so here each prompt has one as long as its longest was, and the others of its median length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise, permutations

PRECISION_S = 1e-3

StepSeconds = Callable[[float, float], float]
"""(rows of a worker, their tokens together) -> seconds of a decode step."""


@dataclass(frozen=True, slots=True)
class ExpectedLoad:
    """Responses of a length, in tokens, and their number; of a share of a group it need not be whole."""

    length: float
    responses: float


Group = Sequence[ExpectedLoad]
Tau = Callable[[Sequence[ExpectedLoad]], float]
"""One worker's responses -> seconds until the last has ended; never less for more responses or longer ones."""


@dataclass(frozen=True, slots=True)
class Allotment:
    """Neighbouring ranking groups `first` to `last` (included) on `num_workers` workers of their own."""

    first: int
    last: int
    num_workers: int


@dataclass(frozen=True, slots=True)
class WorkerAllocation:
    parts: tuple[Allotment, ...]  # in the order of the ranks; each group is in one, and their workers are all there are
    is_feasible: bool  # whether targets on a line can be met; False also where nothing predicts times


def rollout_s(loads: Sequence[ExpectedLoad], step_s: StepSeconds, tokens_per_step: float = 1.0) -> float:
    """Seconds in which one worker decodes `loads` all at once. `tokens_per_step`: that a response gains in a decode
    step; more than 1 with speculation."""
    seconds, done, rows = 0.0, 0.0, sum(load.responses for load in loads)
    for load in sorted(loads, key=lambda one: one.length):
        steps = (load.length - done) / tokens_per_step
        if steps > 0 and rows > 0:
            seconds += steps * step_s(rows, rows * (done + load.length) / 2)
        done, rows = max(done, load.length), rows - load.responses
    return seconds


def equal_shares(num_groups: int, num_workers: int) -> tuple[Allotment, ...]:
    """Workers in equal shares, sizes differing by one at most: of more workers than groups, the longest groups get one
    more; of fewer, the first workers get the shortest groups, and one more of them."""
    if num_workers >= num_groups:
        each, over = divmod(num_workers, num_groups)
        return tuple(Allotment(i, i, each + (i >= num_groups - over)) for i in range(num_groups))
    each, over = divmod(num_groups, num_workers)
    sizes = [each + (worker < over) for worker in range(num_workers)]
    return tuple(Allotment(sum(sizes[:j]), sum(sizes[: j + 1]) - 1, 1) for j in range(num_workers))


def allocate(groups: Sequence[Group], num_workers: int, tau: Tau | None, train_s: float = 0.0) -> WorkerAllocation:
    """Maps ranking groups, the shortest first, to workers. `tau`: predicts a worker's time (None: equal shares);
    `train_s`: t_train, how long the last update took."""
    assert groups, "no ranking groups"
    assert num_workers >= 1, "no workers"
    if tau is None:
        return WorkerAllocation(equal_shares(len(groups), num_workers), False)
    split = _Spread(groups, num_workers, tau) if num_workers >= len(groups) else _Runs(groups, num_workers, tau)
    found = [parts for start_s in sorted(set(split.starts())) for parts in _lines(split, max(start_s, train_s))]
    best = min([equal_shares(len(groups), num_workers), *found], key=lambda parts: pair_s(split.times(parts), train_s))
    return WorkerAllocation(_climbed(split, best, train_s), bool(found))


def pair_s(times: Sequence[float], train_s: float) -> float:
    """Seconds of two steps, by the times of the workers in the order of their ranks: each worker has the place from the
    other end in the step after, which begins no sooner than the update has ended."""
    return max(_pairs(times, train_s))


def _pairs(times: Sequence[float], train_s: float) -> list[float]:
    return [max(here, train_s) + there for here, there in zip(times, reversed(times), strict=True)]


def _climbed(split: _Spread | _Runs, parts: tuple[Allotment, ...], train_s: float) -> tuple[Allotment, ...]:
    """These parts, after the moves from one part to another that shorten two steps most, until none does. Of equal
    ones the other workers' two steps count, the longest first."""

    def cost(sizes: Sequence[int]) -> list[float]:
        return sorted(_pairs(split.times(split.parts(sizes)), train_s), reverse=True)

    sizes = [part.num_workers + part.last - part.first for part in parts]  # workers of a group, or groups of a worker
    while True:
        pairs = permutations(range(len(sizes)), 2)
        moves = (
            [size + count * ((place == j) - (place == i)) for place, size in enumerate(sizes)]
            for i, j in pairs
            for count in range(1, sizes[i])
        )
        if cost(nearest := min(moves, key=cost, default=sizes)) >= cost(sizes):
            return split.parts(sizes)
        sizes = nearest


def _lines(split: _Spread | _Runs, t0: float) -> Iterator[tuple[Allotment, ...]]:
    """Allocations that meet the targets from `t0` on with smaller and smaller d, down to the smallest feasible d, to
    `PRECISION_S`; nothing where none is."""
    low, high = 0.0, max(split.most_s - t0, 0.0) / max(split.num_targets - 1, 1)
    if (found := split.meeting(t0, high)) is None:
        return
    yield found
    if (found := split.meeting(t0, 0.0)) is not None:
        yield found
        return
    while high - low > PRECISION_S:
        middle = (low + high) / 2
        if (found := split.meeting(t0, middle)) is None:
            low = middle
        else:
            high = middle
            yield found


def _met(seconds: float, target_s: float) -> bool:
    return seconds <= target_s * (1 + 1e-9)  # a target is worked out from such times, and rounded


class _Spread:
    """At least as many workers as groups: no worker serves two groups.

    Here and in `_Runs`, `starts` are the possible values of t0, `times` the workers' times in the order of the parts,
    and `parts` the parts of given sizes. `meeting` returns parts that meet the targets, or None.
    """

    def __init__(self, groups: Sequence[Group], num_workers: int, tau: Tau) -> None:
        self._num_workers = num_workers
        self.num_targets = len(groups)
        most = num_workers - len(groups) + 1  # MAX_WKS
        # [group][workers - 1]
        self._s = [
            [tau([ExpectedLoad(load.length, load.responses / k) for load in group]) for k in range(1, most + 1)]
            for group in groups
        ]
        self.most_s = self._s[-1][0]

    def starts(self) -> list[float]:
        return self._s[0]

    def times(self, parts: Sequence[Allotment]) -> list[float]:
        return [self._s[part.first][part.num_workers - 1] for part in parts for _ in range(part.num_workers)]

    def meeting(self, t0: float, d: float) -> tuple[Allotment, ...] | None:
        """The fewest workers for each group, those left over shared out."""
        counts: list[int] = []
        for i, times in enumerate(self._s):
            fewest = bisect_left(times, True, key=partial(_met, target_s=t0 + i * d)) + 1
            if fewest > len(times):
                return None
            counts.append(fewest)
        if sum(counts) > self._num_workers:
            return None
        while sum(counts) < self._num_workers:  # ties: the longer group
            counts[max(range(len(counts)), key=lambda i: (self._s[i][counts[i] - 1], i))] += 1
        return self.parts(counts)

    def parts(self, sizes: Sequence[int]) -> tuple[Allotment, ...]:
        return tuple(Allotment(i, i, count) for i, count in enumerate(sizes))


class _Runs:
    """Fewer workers than groups: each worker has neighbouring groups."""

    def __init__(self, groups: Sequence[Group], num_workers: int, tau: Tau) -> None:
        self._num_groups, self._num_workers = len(groups), num_workers
        self._s = cache(lambda first, end: tau([load for group in groups[first:end] for load in group]))
        self.num_targets = num_workers
        self.most_s = self._s(0, len(groups))

    def starts(self) -> list[float]:
        return [self._s(0, end) for end in range(1, self._num_groups - self._num_workers + 2)]

    def times(self, parts: Sequence[Allotment]) -> list[float]:
        return [self._s(part.first, part.last + 1) for part in parts]

    def parts(self, sizes: Sequence[int]) -> tuple[Allotment, ...]:
        return tuple(Allotment(first, end - 1, 1) for first, end in pairwise(accumulate(sizes, initial=0)))

    def meeting(self, t0: float, d: float) -> tuple[Allotment, ...] | None:
        """Runs of which the first are as long as they can be; None also where some group would be left."""
        sizes: list[int] = []
        first, count = 0, self._num_groups
        for worker in range(self._num_workers):
            most = count - (self._num_workers - 1 - worker)  # the others have one group each at least
            end, target_s = first + 1, t0 + worker * d
            if not _met(self._s(first, end), target_s):
                return None
            while end < most and _met(self._s(first, end + 1), target_s):
                end += 1
            sizes.append(end - first)
            first = end
        return self.parts(sizes) if first == count else None
