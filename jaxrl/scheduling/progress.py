"""What is known about a request on its way through the engine, and the small records made of it.

Purpose: the batcher's per-request state (`Progress`), its counters, and the trace events by which a recorded run and
its replay are compared. No decisions are taken here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.scheduling.plan import Request, RowResult
from jaxrl.types import FinishReason, Sample, SampleKey


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request got a row in plan `plan_index`, `shared_tokens` of its prefill being there already."""

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
      prefill_tokens: tokens put into prefill chunks; shared_tokens: tokens saved by shared prompt blocks.
      busy_row_steps, offered_row_steps: rows that gained a token, and rows there are, summed over steps.
      dropped_tokens: tokens that came for requests ended by the host meanwhile.
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

    @property
    def bubble_ratio(self) -> float:
        """The part of row-steps in which no token was made."""
        return 1.0 - self.busy_row_steps / self.offered_row_steps if self.offered_row_steps else 0.0


@dataclass(frozen=True, slots=True)
class PlanTimes:
    """How long a plan took, and under which load.

    Attributes:
      index, num_steps, duration_s: of its result.
      prefill_tokens: tokens of its prefill chunks.
      batch, context: the most rows of a dp group, and the most tokens of one, halfway through its decode steps.
      was_queued: it was submitted while the plan before it ran: `duration_s` is the device's time alone.
    """

    index: int
    num_steps: int
    duration_s: float
    prefill_tokens: int
    batch: int
    context: float
    was_queued: bool


@dataclass(slots=True, eq=False)
class Progress:
    """One live request: what it has, where it runs."""

    request: Request
    arrival: int
    tokens: list[int]
    sampled_logprobs: list[float]
    rollout_logprobs: list[float]
    versions: list[int]
    group: int = -1
    slot: int = -1  # -1: waiting
    prefix: tuple[int, ...] = ()  # prompt + kept tokens: what the prefill of this stay on the device runs
    prefilled: int = 0  # tokens of it that are in plans, or in shared blocks
    pending: int = 0  # the most tokens that plans in flight may add
    ended: bool = False

    @property
    def limit(self) -> int:
        """No position at or beyond this one is ever written."""
        return len(self.request.prompt_ids) + self.request.params.max_tokens

    @property
    def num_written(self) -> int:
        """Positions that may be written once all plans so far have run, for a request whose prefill is in plans.

        One less than its tokens: the newest has been sampled, but has not been run through the model.
        """
        return len(self.request.prompt_ids) + len(self.tokens) + self.pending - 1

    @property
    def is_resident(self) -> bool:
        """It has a row whose prefill is complete."""
        return self.slot >= 0 and self.prefilled == len(self.prefix)

    def append(self, row: RowResult, version: int) -> None:
        self.tokens.extend(row.token_ids.tolist())
        self.sampled_logprobs.extend(row.sampled_logprobs.tolist())
        self.rollout_logprobs.extend(row.rollout_logprobs.tolist())
        self.versions.extend([version] * len(row.token_ids))

    def truncate(self, length: int) -> None:
        for values in (self.tokens, self.sampled_logprobs, self.rollout_logprobs, self.versions):
            del values[length:]

    def sample(self, reason: FinishReason) -> Sample:
        return Sample(
            key=self.request.key,
            token_ids=np.asarray(self.tokens, np.int32),
            rollout_logprobs=np.asarray(self.rollout_logprobs, np.float32),
            sampled_logprobs=np.asarray(self.sampled_logprobs, np.float32),
            versions=np.asarray(self.versions, np.int32),
            finish_reason=reason,
        )


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
            assert 0 <= keep <= len(progress.tokens), f"stop_check keeps {keep} of {len(progress.tokens)} tokens"
            progress.truncate(keep)
            return "stop"
    if not row.stopped:
        return None
    return "stop" if progress.tokens[-1] in request.params.stop_token_ids else "length"
