"""When a judge on the rollout's devices may take a turn. A turn is one plan of the judge's engine.

Source: RollPacker §4.3, which runs judge and actor at once and lets the GPU share itself out (MPS).

Departure: here they take turns on the devices, by a rule over counts and never over clocks. A plan of the actor and
one of the judge alternate at the most, so neither starves: while responses decode the judge has gaps, and once only
verdicts are awaited it has the devices to itself. The paper does not say where its judge is while half of the devices
compute gradients (§4.4); here a turn takes those as well, after the microbatch that is under way, so that a verdict
has the same layout, and the same bits, in every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class JudgeTurns:
    """The rule of `reward.judge.when`.

    Attributes:
      when: `gaps`: while at most `busy_share` of the rows are busy; `after`: while none is.
      busy_share: from 0 to 1.
    """

    when: Literal["gaps", "after"] = "gaps"
    busy_share: float = 0.5

    def allows(self, busy_rows: int, num_rows: int) -> bool:
        """Whether a turn may be taken; always where no row is busy."""
        return busy_rows == 0 or (self.when == "gaps" and busy_rows <= self.busy_share * num_rows)
