"""How long a round's scorers were busy: the time in which at least one sample waited for its verdict. The verdicts' own
times count, however late the backend looks at them. Times are whole nanoseconds, so that a simulated run that resumes,
with a clock that begins at 0 again, reports the same."""

from __future__ import annotations

from jaxrl.types import SampleKey


class BusyTime:
    def __init__(self) -> None:
        self._since_ns: dict[SampleKey, int] = {}
        self._spans_ns: list[tuple[int, int]] = []

    def begin(self, key: SampleKey, time_s: float) -> None:
        self._since_ns[key] = round(time_s * 1e9)

    def end(self, key: SampleKey, time_s: float) -> None:
        since_ns = self._since_ns.pop(key, None)
        if since_ns is not None:
            self._spans_ns.append((since_ns, round(time_s * 1e9)))

    def take(self) -> float:
        """Seconds that lie in at least one span that has ended, each once; forgets them."""
        spans = sorted(self._spans_ns)
        total_ns, until_ns = 0, spans[0][0] if spans else 0
        for since_ns, end_ns in spans:
            total_ns += max(end_ns - max(since_ns, until_ns), 0)
            until_ns = max(until_ns, end_ns)
        self._spans_ns.clear()
        return total_ns / 1e9
