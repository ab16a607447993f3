"""What the engine reports: responses that ended, counters, the time of plans, and the trace events by which a recorded
run and its replay are compared."""

from __future__ import annotations

from dataclasses import dataclass, fields

from jaxrl.scheduling.tokens.plan import VerifyCounts
from jaxrl.types import FinishReason, Sample, SampleKey


@dataclass(frozen=True, slots=True)
class Finished:
    """A response that ended by itself: its sample, where and when (in logical time) it ended."""

    request_id: int
    sample: Sample
    dispatch: int
    dp_group: int
    slot: int


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
    """The batcher's counts so far.

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
