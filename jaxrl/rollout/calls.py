"""What a submitted plan is on the devices: program calls over padded rows, and how their values go back to requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxrl.rollout.layout_programs import LayoutPrograms, bucket
from jaxrl.rollout.programs import Generated
from jaxrl.scheduling.tokens.plan import PrefillChunk, RowResult, VerifyCounts
from jaxrl.types import TopTokens

_UNKNOWN = -3
"""Stands for a token that a chunk does not show; no history has it."""


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

    @property
    def is_done(self) -> bool:
        """Whether the devices have run the plan."""
        arrays = [self.steps, *(call.generated.counts for call in self.calls)]
        return all(array.is_ready() for array in arrays if array is not None)


def place(items: Iterable[Any], num_groups: int) -> list[tuple[int, int, Any]]:
    """Numbers items (group, row) in order, each within its dp group."""
    rows = [0] * num_groups
    placed = []
    for item in items:
        placed.append((item.dp_group, rows[item.dp_group], item))
        rows[item.dp_group] += 1
    return placed


def prefill_calls(chunks: Iterable[PrefillChunk], programs: LayoutPrograms) -> list[tuple[list[PrefillChunk], int]]:
    """Runs of chunks with the same length bucket, cut where a call's rows would exceed the prefill budget."""
    num_groups = programs.capacity.num_groups
    ordered = sorted(chunks, key=lambda c: (c.start, -len(c.tokens)))
    calls: list[tuple[list[PrefillChunk], int]] = []
    for length, run in itertools.groupby(ordered, key=lambda c: bucket(len(c.tokens), programs.chunk_buckets)):
        most = programs.prefill_rows(length)[-1]
        rows: list[PrefillChunk] = []
        per_group = [0] * num_groups
        for chunk in run:
            if per_group[chunk.dp_group] == most:
                calls.append((rows, length))
                rows, per_group = [], [0] * num_groups
            rows.append(chunk)
            per_group[chunk.dp_group] += 1
        calls.append((rows, length))
    return calls


def kept_tokens(chunk: PrefillChunk) -> Sequence[int]:
    """The response's tokens at the end of a prefill. Those that an earlier chunk had are unknown: for a few
    steps nothing is proposed."""
    shown = min(chunk.num_generated, len(chunk.tokens))
    return (_UNKNOWN,) * (chunk.num_generated - shown) + chunk.tokens[len(chunk.tokens) - shown :]


def results(calls: Iterable[Call]) -> dict[int, RowResult]:
    """Waits for the values of a plan's calls, and groups them by request id."""
    pieces: dict[int, list[RowResult]] = {}
    for call in calls:
        host: Generated = jax.tree.map(np.asarray, call.generated)
        for group, row, request_id in call.requests:
            count, verified = int(host.counts[group, row]), None
            if host.verified is not None:
                verified = VerifyCounts(**{name: int(x[group, row]) for name, x in host.verified._asdict().items()})
            pieces.setdefault(request_id, []).append(
                RowResult(
                    host.tokens[group, row, :count],
                    host.sampled_logprobs[group, row, :count],
                    host.rollout_logprobs[group, row, :count],
                    bool(host.stopped[group, row]),
                    verified,
                    _top(host, group, row, count),
                )
            )
    return {request_id: _join(parts) for request_id, parts in pieces.items()}


def _join(parts: list[RowResult]) -> RowResult:
    """A finished prefill's first token and what the same plan decoded after it."""
    if len(parts) == 1:
        return parts[0]
    return RowResult(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.sampled_logprobs for part in parts]),
        np.concatenate([part.rollout_logprobs for part in parts]),
        any(part.stopped for part in parts),
        parts[-1].verified,
        _join_top([part.top for part in parts if part.top is not None]),
    )


def _top(host: Generated, group: int, row: int, count: int) -> TopTokens | None:
    if host.top_ids is None:
        return None
    return TopTokens(host.top_ids[group, row, :count], host.top_logprobs[group, row, :count])


def _join_top(parts: list[TopTokens]) -> TopTokens | None:
    return TopTokens(*map(np.concatenate, zip(*parts, strict=True))) if parts else None
