"""Rules across rounds: what a round launches, and what happens to the prompts that it does not finish.

A `BatchRule` plans each training step's `Round` and settles it when it is done. What it carries from round to round is
part of a checkpoint. The loop calls it without knowing which rule it is::

    current = rule.plan(prompts, RoundTime(step, policy_version, steps_left))
    while not current.done:
        for command in current.handle(backend.wait()):
            backend.apply(command)
    result = rule.settle(current)         # result.groups is the batch

Here are the rules' common part and the baseline. The other rules are mechanisms (`jaxrl.mechanisms`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import Any, ClassVar, Protocol

from jaxrl.scheduling.rounds.carried import as_carried, check_lengths, pack_groups, unpack_groups
from jaxrl.scheduling.rounds.events import Outcome, PromptKey
from jaxrl.scheduling.rounds.round import BatchSettings, PlannedGroup, RaceLimits, RacingGroup, Round, RoundKind
from jaxrl.schema.limits import AtEnd
from jaxrl.types import Group, Prompt, Sample, check_schema


class PromptStream(Protocol):
    """What rules need of the data (`jaxrl.data.prompts.PromptSource`)."""

    def next(self, num_prompts: int, /) -> list[Prompt]:
        """New prompts; never fewer than asked for."""
        ...

    def get(self, epoch: int, index: int, /) -> Prompt:
        """A prompt that `next` has returned before, by its key."""
        ...


@dataclass(frozen=True, slots=True)
class RoundTime:
    """A round's place in the run: the training step that it is for (from 1), the version of the weights that it samples
    with, and the training steps left, this one included (None: unknown)."""

    step: int
    policy_version: int
    steps_left: int | None = None


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """A rule's decision about its next round. `num_kept`: prompts at the end of the queue that it leaves there; `due`:
    as in `Round`."""

    limits: RaceLimits
    kind: RoundKind = "plain"
    num_kept: int = 0
    due: Collection[PromptKey] = ()


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The outcome of a round.

    Attributes:
      groups: to train on, sorted by prompt key.
      left: prompts that leave the system now without being trained on, and why.
      filtered: scored groups of those that were filtered, in the order of those decisions.
      carried: samples with tokens that the rule keeps for a later round, those of earlier rounds among them.
    """

    kind: RoundKind
    groups: list[Group]
    left: dict[PromptKey, Outcome]
    metrics: dict[str, float]
    filtered: list[Group]
    carried: list[Sample]


class BatchRule:
    """Decides across rounds; its only effect is to take prompts from the source. A rule limits a round (`_plan`), and
    may add metrics (`_own_metrics`).

    Prompts that a round launched and did not finish wait in the queue for a later one. Without `keep_unfinished` they
    start again, with the next attempt if `draws_anew`. The same attempt has the same random bits: as far as the weights
    are the same, it samples the same tokens again. With `keep_unfinished` R0 responses of each wait with their tokens:
    those with the lowest numbers, whichever have ended.

    Args:
      batch: P0, R0, and what else rules share.
      limits: of a round at its largest.
      num_waiting_responses: responses of a prompt that waits without tokens.

    Attributes:
      queue: prompts that wait for a round, the first launched first; in a round, those that it has not launched.
      filter: of groups, with its statistics.
    """

    SCHEMA = 4
    name: ClassVar[str]
    """For users; a checkpoint keeps the name of the rule that carries prompts."""
    has_queue: ClassVar[bool] = True
    """Whether prompts wait in the queue even where no groups are filtered."""
    at_end: AtEnd = "flush"
    draws_anew: bool = True

    def __init__(self, batch: BatchSettings, limits: RaceLimits, num_waiting_responses: int) -> None:
        self.batch, self.limits = batch, limits
        self.queue: deque[PlannedGroup] = deque()
        self.num_rounds = 0
        self.filter = batch.group_filter
        self._num_waiting_responses = num_waiting_responses
        self._dropped_tokens = self._restarted = 0  # of responses that the open round's plan started again; how many
        self._open: tuple[Round, RoundTime] | None = None  # planned, and not settled

    @property
    def num_carried(self) -> int:
        """Prompts taken from the source and still in the system: a run that ended now would leave them behind."""
        return len(self.queue)

    def ahead(self, prompts: PromptStream, time: RoundTime) -> Sequence[PlannedGroup]:
        """All that the round after the open one (`time` is that round's) will launch, taken from the source now. Empty
        where that is unknown, or where the batch depends on which of its responses end first: they may begin now, at a
        moment that a clock decides."""
        return ()

    def plan(self, prompts: PromptStream, time: RoundTime) -> Round:
        """The next round. It takes prompts from `prompts` as it launches them."""
        assert self._open is None, "a round is planned before the one before it is settled"
        self.num_rounds += 1
        self._dropped_tokens = self._restarted = 0
        plan = self._plan(time)

        def supply() -> PlannedGroup:
            if len(self.queue) > plan.num_kept:
                return self.queue.popleft()
            (prompt,) = prompts.next(1)
            return PlannedGroup.first(prompt, plan.limits.num_responses, time.step, self.num_rounds)

        current = Round(plan.limits, supply, plan.due, self.filter, plan.kind)
        self._open = current, time
        return current

    def _plan(self, time: RoundTime) -> RoundPlan:
        """The limits of the next round; may reorder the queue."""
        raise NotImplementedError

    def settle(self, current: Round) -> RoundResult:
        """Takes in a round that is done, the one planned last."""
        assert self._open is not None, "a round is settled that was not planned"
        (planned, time), self._open = self._open, None
        assert planned is current, "a round is settled that is not the one planned last"
        assert current.done, "a round is settled before it is done"
        self.filter = current.filter
        left_over = [self._waiting(group, current) for group in current.left_over]
        discarded = self._enqueue(left_over, time)
        groups, filtered = current.groups(), list(map(current.group, current.filtered))
        carried = [sample for group in self.queue for sample in group.samples if len(sample)]
        lost = self._dropped_tokens + _lost_tokens(current, carried)
        lost += sum(len(s) for group in discarded if group.key not in current.racing for s in group.samples)
        metrics = _round_metrics(current, time, groups, lost) | self._own_metrics(current, groups, len(left_over))
        if self.filter or self.has_queue:
            metrics |= _queue_metrics(self.queue, time.step, self.num_rounds)
        if self.filter or not self.has_queue:
            metrics["rollout/discarded_prompts"] = float(len(discarded))
        left: dict[PromptKey, Outcome] = {**current.filtered, **{group.key: "filtered" for group in discarded}}
        return RoundResult(current.kind, groups, left, metrics, filtered, carried)

    def _own_metrics(self, current: Round, groups: Sequence[Group], num_left_over: int) -> dict[str, float]:
        return {}

    def _waiting(self, group: RacingGroup, current: Round) -> PlannedGroup:
        planned = group.planned
        if not current.limits.keep_unfinished:
            return planned.afresh(self._num_waiting_responses, planned.attempt + self.draws_anew)
        keys, aborted = group.lowest(self.batch.group_size), current.aborted
        assert len(keys) == self.batch.group_size, f"{planned.key}: a response is missing"
        return replace(
            planned, samples=tuple(as_carried(group.kept[k]) if k in group.kept else aborted[k] for k in keys)
        )

    def _restart(self, group: PlannedGroup, asked: Callable[[Sample], bool]) -> PlannedGroup:
        """The group, with empty samples for those that have tokens and are `asked` to start again."""
        samples = list(group.samples)
        for place, sample in enumerate(samples):
            if len(sample) and asked(sample):
                self._restarted += 1
                self._dropped_tokens += len(sample)
                samples[place] = Sample.empty(replace(sample.key, attempt=sample.key.attempt + self.draws_anew))
        return replace(group, samples=tuple(samples))

    def _kept_metrics(self, current: Round, groups: Sequence[Group]) -> dict[str, float]:
        """Of a rule whose prompts wait with their tokens."""
        import numpy as np

        resumed = [sample for group in current.racing.values() for sample in group.launch.resumed]
        own_versions = [sample.versions[sample.drawn] for group in groups for sample in group.samples]
        spans = [np.count_nonzero(np.diff(versions)) + (len(versions) > 0) for versions in own_versions]
        return {
            "rollout/buffered_tokens": float(sum(len(s) for group in self.queue for s in group.samples)),
            "rollout/resumed_tokens": float(sum(map(len, resumed))),
            "rollout/restarted_samples": float(self._restarted),
            "training/off_policy/spans/mean": float(np.mean(spans)),
            "training/off_policy/spans/max": float(max(spans)),
        }

    def _enqueue(self, left_over: Sequence[PlannedGroup], time: RoundTime) -> list[PlannedGroup]:
        """Queues groups that are left over; returns those that leave instead, because no step is left that could train
        on them: they were launched ahead of verdicts. (Without a filter no rule launches too many. A run that resumes
        with fewer steps keeps what it carries, and says so at its end.)"""
        self.queue = deque(sorted((*left_over, *self.queue), key=lambda group: group.first_round))  # stable
        room = room_until_end(self.at_end, self.batch.num_prompts, time) if self.filter else None
        num_discarded = 0 if room is None else max(len(self.queue) - room, 0)
        return [self.queue.pop() for _ in range(num_discarded)]

    # -- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Part of a checkpoint: JSON values and arrays. `first` is int64 [N, 2]: the first step and the first round of
        each group of the queue."""
        import numpy as np

        assert self._open is None, "state between rounds only"
        first = [(group.first_step, group.first_round) for group in self.queue]
        return {
            "schema": self.SCHEMA,
            "num_rounds": self.num_rounds,
            "filtered_share": self.filter.state() if self.filter else [0.0, 0.0],
            "queue": pack_groups(self.queue) | {"first": np.asarray(first, np.int64).reshape(-1, 2)},
        }

    def load_state(self, state: Mapping[str, Any], prompts: PromptStream) -> None:
        """Raises ValueError for a state of another schema, and for samples that this run has no place for."""
        check_schema(self.name, state, self.SCHEMA)
        packed = state["queue"]
        groups = unpack_groups(packed, prompts.get)
        queue: deque[PlannedGroup] = deque()
        for group, (step, round_index) in zip(groups, packed["first"], strict=True):
            planned = PlannedGroup(group.prompt, tuple(group.samples), int(step), int(round_index))
            if len(group.samples) != self._num_waiting_responses:
                if any(map(len, group.samples)):
                    raise ValueError(
                        f"{self.name}: a prompt waits with {len(group.samples)} samples, and rollout.n is "
                        f"{self.batch.group_size}: a resumed run must keep rollout.n"
                    )
                planned = planned.afresh(self._num_waiting_responses, planned.attempt)
            queue.append(planned)
        samples = [sample for group in queue for sample in group.samples]
        check_lengths(f"that {self.name} carries", samples, self.batch.max_response_length)
        self.queue, self.num_rounds = queue, int(state["num_rounds"])
        self.filter = self.filter and self.filter.of_state(state["filtered_share"])


class FreshBatches(BatchRule):
    """New prompts every round: plain synchronous batches that wait for all responses.

    Where groups are filtered, a plain round launches ahead of verdicts. Prompts that were launched and not needed are
    the first of the next round, where they sample new responses (verl drops them): nothing is off-policy.

    Source: the baselines of RollPacker §6.1 and §3.

    Args:
      limits: None: a batch, and nothing beyond it. Prompts that lose a race leave the system as `filtered` and do not
        return.
    """

    name = "plain batches"
    has_queue = False
    begins_ahead = True
    """Whether its batch is all that a round launches, so that the next round may begin in the present one."""

    def __init__(self, batch: BatchSettings, limits: RaceLimits | None = None) -> None:
        limits = limits or RaceLimits(batch, batch.group_size)
        super().__init__(batch, limits, limits.num_responses)

    def ahead(self, prompts: PromptStream, time: RoundTime) -> list[PlannedGroup]:
        batch = self.batch
        if not self.begins_ahead or batch.group_filter:
            return []  # `jaxrl.mechanisms.is_timeless` says the same of a configuration
        missing = batch.num_prompts - len(self.queue)  # a resumed run with smaller batches may have some
        for prompt in prompts.next(max(missing, 0)):
            self.queue.append(PlannedGroup.first(prompt, self.limits.num_responses, time.step, self.num_rounds + 1))
        return list(islice(self.queue, batch.num_prompts))

    def _plan(self, time: RoundTime) -> RoundPlan:
        return RoundPlan(self.limits)

    def _enqueue(self, left_over: Sequence[PlannedGroup], time: RoundTime) -> list[PlannedGroup]:
        return list(left_over) if self.limits.num_spare else super()._enqueue(left_over, time)


def last_step(sample: Sample, max_staleness: int) -> float:
    """The last training step for which the sample's oldest token is within the cap: step s trains version s - 1."""
    return int(sample.versions[0]) + 1 + max_staleness if len(sample) and max_staleness >= 0 else math.inf


def launched(prompt_factor: float, response_factor: float, batch: BatchSettings) -> tuple[int, int]:
    return provisioned(prompt_factor, batch.num_prompts), provisioned(response_factor, batch.group_size)


def provisioned(factor: float, count: int) -> int:
    """ceil(factor · count), the factor taken as written, in decimal: 1.1 · 50 is 55."""
    return math.ceil(Fraction(str(factor)) * count)


def room_until_end(at_end: AtEnd, num_prompts: int, time: RoundTime, num_waiting: int = 0) -> int | None:
    """How many prompts beyond its batch a round may leave over so that later steps can train on all of them, besides
    `num_waiting` that its rule carries; None: any number."""
    if at_end == "leave" or time.steps_left is None:
        return None
    return num_prompts * (time.steps_left - 1) - num_waiting


# -- what a round was like ---------------------------------------------------------------------------------------------


def _lost_tokens(current: Round, carried: Iterable[Sample]) -> int:
    """Tokens of responses that ended or were aborted in this round and are neither in the batch, in a filtered group,
    nor carried on."""
    kept = {*current.chosen(), *(sample.key for sample in carried)}
    for prompt_key in current.filtered:
        kept |= current.racing[prompt_key].kept.keys()
    ended = (*current.finished.values(), *current.aborted.values())
    return sum(len(sample) for sample in ended if sample.key not in kept)


def _round_metrics(current: Round, time: RoundTime, groups: Sequence[Group], lost_tokens: int) -> dict[str, float]:
    import numpy as np

    samples = [sample for group in groups for sample in group.samples]
    started = [key for group in current.racing.values() for key in group.launch.keys]
    # not the ledger's count: a response that ended while a verdict was awaited may end or be aborted there
    counted = {key for group in current.racing.values() for key in group.kept}
    outcomes = list(current.filtered.values())
    filtered = [s for key in current.filtered for s in current.racing[key].kept.values()]
    known = [*current.finished.values(), *current.aborted.values()]
    mean_tokens = [sum(map(len, each)) / max(len(each), 1) for each in (samples, known)]
    ages = [time.step - current.racing[group.prompt.key].planned.first_step for group in groups]
    return {
        "rollout/long_round": float(current.kind == "long"),
        "rollout/launched_prompts": float(len(current.racing)),
        "rollout/launched_samples": float(len(started)),
        "rollout/kept_prompts": float(len(groups)),
        "rollout/kept_samples": float(len(samples)),
        "rollout/aborted_samples": float(sum(key not in counted for key in started)),
        "rollout/filtered_prompts": float(outcomes.count("filtered")),
        "rollout/failed_prompts": float(outcomes.count("failed")),
        "rollout/filtered_tokens": float(sum(len(sample) for sample in filtered)),
        "rollout/thrown_tokens": float(lost_tokens),
        "rollout/length_bias": mean_tokens[0] / mean_tokens[1] if mean_tokens[1] else 1.0,
        "rollout/trained_age_steps/mean": float(np.mean(ages)),
        "rollout/trained_age_steps/max": float(max(ages)),
        "rollout/resumed_share": off_policy_share(samples, time.policy_version),
        **({"rollout/filtered_share": current.filter.share} if current.filter else {}),
    }


def _queue_metrics(queue: Collection[PlannedGroup], step: int, round_index: int) -> dict[str, float]:
    import numpy as np

    metrics = {"rollout/queue_length": float(len(queue))}
    ages = {
        "steps": [step - group.first_step for group in queue],
        "rounds": [round_index - group.first_round for group in queue],
    }
    for unit, values in ages.items():
        metrics[f"rollout/queue_age_{unit}/mean"] = float(np.mean(values)) if values else 0.0
        metrics[f"rollout/queue_age_{unit}/max"] = float(max(values, default=0))
    return metrics


def off_policy_share(samples: Iterable[Sample], policy_version: int) -> float:
    """The share of the model's tokens from versions before `policy_version`; 0 if there are no tokens."""
    total = older = 0
    for sample in samples:
        num_own = sample.num_drawn
        total += num_own
        if num_own and sample.versions[0] < policy_version:
            older += num_own - int((sample.versions >= policy_version).sum())
    return older / total if total else 0.0
