"""The options `rollout.layout.*`: tensor parallelism that adapts, and what of them cannot be."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal


def prime_factors(count: int) -> tuple[int, ...]:
    """The primes whose product is `count`, ascending."""
    factors: list[int] = []
    divisor = 2
    while count > 1:
        while count % divisor == 0:
            factors.append(divisor)
            count //= divisor
        divisor += 1
    return tuple(factors)


def devices_problem(own: int, total: int, tp: int, option: str) -> str | None:
    """Why the rollout cannot have degree `tp` on `own` of `total` devices (0 of its own: on all), or None.

    `option` says where the devices are counted; `total` 0: not known yet. Weights pass from mesh to mesh with the same
    spec on both sides, so the axes of one must begin those of the other.
    """
    if own and total:
        if own >= total:
            return f"rollout.num_devices ({own}) must be below {option} ({total}): some are left for training"
        mine, others = prime_factors(own), prime_factors(total - own)
        if mine[: len(others)] != others and others[: len(mine)] != mine:
            return (
                f"rollout.num_devices ({own}) and the {total - own} devices left of {option} ({total}) must have "
                f"nested meshes for weights to pass: the prime factors of one, {mine} and {others}, must begin those "
                "of the other"
            )
    if (own or total) % tp:
        where = f"rollout.num_devices ({own})" if own else f"{option} ({total})"
        return f"rollout.tensor_model_parallel_size ({tp}) must divide {where}"
    return None


@dataclass(frozen=True)
class LayoutSection:
    """Tensor parallelism that adapts; `rollout.tensor_model_parallel_size` is where it begins."""

    switch: bool = False  # change tp while a batch drains (jaxrl.scheduling.layouts.switch_rule)
    planner: bool = (
        False  # choose each step's first tp from the preemptions before (jaxrl.scheduling.layouts.tp_planner)
    )
    degrees: list[int] = field(default_factory=list)  # tp degrees that may be used; empty: all inside a host
    devices_per_host: int = 0  # tp stays inside a host; 0: all of the run's devices are in one
    scale_rows: bool = True  # max_num_seqs and num_blocks of a dp group grow with tp, so that the totals stay
    profile: str = ""  # switch: the file that `jaxrl profile` wrote
    allow_synthetic: bool = False  # accept a profile that was made up to try switches out
    bound: Literal["max_length", "expected"] = "max_length"  # rows go on to their limit, or as long as others did
    direction: Literal["up", "both"] = "up"  # within a generation
    min_gain: float = 0.05  # share of the predicted remaining time that a switch must save
    cooldown: int = 4  # plans between switches, at least
    reversal_factor: float = 2.0  # by which live rows must change before a switch back
    state: Literal["cheaper", "migrate", "recompute"] = "cheaper"  # how KV is carried over
    headroom_tokens: int = 32  # that every live row must have room to grow by in the new layout
    correction_weight: float = 0.1  # of a new step time in the correction of the profile; 0: off
    correction_max_factor: float = 2.0  # step times count as at most this many times the predicted ones
    planner_rise: float = 1.05  # more than this times the preemptions of the step before double tp
    planner_quiet_rounds: int = 4  # so many steps in a row without preemption halve it

    @property
    def adapts(self) -> bool:
        return self.switch or self.planner

    def degrees_on(self, tp: int, num_devices: int) -> tuple[int, ...]:
        """The degrees that rounds which start in `tp` use on so many devices. Raises ValueError for what cannot be."""
        if not self.adapts:
            return (tp,)
        possible = tuple(accumulate((1, *prime_factors(num_devices)), operator.mul))
        host = self.devices_per_host or num_devices
        degrees = tuple(self.degrees) or tuple(degree for degree in possible if degree <= host)
        for degree in (*degrees, tp):
            if degree not in possible or degree > host or degree not in degrees:
                raise ValueError(
                    f"rollout.layout.degrees: tp {degree} must be one of {', '.join(map(str, possible))} (which the "
                    f"{num_devices} devices can be factored into), at most the {host} devices of a host, and the first "
                    f"tp ({tp}) one of the degrees {degrees}"
                )
        return degrees

    def problem(self, tp: int, num_devices: int) -> str | None:
        """What cannot be, in a sentence, for rounds that start in `tp` on `num_devices` (0: not known yet); or None."""
        degrees = self.degrees
        if not self.adapts:
            return None
        if self.switch and not self.profile:
            return "rollout.layout.profile is missing: rollout.layout.switch needs a file of `jaxrl profile`"
        if self.planner and self.switch and self.direction != "up":
            return (
                f"rollout.layout.direction must be up where rollout.layout.planner is on, found {self.direction}: the "
                "planner alone lowers tp, between steps"
            )
        if degrees and (degrees[0] < 1 or any(a >= b or b % a for a, b in pairwise(degrees)) or tp not in degrees):
            return (
                f"rollout.layout.degrees {degrees} must ascend from at least 1, each dividing the next, with "
                f"rollout.tensor_model_parallel_size ({tp}) among them"
            )
        for degree in degrees if num_devices else ():
            if num_devices % degree:
                return f"rollout.layout.degrees: {degree} must divide trainer.num_devices ({num_devices})"
        if self.reversal_factor <= 1:
            return f"rollout.layout.reversal_factor must be above 1, found {self.reversal_factor}"
        if self.correction_weight > 1:
            return f"rollout.layout.correction_weight must be at most 1, found {self.correction_weight}"
        return None
