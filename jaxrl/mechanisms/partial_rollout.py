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

A sample is carried without its verdict and scored when its group is complete: a clock would decide whether a verdict
came before the end of a round.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Self

from annotated_types import Ge

from jaxrl.scheduling.mechanism import UNFINISHED, Mechanism, Searched
from jaxrl.scheduling.rounds.batches import BatchRule, RoundPlan, RoundTime, last_step, provisioned, room_until_end
from jaxrl.scheduling.rounds.events import PromptKey
from jaxrl.scheduling.rounds.round import BatchSettings, PlannedGroup, RaceLimits, Round
from jaxrl.schema.limits import AtEnd, Factor
from jaxrl.schema.section import Section
from jaxrl.types import Group

if TYPE_CHECKING:
    from jaxrl.config import Config


class PartialRollout(BatchRule, Mechanism):
    """The batch rule; its queue is the buffer. Raises ValueError for impossible limits.

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
        return cls(batch, config.rollout.partial_rollout)

    def __init__(self, batch: BatchSettings, options: Options) -> None:
        batch = replace(batch, score_when="group")
        self.options, self.at_end = options, options.at_end
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
        self.queue = deque(waiting)
        limits = replace(self.limits, num_spare=num_spare, max_left_over=self._most_left_over(time, num_spare))
        return RoundPlan(limits, "partial", due=due)

    def _most_left_over(self, time: RoundTime, num_spare: int) -> int | None:
        """How many groups dynamic sampling may leave over by launching ahead: as many as find room in batches before
        their tokens are over the cap, and before the run ends."""
        rooms: list[int] = []
        if self.options.max_staleness >= 0:
            rooms.append(self.batch.num_prompts * (self.options.max_staleness - self.batch.version_lag))
        # a race cannot wait for all of them, and must not lose any
        until_end = room_until_end(self.at_end, self.batch.num_prompts, time)
        if num_spare and until_end is not None:
            rooms.append(until_end)
        return max(min(rooms), 0) if rooms else None

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
