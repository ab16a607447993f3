"""Timing on a machine that other processes may disturb: brackets, interleaving, medians.

A shared machine can lose cores without a trace: no load shows, everything just takes longer. So every timed run is
bracketed by a short *gauge* of the parallel capacity. A run is dropped if either of its brackets is below `KEEP_SHARE`
of the whole benchmark's best gauge; that is known only at the end. Cases of one comparison take turns (`interleave`),
so that a slow hour is slow for all of them.

Work on an accelerator is not disturbed by lost host cores in the same way and needs no gauge (`brackets` are None).
"""

from __future__ import annotations

import hashlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

KEEP_SHARE = 0.93
GAUGE_S = 0.04
SETTLE_S = 0.2
"""Before a gauge: what a run leaves behind (memory handed back, threads that spin) is not another's load."""
_READINGS = 3
"""Of each gauge, in a row; their median counts, since a lost core is missing in all of them, and a blink in one."""
DISTURBED = "  DISTURBED"
_CHUNK = bytes(1 << 17)

Values = dict[str, float]


def say(text: str) -> None:
    """Prints at once, also into a file: a benchmark may take an hour."""
    print(text, flush=True)


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Gauge:
    """Measures how much all cores together do, in bytes hashed per second (hashing releases Python's lock).

    Args:
      seconds: how long one reading lasts; a gauge is the median of three.
      threads: how many work at once; default: one per core.
      settle_s: how long it waits before the first.
    """

    def __init__(self, seconds: float = GAUGE_S, threads: int | None = None, settle_s: float = SETTLE_S) -> None:
        self.seconds, self.settle_s = seconds, settle_s
        self.threads = threads or num_cores()
        self.readings: list[float] = []
        self._pool = ThreadPoolExecutor(self.threads)
        self._start = threading.Barrier(self.threads)
        self()  # the first one also starts the threads
        self.readings.clear()

    def __call__(self) -> float:
        """One gauge; it is kept in `readings`."""
        time.sleep(self.settle_s)
        self.readings.append(statistics.median(self._read() for _ in range(_READINGS)))
        return self.readings[-1]

    def _read(self) -> float:
        return sum(self._pool.map(lambda _: self._hash(), range(self.threads)))

    def _hash(self) -> float:
        self._start.wait()
        began = time.perf_counter()
        done = 0
        while (elapsed := time.perf_counter() - began) < self.seconds:
            hashlib.sha256(_CHUNK)
            done += len(_CHUNK)
        return done / elapsed

    def close(self) -> None:
        self._pool.shutdown()


@dataclass(frozen=True, slots=True)
class Run:
    """One timed repetition of a case, with the gauges before and after it (None where none is needed)."""

    case: str
    values: Values
    brackets: tuple[float, float] | None = None


@dataclass(slots=True)
class Summary:
    """A case's medians. `disturbed`: every run was dropped, and the medians are those of all of them."""

    medians: Values
    kept: int
    dropped: int
    disturbed: bool

    @property
    def judged(self) -> dict[str, Any]:
        """For records: which runs count."""
        return {"kept": self.kept, "dropped": self.dropped, "disturbed": self.disturbed}

    @property
    def mark(self) -> str:
        """Behind a line of figures."""
        return DISTURBED if self.disturbed else ""


def keep(brackets: Sequence[tuple[float, float] | None], share: float = KEEP_SHARE) -> list[bool]:
    """Which runs count: those with both brackets at `share` of the best gauge or more, and those without brackets."""
    best = max((gauge for pair in brackets if pair for gauge in pair), default=0.0)
    return [pair is None or min(pair) >= share * best for pair in brackets]


def summarise(runs: Sequence[Run], share: float = KEEP_SHARE) -> dict[str, Summary]:
    """Medians per case, of the kept runs, or of all where none was kept (then marked as disturbed)."""
    kept = keep([run.brackets for run in runs], share)
    summaries: dict[str, Summary] = {}
    for case in dict.fromkeys(run.case for run in runs):
        own = [(run.values, good) for run, good in zip(runs, kept, strict=True) if run.case == case]
        good = [values for values, is_good in own if is_good]
        used = good or [values for values, _ in own]
        medians = {name: statistics.median(values[name] for values in used) for name in used[0]}
        summaries[case] = Summary(medians, len(good), len(own) - len(good), not good)
    return summaries


@dataclass(slots=True)
class Bench:
    """The timed runs of one benchmark.

    Attributes:
      gauge: None on an accelerator.
      tell: where progress goes.
      runs: what was measured so far; judge it with `summarise` once everything has been.
    """

    gauge: Gauge | None
    tell: Callable[[str], None]
    runs: list[Run] = field(default_factory=list)

    def interleave(
        self, cases: Mapping[str, Callable[[], Values]], repetitions: int, warm_up: int = 0, same: Sequence[str] = ()
    ) -> None:
        """Runs every case `repetitions` times, in turns; one gauge stands between two runs and brackets both.

        Args:
          warm_up: runs of each case before, in turns as well, that do not count; the first of them compiles.
          same: values in which the cases of a turn are equal, and turns differ. A turn is then kept or dropped whole:
            medians over different turns would compare different work.

        Raises:
          RuntimeError: the cases of a turn differ in one of `same`.
        """
        for case in [*cases] * warm_up:
            cases[case]()
        before = self.gauge() if self.gauge else None
        for _ in range(repetitions):
            turn: list[Run] = []
            for case in cases:
                values = cases[case]()
                after = self.gauge() if self.gauge else None
                brackets = None if before is None or after is None else (before, after)
                turn.append(Run(case, values, brackets))
                before = after
                capacity = "" if after is None else f" (capacity {after / 1e9:.2f} GB/s hashed)"
                self.tell(f"  {case}: {values['seconds']:.3f} s{capacity}")
            self.runs += _whole(turn, same) if same else turn

    def counts(self) -> tuple[int, int]:
        """(kept, dropped) over all runs."""
        kept = keep([run.brackets for run in self.runs])
        return sum(kept), len(kept) - sum(kept)


def _whole(turn: Sequence[Run], same: Sequence[str]) -> list[Run]:
    """The runs of a turn, each with the turn's worst gauge and its best."""
    for name in same:
        found = {run.case: run.values[name] for run in turn}
        if len({*found.values()}) > 1:
            raise RuntimeError(f"{name} is to be the same in all cases of a turn: {found}")
    gauges = [gauge for run in turn if run.brackets for gauge in run.brackets]
    return [replace(run, brackets=(min(gauges), max(gauges)) if gauges else None) for run in turn]


def verdict(bench: Bench) -> str:
    """What the gauges say about the whole benchmark, in words."""
    kept, dropped = bench.counts()
    if bench.gauge is None:
        return f"runs: {kept}, on an accelerator: no gauge, none dropped"
    best, worst = max(bench.gauge.readings), min(bench.gauge.readings)
    text = (
        f"runs: {kept} kept, {dropped} dropped (a bracket below {KEEP_SHARE:.0%} of the best gauge; the worst gauge "
        f"was {worst / best:.0%} of it)"
    )
    if not kept:
        text += "\nEVERY RUN WAS DISTURBED: the machine was shared all the time. The medians below are of all runs."
    return text
