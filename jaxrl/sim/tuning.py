"""The pure half of `jaxrl tune`: what to simulate, what a simulated run shows, and what all of them say.

Source: RollPacker §6.3 (one speculation factor for prompts and responses, and a grid search over [1.1, 1.4]; Fig. 12:
each factor alone, averages over whole periods of short rounds and a long one); APRIL §3 (N' / N).

Departures: instead of whole periods, a run is charged for the prompts that still wait at its end, as if they had run in
long rounds of that run's mean time. So factors with periods of 4 and of 11 steps are compared over equally many steps.
The seeds are paired: each compares all values on the same draws, and a lead counts only where it exceeds its own
standard deviation over the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.scheduling.mechanism import Searched
from jaxrl.scheduling.rounds.batches import provisioned

Factors = tuple[float, ...]  # one for each option of a search; none: plain batches
PLAIN: Factors = ()
_LEAST_STEPS = 20
_PERIODS = 2  # at the least


@dataclass(frozen=True, slots=True)
class RuleSearch:
    """A rule's section, what is searched of it, and the sections of all other rules."""

    section: str
    of: Searched
    others: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.section.removeprefix("rollout.").replace("_", " ")

    def together(self, values: Sequence[float]) -> list[Factors]:
        return [(value,) * len(self.of.options) for value in values]

    def overrides(self, factors: Factors) -> list[str]:
        """The options of a run with these factors, or with plain batches, as on the command line."""
        pairs = zip(self.of.options, factors, strict=bool(factors))
        values = [f"{self.section}.{name}={value:g}" for name, value in pairs]
        return [f"{self.section}.enable={str(bool(factors)).lower()}", *values]

    def alone(self, factors: Factors) -> list[str]:
        """`overrides`, with every other rule off, and without the changes that a rule makes when a run ends."""
        others = [f"{section}.enable=false" for section in self.others]
        return [*others, *self.overrides(factors), f"{self.section}.at_end=leave"]

    def launched(self, factors: Factors, num_prompts: int, group_size: int) -> tuple[int, int]:
        """Prompts, and samples of each, that a round launches: a short one, if there are long ones."""
        counts = [num_prompts, group_size]
        for i, factor in enumerate(factors):
            counts[i] = provisioned(factor, counts[i])
        return counts[0], counts[1]

    def distinct(self, grid: Sequence[Factors], num_prompts: int, group_size: int) -> list[Factors]:
        """Without the factors that launch what earlier ones launch: small batches round them up alike."""
        first: dict[tuple[int, int], Factors] = {}
        for factors in grid:
            first.setdefault(self.launched(factors, num_prompts, group_size), factors)
        return list(first.values())

    def num_steps(self, grid: Sequence[Factors], num_prompts: int) -> int:
        periods = (_PERIODS * self.of.period(factors[0], num_prompts) for factors in grid)
        return self.of.warm_up + max(_LEAST_STEPS, *periods)


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one simulated run. Its seconds have a share of a long round for the prompts that wait at the
    end."""

    step_s: float
    gen_s: float  # of a step's rollout
    thrown_share: float  # of all response tokens: neither trained on, filtered, nor carried
    stale_share: float  # of the trained tokens: of earlier versions than the policy that trains on them
    queue: float  # prompts carried from step to step, on average
    wait_steps: float  # the longest that a prompt was carried
    long_share: float  # of the steps: with a long round


def trial(steps: Sequence[Mapping[str, float]], num_prompts: int, warm_up: int = 0) -> Trial:
    """The result from the metrics of a run's steps, without the first `warm_up`.

    Raises ValueError if prompts wait for a long round at the end and no long round has shown what it costs.
    """
    counted = steps[warm_up:]
    queue = [step.get("rollout/queue_length", 0.0) for step in counted]
    long = [step for step in counted if step["rollout/long_round"]]
    # a rule that defers none carries as much at the start of the counted steps as at their end
    owed = queue[-1] / num_prompts if "rollout/deferred_prompts" in counted[-1] else 0.0
    if owed and not long:
        raise ValueError(
            f"--steps ({len(steps)}) holds no long round, and {queue[-1]:.0f} of the {num_prompts} prompts that make "
            "one wait at the end: give more steps, or larger prompt factors"
        )
    count = len(counted) + owed

    def seconds(name: str) -> float:
        late = owed * float(np.mean([step.get(name, 0.0) for step in long])) if owed else 0.0
        return (sum(step.get(name, 0.0) for step in counted) + late) / count

    thrown = sum(step["rollout/thrown_tokens"] for step in counted)
    useful = sum(
        step["response_length/mean"] * step["rollout/kept_samples"] + step["rollout/filtered_tokens"]
        for step in counted
    )
    waits = [max(step.get("rollout/queue_age_steps/max", 0), step["rollout/trained_age_steps/max"]) for step in counted]
    return Trial(
        step_s=seconds("timing_s/step"),
        gen_s=seconds("timing_s/gen"),
        thrown_share=thrown / (thrown + useful),
        stale_share=float(np.mean([step["training/off_policy/share"] for step in counted])),
        queue=float(np.mean(queue)),
        wait_steps=float(max(waits)),
        long_share=(len(long) + owed) / count,
    )


def label(factors: Factors) -> str:
    if not factors:
        return "plain"
    return f"{factors[0]:g}" if len(set(factors)) == 1 else " × ".join(f"{factor:g}" for factor in factors)


@dataclass(frozen=True, slots=True)
class Tried:
    """A value of the grid: its factors, what they launch (prompts, and samples of each), and a trial for each seed."""

    factors: Factors
    launched: tuple[int, int]
    trials: tuple[Trial, ...]

    @property
    def label(self) -> str:
        return label(self.factors)

    def values(self, name: str) -> np.ndarray:
        return np.array([getattr(each, name) for each in self.trials])

    def mean(self, name: str) -> float:
        return float(self.values(name).mean())

    def gain(self, other: Tried) -> Spread:
        """Seconds of a step that `other` takes more than this one, over the seeds."""
        return Spread.of(other.values("step_s") - self.values("step_s"))

    def speedup(self, plain: Tried) -> Spread:
        return Spread.of(plain.values("step_s") / self.values("step_s"))


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and standard deviation over the seeds; one seed has none (nan)."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        return cls(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else math.nan)

    @property
    def is_clear(self) -> bool:
        """Whether the mean exceeds the deviation, where that is known."""
        return self.mean > (0.0 if math.isnan(self.deviation) else self.deviation)

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if math.isnan(self.deviation) else f"{self.mean:.4g} ± {self.deviation:.2g}"


@dataclass(frozen=True, slots=True)
class Table:
    search: RuleSearch
    plain: Tried  # the baseline
    tried: tuple[Tried, ...]  # the values of the grid, in its order

    @property
    def best(self) -> Tried:
        return min(self.tried, key=lambda each: each.mean("step_s"))

    @property
    def as_good(self) -> list[Tried]:
        """The values that the best leads by less than the spread over the seeds."""
        best = self.best
        return [each for each in self.tried if each is not best and not best.gain(each).is_clear]

    @property
    def pays(self) -> bool:
        """Whether the best is faster than plain batches by more than the spread."""
        return self.best.gain(self.plain).is_clear

    @property
    def chosen(self) -> list[str]:
        return self.search.overrides(self.best.factors if self.pays else PLAIN)

    def rows(self) -> list[str]:
        body: list[tuple[str, ...]] = [_HEAD]
        for each in (self.plain, *self.tried):
            body.append(
                (
                    ("* " if each is self.best else "  ") + each.label,
                    " × ".join(map(str, each.launched)),
                    str(Spread.of(each.values("step_s"))),
                    f"{each.mean('gen_s'):.4g}",
                    "1" if each is self.plain else str(each.speedup(self.plain)),
                    f"{each.mean('thrown_share'):.1%}",
                    f"{each.mean('stale_share'):.1%}",
                    f"{each.mean('queue'):.1f}",
                    f"{each.values('wait_steps').max():.0f}",
                    f"{each.mean('long_share'):.0%}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*body, strict=True)]
        return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in body]

    def verdict(self) -> list[str]:
        best, gain = self.best, f"{self.best.speedup(self.plain)} times as fast as plain batches"
        if len(self.plain.trials) == 1:
            return [f"best: {best.label}, {gain}; one seed shows no spread"]
        if not self.pays:
            return [f"no value beats plain batches by more than the spread over the seeds; {best.label}: {gain}"]
        said = [f"best: {best.label}, {gain}"]
        if self.as_good:
            labels = [each.label for each in self.as_good]
            listed = f"{', '.join(labels[:-1])} and {labels[-1]} are" if len(labels) > 1 else f"{labels[0]} is"
            said.append(f"{listed} within the noise of it: the lead is no larger than its own spread over the seeds")
        return said


_HEAD = (
    "  factor",
    "launches",
    "seconds a step",
    "rollout",
    "speed-up",
    "thrown tokens",
    "stale tokens",
    "queue",
    "longest wait",
    "long rounds",
)
