"""Active partial rollout: stop when enough groups are complete, and go on with the others in the next round.

Purpose: the rule across rounds. A round has N' > N groups under way: first complete groups that the last round did not
need, then unfinished groups from the buffer, oldest first, then new prompts. It stops at the N-th complete group.
Unfinished samples stay in the buffer with their tokens, and with both log-probabilities and the version of each token;
they go on under the same key (same attempt) from their token ids.

Source: APRIL §2.2 (over-provision, stop early, buffer, resume first), §3.1 (N' = 2N), §3.2.3 (a group is complete when
all its samples are; finished samples wait in the buffer and are scored together), A.4.3.

Departures:

- `max_staleness` caps, in versions, how much older than the policy in training a trained token may be. Before each
  round, a buffered response with its oldest token over the cap loses its tokens and starts again with the next attempt;
  the other samples of its group keep theirs. By itself that could drop a long response again and again. So a group
  with a response that has started again `max_restarts` times has a *last step*, from which on its tokens would be over
  the cap, and rounds wait for groups that are *due*: as many of the earliest last steps as must be in this batch for
  the others to find room in the batches up to theirs (`_due`; earliest deadline first). With `max_restarts` 0, resumed
  responses are waited for rather than dropped.
- N' is at most N · (1 + the steps that a token may wait for its batch). That many groups fit into the batches of those
  steps, so `max_restarts` holds for every response. With more under way some would have to start again whatever the
  rule does, since each batch takes N; at the smallest cap everything that is resumed would. A resumed run may have
  a smaller cap or smaller batches than the run that filled its buffer: then the cap comes first, and responses that it
  leaves no room for start again once more.
- Groups that complete while the round is being stopped, or beyond N because a due group kept it going, are not lost:
  they are the first of the next round.
- `at_end="flush"`: the last rounds launch no more new prompts than the run can still train on.
- A function of the user's may order the buffer, hold groups back, and restart them (`BufferFilter`, after slime's
  `--buffer-filter-path`). It decides and takes nothing out, so that no prompt is lost; it sees numbers, not samples;
  and it must give the same answer to the same question, because a resumed run asks again. Groups that it holds back
  count as under way, so that the bounds above hold; the cap, `max_restarts` and the flush come first.

A sample is carried without its verdict and scored when its group is complete: a clock would decide whether a verdict
came before the end of a round.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self, get_args

import numpy as np
from annotated_types import Ge

from jaxrl.scheduling.mechanism import UNFINISHED, Mechanism, Searched
from jaxrl.scheduling.rounds.batches import (
    OpenRound,
    PromptStream,
    RoundResult,
    RoundTime,
    check_schema,
    close_round,
    discard_at_end,
    new_group,
    open_round,
    pack_learnt,
    provisioned,
    queue_metrics,
    room_until_end,
)
from jaxrl.scheduling.rounds.carried import as_carried, check_lengths, pack_samples, unpack_samples
from jaxrl.scheduling.rounds.race import BatchSettings, PlannedGroup, Race, RaceLimits
from jaxrl.scheduling.rounds.round import Outcome, PromptKey, Round
from jaxrl.schema.declared import Names
from jaxrl.schema.limits import AtEnd, Factor
from jaxrl.types import Sample

if TYPE_CHECKING:
    from jaxrl.config import Config

SCHEMA = 1


Action = Literal["resume", "wait", "restart"]


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """A prompt that has begun and is not trained on. Tuples have one entry per sample.

    Attributes:
      key: (epoch, index) of the prompt.
      steps_waited: training steps since its first launch.
      lengths: tokens drawn so far.
      finished: whether the response has ended.
      oldest_versions: the version of the first token; None without tokens.
      restarts: how often it has started again.
    """

    key: PromptKey
    steps_waited: int
    lengths: tuple[int, ...]
    finished: tuple[bool, ...]
    oldest_versions: tuple[int | None, ...]
    restarts: tuple[int, ...]

    def lag(self, policy_version: int) -> int:
        """By how many versions its oldest token is behind the version that draws; 0 without tokens."""
        return max((policy_version - version for version in self.oldest_versions if version is not None), default=0)


class BufferFilter(Protocol):
    """Example::

    def buffer_filter(groups, policy_version):
        # the longest first; what is two versions old starts anew
        longest = sorted(groups, key=lambda group: -max(group.lengths))
        return {g.key: "restart" if g.lag(policy_version) >= 2 else "resume" for g in longest}
    """

    def __call__(self, *, groups: Sequence[WaitingGroup], policy_version: int) -> Mapping[PromptKey, Action]:
        """What becomes of buffered groups in the round that `policy_version` draws: those that go on do so in the order
        of the answer. A group that is not named goes on after those that are."""
        ...


def decide(buffer_filter: BufferFilter, groups: Sequence[WaitingGroup], policy_version: int) -> dict[PromptKey, Action]:
    """The function's answer for all groups, checked, in order. Raises ValueError for one that is none."""
    place = "rollout.partial_rollout.buffer_filter_path: the function"
    try:
        answer = buffer_filter(groups=list(groups), policy_version=policy_version)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{place} failed with {type(error).__name__}: {error}") from error
    if not isinstance(answer, Mapping):
        raise ValueError(f"{place} must return a mapping from keys of groups to actions, found {answer!r:.200}")
    decided: dict[PromptKey, Action] = {}
    keys = [group.key for group in groups]
    for key, action in answer.items():
        if key not in keys:
            raise ValueError(f"{place} returned {key!r:.200}, which is the key of none of its {len(keys)} groups")
        if action not in get_args(Action):
            raise ValueError(f"{place} must say one of {', '.join(get_args(Action))} for {key}, found {action!r:.200}")
        decided[key] = action
    for key in keys:
        decided.setdefault(key, "resume")
    return decided


@dataclass(frozen=True, slots=True)
class BufferedGroup:
    """A prompt that was launched and has not left.

    Attributes:
      key: its (epoch, index).
      first_step, first_round: when it was first launched.
      samples: all `group_size` of them in their present state, also those without tokens.
    """

    key: PromptKey
    first_step: int
    first_round: int
    samples: tuple[Sample, ...]

    @property
    def is_complete(self) -> bool:
        return all(has_ended(sample) for sample in self.samples)


class PartialRollout(Mechanism):
    """The batch rule (`jaxrl.scheduling.rounds.batches.BatchRule`).

    Args:
      batch: N, the group size, and what else rules share. Its `score_when` is not used: samples are scored by group.
      options: `rollout.partial_rollout`.
      buffer_filter: what becomes of buffered groups; None: all go on, the complete and then the oldest first.

    Raises ValueError for impossible limits.

    Attributes:
      num_spare: N' - N.
    """

    @dataclass(frozen=True)
    class Options:
        """A round stops at enough complete prompts, and the next round goes on with the others."""

        enable: Annotated[bool, "Switch active partial rollout on."] = False
        over_provision: Annotated[Factor, "Prompts under way, as a multiple of data.train_batch_size."] = 2.0
        max_staleness: Annotated[
            int, Ge(-1), "Versions that a trained token may lag behind the policy; -1: no cap."
        ] = -1
        max_restarts: Annotated[
            int, Ge(0), "The most times that a sample may lose its tokens and start again; rounds wait for it in time."
        ] = 1
        at_end: Annotated[
            AtEnd, "What becomes of the buffer when training ends; flush: the last rounds empty it, leave: it stays."
        ] = "flush"
        buffer_filter_path: Annotated[
            str,
            Names("file"),
            "A Python file with a function that says what becomes of buffered prompts in a round; empty: none.",
        ] = ""
        buffer_filter_name: Annotated[
            str, "The function in buffer_filter_path, called with groups and policy_version."
        ] = "buffer_filter"

    name = title = "partial rollout"
    option = "rollout.partial_rollout"
    decides = frozenset({UNFINISHED})
    races = True
    searched = Searched(("over_provision",), (1.5, 2.0, 2.5, 3.0), warm_up=8)

    @classmethod
    def problem(cls, config: Config, racing: Sequence[str]) -> str | None:
        if config.reward.score_when == "rollout":
            return (
                "partial rollout scores a prompt's samples when all of them have ended, whatever comes later: "
                "reward.score_when must be 'sample' or 'group' (which mean the same there), found 'rollout'"
            )
        return None

    @classmethod
    def batch_rule(cls, config: Config, batch: BatchSettings) -> Self:
        """A new rule, with an empty buffer. Raises ValueError for a file that cannot be used, too."""
        from jaxrl.config.functions import read_user_file, user_function

        options, buffer_filter = config.rollout.partial_rollout, None
        if options.buffer_filter_path:
            names = f"{cls.option}.buffer_filter_path", f"{cls.option}.buffer_filter_name"
            file = read_user_file(names[0], options.buffer_filter_path)
            buffer_filter = user_function(names, file, options.buffer_filter_name, ("groups", "policy_version"))
        return cls(batch, options, buffer_filter)

    def __init__(self, batch: BatchSettings, options: Options, buffer_filter: BufferFilter | None = None) -> None:
        self.batch, self.options = replace(batch, score_when="group"), options
        self.buffer_filter = buffer_filter
        under_way = provisioned("rollout.partial_rollout.over_provision", options.over_provision, batch.num_groups)
        self.num_spare = under_way - batch.num_groups
        self._limits(self.num_spare)
        if 0 <= options.max_staleness < self.least_staleness:
            lag = ", and one-step-off adds one version to every token" if batch.version_lag else ""
            raise ValueError(
                f"rollout.partial_rollout.max_staleness ({options.max_staleness} versions) must be >= "
                f"{self.least_staleness}, or -1 for no cap: {under_way} prompts are under way (over_provision "
                f"{options.over_provision}) and a batch takes {batch.num_groups}{lag}"
            )
        self.buffer: deque[BufferedGroup] = deque()  # by first launch; in a round, those that it has not launched
        self.num_rounds = 0
        self.filter = batch.group_filter
        self._open: OpenRound | None = None
        self._restarted = 0
        self._dropped_tokens = 0
        self._resumed_tokens = 0

    @property
    def num_carried(self) -> int:
        return len(self.buffer)

    @property
    def max_under_way(self) -> tuple[int, int]:
        return self._limits(self.num_spare).max_under_way

    @property
    def least_staleness(self) -> int:
        """The smallest cap in versions under which all groups under way find room in batches."""
        return self.batch.version_lag - (-self.num_spare // self.batch.num_groups)

    def _limits(self, num_spare: int, max_left_over: int | None = None) -> RaceLimits:
        return RaceLimits(self.batch, self.batch.group_size, num_spare, True, max_left_over)

    def ahead(self, prompts: PromptStream, time: RoundTime) -> list[PlannedGroup]:
        return []  # the batch depends on which responses end first

    # -- planning ----------------------------------------------------------------------------------------------------

    def plan(self, prompts: PromptStream, time: RoundTime) -> Round:
        assert self._open is None, "a round is planned before the one before it is settled"
        batch = self.batch
        self.num_rounds += 1
        self._restarted = self._dropped_tokens = self._resumed_tokens = 0
        waiting = [self._restart(group, lambda sample: self._last_step(sample) < time.step) for group in self.buffer]
        due = self._due(waiting, time.step)
        # stable sort: oldest first among the due, the complete and the other groups
        waiting.sort(key=lambda group: (group.key not in due, not group.is_complete))
        room = room_until_end(self.options.at_end, batch.num_groups, time)
        num_spare = self.num_spare if room is None else min(self.num_spare, room)
        go_on, held_back = self._filtered(waiting, due, time, num_spare)
        self.buffer = deque((*go_on, *held_back))
        num_resumable = len(go_on)

        def supply() -> PlannedGroup:
            nonlocal num_resumable
            if num_resumable:
                num_resumable -= 1
                return self._resume(prompts)
            return new_group(prompts, batch.group_size, time.step, self.num_rounds)

        limits = self._limits(num_spare - len(held_back), self._most_left_over(time, num_spare, len(held_back)))
        race = Race(limits, supply, due, self.filter)
        self._open = open_round(race, "partial", time)
        return self._open.round

    def _most_left_over(self, time: RoundTime, num_spare: int, num_held_back: int) -> int | None:
        """How many groups dynamic sampling may leave over by launching ahead: as many as find room in batches before
        their tokens are over the cap, and before the run ends."""
        rooms: list[int] = []
        if self.options.max_staleness >= 0:
            rooms.append(self.batch.num_groups * (self.options.max_staleness - self.batch.version_lag))
        # a race cannot wait for all of them, and must not lose any
        until_end = room_until_end(self.options.at_end, self.batch.num_groups, time)
        if num_spare and until_end is not None:
            rooms.append(until_end)
        return max(min(rooms) - num_held_back, 0) if rooms else None

    def _filtered(
        self, waiting: list[BufferedGroup], due: Collection[PromptKey], time: RoundTime, num_spare: int
    ) -> tuple[list[BufferedGroup], list[BufferedGroup]]:
        """The groups that go on in this round, in that order, and those that the user's function holds back."""
        if self.buffer_filter is None:
            return waiting, []
        go_on = [group for group in waiting if group.key in due]
        asked = {group.key: group for group in waiting if group.key not in due}
        waits: list[BufferedGroup] = []
        described = [self._describe(group, time.step) for group in asked.values()]
        for prompt_key, action in decide(self.buffer_filter, described, time.policy_version).items():
            group = asked[prompt_key]
            if action == "restart":
                group = self._restart(group, lambda sample: sample.key.attempt < self.options.max_restarts)
            (waits if action == "wait" else go_on).append(group)
        # those that the run ends too soon to hold back, or that a buffer filled by other options has too many of
        num_more = max(len(waits) - num_spare, 0)
        return go_on + waits[:num_more], waits[num_more:]

    def _describe(self, group: BufferedGroup, step: int) -> WaitingGroup:
        samples = group.samples
        return WaitingGroup(
            key=group.key,
            steps_waited=step - group.first_step,
            lengths=tuple(map(len, samples)),
            finished=tuple(map(has_ended, samples)),
            oldest_versions=tuple(int(sample.versions[0]) if len(sample) else None for sample in samples),
            restarts=tuple(sample.key.attempt for sample in samples),
        )

    def _restart(self, group: BufferedGroup, asked: Callable[[Sample], bool]) -> BufferedGroup:
        """The group, with empty samples of the next attempt for those with tokens that are `asked` to start again."""
        samples = list(group.samples)
        for place, sample in enumerate(samples):
            if len(sample) and asked(sample):
                self._restarted += 1
                self._dropped_tokens += len(sample)
                samples[place] = Sample.empty(replace(sample.key, attempt=sample.key.attempt + 1))
        return replace(group, samples=tuple(samples))

    def _last_step(self, sample: Sample) -> float:
        """The last training step for which the sample's oldest token is within the cap: step s trains version s - 1."""
        cap = self.options.max_staleness
        return int(sample.versions[0]) + 1 + cap if len(sample) and cap >= 0 else math.inf

    def _due(self, waiting: Iterable[BufferedGroup], step: int) -> set[PromptKey]:
        """The groups that must be in the batch of `step`.

        A group has a last step if one of its samples may not start again; of those up to any step s, all but
        N · (s - `step`) must be in this batch, because that many find room in the batches after it."""
        last_steps: dict[PromptKey, float] = {}
        for group in waiting:
            bound = [s for s in group.samples if s.key.attempt >= self.options.max_restarts]
            last_steps[group.key] = min(map(self._last_step, bound), default=math.inf)
        ordered = sorted(last_steps, key=lambda prompt_key: last_steps[prompt_key])  # stable: the oldest first
        size = self.batch.num_groups
        num_due = max((place - size * (last_steps[key] - step) for place, key in enumerate(ordered, 1)), default=0)
        # more than fit: only in a resumed run whose buffer other options have filled
        return set(ordered[: int(min(max(num_due, 0), size))])

    def _resume(self, prompts: PromptStream) -> PlannedGroup:
        group = self.buffer.popleft()
        live = [sample for sample in group.samples if not has_ended(sample)]
        resumed = tuple(sample for sample in live if len(sample))
        self._resumed_tokens += sum(map(len, resumed))
        return PlannedGroup(
            prompt=prompts.get(*group.key),
            keys=tuple(sample.key for sample in live),
            resumed=resumed,
            finished=tuple(sample for sample in group.samples if has_ended(sample)),
            first_step=group.first_step,
            first_round=group.first_round,
        )

    # -- settling ----------------------------------------------------------------------------------------------------

    def settle(self, current: Round) -> RoundResult:
        opened, self._open = close_round(self._open, current), None
        race, ledger = opened.race, opened.ledger
        self.filter = race.filter
        gone = {*race.batch, *race.filtered}
        kept: list[BufferedGroup] = []
        for prompt_key, group in race.groups.items():
            if prompt_key not in gone:
                begun = [ledger.aborted[key] for key in group.planned.keys if key in ledger.aborted]
                samples = sorted((*map(as_carried, group.kept.values()), *begun), key=lambda sample: sample.key)
                assert len(samples) == self.batch.group_size, f"{prompt_key}: a response is missing"
                planned = group.planned
                kept.append(BufferedGroup(prompt_key, planned.first_step, planned.first_round, tuple(samples)))
        self.buffer = deque(sorted((*kept, *self.buffer), key=lambda entry: entry.first_round))  # stable
        discarded = discard_at_end(self.buffer, self.batch, self.options.at_end, opened.time)
        thrown = sum(len(s) for entry in discarded if entry.key not in race.groups for s in entry.samples)
        groups = current.groups()
        carried = {sample.key for entry in self.buffer for sample in entry.samples}
        metrics = opened.metrics(groups, opened.tokens_lost(carried) + self._dropped_tokens + thrown)
        metrics |= queue_metrics(self.buffer, opened.time.step, self.num_rounds)
        metrics |= self._partial_metrics(opened)
        if self.filter:
            metrics["rollout/discarded_prompts"] = float(len(discarded))
        left: dict[PromptKey, Outcome] = dict(race.filtered)
        left |= {entry.key: "filtered" for entry in discarded}
        begun = [sample for entry in self.buffer for sample in entry.samples if len(sample)]
        return RoundResult(current.kind, groups, left, metrics, opened.filtered(), begun)

    def _partial_metrics(self, opened: OpenRound) -> dict[str, float]:
        spans = [
            num_spans(sample.versions[sample.drawn]) for group in opened.round.groups() for sample in group.samples
        ]
        return {
            "rollout/surplus_prompts": float(sum(entry.is_complete for entry in self.buffer)),
            "rollout/buffered_tokens": float(sum(len(s) for entry in self.buffer for s in entry.samples)),
            "rollout/resumed_tokens": float(self._resumed_tokens),
            "rollout/restarted_samples": float(self._restarted),
            "training/off_policy/spans/mean": float(np.mean(spans)),
            "training/off_policy/spans/max": float(max(spans)),
        }

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Groups as int64 [N, 5] (epoch, index, first step, first round, samples), in the buffer's order."""
        assert self._open is None, "state between rounds only"
        rows = [(*entry.key, entry.first_step, entry.first_round, len(entry.samples)) for entry in self.buffer]
        return {
            "schema": SCHEMA,
            "num_rounds": self.num_rounds,
            "filtered_share": pack_learnt(self.filter),
            "groups": np.asarray(rows, np.int64).reshape(-1, 5),
            "samples": pack_samples([sample for entry in self.buffer for sample in entry.samples]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state of another schema, another `rollout.n`, one that does not fit together, or
        samples that are too long for this run."""
        check_schema("partial rollout", state, SCHEMA)
        samples = deque(unpack_samples(state["samples"]))
        check_lengths("in the buffer of partial rollout", samples, self.batch.max_response_length)
        rows = [tuple(int(value) for value in row) for row in state["groups"]]
        if any(row[4] != self.batch.group_size for row in rows):
            raise ValueError(
                f"partial rollout: the buffer holds groups of {sorted({row[4] for row in rows})} samples, and "
                f"rollout.n is {self.batch.group_size}: a resumed run must keep rollout.n"
            )
        if sum(row[4] for row in rows) != len(samples):
            raise ValueError(
                f"partial rollout: {len(samples)} samples for {len(rows)} groups of {self.batch.group_size}"
            )
        buffer: deque[BufferedGroup] = deque()
        for epoch, index, first_step, first_round, count in rows:
            members = tuple(samples.popleft() for _ in range(count))
            buffer.append(BufferedGroup((epoch, index), first_step, first_round, members))
        self.buffer, self.num_rounds = buffer, int(state["num_rounds"])
        self.filter = self.filter and self.filter.of_state(state["filtered_share"])


def has_ended(sample: Sample) -> bool:
    """Whether a response ended by itself."""
    return sample.finish_reason in ("stop", "length")


def version_spans(versions: np.ndarray) -> list[tuple[int, int, int]]:
    """Runs of tokens of one version, as (version, start, stop) in tokens of the response."""
    versions = np.asarray(versions)
    if not len(versions):
        return []
    bounds = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist(), len(versions)]
    return [(int(versions[start]), start, stop) for start, stop in pairwise(bounds)]


def num_spans(versions: np.ndarray) -> int:
    """The number of stretches of one version in a response."""
    return len(version_spans(versions))
