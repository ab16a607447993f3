"""Tail batching: slow prompts wait in a queue and are run together, so that most rounds are short.

Purpose: the rule across rounds. A *short round* launches ceil(prompt_factor · P0) prompts × ceil(response_factor · R0)
responses and keeps the first P0 × R0 (`Race`). Prompts that lose wait in the long-prompt queue, first in, first out.
A *long round* runs P0 of them, R0 responses each and all waited for, as soon as the queue holds P0.

Source: RollPacker §3 (rounds, queue, η = 1.25), §6.3 (one factor for prompts, one for responses), §7 (dynamic
sampling: groups without reward variance leave, unfinished prompts stay; a cap on active requests).

Departures:

- `max_age_steps` bounds how long a prompt may wait, in training steps since it was first launched: where one more short
  round could break the bound, a long round comes first.
- `at_end="flush"`: a round launches no more new prompts than the run can still train on, so the queue is empty after
  the last step and every prompt that was drawn has been trained on. (With dynamic sampling as well: filtered prompts
  are replaced by new ones, and the queue still fits into the steps that are left.) "leave" keeps to the rule to the
  end; what is then in the queue is reported.
- A long round whose queue holds fewer than P0 prompts (age, flush) is filled with new prompts, without speculation:
  every batch has exactly P0 × R0 samples.
- `keep_finished`: the responses of a deferred prompt that had ended count in the long round if no weight update lies
  between; the paper drops them. They are the prompt's shortest, but they were drawn by the same weights.

Defined behaviour at the edges: with prompt_factor 1 nothing is ever deferred, and the queue stays empty; a data set
smaller than P0 repeats inside a batch, each time with its own epoch; the queue does not know epochs.

A relaunched prompt draws new responses: their `attempt` is one higher (design §7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl.scheduling.rounds.batches import (
    AtEnd,
    OpenRound,
    PromptStream,
    RoundResult,
    RoundTime,
    as_carried,
    check_schema,
    close_round,
    new_group,
    open_round,
    pack_samples,
    provisioned,
    spread_of_ages,
    unpack_samples,
)
from jaxrl.scheduling.rounds.race import DynamicSampling, PlannedGroup, Race, RaceLimits, ScoreWhen
from jaxrl.scheduling.rounds.round import PromptKey, Round, RoundKind
from jaxrl.types import Sample, SampleKey

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class TailBatchingConfig:
    """Options of tail batching.

    Attributes:
      num_groups: prompts per batch, P0 (`data.train_batch_size`).
      group_size: samples per prompt, R0 (`rollout.n`).
      prompt_factor, response_factor: speculation in short rounds, >= 1.
      max_age_steps: the most training steps from a prompt's first launch to its batch; 0: no bound.
      at_end: what becomes of the queue when training ends.
      keep_finished: whether finished responses of deferred prompts may count later.
      score_when: when samples are scored.
      dynamic_sampling: leave out groups whose rewards are all equal, and draw others.
      max_active_requests: the most samples under way; 0: no limit.
    """

    num_groups: int
    group_size: int
    prompt_factor: float = 1.25
    response_factor: float = 1.25
    max_age_steps: int = 0
    at_end: AtEnd = "flush"
    keep_finished: bool = False
    score_when: ScoreWhen = "sample"
    dynamic_sampling: DynamicSampling | None = None
    max_active_requests: int = 0

    def __post_init__(self) -> None:
        self.limits("short", self.num_spare)
        if self.at_end not in ("flush", "leave"):
            raise ValueError(f"rollout.tail_batching.at_end ({self.at_end!r}) must be 'flush' or 'leave'")
        if self.max_age_steps and self.max_age_steps < self.least_age_bound:
            raise ValueError(
                f"rollout.tail_batching.max_age_steps ({self.max_age_steps} steps) must be >= {self.least_age_bound}, "
                f"or 0 for no bound: a short round defers up to {self.num_spare} prompts (prompt_factor "
                f"{self.prompt_factor}), and long rounds take {self.num_groups} each"
            )

    @property
    def num_spare(self) -> int:
        """Prompts of a full short round beyond P0."""
        return provisioned("rollout.tail_batching.prompt_factor", self.prompt_factor, self.num_groups) - self.num_groups

    @property
    def least_age_bound(self) -> int:
        """Steps until the last prompt deferred by one short round has been run, if only long rounds follow."""
        return -(-self.num_spare // self.num_groups)

    def limits(self, kind: RoundKind, num_spare: int) -> RaceLimits:
        """Of a short round, or of a long one (then `num_spare` is 0)."""
        num_responses = provisioned("rollout.tail_batching.response_factor", self.response_factor, self.group_size)
        return RaceLimits(
            num_groups=self.num_groups,
            group_size=self.group_size,
            num_responses=num_responses if kind == "short" else self.group_size,
            num_spare=num_spare,
            score_when=self.score_when,
            dynamic_sampling=self.dynamic_sampling,
            max_active=self.max_active_requests,
        )


@dataclass(frozen=True, slots=True)
class Deferred:
    """A prompt in the long-prompt queue.

    Attributes:
      key: its (epoch, index).
      attempt: of the responses that were launched last.
      first_step, first_round: when it was first launched.
      kept: responses that had ended when it was deferred.
    """

    key: PromptKey
    attempt: int
    first_step: int
    first_round: int
    kept: tuple[Sample, ...] = ()


class TailBatching:
    """The batch rule (`jaxrl.scheduling.rounds.batches.BatchRule`)."""

    def __init__(self, config: TailBatchingConfig) -> None:
        self.config = config
        self.queue: deque[Deferred] = deque()
        self.num_rounds = 0
        self._open: OpenRound | None = None
        self._forgotten_tokens = 0  # of kept responses that a weight update has made useless

    @property
    def name(self) -> str:
        return "tail batching"

    @property
    def num_carried(self) -> int:
        return len(self.queue)

    # -- planning ----------------------------------------------------------------------------------------------------

    def plan(self, prompts: PromptStream, time: RoundTime) -> Round:
        assert self._open is None, "a round is planned before the one before it is settled"
        self.num_rounds += 1
        self._forget_kept(time.policy_version)
        kind, num_spare = self._choose(time)
        limits = self.config.limits(kind, num_spare)

        def supply() -> PlannedGroup:
            if kind == "long" and self.queue:
                return self._relaunch(prompts)
            return new_group(prompts, limits.num_responses, time.step, self.num_rounds)

        self._open = open_round(Race(limits, supply), kind, time)
        return self._open.round

    def _choose(self, time: RoundTime) -> tuple[RoundKind, int]:
        """The kind of the next round, and how many prompts it launches beyond P0."""
        config = self.config
        if len(self.queue) >= config.num_groups or self._age_forces_long(time.step):
            return "long", 0
        num_spare = config.num_spare
        if config.at_end == "flush" and time.steps_left is not None:
            # after this step so many prompts can be run, and those in the queue are among them
            left = config.num_groups * (time.steps_left - 1) - len(self.queue)
            if left < 0:
                return "long", 0
            num_spare = min(num_spare, left)
        return "short", num_spare

    def _age_forces_long(self, step: int) -> bool:
        """Whether a prompt could grow older than the bound if this round were short and all that follow long."""
        config = self.config
        if not config.max_age_steps or not self.queue:
            return False
        first_steps = [deferred.first_step for deferred in self.queue] + [step] * config.num_spare
        last_runs = (step + 1 + place // config.num_groups for place in range(len(first_steps)))
        return any(last - first > config.max_age_steps for last, first in zip(last_runs, first_steps, strict=True))

    def _relaunch(self, prompts: PromptStream) -> PlannedGroup:
        deferred = self.queue.popleft()
        attempt = deferred.attempt + 1
        taken = {sample.key.sample_index for sample in deferred.kept}
        size = self.config.group_size
        free = [i for i in range(size + len(taken)) if i not in taken][: size - len(taken)]
        return PlannedGroup(
            prompt=prompts.get(*deferred.key),
            keys=tuple(SampleKey(*deferred.key, i, attempt) for i in free),
            finished=deferred.kept,
            attempt=attempt,
            first_step=deferred.first_step,
            first_round=deferred.first_round,
        )

    def _forget_kept(self, policy_version: int) -> None:
        """Drops kept responses that other weights than this round's have drawn."""
        for place, deferred in enumerate(self.queue):
            useful = tuple(s for s in deferred.kept if bool((s.versions == policy_version).all()))
            if len(useful) < len(deferred.kept):
                self._forgotten_tokens += sum(map(len, deferred.kept)) - sum(map(len, useful))
                self.queue[place] = replace(deferred, kept=useful)

    # -- settling ----------------------------------------------------------------------------------------------------

    def settle(self, current: Round) -> RoundResult:
        opened, self._open = close_round(self._open, current), None
        race, step = opened.race, opened.time.step
        deferred: list[Deferred] = []
        for group in race.unfinished:
            planned = group.planned
            kept = tuple(as_carried(sample) for sample in group.kept.values()) if self.config.keep_finished else ()
            deferred.append(
                Deferred(planned.prompt.key, planned.attempt, planned.first_step, planned.first_round, kept)
            )
        assert not deferred or current.kind == "short", "a long round waits for all of its prompts"
        self.queue.extend(deferred)
        groups = current.groups()
        carried = {sample.key for entry in deferred for sample in entry.kept}
        thrown = opened.tokens_lost(carried) + self._forgotten_tokens
        self._forgotten_tokens = 0
        metrics = opened.metrics(groups, thrown)
        metrics["rollout/deferred_prompts"] = float(len(deferred))
        metrics["rollout/queue_length"] = float(len(self.queue))
        metrics |= spread_of_ages("rollout/queue_age_steps", [step - entry.first_step for entry in self.queue])
        ages = [self.num_rounds - entry.first_round for entry in self.queue]
        metrics |= spread_of_ages("rollout/queue_age_rounds", ages)
        return RoundResult(current.kind, groups, dict(race.filtered), metrics)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Queue as int64 [N, 6] (epoch, index, attempt, first step, first round, kept responses), in its order."""
        assert self._open is None, "state between rounds only"
        rows = [(*d.key, d.attempt, d.first_step, d.first_round, len(d.kept)) for d in self.queue]
        return {
            "schema": SCHEMA,
            "num_rounds": self.num_rounds,
            "queue": np.asarray(rows, np.int64).reshape(-1, 6),
            "kept": pack_samples([sample for deferred in self.queue for sample in deferred.kept]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state of another schema, or one that does not fit together."""
        check_schema("tail batching", state, SCHEMA)
        kept = unpack_samples(state["kept"])
        rows = [tuple(int(value) for value in row) for row in state["queue"]]
        if sum(row[5] for row in rows) != len(kept):
            raise ValueError(
                f"tail batching: {len(kept)} kept responses, and the queue counts {sum(r[5] for r in rows)}"
            )
        if any(row[5] > self.config.group_size for row in rows):
            raise ValueError(
                f"tail batching: prompts in the queue keep up to {max(row[5] for row in rows)} responses, and "
                f"rollout.n is {self.config.group_size}: a resumed run with keep_finished must not lower rollout.n"
            )
        queue: deque[Deferred] = deque()
        for epoch, index, attempt, first_step, first_round, count in rows:
            queue.append(Deferred((epoch, index), attempt, first_step, first_round, tuple(kept[:count])))
            del kept[:count]
        self.queue, self.num_rounds = queue, int(state["num_rounds"])
