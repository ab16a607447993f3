"""How long a round had anything with the scorers: what the rollout hid of that time is what the loop did not wait for.

Purpose: `BusyTime` adds up the time in which at least one sample had been sent for scoring and had no verdict, waiting
for a worker included. The verdicts' own times count, however late the backend looks at them.
"""

from __future__ import annotations

from jaxrl.types import SampleKey


class BusyTime:
    """Spans of time, from `begin` to `end` of each sample."""

    def __init__(self) -> None:
        self._since: dict[SampleKey, float] = {}
        self._spans: list[tuple[float, float]] = []

    def begin(self, key: SampleKey, time_s: float) -> None:
        self._since[key] = time_s

    def end(self, key: SampleKey, time_s: float) -> None:
        """Nothing, for a sample that was not begun, or has ended."""
        since_s = self._since.pop(key, None)
        if since_s is not None:
            self._spans.append((since_s, time_s))

    def take(self) -> float:
        """Seconds that lie in at least one span that has ended, each once; forgets them."""
        total_s, until_s = 0.0, float("-inf")
        for since_s, end_s in sorted(self._spans):
            total_s += max(end_s - max(since_s, until_s), 0.0)
            until_s = max(until_s, end_s)
        self._spans.clear()
        return total_s
