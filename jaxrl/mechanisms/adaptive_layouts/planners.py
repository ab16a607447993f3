"""The tensor-parallel degree that a rollout round starts with, from how often requests were preempted before.

`TpPlanner` doubles the degree when preemptions rise (a larger tp splits the weights further, which leaves more memory
for KV) and halves it after quiet rounds (a smaller one communicates less).

Source: RollPacker §4.2: a rise of preemptions above x1.05 doubles TP, four steps in a row without any halve it, TP
groups stay inside one host, and the first degree is the profile's best.

Departures:

- The paper does not say what a rise is measured against. Here it is the previous round of the same kind, whatever its
  degree was. Short rounds have up to 1.79 times the preemptions of long ones (§4.2), so across kinds every short round
  after a long one would be a rise. So each kind has a degree, a count and a quiet streak of its own.
- The first round of a kind is never a rise. From no preemptions to some is a rise.
- "Doubling" and "halving" are steps to the next allowed degree, which is the same for powers of two.

Preemptions are logical, not measured by a clock: decisions follow from the state in the checkpoint and need no journal.

`ConfidentPlanner` (`rollout.layout.planner_rule=confident`) raises tp only where preemptions have risen beyond noise,
and tries to come down. In the paper's rule a round with 5 % more preemptions than the one before doubles tp. Counts
that only scatter pass 5 % often: Poisson counts of mean 100 every third round. As only rounds without any preemption
lower tp, the paper's rule then ends at the largest degree.

Source of its test: the comparison of two Poisson means by their deviance, with a dispersion estimated from the data
(McCullagh and Nelder 1989, Generalized Linear Models, 2nd edition, §6.3 and §9.2). The dispersion comes from successive
differences (von Neumann et al. 1941, Annals of Mathematical Statistics 12), which a slow drift hardly touches. The tail
of Student's t is Wallace's approximation (1959, Annals of Mathematical Statistics 30).

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

Departures from RollPacker: the test, and the trials.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts

SCHEMA = 2


class Planner:
    """Chooses a degree per kind of round, from the preemptions of those before.

    Args:
      degrees: tp degrees that may be used, ascending, all of them inside one host.
      initial: the degree that the first round of each kind starts in.
    """

    RULE: ClassVar[str]

    def __init__(self, options: AdaptiveLayouts.Options, degrees: Sequence[int], initial: int) -> None:
        assert initial in degrees
        self.options, self.degrees, self.initial = options, tuple(degrees), initial
        self._kinds: dict[str, Any] = {}

    def degree(self, kind: str = "all") -> int:
        """The degree that the next round of this kind starts with."""
        known = self._kinds.get(kind)
        return self.initial if known is None else known.degree

    def observe(self, preemptions: int, kind: str = "all") -> int:
        """Takes in a whole round's preemptions; returns the degree of the next round of this kind."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Part of a checkpoint: JSON values."""
        kinds = {kind: self._saved(state) for kind, state in self._kinds.items()}
        return {"rule": self.RULE, "schema": SCHEMA, "kinds": kinds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a planner's state, from one of another rule with its degrees alone. A degree that is not allowed
        becomes the largest one below it."""
        if state["schema"] != SCHEMA:
            raise ValueError(f"tp planner of schema {state['schema']}: this version reads schema {SCHEMA}")
        same_rule = state["rule"] == self.RULE
        self._kinds = {
            kind: self._loaded(self._fitting(saved["degree"]), saved if same_rule else None)
            for kind, saved in state["kinds"].items()
        }

    def _saved(self, state: Any) -> dict[str, Any]:
        return asdict(state)

    def _loaded(self, degree: int, saved: Mapping[str, Any] | None) -> Any:
        """The state of a kind with this degree; `saved`: of the same rule."""
        raise NotImplementedError

    def _fitting(self, degree: int) -> int:
        """The largest allowed degree that is at most `degree`; the smallest of all, if none is."""
        return max((each for each in self.degrees if each <= degree), default=self.degrees[0])


@dataclass(slots=True)
class _PaperKind:
    """The state of one kind of round."""

    degree: int
    last: int = -1  # preemptions of the round before; -1: there was none
    quiet: int = 0  # rounds without preemption in a row, since the degree last changed


class TpPlanner(Planner):
    """The paper's rule."""

    RULE = "paper"

    def observe(self, preemptions: int, kind: str = "all") -> int:
        assert preemptions >= 0
        state = self._kinds.setdefault(kind, _PaperKind(self.initial))
        state.quiet = 0 if preemptions else state.quiet + 1
        if state.last >= 0 and preemptions > self.options.planner_rise * state.last:
            self._move(state, +1)
        elif state.quiet >= self.options.planner_quiet_rounds:
            self._move(state, -1)
        state.last = preemptions
        return state.degree

    def _move(self, state: _PaperKind, steps: int) -> None:
        """Moves to the next degree, or stays at the last one; both restart the count of quiet rounds."""
        at = min(max(self.degrees.index(state.degree) + steps, 0), len(self.degrees) - 1)
        state.degree, state.quiet = self.degrees[at], 0

    def _loaded(self, degree: int, saved: Mapping[str, Any] | None) -> _PaperKind:
        return _PaperKind(degree) if saved is None else _PaperKind(degree, saved["last"], saved["quiet"])


WINDOWS = (1, 2, 4, 8)
PRIOR_ROUNDS = 8.0
LEVEL = 1e-4  # the chance per round that noise alone raises tp
TRIAL_ROUNDS = 16  # after which a raised tp is lowered on trial; doubled each time that this fails


def risen(counts: Sequence[int], window: int, rise: float, level: float) -> bool:
    """Whether the last `window` counts have more than `rise` times the mean of those before, beyond chance. `level`:
    the chance of an affirmative answer where the means differ by no more than that."""
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
class _ConfidentKind:
    """The state of one kind of round."""

    degree: int
    floor: int  # the lowest degree that trials go back to
    here: int = 0  # rounds since the degree last changed
    quiet: int = 0  # the last of them, without preemption
    came_down: bool = False  # whether it came from the degree above, and that trial still runs
    levels: dict[int, _Level] = field(default_factory=dict)  # by degree

    def level(self, degree: int) -> _Level:
        return self.levels.setdefault(degree, _Level())

    def move(self, degree: int, *, came_down: bool) -> None:
        self.degree, self.here, self.quiet, self.came_down = degree, 0, 0, came_down


class ConfidentPlanner(Planner):
    """The rule with a test and trials."""

    RULE = "confident"

    def __init__(
        self, options: AdaptiveLayouts.Options, degrees: Sequence[int], initial: int, trial_rounds: int = TRIAL_ROUNDS
    ) -> None:
        super().__init__(options, degrees, initial)
        self._trial_rounds = trial_rounds

    def observe(self, preemptions: int, kind: str = "all") -> int:
        assert preemptions >= 0
        state = self._kinds.setdefault(kind, _ConfidentKind(self.initial, self.initial))
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

    def _saved(self, state: _ConfidentKind) -> dict[str, Any]:
        saved = asdict(state)
        return saved | {"levels": {str(degree): level for degree, level in saved["levels"].items()}}

    def _loaded(self, degree: int, saved: Mapping[str, Any] | None) -> _ConfidentKind:
        """Counts of a degree that is not allowed are dropped."""
        if saved is None:
            return _ConfidentKind(degree, degree)
        came_down = saved["came_down"] and degree < self.degrees[-1]
        levels = {int(each): _Level(**level) for each, level in saved["levels"].items() if int(each) in self.degrees}
        return _ConfidentKind(degree, self._fitting(saved["floor"]), saved["here"], saved["quiet"], came_down, levels)
