"""The clock of a simulation, and the phases and the timeline that follow it.

Departures: time is a whole number of nanoseconds. A step's seconds are then differences that do not depend on when the
step began, so a run that resumes reports the same seconds as one that was never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from jaxrl.record.timeline import Timeline

_NS = 1_000_000_000
A = TypeVar("A")
B = TypeVar("B")


class SimulatedClock:
    def __init__(self) -> None:
        self.now_ns = 0

    @property
    def now_s(self) -> float:
        return self.now_ns / _NS

    def advance(self, seconds: float) -> None:
        """Lets time pass, rounded to a nanosecond. Raises ValueError for time that is negative or not finite."""
        self.now_ns += nanoseconds(seconds)

    def reach(self, at_ns: int) -> None:
        """Waits until `at_ns`; does nothing if that is past."""
        self.now_ns = max(self.now_ns, at_ns)

    def at_once(self, acts: Iterable[Callable[[], None]]) -> None:
        """Runs acts that all start now; returns at the end of the last one."""
        began_ns = ended_ns = self.now_ns
        for act in acts:
            self.now_ns = began_ns
            act()
            ended_ns = max(ended_ns, self.now_ns)
        self.now_ns = ended_ns


class SimulatedConcurrently:
    """As `jaxrl.mechanisms.one_step_off.ConcurrentPhases`. The second of two phases runs first, and then the clock goes
    back; so the first phase can query when the second ends."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self._ends_ns = 0

    def __call__(self, first: Callable[[], A], second: Callable[[], B], /) -> tuple[A, B]:
        began_ns = self._clock.now_ns
        other = second()
        self._ends_ns, self._clock.now_ns = self._clock.now_ns, began_ns
        one = first()
        self._clock.reach(self._ends_ns)
        return one, other

    @property
    def busy(self) -> bool:
        """Never: a simulated run may be stopped anywhere."""
        return False

    @property
    def has_ended(self) -> bool:
        return self._clock.now_ns >= self._ends_ns


def nanoseconds(seconds: float) -> int:
    """The nearest whole number of them. Raises ValueError if it cannot be a duration."""
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"a cost model or workload answered {seconds!r} seconds: durations must be >= 0 and finite")
    return round(seconds * _NS)


class SimulatedPhases:
    """`timing_s/<phase>` in seconds of `clock`, drawn into the timeline at `path`, if given, from `begin` on."""

    def __init__(self, clock: SimulatedClock, path: str | Path | None = None) -> None:
        self.clock = clock
        self._picture = None if path is None else Timeline(path, clock=lambda: clock.now_s, begin=False)
        self._sums_ns: dict[str, int] = {}

    def begin(self) -> None:
        if self._picture is not None:
            self._picture.begin()

    @contextmanager
    def phase(self, name: str, track: str = "loop", **args: Any) -> Iterator[None]:
        if name == "step" and self._picture is not None:
            self._picture.begin_step()
        began_ns = self.clock.now_ns
        try:
            yield
        finally:
            self._sums_ns[name] = self._sums_ns.get(name, 0) + self.clock.now_ns - began_ns
            self.complete(track, name, began_ns / _NS, self.clock.now_s, **args)

    def take_phases(self, *names: str) -> dict[str, float]:
        taken = [name for name in names or list(self._sums_ns) if name in self._sums_ns]
        return {f"timing_s/{name}": self._sums_ns.pop(name) / _NS for name in taken}

    def complete(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        if self._picture is not None:
            self._picture.complete(track, name, start_s, end_s, **args)

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    def row(self, row: str, order: int, name: str, start_s: float, end_s: float, **args: Any) -> None:
        if self._picture is not None:
            self._picture.row(row, order, name, start_s, end_s, **args)

    def span(self, track: str, name: str, **args: Any) -> AbstractContextManager[None]:
        """Draws nothing: only the host waits here, and `complete` draws the devices' plans."""
        return nullcontext()

    def counter(self, track: str, **values: float) -> None:
        if self._picture is not None:
            self._picture.counter(track, **values)

    def close(self) -> None:
        if self._picture is not None:
            self._picture.close()
