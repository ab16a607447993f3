"""Active partial rollout: stop when enough groups are complete, and resume the others in the next round.

A round has N' > N groups in flight: first complete groups that the last round did not need, then unfinished groups from
the buffer, oldest first, then new prompts. It stops at the N-th complete group. Unfinished samples stay in the buffer
with their tokens, both log-probabilities and the version of each; they resume under the same key.

Source: APRIL §2.2 (over-provision, stop early, buffer, resume first), §3.1 (N' = 2N), §3.2.3 (a group is complete when
all its samples are; finished samples wait in the buffer and are scored together), A.4.3.

Departures:

- `max_staleness` caps, in versions, how much older than the policy in training a trained token may be. Before each
  round, a buffered response with its oldest token over the cap loses its tokens and starts again with the next attempt;
  the other samples of its group keep theirs. By itself that could drop a long response again and again. So a group with
  a response that has started again `max_restarts` times has a *last step*, after which its tokens would be over the
  cap. Rounds wait for the groups that are *due* (`_due`; earliest deadline first): those that must be in this batch so
  that the others fit into the batches up to their last steps. With `max_restarts` 0, resumed responses are waited for
  rather than dropped.
- N' is at most N · (1 + the steps that a token may wait for its batch). That many groups fit into the batches of those
  steps, so `max_restarts` holds for every response. A resumed run may have a smaller cap or smaller batches than the
  run that filled its buffer: then the cap comes first, and responses that it leaves no room for start again once more.
- Groups that complete while the round is being stopped, or beyond N because a due group kept it going, are not lost:
  they are the first of the next round.
- `at_end="flush"`: the last rounds launch no more new prompts than the run can still train on.
- A function of the user's may order the buffer, hold groups back, and restart them (`BufferFilter`, after slime's
  `--buffer-filter-path`). It takes nothing out, so that no prompt is lost; it sees numbers, not samples; and it must be
  deterministic, because a resumed run asks again. Groups that it holds back count as in flight, so that the bounds
  above hold; the cap, `max_restarts` and the flush take precedence.

A sample is carried without its verdict and scored when its group is complete: a clock would decide whether a verdict
came before the end of a round.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, Self, get_args

from annotated_types import Ge

from jaxrl.scheduling.mechanism import UNFINISHED, Mechanism, Searched
from jaxrl.scheduling.rounds.batches import BatchRule, RoundPlan, RoundTime, last_step, provisioned, room_until_end
from jaxrl.scheduling.rounds.events import PromptKey
from jaxrl.scheduling.rounds.race import BatchSettings, PlannedGroup, RaceLimits
from jaxrl.scheduling.rounds.round import Round
from jaxrl.schema.declared import Names
from jaxrl.schema.limits import AtEnd, Factor
from jaxrl.schema.section import Section
from jaxrl.types import Group

if TYPE_CHECKING:
    from jaxrl.config import Config

Action = Literal["resume", "wait", "restart"]


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """A buffered group as the user's function sees it. Tuples have one entry per sample."""

    key: PromptKey  # (epoch, index) of the prompt
    steps_waited: int  # training steps since its first launch
    lengths: tuple[int, ...]  # tokens so far
    finished: tuple[bool, ...]  # whether the response has ended
    oldest_versions: tuple[int | None, ...]  # the version of the first token; None without tokens
    restarts: tuple[int, ...]  # how often it has started again

    def lag(self, policy_version: int) -> int:
        """By how many versions its oldest token is behind the version that samples; 0 without tokens."""
        return max((policy_version - version for version in self.oldest_versions if version is not None), default=0)


class BufferFilter(Protocol):
    """Decides about prompts that wait.

    For example::

        def buffer_filter(groups, policy_version):
            # the longest first; what is two versions old restarts
            longest = sorted(groups, key=lambda group: -max(group.lengths))
            return {g.key: "restart" if g.lag(policy_version) >= 2 else "resume" for g in longest}
    """

    def __call__(self, *, groups: Sequence[WaitingGroup], policy_version: int) -> Mapping[PromptKey, Action]:
        """The action for each group in a round of `policy_version`; groups resume in the order of the answer, and those
        without an action after them."""
        ...


def decide(buffer_filter: BufferFilter, groups: Sequence[WaitingGroup], policy_version: int) -> dict[PromptKey, Action]:
    """The function's answer for all groups, checked, in order. Raises ValueError for an impossible one."""
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


class PartialRollout(BatchRule, Mechanism):
    """The batch rule; its queue is the buffer. Raises ValueError for impossible limits.

    Args:
      buffer_filter: decides about buffered groups; None: all resume, the complete and then the oldest first.

    Attributes:
      num_spare: N' - N.
      least_staleness: the smallest cap in versions under which all groups in flight fit into batches.
    """

    class Options(Section):
        """A round stops at enough complete prompts, and the next round resumes the others."""

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
                "partial rollout scores a prompt's samples when all of them have ended, even if the round continues: "
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
        batch = replace(batch, score_when="group")
        self.options, self.at_end = options, options.at_end
        self.buffer_filter = buffer_filter
        under_way = provisioned(options.over_provision, batch.num_prompts)
        self.num_spare = under_way - batch.num_prompts
        limits = RaceLimits(batch, batch.group_size, self.num_spare, keep_unfinished=True)
        super().__init__(batch, limits, batch.group_size)
        self.least_staleness = batch.version_lag - (-self.num_spare // batch.num_prompts)
        if 0 <= options.max_staleness < self.least_staleness:
            lag = ", and one-step-off adds one version to every token" if batch.version_lag else ""
            raise ValueError(
                f"rollout.partial_rollout.max_staleness ({options.max_staleness} versions) must be >= "
                f"{self.least_staleness}, or -1 for no cap: {under_way} prompts are under way (over_provision "
                f"{options.over_provision}) and a batch takes {batch.num_prompts}{lag}"
            )

    def _plan(self, time: RoundTime) -> RoundPlan:
        cap = self.options.max_staleness
        waiting = [self._restart(group, lambda sample: last_step(sample, cap) < time.step) for group in self.queue]
        due = self._due(waiting, time.step)
        # stable sort: oldest first among the due, the complete and the other groups
        waiting.sort(key=lambda group: (group.key not in due, not group.is_complete))
        room = room_until_end(self.at_end, self.batch.num_prompts, time)
        num_spare = self.num_spare if room is None else min(self.num_spare, room)
        resuming, held_back = self._filtered(waiting, due, time, num_spare)
        self.queue = deque((*resuming, *held_back))
        num_kept = len(held_back)
        limits = replace(
            self.limits, num_spare=num_spare - num_kept, max_left_over=self._most_left_over(time, num_spare, num_kept)
        )
        return RoundPlan(limits, "partial", num_kept, due)

    def _most_left_over(self, time: RoundTime, num_spare: int, num_held_back: int) -> int | None:
        """How many groups dynamic sampling may leave over by launching ahead: as many as find room in batches before
        their tokens are over the cap, and before the run ends."""
        rooms: list[int] = []
        if self.options.max_staleness >= 0:
            rooms.append(self.batch.num_prompts * (self.options.max_staleness - self.batch.version_lag))
        # a race cannot wait for all of them, and must not lose any
        until_end = room_until_end(self.at_end, self.batch.num_prompts, time)
        if num_spare and until_end is not None:
            rooms.append(until_end)
        return max(min(rooms) - num_held_back, 0) if rooms else None

    def _filtered(
        self, waiting: list[PlannedGroup], due: Collection[PromptKey], time: RoundTime, num_spare: int
    ) -> tuple[list[PlannedGroup], list[PlannedGroup]]:
        """The groups that this round resumes, in that order, and those that the user's function holds back."""
        if self.buffer_filter is None:
            return waiting, []
        resuming = [group for group in waiting if group.key in due]
        asked = {group.key: group for group in waiting if group.key not in due}
        waits: list[PlannedGroup] = []
        described = [self._describe(group, time.step) for group in asked.values()]
        for prompt_key, action in decide(self.buffer_filter, described, time.policy_version).items():
            group = asked[prompt_key]
            if action == "restart":
                group = self._restart(group, lambda sample: sample.key.attempt < self.options.max_restarts)
            (waits if action == "wait" else resuming).append(group)
        # those that the run ends too soon to hold back, or that a buffer filled by other options has too many of
        num_more = max(len(waits) - num_spare, 0)
        return resuming + waits[:num_more], waits[num_more:]

    @staticmethod
    def _describe(group: PlannedGroup, step: int) -> WaitingGroup:
        samples = group.samples
        return WaitingGroup(
            key=group.key,
            steps_waited=step - group.first_step,
            lengths=tuple(map(len, samples)),
            finished=tuple(sample.has_ended for sample in samples),
            oldest_versions=tuple(int(sample.versions[0]) if len(sample) else None for sample in samples),
            restarts=tuple(sample.key.attempt for sample in samples),
        )

    def _due(self, waiting: Iterable[PlannedGroup], step: int) -> set[PromptKey]:
        """The groups that must be in the batch of `step`.

        A group has a last step if one of its samples may not start again; of those up to any step s, all but
        N · (s - `step`) must be in this batch, because that many find room in the batches after it."""
        last_steps: dict[PromptKey, float] = {}
        for group in waiting:
            bound = [s for s in group.samples if s.key.attempt >= self.options.max_restarts]
            last_steps[group.key] = min((last_step(s, self.options.max_staleness) for s in bound), default=math.inf)
        ordered = sorted(last_steps, key=lambda prompt_key: last_steps[prompt_key])  # stable: the oldest first
        size = self.batch.num_prompts
        num_due = max((place - size * (last_steps[key] - step) for place, key in enumerate(ordered, 1)), default=0)
        # more than fit: only in a resumed run whose buffer other options have filled
        return set(ordered[: int(min(max(num_due, 0), size))])

    def _own_metrics(self, current: Round, groups: Sequence[Group], num_left_over: int) -> dict[str, float]:
        return {
            "rollout/surplus_prompts": float(sum(group.is_complete for group in self.queue)),
            **self._kept_metrics(current, groups),
        }
