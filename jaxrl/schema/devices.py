"""How a number of devices can be divided: the factors of a mesh, the shares of rollout and training, and workers."""

from __future__ import annotations

import operator
from itertools import accumulate

from jaxrl.schema.declared import Cap

MAX_DEVICES = Cap(16384, "no machine has more, and each is listed")


def prime_factors(count: int) -> tuple[int, ...]:
    factors: list[int] = []
    divisor = 2
    while count > 1:
        while count % divisor == 0:
            factors.append(divisor)
            count //= divisor
        divisor += 1
    return tuple(factors)


def mesh_factors(num_devices: int, num_hosts: int = 1) -> tuple[int, ...]:
    """The factors of a mesh, of its minor axis first: the factors of one host's devices, then of the number of hosts.

    So every axis either lies inside hosts or goes from host to host, and a host's devices have the minor axes of the
    whole: 2 hosts of 3 devices give (3, 2), where one host of 6 gives (2, 3).
    """
    return (*prime_factors(num_devices // num_hosts), *prime_factors(num_hosts))


def sharing_problem(sharing: int, num_devices: int, num_hosts: int = 1, where: str = "of the trainer") -> str | None:
    """Why groups of `sharing` devices cannot share rows of tokens; None if they can. `where`: whose devices."""
    possible = tuple(accumulate((1, *mesh_factors(num_devices, num_hosts)), operator.mul))
    if sharing in possible:
        return None
    return (
        f"actor.context_parallel_size ({sharing}) must be one of {', '.join(map(str, possible))}: products of the "
        f"first factors of the number of devices {where} ({num_devices})"
    )


def possible_workers(num_devices: int) -> tuple[int, ...]:
    """The numbers of workers into which the devices can be divided, ascending.

    The cut goes along the major axes of the factored mesh, so that a worker's devices are a factored mesh themselves,
    with the minor axes of the whole.
    """
    return tuple(accumulate((1, *reversed(prime_factors(num_devices))), operator.mul))


def devices_problem(own: int, total: int, tp: int, option: str, num_workers: int) -> str | None:
    """Why the rollout cannot have degree `tp` on `num_workers` workers of `own` of `total` devices (`own` 0: of all of
    them); None if it can.

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
    rolling, where = (own, f"rollout.num_devices ({own})") if own else (total, f"{option} ({total})")
    if rolling and num_workers not in possible_workers(rolling):
        return (
            f"rollout.num_workers ({num_workers}) must cut {where} along the major axes of their mesh, into one of "
            f"{', '.join(map(str, possible_workers(rolling)))} workers"
        )
    if (rolling // num_workers) % tp:
        cut = f" / rollout.num_workers ({num_workers})" if num_workers > 1 else ""
        return f"rollout.tensor_model_parallel_size ({tp}) must divide {where}{cut}"
    return None
