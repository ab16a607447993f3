"""A submitted plan on the devices: program calls over padded rows, and how their values become a result."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxrl.rollout.layout_programs import LayoutPrograms, bucket
from jaxrl.rollout.programs import Generated
from jaxrl.scheduling.tokens.plan import PlanResult, PrefillChunk, ScheduledRows
from jaxrl.types import TopTokens

_UNKNOWN = -3
"""Stands for a token that a chunk does not show; no history has it."""


@dataclass(slots=True)
class Call:
    """A program call's future result, and which of the plan's rows are at which of its places [group, row]."""

    rows: np.ndarray
    groups: np.ndarray
    places: np.ndarray
    generated: Generated


@dataclass(slots=True)
class MeshTicket:
    """A submitted plan: its calls' device values."""

    index: int
    rows: ScheduledRows
    policy_version: int
    calls: list[Call] = field(default_factory=list)
    steps: jax.Array | None = None
    submitted_s: float = 0.0

    @property
    def is_done(self) -> bool:
        arrays = [self.steps, *(call.generated.counts for call in self.calls)]
        return all(array.is_ready() for array in arrays if array is not None)


def places_in(groups: np.ndarray) -> np.ndarray:
    """Numbers rows, of these dp groups, within each group; int64, as `groups`."""
    places = np.zeros(len(groups), np.int64)
    for group in np.unique(groups):
        own = groups == group
        places[own] = np.arange(own.sum())
    return places


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
    """The response's tokens at the end of a prefill. Those that an earlier chunk had are unknown: for a few steps
    nothing is proposed."""
    shown = min(chunk.num_generated, len(chunk.tokens))
    return (_UNKNOWN,) * (chunk.num_generated - shown) + chunk.tokens[len(chunk.tokens) - shown :]


def result_of(ticket: MeshTicket) -> PlanResult:
    """Waits for a plan's values, and puts them in the order of its rows: of each, the first token of a prefill that
    ended before those that it decoded."""
    num_rows = len(ticket.rows)
    counts, stopped, verified = np.zeros(num_rows, np.int64), np.zeros(num_rows, bool), None
    found: list[tuple[Generated, np.ndarray]] = []  # values of a call's rows [R, ...], and which of them count [R, T]
    owners: list[np.ndarray] = []  # of these values, their rows
    for call in ticket.calls:
        at = call.groups, call.places
        own: Generated = jax.tree.map(lambda x, at=at: np.asarray(x)[at], call.generated)
        counts[call.rows] += own.counts
        stopped[call.rows] |= own.stopped
        found.append((own, np.arange(own.tokens.shape[1]) < own.counts[:, None]))
        owners.append(np.repeat(call.rows, own.counts))
        if own.verified is not None:
            verified = np.zeros((len(own.verified), num_rows), np.int64)
            verified[:, call.rows] = own.verified
    order = np.argsort(np.concatenate([np.zeros(0, np.int64), *owners]), kind="stable")

    def joined(name: str, empty: np.ndarray) -> np.ndarray:
        return np.concatenate([empty, *(getattr(own, name)[counted] for own, counted in found)])[order]

    no_ids, no_values, top = np.zeros(0, np.int32), np.zeros(0, np.float32), None
    if found and found[0][0].top_ids is not None:
        shape = 0, found[0][0].top_ids.shape[-1]
        top = TopTokens(joined("top_ids", no_ids.reshape(shape)), joined("top_logprobs", no_values.reshape(shape)))
    return PlanResult(
        index=ticket.index,
        request_ids=ticket.rows.request_ids,
        counts=counts,
        stopped=stopped,
        token_ids=joined("tokens", no_ids),
        sampled_logprobs=joined("sampled_logprobs", no_values),
        rollout_logprobs=joined("rollout_logprobs", no_values),
        num_steps=0 if ticket.steps is None else int(ticket.steps),
        policy_version=ticket.policy_version,
        verified=verified,
        top=top,
    )
