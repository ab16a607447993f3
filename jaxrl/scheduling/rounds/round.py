"""One rollout round: events in, commands out, until every prompt of the batch has its scored samples.

A `Round` launches more than is needed, keeps what finishes first, and ends the rest. Its limits say how many groups are
needed, how many more are in flight, how many spare responses each may have, and whether losers keep their tokens.
Without spare groups and responses it is the synchronous round. It refuses events that do not fit what has happened. A
`BatchRule` (`jaxrl.scheduling.rounds.batches`) makes the rounds of training and keeps what outlives them (queues,
buffers).

Source: RollPacker §3 (the first R0 responses of a prompt and the first P0 prompts; the others end at once), §7 (groups
that are left out); APRIL §2.2 and §3.2.3 (stop at the N-th group that has all its samples).

Departures:

- A round with dynamic sampling launches ahead of verdicts: as many groups are in flight as it expects to need, so a
  round without filtered prompts is the plain short round. (RollPacker §7 keeps the active requests at the cap until the
  end; verl draws batches of fixed size one after another.)
- So more groups may count than the batch needs. Where prompts do not race, it takes the first of them in the order of
  launch, as verl does, and waits for those before them: taking the first that end would neglect long responses. For
  the same reason groups launched after the batch's last one are left over, filtered or not (`_take_back`).
- A verdict's decision (which groups are left out, how many come in) takes effect at a logical time: the round needs a
  complete group's verdicts when `max_unscored` other groups wait behind it, or when they could end the round, and
  generation waits for them (`AwaitVerdict`). So neither the batch nor the plan that a replacement enters (and so the
  rows that decode together) depends on how long scoring takes.
- A group that is filtered leaves as `failed` if all its scorings failed.

The order is that of completion: (dispatch, dp group, slot), as the engine reports it. Verdicts must come in that order;
the backend holds back one that arrives early.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from jaxrl.scheduling.rounds.events import (
    Abort,
    AwaitVerdict,
    CancelScore,
    Command,
    Event,
    Launch,
    Outcome,
    PromptKey,
    RoundStarted,
    SampleAborted,
    SampleFinished,
    Score,
    Verdict,
)
from jaxrl.schema.limits import ScoreWhen
from jaxrl.types import Group, Prompt, Sample, SampleKey, check_schema

if TYPE_CHECKING:
    import numpy as np

    from jaxrl.mechanisms.dynamic_sampling import DynamicSampling

RoundKind = Literal["plain", "short", "long", "partial"]
"""`short`: launches more than it needs; `long`: waits for what such rounds have left; `partial`: stops early and keeps
the unfinished; `plain`: all others."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The configuration that all batch rules share.

    Attributes:
      num_prompts: prompts per batch, P0 (`data.train_batch_size`). group_size: samples per prompt, R0 (`rollout.n`).
      group_filter: leaves groups out of batches, with nothing learnt; None: every complete group counts.
      version_lag: versions by which the policy in training is ahead of the one that samples: 0, or 1 where a round
        comes before the update that its weights lack.
      max_response_length: in tokens; 0: no limit.
    """

    num_prompts: int
    group_size: int
    score_when: ScoreWhen = "sample"
    group_filter: DynamicSampling | None = None
    version_lag: int = 0
    max_response_length: int = 0


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A prompt from its first launch (`first_step`, `first_round`) until it leaves the system, and its responses
    between two rounds. `samples`: all that its next launch needs, sorted by key: those without tokens start, those with
    tokens resume, and those that have ended count as they are."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    first_step: int = 0
    first_round: int = 0

    @classmethod
    def first(cls, prompt: Prompt, num_responses: int, step: int = 0, round_index: int = 0) -> Self:
        return cls(prompt, (), step, round_index).afresh(num_responses)

    def afresh(self, num_responses: int, attempt: int = 0) -> Self:
        keys = (SampleKey(*self.prompt.key, i, attempt) for i in range(num_responses))
        return replace(self, samples=tuple(map(Sample.empty, keys)))

    @property
    def key(self) -> PromptKey:
        return self.prompt.key

    @property
    def attempt(self) -> int:
        return max(sample.key.attempt for sample in self.samples)

    @property
    def is_complete(self) -> bool:
        return all(sample.has_ended for sample in self.samples)

    def launch(self) -> Launch:
        live = [sample for sample in self.samples if not sample.has_ended]
        return Launch(
            self.prompt,
            tuple(sample.key for sample in live),
            resumed=tuple(sample for sample in live if len(sample)),
            finished=tuple(sample for sample in self.samples if sample.has_ended),
        )


@dataclass(frozen=True, slots=True)
class RaceLimits:
    """The limits of a round.

    Attributes:
      num_responses: started per new prompt, at least `group_size`; the most that a prompt may have in flight.
      num_spare: groups in flight beyond those still needed.
      keep_unfinished: whether losing responses keep their tokens, but for spare ones.
      max_left_over: the most prompts that may be launched ahead of verdicts, beyond the batch and those that are
        filtered; None: no limit.
    """

    batch: BatchSettings
    num_responses: int
    num_spare: int = 0
    keep_unfinished: bool = False
    max_left_over: int | None = None

    @property
    def in_launch_order(self) -> bool:
        """Whether the batch takes the first groups that count in the order of launch, whichever end first: so a rule
        without a race of prompts neglects no long response."""
        return self.batch.group_filter is not None and not self.num_spare

    @property
    def max_under_way(self) -> int:
        """Prompts, each with `num_responses` samples."""
        num_prompts, group_filter = self.batch.num_prompts, self.batch.group_filter
        return (group_filter.most_under_way(num_prompts) if group_filter else num_prompts) + self.num_spare


@dataclass(slots=True, eq=False)
class RacingGroup:
    """A prompt in flight: its launches, the responses that decode (`live`), and those that count, in the order in which
    they ended."""

    planned: PlannedGroup
    launch: Launch
    live: dict[SampleKey, None]
    kept: dict[SampleKey, Sample]

    def lowest(self, count: int) -> list[SampleKey]:
        """The keys with the lowest numbers, whichever have ended."""
        return sorted((*self.kept, *self.live))[:count]


class Round:
    """One round.

    Args:
      supply: the next group to launch; called only when there is room for it.
      due: keys of prompts that must be in the batch. They are the first that `supply` gives, and at most `num_prompts`.
      group_filter: that of `limits.batch`, as the rounds before have left it; None: as it is there.
      kind: for resource planning and for pictures.

    Attributes:
      launched, finished, scoring, verdicts, aborting, aborted: what has happened, by sample, in the order of events.
        `finished` with their rewards, once scored; `scoring`: sent to the reward pool, no verdict yet; `aborting`:
        asked to end, no event yet, and whether tokens matter; `aborted` with the tokens that they had.
      racing: all groups that were launched, in that order.
      accepted: complete groups; the batch takes `num_prompts` of them (`batch`), the due ones first.
      filtered: groups left out, and the outcome of each.
    """

    def __init__(
        self,
        limits: RaceLimits,
        supply: Callable[[], PlannedGroup],
        due: Collection[PromptKey] = frozenset(),
        group_filter: DynamicSampling | None = None,
        kind: RoundKind = "plain",
    ) -> None:
        assert len(due) <= limits.batch.num_prompts
        self.limits, self.done = limits, False
        self.kind: RoundKind = kind
        self.filter = group_filter or limits.batch.group_filter
        self.launched: dict[SampleKey, Prompt] = {}
        self.finished: dict[SampleKey, Sample] = {}
        self.scoring: dict[SampleKey, None] = {}
        self.verdicts: dict[SampleKey, Verdict] = {}
        self.aborting: dict[SampleKey, bool] = {}
        self.aborted: dict[SampleKey, Sample] = {}
        self.racing: dict[PromptKey, RacingGroup] = {}
        self.accepted: list[PromptKey] = []
        self.filtered: dict[PromptKey, Outcome] = {}
        self.batch: list[PromptKey] = []
        self._supply = supply
        self._due = frozenset(due)
        self._due_left = set(due)
        self._unresolved: deque[PromptKey] = deque()  # complete, not decided about yet
        self._backlog: deque[Sample] = deque()  # ended, to be taken in when the awaited verdict is there
        self._awaited: SampleKey | None = None
        self._sent: dict[SampleKey, None] = {}  # for scoring, in that order
        self._num_active = 0
        self._num_owed = 0  # of those that are launched at once, still to be launched
        self._started = self._stopped = False

    @classmethod
    def of(cls, prompts: Sequence[Prompt], group_size: int) -> Self:
        """These prompts, in this order, `group_size` times each, and all are waited for. Their keys must differ."""
        assert prompts, "a round needs prompts"
        supply = iter([PlannedGroup.first(prompt, group_size) for prompt in prompts])
        return cls(RaceLimits(BatchSettings(len(prompts), group_size), group_size), lambda: next(supply))

    def handle(self, event: Event) -> list[Command]:
        """The answer to an event, which must fit the round."""
        assert not self.done, f"{event}: the round is done"
        assert self._started != isinstance(event, RoundStarted), f"{event}: RoundStarted must come first, and once"
        match event:
            case RoundStarted():
                self._started = True
            case SampleFinished(sample=sample):
                self._record_finish(sample)
                if self._stopped:
                    self._keep_late(sample)
                else:
                    self._backlog.append(sample)
            case SampleAborted(sample=sample):
                self._record_abort(sample)
            case Verdict():
                self._record_verdict(event)
                if self._awaited == event.key:
                    self._awaited = None
        commands = [] if isinstance(event, SampleAborted) else self._advance()
        self.done = self._stopped and not self.aborting and not self.scoring
        return commands

    def groups(self) -> list[Group]:
        """The batch: groups sorted by prompt key, samples sorted by key, with their rewards."""
        assert self.done, "groups() of a round that is not done"
        return [self.group(prompt_key) for prompt_key in sorted(self.batch)]

    def certain(self) -> list[Group]:
        """Groups that `groups` will hold after any further events, scored or not; sorted as there. (A dropped round
        still yields nothing.)"""
        return [
            self.group(prompt_key)
            for prompt_key in sorted(self._certain())
            if all(key in self.verdicts or key in self.scoring for key in self.racing[prompt_key].kept)
        ]

    def group(self, prompt_key: PromptKey) -> Group:
        """A group's samples that count so far, sorted by key."""
        racing = self.racing[prompt_key]
        return Group(racing.planned.prompt, [self.finished[key] for key in sorted(racing.kept)])

    def chosen(self) -> list[SampleKey]:
        return [key for prompt_key in self.batch for key in self.racing[prompt_key].kept]

    @property
    def left_over(self) -> list[RacingGroup]:
        """Groups that were launched, and are neither in the batch nor filtered."""
        gone = {*self.batch, *self.filtered}
        return [group for key, group in self.racing.items() if key not in gone]

    # -- what has happened -------------------------------------------------------------------------------------------

    def _record_finish(self, sample: Sample) -> None:
        key = sample.key
        lost = key in self.aborted or not self.aborting.get(key, True)
        assert key in self.launched, f"{key} finished: it must be launched"
        assert key not in self.finished, f"{key} finished: it has finished before"
        assert not lost, f"{key} finished: it was aborted"
        assert sample.has_ended, f"{key} finished with reason {sample.finish_reason!r}"
        self.aborting.pop(key, None)
        self.finished[key] = sample

    def _record_abort(self, sample: Sample) -> None:
        key = sample.key
        assert key in self.aborting, f"{key} aborted: no command asked for it, or it has ended before"
        assert sample.finish_reason == "abort", f"{key} aborted: its reason ({sample.finish_reason}) must be 'abort'"
        del self.aborting[key]
        self.aborted[key] = sample

    def _record_verdict(self, verdict: Verdict) -> None:
        key = verdict.key
        due = next(iter(self.scoring), None)
        assert due == key, f"verdict on {key}: they come once each, in the order of completion; due: {due}"
        del self.scoring[key]
        self.verdicts[key] = verdict
        self.finished[key] = replace(
            self.finished[key], reward=verdict.reward, reward_info=dict(verdict.info), failure=verdict.failure
        )

    # -- the rule ----------------------------------------------------------------------------------------------------

    def _advance(self) -> list[Command]:
        """Takes all steps that are due now, one at a time, because each may end the round."""
        commands: list[Command] = []
        while not self._stopped and self._awaited is None:
            if self._has_batch(self.accepted) and not self._due_left:
                self._stop(commands)
            elif self._decide_next(commands):
                continue
            elif self._awaited is not None:
                break
            elif self._has_room():
                self._launch(commands)
            elif self._backlog:
                self._take(self._backlog.popleft(), commands)
            elif not self._score_after_rollout(commands):
                break
        return commands

    def _certain(self) -> list[PromptKey]:
        """Accepted groups that no later event can remove from the batch; a certain group stays certain. Due groups may
        precede one in the batch. So may groups launched before it and not filtered, if the order of launch counts, or
        else groups accepted before it."""
        if self._stopped:
            return list(self.batch)
        due = {key for key in self._due if key not in self.filtered}
        others = [key for key in self.racing if key not in self._due and key not in self.filtered]
        if not self.limits.in_launch_order:
            others = [key for key in self.accepted if key not in self._due]
        first = {*due, *others[: self.limits.batch.num_prompts - len(due)]}
        return [prompt_key for prompt_key in self.accepted if prompt_key in first]

    def _decide_next(self, commands: list[Command]) -> bool:
        """Decides about the group that has been complete for longest; False if it cannot yet."""
        if not self._unresolved:
            return False
        group = self.racing[self._unresolved[0]]
        if self.filter is None:
            self._accept(self._unresolved.popleft())
            return True
        if not self._must_decide(self.filter) or not all(key in self._sent for key in group.kept):
            return False
        if not all(key in self.verdicts for key in group.kept):
            # verdicts come in the order in which samples were sent
            self._awaited = next(key for key in reversed(self._sent) if key in group.kept)
            commands.append(AwaitVerdict(self._awaited))
            return False
        prompt_key = self._unresolved.popleft()
        kept = self.filter.keeps(self.group(prompt_key), [self.verdicts[key] for key in sorted(group.kept)])
        self.filter = self.filter.after(kept=kept, num_prompts=self.limits.batch.num_prompts)
        if not kept:
            failed = all(self.verdicts[key].status != "ok" for key in group.kept)
            self.filtered[prompt_key] = "failed" if failed else "filtered"
            self._due_left.discard(prompt_key)
        else:
            self._accept(prompt_key)
        return True

    def _must_decide(self, group_filter: DynamicSampling) -> bool:
        if self._has_batch({*self.accepted, *self._unresolved}):
            return True  # it could end the round
        num_running = self._num_under_way - len(self._unresolved)
        return len(self._unresolved) > group_filter.max_unscored(num_running, self.limits.batch.num_prompts)

    def _has_batch(self, complete: Collection[PromptKey]) -> bool:
        num_prompts = self.limits.batch.num_prompts
        if len(complete) < num_prompts or not self.limits.in_launch_order:
            return len(complete) >= num_prompts
        known = {*complete, *self.filtered}
        before = itertools.takewhile(known.__contains__, self.racing)
        return sum(key not in self.filtered for key in before) >= num_prompts

    def _accept(self, prompt_key: PromptKey) -> None:
        self.accepted.append(prompt_key)
        self._due_left.discard(prompt_key)

    @property
    def _num_under_way(self) -> int:
        """Launched, and neither accepted nor filtered."""
        return len(self.racing) - len(self.accepted) - len(self.filtered)

    def _has_room(self) -> bool:
        limits, batch = self.limits, self.limits.batch
        missing = batch.num_prompts - len(self.accepted)
        if self.filter is None:
            return self._num_under_way < missing + limits.num_spare
        gives_up = len(self.racing) >= self.filter.most_launched(batch.num_prompts + limits.num_spare)
        if self._num_under_way < missing:
            if gives_up:
                raise ValueError(
                    f"{len(self.racing)} prompts launched in one round, {len(self.filtered)} of them filtered, and "
                    f"{len(self.accepted)} of {batch.num_prompts} groups found: {self.filter.advice}"
                )
            return True
        not_filtered = len(self.accepted) + self._num_under_way
        too_many = limits.max_left_over is not None and not_filtered >= batch.num_prompts + limits.max_left_over
        if missing <= 0 or too_many or gives_up:
            self._num_owed = 0
            return False
        return self._num_owed > 0 or self._num_under_way < self.filter.under_way(missing) + limits.num_spare

    def _launch(self, commands: list[Command]) -> None:
        self._num_owed = (self._num_owed or (self.filter.launched_at_once if self.filter else 1)) - 1
        planned = self._supply()
        prompt_key, launch = planned.key, planned.launch()
        assert prompt_key not in self.racing, f"{prompt_key} is in the round already"
        assert len(launch.keys) <= self.limits.num_responses
        finished = {sample.key: sample for sample in launch.finished}
        self.racing[prompt_key] = RacingGroup(planned, launch, dict.fromkeys(launch.keys), finished)
        self.launched |= dict.fromkeys((*launch.keys, *finished), planned.prompt)
        self.finished |= finished
        self._num_active += len(launch.keys)
        commands.append(launch)
        if self.limits.batch.score_when == "sample":
            self._score(self.racing[prompt_key], commands)
        self._end_group_if_complete(prompt_key, commands)

    def _take(self, sample: Sample, commands: list[Command]) -> None:
        prompt_key = sample.key.epoch, sample.key.prompt_index
        group = self.racing[prompt_key]
        if sample.key not in group.live:
            return  # it ended while a verdict was awaited, when its group was already complete
        del group.live[sample.key]
        self._num_active -= 1
        group.kept[sample.key] = sample
        if self.limits.batch.score_when == "sample":
            self._score(group, commands)
        if len(group.kept) == self.limits.batch.group_size:
            others = tuple(key for key in group.live if key not in self.finished)
            self._num_active -= len(group.live)
            group.live.clear()
            if others:
                self._abort(others, False, commands)
        self._end_group_if_complete(prompt_key, commands)

    def _abort(self, keys: tuple[SampleKey, ...], keep: bool, commands: list[Command]) -> None:
        commands.append(Abort(keys, keep=keep))
        self.aborting |= dict.fromkeys(keys, keep)

    def _end_group_if_complete(self, prompt_key: PromptKey, commands: list[Command]) -> None:
        group = self.racing[prompt_key]
        if len(group.kept) < self.limits.batch.group_size:
            return
        self._unresolved.append(prompt_key)
        if self.limits.batch.score_when == "group":
            self._score(group, commands)

    def _score(self, group: RacingGroup, commands: list[Command]) -> None:
        for key, sample in group.kept.items():
            if key not in self._sent:
                self._sent[key] = self.scoring[key] = None
                commands.append(Score(group.planned.prompt, sample))

    def _score_after_rollout(self, commands: list[Command]) -> bool:
        """Whether any sample was sent."""
        num_sent = len(self._sent)
        if self.limits.batch.score_when == "rollout" and not self._num_active:
            for prompt_key in self._unresolved:
                self._score(self.racing[prompt_key], commands)
        return len(self._sent) > num_sent

    def _stop(self, commands: list[Command]) -> None:
        self._stopped = True
        accepted, place = self.accepted, {prompt_key: i for i, prompt_key in enumerate(self.racing)}
        if self.limits.in_launch_order:
            accepted = sorted(accepted, key=place.__getitem__)
        ordered = sorted(accepted, key=lambda prompt_key: prompt_key not in self._due)  # stable
        self.batch = ordered[: self.limits.batch.num_prompts]
        if self.limits.in_launch_order:
            self._take_back(max(place[prompt_key] for prompt_key in self.batch), place)
        live = [key for group in self.racing.values() for key in group.live if key not in self.finished]
        waiting: set[SampleKey] = set()  # a spare response does not wait
        if self.limits.keep_unfinished:
            waiting.update(*(group.lowest(self.limits.batch.group_size) for group in self.racing.values()))
        for keep in (True, False):
            if keys := tuple(key for key in live if (key in waiting) == keep):
                self._abort(keys, keep, commands)
        for sample in self._backlog:
            self._keep_late(sample)
        for prompt_key in self.batch:
            self._score(self.racing[prompt_key], commands)
        wanted = {key for prompt_key in self.batch for key in self.racing[prompt_key].kept}
        unwanted = tuple(key for key in self._sent if key not in self.verdicts and key not in wanted)
        if unwanted:
            commands.append(CancelScore(unwanted))
            for key in unwanted:
                del self.scoring[key]

    def _take_back(self, last: int, place: Mapping[PromptKey, int]) -> None:
        """Groups that were filtered, and launched after the batch's last one, are left over like the others there.

        Those with verdicts by now are the short ones. If they left, and the long ones were filtered in a later round
        only, short groups would pass two filters where long ones pass one."""
        room = self.limits.max_left_over
        num_back = None if room is None else max(room - len(self.left_over), 0)
        later = [prompt_key for prompt_key in self.racing if prompt_key in self.filtered and place[prompt_key] > last]
        for prompt_key in later[:num_back]:
            del self.filtered[prompt_key]

    def _keep_late(self, sample: Sample) -> None:
        """A response ended after the batch was chosen. Without `keep_unfinished` it counts as aborted, because the time
        of a verdict may decide whether the round receives its end."""
        if not self.limits.keep_unfinished:
            return
        group = self.racing[sample.key.epoch, sample.key.prompt_index]
        if sample.key in group.live:
            del group.live[sample.key]
            group.kept[sample.key] = sample


class Departures:
    """How prompts left the system: each (epoch, index) once. Part of a checkpoint. It keeps flags, in blocks of
    neighbouring prompts: a long run has a million of them, and every step boundary copies them."""

    SCHEMA = 1
    BLOCK = 1024

    def __init__(self) -> None:
        self.counts: dict[Outcome, int] = {"trained": 0, "filtered": 0, "failed": 0}
        self._left: dict[tuple[int, int], np.ndarray] = {}  # (epoch, index // BLOCK) -> bool [BLOCK]

    def leave(self, prompt_key: PromptKey, outcome: Outcome) -> None:
        assert not self.has_left(prompt_key), f"prompt {prompt_key} leaves as {outcome!r}: it has left before"
        self.counts[outcome] += 1
        self._mark(*prompt_key)

    def has_left(self, prompt_key: PromptKey) -> bool:
        epoch, index = prompt_key
        flags = self._left.get((epoch, index // self.BLOCK))
        return flags is not None and bool(flags[index % self.BLOCK])

    def state_dict(self) -> dict[str, Any]:
        """Counts, and the prompts that left as flat integers [N, 2] (epoch, index), ascending."""
        import numpy as np

        rows = [np.zeros((0, 2), np.int64)]
        for epoch, block in sorted(self._left):
            indices = np.flatnonzero(self._left[epoch, block]) + block * self.BLOCK
            rows.append(np.stack([np.full_like(indices, epoch), indices], axis=1))
        return {"schema": self.SCHEMA, "counts": dict(self.counts), "left": np.concatenate(rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_schema("departures", state, self.SCHEMA)
        self.counts, self._left = {outcome: int(state["counts"][outcome]) for outcome in self.counts}, {}
        for epoch, index in state["left"]:
            self._mark(int(epoch), int(index))

    def _mark(self, epoch: int, index: int) -> None:
        place = epoch, index // self.BLOCK
        if place not in self._left:
            import numpy as np

            self._left[place] = np.zeros(self.BLOCK, np.bool_)
        self._left[place][index % self.BLOCK] = True
