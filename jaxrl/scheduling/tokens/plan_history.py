"""The last plans of a worker, from which its state at an earlier tick follows.

Purpose: a worker runs ahead of virtual time (`jaxrl.scheduling.tokens.event_merger`). When a response is aborted at
tick T, its tokens are those of the plans that ended by T. When a busy period ends at T, later plans do not count.
`PlanHistory` keeps the results of the plans after the low watermark, and the batcher's counts after each.

Source: none published. Departures: rows are not counted plan by plan, which would cost work for every row; what a
request has gained since T is added up when it is asked for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from operator import attrgetter

from jaxrl.scheduling.tokens.plan import PlanResult
from jaxrl.scheduling.tokens.progress import Counters

_NAMES = tuple(each.name for each in fields(Counters))
_WHEN_MADE = frozenset({"admissions", "preemptions", "prefill_tokens", "shared_tokens"})
_counts_of = attrgetter(*_NAMES)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A plan that was collected: the tick after it, its number, its result, and the counts up to it."""

    tick: int
    dispatch: int
    result: PlanResult
    counts: tuple[int, ...]


class PlanHistory:
    """Of one worker's present busy period.

    Args:
      counters: of its batcher; they only grow.

    Attributes:
      num_plans: before this busy period, in this round.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._counted = Counters()  # of earlier busy periods
        self.num_plans = 0
        self.begin()

    def begin(self) -> None:
        """A round begins: nothing counts yet."""
        self.num_plans, self._counted = 0, Counters()
        self.restart()

    def restart(self) -> None:
        """A busy period begins; no plan is in flight."""
        self._base = _counts_of(self._counters)
        self._made: deque[tuple[int, ...]] = deque()  # the counts when each plan in flight had been made
        self._plans: deque[_Plan] = deque()
        self._before = self._base, self.num_plans - 1  # counts and number of the last plan that was forgotten

    def made(self) -> None:
        """A plan was made."""
        self._made.append(_counts_of(self._counters))

    def collected(self, tick: int, dispatch: int, result: PlanResult) -> None:
        """The oldest plan in flight was collected, and the batcher has taken in its result."""
        made, now = self._made.popleft(), _counts_of(self._counters)
        counts = tuple(m if name in _WHEN_MADE else n for name, m, n in zip(_NAMES, made, now, strict=True))
        self._plans.append(_Plan(tick, dispatch, result, counts))

    def forget(self, tick: int) -> None:
        """No earlier tick than this will be asked for."""
        while self._plans and self._plans[0].tick <= tick:
            last = self._plans.popleft()
            self._before = last.counts, last.dispatch

    def gained_since(self, request_id: int, tick: int, until: int = 1 << 62) -> int:
        """Tokens that a request gained in plans that ended after a tick, up to the plan of number `until`, excluded."""
        found = (p.result.rows.get(request_id) for p in self._plans if p.tick > tick and p.dispatch < until)
        return sum(len(row.token_ids) for row in found if row is not None)

    def last_by(self, tick: int) -> int:
        """The number of the last plan that ended by a tick; of none, one less than that of the first."""
        return self._at(tick)[1]

    def close(self, tick: int) -> None:
        """The busy period has ended at a tick: counts what ended by then."""
        counts, dispatch = self._at(tick)
        done = Counters(*(now - then for now, then in zip(counts, self._base, strict=True)))
        self._counted += done
        self.num_plans = dispatch + 1
        self._before = counts, dispatch
        self._plans.clear()
        self._made.clear()

    @property
    def counted(self) -> Counters:
        """Of all busy periods of the round that have ended."""
        return self._counted

    def _at(self, tick: int) -> tuple[tuple[int, ...], int]:
        last = self._before
        for plan in self._plans:
            if plan.tick > tick:
                break
            last = plan.counts, plan.dispatch
        return last
