#!/usr/bin/env python3
"""What the two rules of the planner between rounds make of preemptions that scatter, rise, and rise for a while.

    python scripts/bench_planner.py [--seeds 200] [--rounds 300] [--means 30 100 1000] [--scatter 1 3]

Counts are drawn, nothing is simulated: Poisson, or with a variance of --scatter times the mean (negative binomial). A
larger tp has the same counts, so nothing but the rule brings it down. Degrees are 1, 2, 4, 8, and 2 the first.

For each rule and kind of counts:

- noise: the share of seeds that never leave tp 2 in --rounds rounds of one mean, the share of rounds at tp 2, and the
  median round in which tp 8 is reached (-: not by half of the seeds);
- a rise to 1.2, 1.5 or 2 times the mean after 16 and after 64 rounds: the median round, and the 95th percentile, in
  which tp rises (-: not within 32 rounds); seeds that rose before are left out;
- a rise to twice the mean for 8 rounds: the median round behind it in which tp is 2 again.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from bench import records
from bench.measure import say

from jaxrl.config.layout import LayoutSection
from jaxrl.record import run_dir
from jaxrl.scheduling.layouts.confident_planner import ConfidentPlanner
from jaxrl.scheduling.layouts.tp_planner import TpPlanner

DEGREES, FIRST = (1, 2, 4, 8), 2
RULES = {"paper": TpPlanner, "confident": ConfidentPlanner}
SEARCHED = 32

Row = tuple[str, dict[str, float | None]]
"""What happens, and what the rule made of it; a round is None where half (or 95 %) of the seeds never came there."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How a round's preemptions are drawn."""

    mean: float
    scatter: float

    def draw(self, rng: np.random.Generator, num: int, factor: float = 1.0) -> list[int]:
        mean = self.mean * factor
        means = mean if self.scatter == 1 else rng.gamma(mean / (self.scatter - 1), self.scatter - 1, num)
        return rng.poisson(means, num).tolist()


def degrees(rule: str, options: LayoutSection, counts: Sequence[int]) -> list[int]:
    planner = RULES[rule](options, DEGREES, FIRST)
    return [planner.observe(count) for count in counts]


def measure(rule: str, counts: Counts, options: LayoutSection, seeds: int, rounds: int) -> Iterator[Row]:
    """All rows of one rule and one kind of counts."""

    def played(*parts: tuple[int, float]) -> list[list[int]]:
        generators = [np.random.default_rng(seed) for seed in range(seeds)]
        return [degrees(rule, options, [c for part in parts for c in counts.draw(g, *part)]) for g in generators]

    noise = played((rounds, 1.0))
    yield (
        "noise",
        {
            "seeds that stayed": float(np.mean([set(found) == {FIRST} for found in noise])),
            "rounds at tp 2": float(np.mean(np.array(noise) == FIRST)),
            "tp 8 in round": _quantile([_first(found, lambda tp: tp == DEGREES[-1]) for found in noise], 0.5),
        },
    )
    for before in (16, 64):
        for factor in (1.2, 1.5, 2.0):
            found = [each for each in played((before, 1.0), (SEARCHED, factor)) if set(each[:before]) == {FIRST}]
            after = [_first(each[before:], lambda tp: tp > FIRST) for each in found]
            values = {"median": _quantile(after, 0.5), "p95": _quantile(after, 0.95), "seeds": float(len(found))}
            yield f"x{factor:g} after {before}", values
    passed = [each[40:] for each in played((32, 1.0), (8, 2.0), (rounds, 1.0))]
    back = _quantile([_first(each, lambda tp: tp == FIRST) for each in passed], 0.5)
    yield "x2 for 8 rounds", {"back in round": back}


def _first(found: Sequence[int], wanted: Callable[[int], bool]) -> float:
    """The number of the first round, from 1, that `wanted` is true of; infinite if there is none."""
    return next((i for i, tp in enumerate(found, 1) if wanted(tp)), math.inf)


def _quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value with a share of `q` of all at or below it; None if that is infinite, or without values."""
    ordered = sorted(values)
    value = ordered[max(math.ceil(q * len(ordered)) - 1, 0)] if ordered else math.inf
    return None if math.isinf(value) else value


def text(value: float | None) -> str:
    return "-" if value is None else f"{value:g}" if value == int(value) else f"{value:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--means", type=float, nargs="+", default=[30.0, 100.0, 1000.0])
    parser.add_argument("--scatter", type=float, nargs="+", default=[1.0, 3.0], help="variance over mean, at least 1")
    options = parser.parse_args(arguments)
    if min(options.scatter) < 1:
        parser.error("--scatter must be at least 1, that of Poisson counts")
    say(f"command: {records.command(arguments)}")
    say(f"commit: {run_dir.commit() or 'unknown'}; {options.seeds} seeds")
    layout = replace(LayoutSection(), planner=True)
    for mean in options.means:
        for scatter in options.scatter:
            say(f"\ncounts of mean {mean:g}, variance {scatter:g} times that")
            for rule in RULES:
                for what, values in measure(rule, Counts(mean, scatter), layout, options.seeds, options.rounds):
                    shown = ", ".join(f"{k} {text(v)}" for k, v in values.items())
                    say(f"  {rule:<9}  {what:<15}  {'all seeds rose before' if values.get('seeds') == 0 else shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
