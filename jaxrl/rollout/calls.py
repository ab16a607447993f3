"""What a submitted plan is on the devices: program calls over padded rows, and how their values go back to requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxrl.rollout.programs import Generated
from jaxrl.scheduling.tokens.plan import RowResult


@dataclass(slots=True)
class Call:
    """Which request each [group, row] of a program call belongs to, and what it will return."""

    requests: list[tuple[int, int, int]]  # (group, row, request id)
    generated: Generated


@dataclass(slots=True)
class MeshTicket:
    """A submitted plan: its calls' device values."""

    index: int
    policy_version: int
    calls: list[Call] = field(default_factory=list)
    steps: jax.Array | None = None
    submitted_s: float = 0.0


def place(items: Iterable[Any], num_groups: int) -> list[tuple[int, int, Any]]:
    """Numbers items (group, row) in order, each within its dp group."""
    rows = [0] * num_groups
    placed = []
    for item in items:
        placed.append((item.dp_group, rows[item.dp_group], item))
        rows[item.dp_group] += 1
    return placed


def join(parts: list[RowResult]) -> RowResult:
    """A finished prefill's first token and what the same plan decoded after it."""
    if len(parts) == 1:
        return parts[0]
    return RowResult(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.sampled_logprobs for part in parts]),
        np.concatenate([part.rollout_logprobs for part in parts]),
        any(part.stopped for part in parts),
    )
