"""How a number of devices can be divided: the factors of a mesh, and the shares of rollout and training."""

from __future__ import annotations

from jaxrl.config.declared import Cap

MAX_DEVICES = Cap(16384, "no machine has more, and each is listed")


def prime_factors(count: int) -> tuple[int, ...]:
    """The prime factors of `count`, ascending."""
    factors: list[int] = []
    divisor = 2
    while count > 1:
        while count % divisor == 0:
            factors.append(divisor)
            count //= divisor
        divisor += 1
    return tuple(factors)


def devices_problem(own: int, total: int, tp: int, option: str) -> str | None:
    """Why the rollout cannot have degree `tp` on `own` of `total` devices (`own` 0: on all of them); None if it can.

    `option` names the option that counts all devices; `total` 0: not known yet. Weights pass from mesh to mesh with the
    same spec on both sides, so the axes of one mesh must be the first axes of the other.
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
