"""The planner between rounds that raises tp only where preemptions have risen beyond noise, and tries to come down.

`rollout.layout.planner_rule=confident`. In the paper's rule (`tp_planner`) a round with 5 % more preemptions than the
one before doubles tp. Counts that only scatter pass 5 % often: Poisson counts of mean 100 every third round. As only
rounds without any preemption lower tp, the paper's rule then ends at the largest degree.

Source: what is planned, the factor of 1.05 and the quiet rounds are RollPacker's (§4.2). The test is the comparison of
two Poisson means by their deviance, with a dispersion estimated from the data (McCullagh and Nelder 1989, Generalized
Linear Models, 2nd edition, §6.3 and §9.2). The dispersion comes from successive differences (von Neumann et al. 1941,
Annals of Mathematical Statistics 12), which a slow drift hardly touches. The tail of Student's t is Wallace's
approximation (1959, Annals of Mathematical Statistics 30).

**A rise.** Let X be the preemptions of the last w rounds of a kind at its degree, and S those of the n rounds before
them at that degree. If the last rounds have at most ρ = `planner_rise` times the mean of the others, then at worst
E X = (X + S) · ρw / (ρw + n) and E S = (X + S) · n / (ρw + n), and

    t = sqrt(2 / φ · (X ln(X / E X) + S ln(S / E S)))

is about Student's t with ν + ν₀ degrees of freedom. φ >= 1 is by how much counts scatter more than Poisson counts:
the weighted mean of 1, which counts as ν₀ = 8 rounds, and of an estimate that counts as ν = 2 (n - 1) / 3: half the
mean square of the differences between successive counts, over the mean count. tp rises if X > E X, and t is beyond the
quantile of 1 - α / 4 for one of w = 1, 2, 4, 8. So in a round of which nothing has changed, noise raises it with a
chance of at most α = 1 in 10,000 (by the union bound over the four; the rest is approximation, and
docs/mechanisms/adaptive_layouts.md has measurements).

The test compares with all rounds of a kind at a degree, however long ago, so it finds slow growth as well. Rounds that
showed a rise are forgotten, so that later ones are compared with what was normal.

**The way down.** As in the paper, `planner_quiet_rounds` without preemption lower tp. Besides, `TRIAL_ROUNDS` after a
rise the planner tries the degree from which it rose. If preemptions there are still beyond what was normal, they raise
tp again by the test above, and the next trial waits twice as long; otherwise the wait is forgotten after
`TRIAL_ROUNDS`. So a false rise, or one that has passed, is undone, and one that stays costs ever rarer trials. A lower
degree without rounds of its own is compared with the one above it.

Departures from RollPacker: the test, and the trials. Kinds of rounds, steps between degrees and what is not a clock are
as in `tp_planner`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.mechanisms.adaptive_layouts.tp_planner import fitting_degree

if TYPE_CHECKING:
    from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts

WINDOWS = (1, 2, 4, 8)
PRIOR_ROUNDS = 8.0
LEVEL = 1e-4
"""The chance per round that noise alone raises tp."""
TRIAL_ROUNDS = 16
"""Rounds after which a raised tp is lowered on trial; doubled each time that this fails."""


def risen(counts: Sequence[int], window: int, rise: float, level: float) -> bool:
    """Whether the last `window` counts have more than `rise` times the mean of those before, beyond chance.

    Args:
      counts: preemptions of rounds, the oldest first.
      level: the chance of an affirmative answer where the means differ by no more than that.
    """
    before, last = np.asarray(counts[:-window], np.float64), float(sum(counts[-window:]))
    num, total = len(before), float(before.sum())
    if not num or not last:
        return False
    part = rise * window / (rise * window + num)
    expected, others = (last + total) * part, (last + total) * (1.0 - part)
    if last <= expected:
        return False
    deviance = 2.0 * (last * math.log(last / expected) + (total * math.log(total / others) if total else 0.0))
    freedom = 2.0 * (num - 1) / 3.0
    scatter = float(np.mean(np.diff(before) ** 2)) / 2.0 / (total / num) if num > 1 and total else 1.0
    dispersion = max((PRIOR_ROUNDS + freedom * scatter) / (PRIOR_ROUNDS + freedom), 1.0)
    # where both are nearly equal, rounding may leave less than nothing
    return _normal_of_t(max(deviance, 0.0) / dispersion, PRIOR_ROUNDS + freedom) > NormalDist().inv_cdf(1.0 - level)


def _normal_of_t(squared: float, freedom: float) -> float:
    """The normal deviate with about the same tail as sqrt(`squared`) has under Student's t."""
    return (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(squared / freedom))


@dataclass(slots=True)
class _Level:
    """One degree of one kind: preemptions of its rounds, and how often in a row a lower degree was tried in vain."""

    counts: list[int] = field(default_factory=list)
    failed: int = 0


@dataclass(slots=True)
class _Kind:
    """One kind of round.

    Attributes:
      floor: the lowest degree that trials go back to.
      here: rounds since the degree last changed.
      quiet: the last of them, without preemption.
      came_down: whether it came from the degree above, and that trial still runs.
      levels: by degree.
    """

    degree: int
    floor: int
    here: int = 0
    quiet: int = 0
    came_down: bool = False
    levels: dict[int, _Level] = field(default_factory=dict)

    def level(self, degree: int) -> _Level:
        return self.levels.setdefault(degree, _Level())

    def move(self, degree: int, *, came_down: bool) -> None:
        self.degree, self.here, self.quiet, self.came_down = degree, 0, 0, came_down


class ConfidentPlanner:
    """Chooses a degree per kind of round, from the preemptions of those before: `TpPlanner` with another rule."""

    RULE = "confident"
    SCHEMA = 2

    def __init__(
        self, options: AdaptiveLayouts.Options, degrees: Sequence[int], initial: int, trial_rounds: int = TRIAL_ROUNDS
    ) -> None:
        assert initial in degrees
        self.options, self.degrees, self.initial = options, tuple(degrees), initial
        self._trial_rounds = trial_rounds
        self._kinds: dict[str, _Kind] = {}

    def degree(self, kind: str = "all") -> int:
        """The degree that the next round of this kind starts with."""
        known = self._kinds.get(kind)
        return self.initial if known is None else known.degree

    def observe(self, preemptions: int, kind: str = "all") -> int:
        """Takes in all preemptions of a round; returns the degree of the next round of this kind."""
        assert preemptions >= 0
        state = self._kinds.setdefault(kind, _Kind(self.initial, self.initial))
        at = self.degrees.index(state.degree)
        above = self.degrees[at + 1] if at + 1 < len(self.degrees) else None
        level = state.level(state.degree)
        level.counts.append(preemptions)
        state.here += 1
        state.quiet = 0 if preemptions else state.quiet + 1
        wait = 2**level.failed
        is_quiet = at > 0 and state.quiet >= self.options.planner_quiet_rounds * wait
        is_tried = state.degree > state.floor and state.here >= self._trial_rounds * wait
        if above is not None and (window := self._risen(level.counts)):
            del level.counts[-window:]
            if state.came_down:
                state.level(above).failed += 1
            state.move(above, came_down=False)
        elif is_quiet or is_tried:
            below = self.degrees[at - 1]
            if not state.level(below).counts:
                state.level(below).counts = list(level.counts)
            state.move(below, came_down=True)
            state.floor = min(state.floor, below)
        elif above is not None and state.came_down and state.here >= self._trial_rounds:
            state.level(above).failed, state.came_down = 0, False
        return state.degree

    def _risen(self, counts: Sequence[int]) -> int:
        """The longest window that shows a rise; 0: none does."""
        level = LEVEL / len(WINDOWS)
        return max((w for w in WINDOWS if risen(counts, w, self.options.planner_rise, level)), default=0)

    def state_dict(self) -> dict[str, Any]:
        """Part of a checkpoint: JSON values."""
        kinds = {kind: asdict(state) for kind, state in self._kinds.items()}
        for kind in kinds.values():
            kind["levels"] = {str(degree): level for degree, level in kind["levels"].items()}
        return {"rule": self.RULE, "schema": self.SCHEMA, "kinds": kinds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a planner's state, from one of another rule with its degrees alone. A degree that is not allowed
        becomes the largest one below it, and its counts are dropped."""
        if state["schema"] != self.SCHEMA:
            raise ValueError(f"tp planner of schema {state['schema']}: this version reads schema {self.SCHEMA}")
        self._kinds = {}
        for kind, saved in state["kinds"].items():
            degree = fitting_degree(self.degrees, saved["degree"])
            self._kinds[kind] = own = _Kind(degree, degree)
            if state["rule"] == self.RULE:
                own.floor = fitting_degree(self.degrees, saved["floor"])
                own.here, own.quiet = saved["here"], saved["quiet"]
                own.came_down = saved["came_down"] and degree < self.degrees[-1]
                levels = {int(each): _Level(**level) for each, level in saved["levels"].items()}
                own.levels = {each: level for each, level in levels.items() if each in self.degrees}
