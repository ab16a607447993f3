"""How samples wait for workers: a queue for each domain, so that a slow domain leaves workers to the others.

A domain may have all workers but one for each other domain in use. Of the domains in which something waits, and which
have fewer samples being scored than that, the one with the fewest is next; of equals the one whose turn was longest
ago. With one domain that is the order of arrival.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Queues of waiting samples, by domain. A popped sample counts as being scored until `done`."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._waiting: dict[str, deque[T]] = {}  # of domains in use: those that have ever had something
        self._scored_now = Counter[str]()
        self._turns = Counter[str]()  # when each domain's last turn was

    def put(self, domain: str, item: T) -> None:
        self._waiting.setdefault(domain, deque()).append(item)

    def pop(self) -> T | None:
        """The next that may be scored; None where nothing may."""
        most = max(self._num_workers - len(self._waiting) + 1, 1)
        ready = [domain for domain, waiting in self._waiting.items() if waiting and self._scored_now[domain] < most]
        if not ready:
            return None
        domain = min(ready, key=lambda each: (self._scored_now[each], self._turns[each]))
        self._turns[domain] = max(self._turns.values(), default=0) + 1
        self._scored_now[domain] += 1
        return self._waiting[domain].popleft()

    def done(self, domain: str) -> None:
        assert self._scored_now[domain] > 0, f"nothing of {domain!r} was being scored"
        self._scored_now[domain] -= 1
