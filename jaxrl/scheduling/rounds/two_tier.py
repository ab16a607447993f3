"""How many workers each ranking group gets, so that the groups' times lie on a line.

Purpose: `allot` maps ranking groups, which stand in the order of their historical lengths, to whole workers.

Source: RhymeRL §6.4, Fig. 12. With l the mean historical length of a group and tau(l, k) the time of a group on k
workers, group i has the target t0 + i·d, where t0 = max(tau(l0, MAX), t_train). d is bisected in
[0, (tau(l_{N-1}, MIN) - t0) / (N - 1)]; each group takes the fewest workers that meet its target, and a d is feasible
if all of them together are there. The smallest feasible d wins. MIN is 1 worker, MAX what is left if every other group
has one.

Departures:

- tau(l0, MAX) as t0 means that the shortest group takes all workers that can be spared, unless t_train is longer than
  it needs. Here t0 = max(tau(l0, k), t_train) is tried for every k, and the line with the smallest sum of its two ends
  wins: so long the workers take for two steps, in which each serves a short and a long group.
- The paper leaves the unit of its precision open: here tau is in seconds, and d is known to `PRECISION_S`.
- Fig. 12 never tries the upper end of the interval, and says nothing of an interval that is empty: both are tried here.
- Where nothing is feasible (the figure leaves it open), the groups get equal shares, the longest what is over.
- Workers that no target needs go, one by one, to the group that is predicted to take longest: none starves.
- With fewer workers than groups, the figure has no answer. Here each worker then serves a run of neighbouring groups,
  all at once, and worker j has the target t0 + j·d: it takes as many of the next groups as meet it. Equal shares are
  runs of equal length.
- tau is worked out from the time of a decode step (`rollout_s`): a group's responses have the group's mean length, and
  a step has as many rows as have not ended. The paper looks it up in a table of whole rollouts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

PRECISION_S = 1e-3

StepSeconds = Callable[[float, float], float]
"""(rows of a worker, their tokens together) -> seconds of a decode step."""


@dataclass(frozen=True, slots=True)
class Load:
    """A ranking group, or a share of it: the mean historical length of its responses in tokens, and their number."""

    length: float
    responses: float


Tau = Callable[[Sequence[Load]], float]
"""What one worker has -> the seconds until the last of it has ended; never less for more responses or longer ones."""


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring ranking groups `first` to `last` (included) on `num_workers` workers of their own."""

    first: int
    last: int
    num_workers: int


@dataclass(frozen=True, slots=True)
class Allotment:
    """Which workers serve which ranking groups.

    Attributes:
      parts: in the order of the ranks; each group is in one of them, and their workers add up to all there are.
      is_feasible: whether every part meets its target; False: equal shares, because nothing is feasible, or because
        nothing predicts times.
    """

    parts: tuple[Part, ...]
    is_feasible: bool


def rollout_s(loads: Sequence[Load], step_s: StepSeconds, tokens_per_step: float = 1.0) -> float:
    """Seconds in which one worker draws `loads` all at once.

    Args:
      step_s: of a decode step.
      tokens_per_step: tokens that a response gains per decode step; more than 1 with speculation.
    """
    seconds, done, rows = 0.0, 0.0, sum(load.responses for load in loads)
    for load in sorted(loads, key=lambda one: one.length):
        steps = (load.length - done) / tokens_per_step
        if steps > 0 and rows > 0:
            seconds += steps * step_s(rows, rows * (done + load.length) / 2)
        done, rows = max(done, load.length), rows - load.responses
    return seconds


def equal_shares(num_groups: int, num_workers: int) -> tuple[Part, ...]:
    """Workers in equal shares, sizes differing by one at most: of more workers than groups, the longest groups get one
    more; of fewer, the first workers get the shortest groups, and one more of them."""
    if num_workers >= num_groups:
        each, over = divmod(num_workers, num_groups)
        return tuple(Part(i, i, each + (i >= num_groups - over)) for i in range(num_groups))
    each, over = divmod(num_groups, num_workers)
    sizes = [each + (worker < over) for worker in range(num_workers)]
    return tuple(Part(sum(sizes[:j]), sum(sizes[: j + 1]) - 1, 1) for j in range(num_workers))


def allot(loads: Sequence[Load], num_workers: int, tau: Tau | None, train_s: float = 0.0) -> Allotment:
    """Maps ranking groups to workers.

    Args:
      loads: the ranking groups, ascending by length.
      num_workers: to share out; all of them are.
      tau: predicts a worker's time; None: equal shares.
      train_s: t_train, how long the last update took.
    """
    assert loads, "no ranking groups"
    assert num_workers >= 1, "no workers"
    if tau is None:
        return Allotment(equal_shares(len(loads), num_workers), False)
    split = _Spread(loads, num_workers, tau) if num_workers >= len(loads) else _Runs(loads, num_workers, tau)
    lines: list[tuple[float, float, tuple[Part, ...]]] = []  # the sum of its ends, t0, what meets it
    for t0 in sorted({max(start_s, train_s) for start_s in split.starts()}):
        found = _flattest(split, t0)
        if found is not None:
            d, parts = found
            lines.append((2 * t0 + (split.num_targets - 1) * d, t0, parts))
    best = min(lines, key=lambda line: line[:2], default=None)
    return Allotment(equal_shares(len(loads), num_workers) if best is None else best[2], best is not None)


def _flattest(split: _Spread | _Runs, t0: float) -> tuple[float, tuple[Part, ...]] | None:
    """The smallest feasible d from `t0` on, to `PRECISION_S`, and the parts that meet it; None: none is feasible."""
    low, high = 0.0, max(split.most_s - t0, 0.0) / max(split.num_targets - 1, 1)
    best = split.meeting(t0, high)
    if best is None:
        return None
    if (flat := split.meeting(t0, 0.0)) is not None:
        return 0.0, flat
    while high - low > PRECISION_S:
        middle = (low + high) / 2
        found = split.meeting(t0, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return high, best


def _met(seconds: float, target_s: float) -> bool:
    return seconds <= target_s * (1 + 1e-9)  # a target is worked out from such times, and rounded


class _Spread:
    """At least as many workers as groups: each group has workers of its own."""

    def __init__(self, loads: Sequence[Load], num_workers: int, tau: Tau) -> None:
        self._num_workers = num_workers
        self.num_targets = len(loads)
        most = num_workers - len(loads) + 1  # MAX_WKS
        # [group][workers - 1]
        self._s = [[tau([Load(each.length, each.responses / k)]) for k in range(1, most + 1)] for each in loads]
        self.most_s = self._s[-1][0]

    def starts(self) -> list[float]:
        """What t0 can be."""
        return self._s[0]

    def meeting(self, t0: float, d: float) -> tuple[Part, ...] | None:
        """The fewest workers for each group that meet its target, those left over shared out; None: too few."""
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
        return tuple(Part(i, i, count) for i, count in enumerate(counts))


class _Runs:
    """Fewer workers than groups: each worker has neighbouring groups."""

    def __init__(self, loads: Sequence[Load], num_workers: int, tau: Tau) -> None:
        self._loads, self._num_workers = loads, num_workers
        self._s = cache(lambda first, end: tau(loads[first:end]))
        self.num_targets = num_workers
        self.most_s = self._s(0, len(loads))

    def starts(self) -> list[float]:
        """What t0 can be."""
        return [self._s(0, end) for end in range(1, len(self._loads) - self._num_workers + 2)]

    def meeting(self, t0: float, d: float) -> tuple[Part, ...] | None:
        """Runs that meet the targets, the first as long as they can be; None: some group would be left."""
        parts: list[Part] = []
        first, count = 0, len(self._loads)
        for worker in range(self._num_workers):
            most = count - (self._num_workers - 1 - worker)  # the others have one group each at least
            end, target_s = first + 1, t0 + worker * d
            if not _met(self._s(first, end), target_s):
                return None
            while end < most and _met(self._s(first, end + 1), target_s):
                end += 1
            parts.append(Part(first, end - 1, 1))
            first = end
        return tuple(parts) if first == count else None
