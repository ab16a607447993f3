"""Decides a worker's tensor-parallel degree: `TpPlanner` between rounds, `LayoutSwitchRule` while a batch drains.

**Between rounds**: the degree doubles when preemptions rise, because a larger tp splits the weights further, which
leaves more memory for KV. It halves after quiet rounds: a smaller one communicates less.

Source: RollPacker §4.2. A rise of preemptions above x1.05 doubles TP; four steps in a row without any halve it. TP
groups stay inside one host, and the first degree is the profile's best. Departures:

- The paper does not say what a rise is measured against. Here it is the previous round of the same kind, at any degree.
  Short rounds have up to 1.79 times the preemptions of long ones (§4.2), so across kinds every short round after a long
  one would be a rise. So the planner keeps a degree, a count and a quiet streak for each kind.
- The first round of a kind is never a rise. From no preemptions to some is a rise.
- "Doubling" and "halving" are steps to the next allowed degree, which is the same for powers of two.

Preemptions are logical, not measured by a clock: decisions follow from the state in the checkpoint and need no journal.

**While a batch drains**: between two plans, `LayoutSwitchRule.decide` compares the time left of a generation under each
tensor-parallel degree, the cost of the switch included.

Source: PAT §4.2, Algorithm 1, and §4.3 for the costs. Its lines are found in: 4 and 8 `remaining_s`
(`jaxrl.scheduling.layouts.batch_state`); 7 `regroup`; 6-14 with 9 `evaluate`; 15 `decide`. Lines 23-25 are left to the
engine, which asks again later, so one generation can switch several times. Departures:

- The paper uses one step time for the rest of the generation. Here, step by step, rows leave at their own limits and
  contexts grow; every dp group waits for the fullest (lockstep, docs/architecture.md).
- `bound="expected"` takes a row's expected remaining length (from history) instead of its limit.
- Hysteresis (the paper has none): a gain has to exceed `min_gain`, a share of the time left; `cooldown` plans lie
  between switches; and a switch in the direction opposite to the last one needs a batch `REVERSAL_FACTOR` times smaller
  (to raise tp) or larger (to lower it) than at that last switch. So a batch that only drains turns at most once, from
  falling to rising tp, for any predictor. With `direction="up"`, the default, tp only rises.
- While requests wait for a row, the batch is not draining and the rule does not switch.

Going back when a generation has ended costs nothing: no KV is left, and the next weights come from training anyway.
Decisions rest on measured times, so each goes to the journal (`Switch.to_json`) before it takes effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.scheduling.layouts.batch_state import BatchState, GroupCapacity, Rows, load_at, num_tokens, remaining_s
from jaxrl.scheduling.layouts.regroup import regroup
from jaxrl.scheduling.layouts.relayout import How
from jaxrl.types import check_schema

if TYPE_CHECKING:
    from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts
    from jaxrl.scheduling.layouts.latency import LatencyPredictor

SCHEMA, PLANNER_SCHEMA = 1, 3
RISE = 1.05
QUIET_ROUNDS = 4
REVERSAL_FACTOR = 2.0
"""Factor by which the live rows must change before a switch back."""
HEADROOM_TOKENS = 32
"""Tokens by which every live row must be able to grow in a new layout."""


@dataclass(slots=True)
class _Kind:
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
        return {"schema": PLANNER_SCHEMA, "kinds": {kind: asdict(state) for kind, state in self._kinds.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a planner's state. A degree that is not allowed becomes the largest one below it."""
        check_schema("tp planner", state, PLANNER_SCHEMA)
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


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch, with the predictions that a decision for it rests on."""

    dispatch: int  # it comes before the plan of this number, counted from the start of the generation
    from_tp: int
    to_tp: int
    how: How
    num_live: int  # rows at that time
    num_tokens: int  # of them, which are migrated or recomputed
    stay_s: float  # the time left without a switch (T_cur)
    remaining_s: float  # the time left after it (T_rem)
    weights_s: float  # this and the next two: parts of its cost (T_switch)
    state_s: float
    fixed_s: float
    step_before_s: float = 0.0  # the next decode step without a switch; worked out for the one that is decided
    step_after_s: float = 0.0

    @property
    def cost_s(self) -> float:
        return self.weights_s + self.state_s + self.fixed_s

    @property
    def total_s(self) -> float:
        """T_total of Algorithm 1, line 9."""
        return self.remaining_s + self.cost_s

    @property
    def gain_s(self) -> float:
        return self.stay_s - self.remaining_s - self.cost_s

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Switch:
        """The reverse of `to_json`, without keys that the journal adds. Raises ValueError for another schema."""
        check_schema("journalled layout switch", entry, SCHEMA)
        return cls(**{each.name: entry[each.name] for each in fields(cls)})


@dataclass(slots=True)
class LayoutSwitchRule:
    """Algorithm 1 with hysteresis. Its only state is the last switch of this generation. `degrees`: those that may be
    used, ascending, each dividing the next."""

    options: AdaptiveLayouts.Options
    degrees: tuple[int, ...]
    model: LatencyPredictor
    _last: Switch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Raises ValueError for degrees that the model cannot predict."""
        degrees, one = self.degrees, np.ones(1)
        assert degrees
        assert all(a < b and not b % a for a, b in pairwise(degrees))
        for tp in degrees:
            self.model.decode_steps_s(tp, one, one)
        for source in degrees:
            for target in degrees:
                if target > source or (target < source and self.options.direction == "both"):
                    self.model.switch_cost(source, target)
                    if self.options.state != "migrate":
                        self.model.recompute_s(target, (1,))

    def begin(self) -> None:
        """A generation begins: forgets the last one's switches; dispatch numbers start anew."""
        self._last = None

    def decide(self, now: BatchState) -> Switch | None:
        """The switch to make now, or None. One that is returned counts as made: if it fails, the next one waits for the
        cooldown all the same."""
        switch = self._find(now)
        if switch is None:
            return None
        before_s, after_s = (self._next_step_s(now, tp) for tp in (now.tp, switch.to_tp))
        self._last = replace(switch, step_before_s=before_s, step_after_s=after_s)
        return self._last

    def wants(self, now: BatchState) -> bool:
        """Whether `decide` would name a degree."""
        return self._find(now) is not None

    def considers(self, dispatch: int, tp: int, num_live: int, num_waiting: int) -> bool:
        """Whether `wants` depends on the rows; False if it is False for all rows. Costs next to nothing."""
        if not num_live or num_waiting:
            return False
        if self._last is not None and dispatch - self._last.dispatch < self.options.cooldown:
            return False
        return any(self._may_go(tp, other, num_live) for other in self.degrees if other != tp)

    def _find(self, now: BatchState) -> Switch | None:
        """The best switch, if it pays."""
        assert now.tp in self.degrees
        assert now.tp * len(now.groups) == self.model.num_devices
        assert self._last is None or now.dispatch >= self._last.dispatch
        if not self.considers(now.dispatch, now.tp, now.num_live, now.num_waiting):
            return None
        best = min(self.evaluate(now), key=lambda switch: switch.total_s, default=None)
        pays = best is not None and best.stay_s - best.total_s > self.options.min_gain * best.stay_s
        return best if pays else None

    def record(self, switch: Switch) -> None:
        self._last = switch

    def evaluate(self, now: BatchState) -> list[Switch]:
        """The switches that may be made, by ascending degree."""
        found, live = list[Switch](), (now.num_live, sum(map(num_tokens, now.groups)))
        stay_s = remaining_s(self.model, now.tp, now.groups, self.options.bound)
        for tp in self.degrees:
            if tp == now.tp or not self._may_go(now.tp, tp, now.num_live):
                continue
            groups = regroup(now.groups, self.model.num_devices // tp)
            if self._fits(groups, now.capacities.get(tp)):
                how, state_s = self._state_way(now, tp, groups)
                left_s = remaining_s(self.model, tp, groups, self.options.bound)
                cost = self.model.switch_cost(now.tp, tp)
                seconds = stay_s, left_s, cost.weights_s, state_s, cost.fixed_s
                found.append(Switch(now.dispatch, now.tp, tp, how, *live, *seconds))
        return found

    def _state_way(self, now: BatchState, tp: int, groups: Sequence[Rows]) -> tuple[How, float]:
        """How the KV goes along, and the seconds that takes."""
        ways: dict[How, float] = {}
        if self.options.state != "recompute":
            ways["migrate"] = self.model.move_s(now.tp, tp, max(map(num_tokens, now.groups)))
        if self.options.state != "migrate":
            lengths = [[row.length for row in rows] for rows in groups if rows]
            ways["recompute"] = max(self.model.recompute_s(tp, each) for each in lengths)
        return min(ways.items(), key=lambda way: way[1])  # at equal cost, migrate

    def _may_go(self, from_tp: int, tp: int, num_live: int) -> bool:
        goes_up = tp > from_tp
        if self.options.direction == "up" and not goes_up:
            return False
        last, factor = self._last, REVERSAL_FACTOR
        if last is None or (last.to_tp > last.from_tp) == goes_up:
            return True
        return num_live * factor <= last.num_live if goes_up else num_live >= last.num_live * factor

    def _fits(self, groups: Sequence[Rows], capacity: GroupCapacity | None) -> bool:
        """Whether the dp groups of a layout can hold these rows, and grow."""
        if capacity is None or max(map(len, groups)) > capacity.rows:
            return False
        need = max(sum(min(row.length + HEADROOM_TOKENS, row.limit) for row in each) for each in groups)
        return max(need, *(row.limit for each in groups for row in each)) <= capacity.tokens

    def _next_step_s(self, now: BatchState, tp: int) -> float:
        groups = now.groups if tp == now.tp else regroup(now.groups, self.model.num_devices // tp)
        return float(self.model.decode_steps_s(tp, *load_at(groups, self.options.bound, np.zeros(1, np.int64)))[0])
