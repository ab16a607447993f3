"""Made-up latency profiles and batch states, for tests of layout decisions."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.mechanisms.adaptive_layouts import AdaptiveLayouts
from jaxrl.scheduling.layouts.batch_state import BatchState, GroupCapacity, LiveRow, Rows
from jaxrl.scheduling.layouts.latency import LatencyPredictor
from jaxrl.scheduling.layouts.latency_profile import Measurement, Profile, ProfileIdentity, SwitchCost

ROOMY = GroupCapacity(tokens=1 << 40, rows=1 << 20)
DEGREES = (1, 2, 4, 8)


def predictor(
    steps: dict[tuple[int, int], float],
    switches: dict[tuple[int, int], tuple[float, float, float]],
    prefill: dict[int, float] | None = None,
    num_devices: int = 8,
) -> LatencyPredictor:
    """Step times by (tp, rows of a dp group) in seconds, whatever the context; prefill by tp, whatever the load."""
    identity = ProfileIdentity("made up", "", "", num_devices, "", "")
    decode = [Measurement(tp, b, n, s) for (tp, b), s in steps.items() for n in (1, 1 << 20)]
    filled = [Measurement(tp, b, 1 << 20, s) for tp, s in (prefill or {}).items() for b in (1, 1 << 10)]
    costs = [SwitchCost(*pair, *cost) for pair, cost in switches.items()]
    return LatencyPredictor(Profile(identity, tuple(decode), tuple(filled), tuple(costs), source="synthetic"))


def batch_state(
    tp: int, rows: Sequence[Sequence[tuple[int, int]]], num_devices: int = 8, dispatch: int = 0, **others
) -> BatchState:
    """Rows as (length, steps left) for the first dp groups; the others are empty."""
    groups: list[Rows] = []
    for g in range(num_devices // tp):
        mine = rows[g] if g < len(rows) else []
        groups.append(tuple(LiveRow(100 * g + i, n, n + left) for i, (n, left) in enumerate(mine)))
    others.setdefault("capacities", dict.fromkeys(DEGREES, ROOMY))
    return BatchState(dispatch, tp, tuple(groups), **others)


# Round numbers: steps of 10 ms at tp 1, 8 at tp 2, 5 at tp 4, 4 at tp 8 with one row in a group; each row more costs
# 1 ms x tp: communication grows with the group's rows. A switch costs 1 s and 0.1 ms per token; a prefill 0.25 s.
SIMPLE = predictor(
    {(tp, b): s + 0.001 * tp * (b - 1) for tp, s in ((1, 0.010), (2, 0.008), (4, 0.005), (8, 0.004)) for b in (1, 64)},
    {(a, b): (0.5, 0.0001, 0.5) for a in DEGREES for b in DEGREES if a != b},
    prefill=dict.fromkeys(DEGREES, 0.25),
)
UP = AdaptiveLayouts.Options(min_gain=0.0)
MOVE = UP.replace(state="migrate")
