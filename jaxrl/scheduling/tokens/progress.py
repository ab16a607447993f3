"""The state of a request in the engine, and the small records made from it.

Purpose: the batcher's per-request state (`Progress`), its counters, and the trace events by which a recorded run and
its replay are compared. No decisions are taken here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from jaxrl.scheduling.tokens.plan import Request, RowResult, VerifyCounts
from jaxrl.types import FinishReason, Sample, SampleKey, TopTokens


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request got a row in plan `plan_index`; shared blocks hold `shared_tokens` tokens of its prefill already."""

    plan_index: int
    key: SampleKey
    dp_group: int
    slot: int
    shared_tokens: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request lost its row when plan `plan_index` was made."""

    plan_index: int
    key: SampleKey
    dp_group: int
    slot: int


@dataclass(frozen=True, slots=True)
class Completed:
    """A request ended in plan `plan_index` with a response of `num_tokens`."""

    plan_index: int
    key: SampleKey
    dp_group: int
    slot: int
    num_tokens: int
    finish_reason: FinishReason


TraceEvent = Admitted | Preempted | Completed


@dataclass(slots=True)
class Counters:
    """What the batcher has done so far.

    Attributes:
      plans, steps: plans collected, and decode steps that the device took in them.
      admissions, preemptions: rows given and taken (a preempted request is admitted again).
      prefill_tokens: tokens in prefill chunks; shared_tokens: tokens that shared prompt blocks saved.
      busy_row_steps, offered_row_steps: rows that gained a token, and all rows, each summed over steps.
      dropped_tokens: tokens that came for requests that the host had already ended.
      verifying_plans: plans collected that verified.
      verifying_row_steps: row-steps of those plans; proposed_row_steps: those with a proposal; matched_tokens: the
        tokens of context that proposals were found by.
      proposed_tokens, accepted_tokens: of them.
    """

    plans: int = 0
    steps: int = 0
    admissions: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    shared_tokens: int = 0
    busy_row_steps: int = 0
    offered_row_steps: int = 0
    dropped_tokens: int = 0
    verifying_plans: int = 0
    verifying_row_steps: int = 0
    proposed_row_steps: int = 0
    matched_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0

    def add_verified(self, counts: VerifyCounts) -> None:
        """Counts a plan that verified, all rows together."""
        self.verifying_plans += 1
        self.verifying_row_steps += counts.steps
        self.proposed_row_steps += counts.proposing_steps
        self.matched_tokens += counts.matched
        self.proposed_tokens += counts.proposed
        self.accepted_tokens += counts.accepted

    @property
    def bubble_ratio(self) -> float:
        """The part of row-steps in which no token was made."""
        return 1.0 - self.busy_row_steps / self.offered_row_steps if self.offered_row_steps else 0.0

    def __add__(self, other: Counters) -> Counters:
        """The counts of two batchers together."""
        return Counters(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def since(self, before: Counters) -> Counters:
        """The counts since `before`, an earlier copy."""
        return Counters(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))


@dataclass(frozen=True, slots=True)
class PlanTimes:
    """The time that a plan took, and its load.

    Attributes:
      index, num_steps, duration_s: of its result.
      prefill_tokens: tokens of its prefill chunks.
      batch, context: the most rows of a dp group, and the most tokens of one, halfway through its decode steps.
      was_queued: it was submitted while the previous plan ran, so `duration_s` is the device's time alone.
      verified: its steps verified proposed tokens, and took longer than decode steps.
    """

    index: int
    num_steps: int
    duration_s: float
    prefill_tokens: int
    batch: int
    context: float
    was_queued: bool
    verified: bool = False


class Progress:
    """One live request: its tokens, and where it runs.

    Tokens and their records lie in arrays that double when they are full, because a plan adds to thousands of responses
    of thousands of tokens each.

    Attributes:
      group, slot: where it runs; slot -1: it waits.
      prefix: prompt and kept tokens, which the prefill runs while the request has this row.
      prefilled: tokens of it that are in plans, or in shared blocks.
      pending: the most tokens that plans in flight may add.
      num_tokens: of the response so far.
      limit: no position at or beyond this one is ever written.
    """

    __slots__ = (
        "_ids",
        "_rollout",
        "_sampled",
        "_top",
        "_versions",
        "arrival",
        "ended",
        "group",
        "limit",
        "num_prompt",
        "num_tokens",
        "pending",
        "prefilled",
        "prefix",
        "request",
        "slot",
    )

    def __init__(self, request: Request, arrival: int) -> None:
        self.request, self.arrival = request, arrival
        self.group = self.slot = -1
        self.prefix: tuple[int, ...] = ()
        self.prefilled = self.pending = 0
        self.ended = False
        self.num_prompt = len(request.prompt_ids)
        self.limit = self.num_prompt + request.params.max_tokens
        self.num_tokens = len(request.generated)
        self._ids = np.asarray(request.generated, np.int32)
        self._sampled = np.asarray(request.generated_sampled_logprobs, np.float32)
        self._rollout = np.asarray(request.generated_rollout_logprobs, np.float32)
        self._versions = np.asarray(request.generated_versions, np.int32)
        self._top: list[TopTokens] | None = [] if request.params.top_logprobs else None

    @property
    def history(self) -> Any:
        """What its next tokens may be proposed from; None: nothing."""
        return self.request.history

    @property
    def tokens(self) -> list[int]:
        """The response so far."""
        return self._ids[: self.num_tokens].tolist()

    @property
    def last_token(self) -> int:
        return int(self._ids[self.num_tokens - 1])

    @property
    def num_written(self) -> int:
        """Positions that may be written once all plans so far have run, for a request with all of its prefill in plans.

        One less than its tokens: the newest has been sampled but not run through the model.
        """
        return self.num_prompt + self.num_tokens + self.pending - 1

    @property
    def first(self) -> int:
        """The first position that plans to come may run, for a request with all of its prefill in plans."""
        return self.num_prompt + self.num_tokens - 1

    @property
    def is_resident(self) -> bool:
        """It has a row, and its prefill is complete."""
        return self.slot >= 0 and self.prefilled == len(self.prefix)

    def append(self, row: RowResult, version: int) -> None:
        start, stop = self.num_tokens, self.num_tokens + len(row.token_ids)
        if stop > len(self._ids):
            room = max(2 * len(self._ids), stop, _ROOM)
            self._ids, self._sampled = _grown(self._ids, room), _grown(self._sampled, room)
            self._rollout, self._versions = _grown(self._rollout, room), _grown(self._versions, room)
        self._ids[start:stop] = row.token_ids
        self._sampled[start:stop] = row.sampled_logprobs
        self._rollout[start:stop] = row.rollout_logprobs
        self._versions[start:stop] = version
        if self._top is not None:
            assert row.top is not None, "a plan with such a row tells the likeliest tokens"
            count = self.request.params.top_logprobs
            self._top.append(TopTokens(row.top.token_ids[:, :count], row.top.logprobs[:, :count]))
        self.num_tokens = stop

    def take_whole(self, row: RowResult, version: int) -> None:
        """Takes a response from its first token, whose tokens so far have all been of this version. Nothing is copied:
        the arrays stay the caller's, who must not change them, and a later `append` makes its own."""
        self._ids, self._sampled, self._rollout = row.token_ids, row.sampled_logprobs, row.rollout_logprobs
        self.num_tokens = len(row.token_ids)
        self._versions = np.broadcast_to(np.int32(version), self.num_tokens)

    def is_all_of(self, version: int) -> bool:
        """Whether all tokens so far were made by weights of this version, in this request. Versions never fall."""
        return self.num_tokens > 0 and not self.request.generated and bool(self._versions[0] == version)

    def truncate(self, length: int) -> None:
        self.num_tokens = min(length, self.num_tokens)

    def sample(self, reason: FinishReason) -> Sample:
        """The request's sample. It shares the arrays, so nothing may be appended afterwards."""
        have = slice(self.num_tokens)
        return Sample(
            key=self.request.key,
            token_ids=self._ids[have],
            rollout_logprobs=self._rollout[have],
            sampled_logprobs=self._sampled[have],
            versions=self._versions[have],
            finish_reason=reason,
            top=None if self._top is None else self._top_tokens(),
            episode=self.request.episode,
        )

    def _top_tokens(self) -> TopTokens:
        assert self._top is not None
        none = np.zeros((0, self.request.params.top_logprobs))
        ids, logprobs = zip((none.astype(np.int32), none.astype(np.float32)), *self._top, strict=True)
        return TopTokens(np.concatenate(ids)[: self.num_tokens], np.concatenate(logprobs)[: self.num_tokens])


_ROOM = 64  # tokens of the first array


def _grown(values: np.ndarray, room: int) -> np.ndarray:
    grown = np.empty(room, values.dtype)
    grown[: len(values)] = values
    return grown


@dataclass(frozen=True, slots=True)
class Named:
    """A request in a plan in flight, with its slot in that plan (it may have moved since)."""

    progress: Progress
    dp_group: int
    slot: int
    max_new: int  # the most tokens that the plan can bring it
    ends_prefill: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that ended in a plan, and the row it had there."""

    progress: Progress
    reason: FinishReason
    dispatch: int
    dp_group: int
    slot: int


StopCheck = Callable[[Request, Sequence[int]], int | None]
"""(request, its response so far) -> how many tokens of it to keep if a stop string is complete, else None."""


def finish_reason(progress: Progress, row: RowResult, stop_check: StopCheck | None) -> FinishReason | None:
    """Why a request that just gained tokens is finished; None if it is not. A stop string cuts what follows it."""
    request = progress.request
    if stop_check is not None and request.params.stop_strings:
        keep = stop_check(request, progress.tokens)
        if keep is not None:
            assert 0 <= keep <= progress.num_tokens, f"stop_check keeps {keep} of {progress.num_tokens} tokens"
            progress.truncate(keep)
            return "stop"
    if not row.stopped:
        return None
    return "stop" if progress.last_token in request.params.stop_token_ids else "length"
