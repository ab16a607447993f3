"""How samples wait for workers: a queue for each domain, so that a slow domain leaves workers to the others.

Of the domains in which something waits, and which have fewer samples being scored than they may have, the one with the
fewest is next; of equals the one whose turn was longest ago. With one domain that is the order of arrival.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from jaxrl.config.domains import Domain

T = TypeVar("T")
MAIN = ""
"""The domain of sources without a domain of their own."""


@dataclass(frozen=True, slots=True)
class DomainLimit:
    """The limits of one domain: how many samples may be scored at once (0: of all workers all but one for each other
    domain in use), seconds for one sample (0: no limit), and the option that sets these."""

    most: int
    timeout_s: float
    option: str = "reward.timeout_s"


@dataclass(frozen=True, slots=True)
class DomainLimits:
    """Limits by source; `MAIN` is always there."""

    by_source: Mapping[str, DomainLimit]

    @classmethod
    def of(cls, domains: Mapping[str, Domain]) -> DomainLimits:
        limits = {
            source: DomainLimit(each.max_concurrent, each.timeout_s, each.timeout_option)
            for source, each in domains.items()
        }
        return cls(limits)

    def domain(self, source: str) -> str:
        return source if source in self.by_source else MAIN


class FairQueue(Generic[T]):
    """Queues of waiting samples, by domain. A popped sample counts as being scored until `done`."""

    def __init__(self, limits: DomainLimits, num_workers: int) -> None:
        self._limits, self._num_workers = limits.by_source, num_workers
        self._waiting: dict[str, deque[T]] = {}  # of domains in use: those that have ever had something
        self._scored_now = Counter[str]()
        self._turns = Counter[str]()  # when each domain's last turn was
        self._turn = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, domain: str, item: T) -> None:
        self._waiting.setdefault(domain, deque()).append(item)

    def _most(self, domain: str) -> int:
        return self._limits[domain].most or max(self._num_workers - len(self._waiting) + 1, 1)

    def pop(self) -> T | None:
        """The next that may be scored; None where nothing may."""
        ready = [
            domain
            for domain, waiting in self._waiting.items()
            if waiting and self._scored_now[domain] < self._most(domain)
        ]
        if not ready:
            return None
        domain = min(ready, key=lambda each: (self._scored_now[each], self._turns[each]))
        self._turn += 1
        self._turns[domain] = self._turn
        self._scored_now[domain] += 1
        return self._waiting[domain].popleft()

    def done(self, domain: str) -> None:
        assert self._scored_now[domain] > 0, f"nothing of {domain!r} was being scored"
        self._scored_now[domain] -= 1
