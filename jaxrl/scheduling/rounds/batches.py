"""The seam for rules across rounds: what a round launches, and what happens to the prompts that it does not finish.

Purpose: a `BatchRule` makes each training step's `Round` (which prompts, how many responses each, which attempt, what
is resumed) and takes the round back when it is done. What it carries from round to round is part of a checkpoint. The
loop calls it without knowing which rule it is::

    current = rule.plan(prompts, RoundTime(step, policy_version, steps_left))
    while not current.done:
        for command in current.handle(backend.wait()):
            backend.apply(command)
    result = rule.settle(current)         # result.groups is the batch

This module has the seam, the baselines, and what rules share. Other rules are mechanisms
(`jaxrl.mechanisms`), whose table says which settings exclude each other. `carried.py` packs what rules carry for a
checkpoint.

Source: the baselines of RollPacker §6.1 and §3: plain synchronous batches, optionally with all rewards after the
rollout, and races that discard their losers. (So they train on fewer long responses than the data holds.)

Departures: a rule keeps prompt *keys* between rounds, and asks the source for the prompts when it launches them again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxrl.scheduling.rounds.race import BatchSettings, GroupFilter, PlannedGroup, Race, RaceLimits
from jaxrl.scheduling.rounds.round import Outcome, PromptKey, Round, RoundKind, RoundLedger
from jaxrl.schema.limits import AtEnd
from jaxrl.types import Group, Prompt, Sample, SampleKey


class PromptStream(Protocol):
    """What rules need of the data (`jaxrl.data.prompts.PromptSource`)."""

    def next(self, num_prompts: int, /) -> list[Prompt]:
        """Prompts not handed out before; never fewer than asked for."""
        ...

    def get(self, epoch: int, index: int, /) -> Prompt:
        """A prompt that was handed out before, by its key."""
        ...


@dataclass(frozen=True, slots=True)
class RoundTime:
    """A round's place in the run: the training step that it is for (from 1), the weights' version that it draws with,
    and the training steps left, this one included (None: not known)."""

    step: int
    policy_version: int
    steps_left: int | None = None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The outcome of a round.

    Attributes:
      kind: of the round.
      groups: to train on, sorted by prompt key.
      left: prompts that leave the system now without being trained on, and why.
      metrics: of the round; counts are of prompts or samples as their names say.
      filtered: scored groups of those that were filtered, in the order in which that was decided.
      carried: samples with tokens that the rule keeps for a later round, those of earlier rounds among them. With
        several hosts their tokens come to all hosts, in place.
    """

    kind: RoundKind
    groups: list[Group]
    left: dict[PromptKey, Outcome]
    metrics: dict[str, float]
    filtered: list[Group]
    carried: list[Sample]


class BatchRule(Protocol):
    """Decides across rounds; its only effect is to draw prompts from the source that it is given."""

    @property
    def name(self) -> str:
        """Its name for users; a checkpoint keeps the name of the rule that carries prompts."""
        ...

    @property
    def num_carried(self) -> int:
        """Prompts drawn from the source and still in the system: a run that ended now would leave them behind."""
        ...

    @property
    def max_under_way(self) -> tuple[int, int]:
        """The most that a round of it has under way at once, as (prompts, samples); `RaceLimits.max_under_way`."""
        ...

    def plan(self, prompts: PromptStream, time: RoundTime) -> Round:
        """The next round. It draws prompts from `prompts` as it launches them."""
        ...

    def ahead(self, prompts: PromptStream, time: RoundTime) -> Sequence[PlannedGroup]:
        """All that the round after the one under way will launch, drawn now; `time` is that round's.

        Empty where that is not known, or where the batch depends on which of its responses end first: they may begin
        now, at a moment that a clock decides.
        """
        ...

    def settle(self, current: Round) -> RoundResult:
        """Takes in a round that is done, the one planned last."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Part of a checkpoint, between rounds: JSON values and arrays. A copy."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


# -- the baselines -----------------------------------------------------------------------------------------------------


class FreshBatches:
    """New prompts every round: plain synchronous batches that wait for all responses.

    Where groups are filtered, a plain round launches ahead of verdicts. Prompts that were launched and not needed are
    the first of the next round, where they draw new responses (verl drops them): nothing is off-policy. Those that no
    step is left for leave as `filtered`.

    Args:
      batch: P0, R0, and what else rules share.
      limits: what a round needs and may spend; None: a batch, and nothing beyond it. Prompts beyond it leave the system
        as `filtered`, for good.

    Attributes:
      queue: prompts that were launched ahead of verdicts and not needed.
      begun: prompts of the next round that were drawn ahead.
      filter: of groups, with what it has learnt.
    """

    SCHEMA = 2
    begins_ahead = True
    """Whether its batch is all that a round launches, so that the next round may begin in the present one."""

    def __init__(self, batch: BatchSettings, limits: RaceLimits | None = None) -> None:
        self.limits = limits or RaceLimits(batch, batch.group_size)
        self.queue: deque[Waiting] = deque()
        self.begun: deque[PromptKey] = deque()
        self.num_rounds = 0
        self.filter = batch.group_filter
        self._open: OpenRound | None = None

    @property
    def name(self) -> str:
        return "plain batches"

    @property
    def num_carried(self) -> int:
        return len(self.queue) + len(self.begun)

    @property
    def max_under_way(self) -> tuple[int, int]:
        return self.limits.max_under_way

    def ahead(self, prompts: PromptStream, time: RoundTime) -> list[PlannedGroup]:
        batch = self.limits.batch
        if not self.begins_ahead or batch.group_filter or batch.max_active_requests:
            return []  # `jaxrl.mechanisms.table.is_timeless` says the same of a configuration
        missing = batch.num_groups - len(self.begun)  # a resumed run with smaller batches may have some
        self.begun.extend(prompt.key for prompt in prompts.next(max(missing, 0)))
        drawn = [prompts.get(*prompt_key) for prompt_key in islice(self.begun, batch.num_groups)]
        return [first_launch(each, self.limits.num_responses, time.step, self.num_rounds + 1) for each in drawn]

    def plan(self, prompts: PromptStream, time: RoundTime) -> Round:
        assert self._open is None, "a round is planned before the one before it is settled"
        self.num_rounds += 1

        def supply() -> PlannedGroup:
            if self.begun:
                drawn = prompts.get(*self.begun.popleft())
                return first_launch(drawn, self.limits.num_responses, time.step, self.num_rounds)
            if self.queue:
                return self.queue.popleft().relaunch(prompts, self.limits.num_responses)
            return new_group(prompts, self.limits.num_responses, time.step, self.num_rounds)

        self._open = open_round(Race(self.limits, supply, group_filter=self.filter), "plain", time)
        return self._open.round

    def settle(self, current: Round) -> RoundResult:
        opened, self._open = close_round(self._open, current), None
        race, groups = opened.race, current.groups()
        self.filter = race.filter
        left: dict[PromptKey, Outcome] = dict(race.filtered)
        surplus = [Waiting.of(group.planned) for group in race.left_over]
        discarded = surplus
        if not self.limits.num_spare:
            self.queue.extendleft(reversed(surplus))
            discarded = discard_at_end(self.queue, self.limits.batch, "flush", opened.time)
        left |= {entry.key: "filtered" for entry in discarded}
        metrics = opened.metrics(groups, thrown_tokens=opened.tokens_lost())
        metrics["rollout/discarded_prompts"] = float(len(discarded))
        if self.filter:
            metrics |= queue_metrics(self.queue, opened.time.step, self.num_rounds)
        return RoundResult(current.kind, groups, left, metrics, opened.filtered(), [])

    def state_dict(self) -> dict[str, Any]:
        """Queue as int64 [N, 5] (epoch, index, attempt, first step, first round), in its order; what was drawn ahead as
        int64 [N, 2] (epoch, index)."""
        assert self._open is None, "state between rounds only"
        return {
            "schema": self.SCHEMA,
            "num_rounds": self.num_rounds,
            "queue": pack_waiting(self.queue),
            "begun": np.asarray(self.begun, np.int64).reshape(-1, 2),
            "filtered_share": pack_learnt(self.filter),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_schema("batches of new prompts", state, self.SCHEMA)
        self.begun = deque((int(epoch), int(index)) for epoch, index in state["begun"])
        self.queue = unpack_waiting(state["queue"])
        self.num_rounds = int(state["num_rounds"])
        self.filter = self.filter and self.filter.of_state(state["filtered_share"])


# -- what rules share --------------------------------------------------------------------------------------------------


def provisioned(option: str, factor: float, count: int) -> int:
    """ceil(factor · count), the factor taken as written, in decimal (1.1 · 50 is 55); ValueError for infinity."""
    if not math.isfinite(factor):
        raise ValueError(f"{option} ({factor}) must be a finite number")
    return math.ceil(Fraction(str(factor)) * count)


def launched(section: str, prompt_factor: float, response_factor: float, batch: BatchSettings) -> tuple[int, int]:
    """Prompts that a round launches, and samples of each. Raises ValueError as `provisioned` does."""
    num_prompts = provisioned(f"{section}.prompt_factor", prompt_factor, batch.num_groups)
    return num_prompts, provisioned(f"{section}.response_factor", response_factor, batch.group_size)


def new_group(prompts: PromptStream, num_responses: int, step: int, round_index: int = 0) -> PlannedGroup:
    """The next prompt of the source, with fresh responses."""
    (prompt,) = prompts.next(1)
    return first_launch(prompt, num_responses, step, round_index)


def first_launch(prompt: Prompt, num_responses: int, step: int, round_index: int = 0) -> PlannedGroup:
    """A prompt that was drawn and never launched, with fresh responses."""
    keys = tuple(SampleKey(prompt.epoch, prompt.index, i) for i in range(num_responses))
    return PlannedGroup(prompt, keys, first_step=step, first_round=round_index)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prompt that a rule carries without samples: its next launch draws new ones, with the next attempt.

    Attributes:
      key: its (epoch, index).
      attempt: of its last launch.
      first_step, first_round: when it was first launched.
    """

    key: PromptKey
    attempt: int
    first_step: int
    first_round: int

    @classmethod
    def of(cls, planned: PlannedGroup) -> Waiting:
        """The prompt of a group that was launched."""
        return cls(planned.prompt.key, planned.attempt, planned.first_step, planned.first_round)

    def relaunch(self, prompts: PromptStream, num_responses: int) -> PlannedGroup:
        """The prompt with `num_responses` new responses."""
        attempt = self.attempt + 1
        keys = tuple(SampleKey(*self.key, i, attempt) for i in range(num_responses))
        prompt = prompts.get(*self.key)
        return PlannedGroup(prompt, keys, attempt=attempt, first_step=self.first_step, first_round=self.first_round)


def pack_waiting(queue: Iterable[Waiting]) -> np.ndarray:
    """int64 [N, 5] (epoch, index, attempt, first step, first round), in the queue's order."""
    rows = [(*each.key, each.attempt, each.first_step, each.first_round) for each in queue]
    return np.asarray(rows, np.int64).reshape(-1, 5)


def unpack_waiting(packed: Iterable[Sequence[int]]) -> deque[Waiting]:
    """The reverse of `pack_waiting`; columns after the fifth are left out."""
    rows = (tuple(int(value) for value in row[:5]) for row in packed)
    return deque(Waiting((epoch, index), *more) for epoch, index, *more in rows)


def pack_learnt(group_filter: GroupFilter | None) -> list[float]:
    """What a rule's filter has learnt, for a checkpoint; zeros without one."""
    return group_filter.state() if group_filter else [0.0, 0.0]


def room_until_end(at_end: AtEnd, num_groups: int, time: RoundTime, num_waiting: int = 0) -> int | None:
    """How many prompts beyond its batch a round may leave over so that later steps can train on all of them, besides
    `num_waiting` that its rule carries; None: any number."""
    if at_end == "leave" or time.steps_left is None:
        return None
    return num_groups * (time.steps_left - 1) - num_waiting


class CarriedPrompt(Protocol):
    """A prompt that a rule carries; a frozen dataclass with these fields is one."""

    @property
    def key(self) -> PromptKey:
        """Its (epoch, index)."""
        ...

    @property
    def first_step(self) -> int:
        """The step that first launched it."""
        ...

    @property
    def first_round(self) -> int:
        """The round that first launched it, as its rule counts them."""
        ...


C = TypeVar("C", bound=CarriedPrompt)


def discard_at_end(carried: deque[C], batch: BatchSettings, at_end: AtEnd, time: RoundTime) -> list[C]:
    """Takes the newest prompts out of `carried` that no step which is left could train on: they were launched ahead of
    verdicts. (Without a filter no rule launches too many. A run that is resumed with fewer steps keeps what it carries,
    and says so at its end.)"""
    room = room_until_end(at_end, batch.num_groups, time) if batch.group_filter else None
    discarded: list[C] = []
    while room is not None and len(carried) > room:
        discarded.append(carried.pop())
    return discarded


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A round that was planned and is not settled."""

    round: Round
    race: Race
    time: RoundTime

    @property
    def ledger(self) -> RoundLedger:
        return self.round.ledger

    def tokens_lost(self, carried: Collection[SampleKey] = frozenset()) -> int:
        """Tokens of responses that ended or were aborted in this round and are neither in the batch, in a filtered
        group, nor carried on."""
        kept = {*self.race.chosen(self.ledger), *carried}
        for prompt_key in self.race.filtered:
            kept |= self.race.groups[prompt_key].kept.keys()
        ended = (*self.ledger.finished.values(), *self.ledger.aborted.values())
        return sum(len(sample) for sample in ended if sample.key not in kept)

    def filtered(self) -> list[Group]:
        """Scored groups of the prompts that were filtered, in the order in which that was decided."""
        finished = self.ledger.finished
        groups = (self.race.groups[prompt_key] for prompt_key in self.race.filtered)
        return [Group(group.planned.prompt, [finished[key] for key in sorted(group.kept)]) for group in groups]

    def metrics(self, groups: Sequence[Group], thrown_tokens: int) -> dict[str, float]:
        """What every rule reports of a round; `groups` is its batch."""
        race = self.race
        samples = [sample for group in groups for sample in group.samples]
        started = [key for group in race.groups.values() for key in group.planned.keys]
        # not the ledger's count: a response that ended while a verdict was awaited may be told as ended or as aborted
        counted = {key for group in race.groups.values() for key in group.kept}
        outcomes = list(race.filtered.values())
        filtered = [s for key in race.filtered for s in race.groups[key].kept.values()]
        estimate = {"rollout/filtered_share": race.filter.share} if race.filter else {}
        ages = [self.time.step - race.groups[group.prompt.key].planned.first_step for group in groups]
        return {
            "rollout/long_round": float(self.round.kind == "long"),
            "rollout/launched_prompts": float(len(race.groups)),
            "rollout/launched_samples": float(len(started)),
            "rollout/kept_prompts": float(len(groups)),
            "rollout/kept_samples": float(len(samples)),
            "rollout/aborted_samples": float(sum(key not in counted for key in started)),
            "rollout/filtered_prompts": float(outcomes.count("filtered")),
            "rollout/failed_prompts": float(outcomes.count("failed")),
            "rollout/filtered_tokens": float(sum(len(sample) for sample in filtered)),
            "rollout/thrown_tokens": float(thrown_tokens),
            "rollout/trained_age_steps/mean": float(np.mean(ages)),
            "rollout/trained_age_steps/max": float(max(ages)),
            "rollout/resumed_share": off_policy_share(samples, self.time.policy_version),
            **estimate,
        }


def open_round(race: Race, kind: RoundKind, time: RoundTime) -> OpenRound:
    return OpenRound(Round((), race.limits.batch.group_size, race, kind=kind), race, time)


def close_round(opened: OpenRound | None, current: Round) -> OpenRound:
    assert opened is not None, "a round is settled that was not planned"
    assert opened.round is current, "a round is settled that is not the one planned last"
    assert current.done, "a round is settled before it is done"
    return opened


def queue_metrics(carried: Collection[CarriedPrompt], step: int, round_index: int) -> dict[str, float]:
    """What every rule that carries prompts reports of them after a round: how many, and how long they have waited."""
    return {
        "rollout/queue_length": float(len(carried)),
        **_spread_of_ages("rollout/queue_age_steps", [step - prompt.first_step for prompt in carried]),
        **_spread_of_ages("rollout/queue_age_rounds", [round_index - prompt.first_round for prompt in carried]),
    }


def _spread_of_ages(name: str, ages: Sequence[int]) -> dict[str, float]:
    """Mean and maximum; zeros where none waits."""
    return {f"{name}/mean": float(np.mean(ages)) if ages else 0.0, f"{name}/max": float(max(ages, default=0))}


def off_policy_share(samples: Iterable[Sample], policy_version: int) -> float:
    """The share of the model's tokens from versions before `policy_version`; 0 if there are no tokens."""
    total = older = 0
    for sample in samples:
        drawn = sample.num_drawn
        total += drawn
        if drawn and sample.versions[0] < policy_version:
            older += drawn - int(np.count_nonzero(sample.versions >= policy_version))
    return older / total if total else 0.0


def check_schema(what: str, state: Mapping[str, Any], schema: int) -> None:
    """Raises ValueError for a state that this version does not read."""
    if state["schema"] != schema:
        raise ValueError(f"{what}: state of schema {state['schema']}; this version reads schema {schema}")
