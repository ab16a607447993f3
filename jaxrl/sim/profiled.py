"""The latency profile of modelled devices: what `jaxrl profile` would measure on them.

Purpose: `modelled_profile` lets a simulated run choose its layouts from a table of points, as a real run does, and not
from the cost model that charges its time.

Source: PAT §4.2 (offline profiler); points as `jaxrl.scheduling.layouts.latency_profile` chooses them. Departure:
without noise, each point is asked for once.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.scheduling.layouts.latency_profile import (
    Measurement,
    Profile,
    ProfileIdentity,
    prefill_points,
    profile_points,
)
from jaxrl.sim.cost_model import CostModel, causal_pairs


def modelled_profile(
    cost: CostModel, name: str, degrees: Sequence[int], num_devices: int, max_batch: int, max_context: int
) -> Profile:
    """The profile that `cost` gives, labelled as made up.

    Args:
      name: of the modelled devices.
      degrees: TP degrees. num_devices: of the machine.
      max_batch: the most live rows of all dp groups together. max_context: tokens of a row.
    """
    budget = max_batch * max_context
    points = profile_points(max_batch, budget, degrees, num_devices, max_context)
    decode = [
        Measurement(p.tp, p.batch, p.context, cost.decode_step_s(p.tp, p.batch, p.batch * p.context)) for p in points
    ]
    prefill = [
        Measurement(
            p.tp,
            p.batch,
            p.context,
            cost.prefill_s(p.tp, p.batch * p.context, p.batch * causal_pairs(p.context)),
        )
        for p in prefill_points(points)
    ]
    switches = [cost.switch_cost(tp, new_tp) for tp in degrees for new_tp in degrees if tp != new_tp]
    identity = ProfileIdentity("", "", name, num_devices, "", "")
    return Profile(identity, tuple(decode), tuple(prefill), tuple(switches), source="synthetic")
