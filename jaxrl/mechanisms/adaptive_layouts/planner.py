"""The tensor-parallel degree that a rollout round starts with, from how often requests were preempted before.

`TpPlanner` doubles the degree when preemptions rise: a larger tp splits the weights further, which leaves more memory
for KV. It halves the degree after quiet rounds: a smaller one communicates less.

Source: RollPacker §4.2. A rise of preemptions above x1.05 doubles TP; four steps in a row without any halve it. TP
groups stay inside one host, and the first degree is the profile's best.

Departures:

- The paper does not say what a rise is measured against. Here it is the previous round of the same kind, at any degree.
  Short rounds have up to 1.79 times the preemptions of long ones (§4.2), so across kinds every short round after a long
  one would be a rise. So the planner keeps a degree, a count and a quiet streak for each kind.
- The first round of a kind is never a rise. From no preemptions to some is a rise.
- "Doubling" and "halving" are steps to the next allowed degree, which is the same for powers of two.

Preemptions are logical, not measured by a clock: decisions follow from the state in the checkpoint and need no journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = 3
RISE = 1.05
QUIET_ROUNDS = 4


@dataclass(slots=True)
class _Kind:
    """The state of one kind of round."""

    degree: int
    last: int = -1  # preemptions of the round before; -1: there was none
    quiet: int = 0  # rounds without preemption in a row, since the degree last changed


class TpPlanner:
    """Chooses a degree per kind of round, from the preemptions of those before.

    Args:
      degrees: tp degrees that may be used, ascending, all of them inside one host.
      initial: the degree that the first round of each kind starts in.
    """

    def __init__(self, degrees: Sequence[int], initial: int) -> None:
        assert initial in degrees
        self.degrees, self.initial = tuple(degrees), initial
        self._kinds: dict[str, _Kind] = {}

    def degree(self, kind: str = "all") -> int:
        """The degree that the next round of this kind starts with."""
        known = self._kinds.get(kind)
        return self.initial if known is None else known.degree

    def observe(self, preemptions: int, kind: str = "all") -> int:
        """Takes in a whole round's preemptions; returns the degree of the next round of this kind."""
        assert preemptions >= 0
        state = self._kinds.setdefault(kind, _Kind(self.initial))
        state.quiet = 0 if preemptions else state.quiet + 1
        if state.last >= 0 and preemptions > RISE * state.last:
            self._move(state, +1)
        elif state.quiet >= QUIET_ROUNDS:
            self._move(state, -1)
        state.last = preemptions
        return state.degree

    def state_dict(self) -> dict[str, Any]:
        """Part of a checkpoint: JSON values."""
        return {"schema": SCHEMA, "kinds": {kind: asdict(state) for kind, state in self._kinds.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a planner's state. A degree that is not allowed becomes the largest one below it."""
        if state["schema"] != SCHEMA:
            raise ValueError(f"tp planner of schema {state['schema']}: this version reads schema {SCHEMA}")
        self._kinds = {
            kind: _Kind(self._fitting(saved["degree"]), saved["last"], saved["quiet"])
            for kind, saved in state["kinds"].items()
        }

    def _move(self, state: _Kind, steps: int) -> None:
        """Moves to the next degree, or stays at the last one; both restart the count of quiet rounds."""
        at = min(max(self.degrees.index(state.degree) + steps, 0), len(self.degrees) - 1)
        state.degree, state.quiet = self.degrees[at], 0

    def _fitting(self, degree: int) -> int:
        """The largest allowed degree that is at most `degree`; the smallest of all, if none is."""
        return max((each for each in self.degrees if each <= degree), default=self.degrees[0])
