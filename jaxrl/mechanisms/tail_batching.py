"""Tail batching: slow prompts wait in a queue and run together later, so that most rounds are short.

A *short round* launches ceil(prompt_factor · P0) prompts × ceil(response_factor · R0)
responses and keeps the first P0 × R0 (`Round`). Prompts that lose wait in the long-prompt queue, first in, first out.
As soon as the queue holds P0 prompts (with dynamic sampling: as many as are expected to yield P0 groups that count), a
*long round* runs P0 of them with R0 responses each, and waits for all.

Source: RollPacker §3 (rounds, queue, η = 1.25), §6.3 (one factor for prompts, one for responses), §7 (dynamic
sampling: groups without reward variance leave, unfinished prompts stay). A cap on active requests (§7) is
`rollout.max_num_seqs`, the rows.

Departures:

- `at_end="flush"`: a round launches no more new prompts than the run can still train on, so the queue is empty after
  the last step and every prompt has been trained on. With dynamic sampling, which launches ahead, those that the last
  steps have no room for leave as filtered. "leave" follows the rule to the end, and reports the prompts that are left.
- With dynamic sampling a long round launches ahead of verdicts too, so it may leave prompts over: they are the first of
  the queue.
- If the queue holds fewer than P0 prompts when a long round is due (flush), new prompts fill it up, without
  speculation: every batch has exactly P0 × R0 samples.
- `relaunch="same"`: a deferred prompt draws with the same random bits again. What a short round puts off then comes in
  a long one, so that the run as a whole trains on the lengths of plain batches, where samples do not race. The paper
  does not say which bits it gets; engines without bits of a sample's own draw anew (`new`).
- `relaunch="resume"`: a deferred prompt waits with the tokens of its responses 0 to R0 - 1, as in partial
  rollout, and the long round resumes them (an earlier version of the paper, Flexes §7, proposes it). A response whose
  oldest token is over `max_staleness` then starts again, with the same random bits; a long round waits for all, so this
  happens once. What waits has no verdict (a clock decides when verdicts come).

With `same` and `new` a deferred prompt samples all of its responses again, as in the paper. Those that had ended are
the short ones. If they were kept beside new ones, a group would hold more short responses than the policy gives
(docs/mechanisms/tail_batching.md).

With prompt_factor 1 nothing is ever deferred, and the queue stays empty (but for what dynamic sampling launches ahead).
A data set smaller than P0 repeats inside a batch, each time with its own epoch; the queue ignores epochs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from annotated_types import Ge

from jaxrl.scheduling.mechanism import PROMPTS_OF_ROUNDS, UNFINISHED, Mechanism, Searched
from jaxrl.scheduling.rounds.batches import (
    BatchRule,
    RoundPlan,
    RoundTime,
    last_step,
    launched,
    provisioned,
    room_until_end,
)
from jaxrl.scheduling.rounds.round import BatchSettings, RaceLimits, Round, RoundKind
from jaxrl.schema.limits import AtEnd, Factor
from jaxrl.schema.section import Section
from jaxrl.types import Group

if TYPE_CHECKING:
    from jaxrl.config import Config
    from jaxrl.report.charts import Chart, Curve, Point
    from jaxrl.report.curves import PagePart
    from jaxrl.report.runs import RecordedRun


def _period(prompt_factor: float, num_prompts: int) -> int:
    """Steps until a long round has come."""
    spare = provisioned(prompt_factor, num_prompts) - num_prompts
    return math.ceil(num_prompts / spare) + 1 if spare else 1


class TailBatching(BatchRule, Mechanism):
    """The batch rule; its queue is the long-prompt queue. Raises ValueError for impossible limits.

    Attributes:
      num_spare: prompts of a full short round beyond P0.
    """

    class Options(Section):
        """Short rounds with speculation, and long rounds of the prompts that came last in them."""

        enable: Annotated[bool, "Switch tail batching on."] = False
        prompt_factor: Annotated[Factor, "Prompts of a short round, as a multiple of data.train_batch_size."] = 1.25
        response_factor: Annotated[Factor, "Samples per prompt of a short round, as a multiple of rollout.n."] = 1.25
        relaunch: Annotated[
            Literal["same", "new", "resume"],
            "How a deferred prompt runs again: with the same random bits, with new ones, or from the tokens it has.",
        ] = "same"
        max_staleness: Annotated[
            int, Ge(-1), "Versions that a trained token may lag behind the policy with relaunch=resume; -1: no cap."
        ] = -1
        at_end: Annotated[
            AtEnd, "What becomes of the queue when training ends; flush: the last rounds empty it, leave: it stays."
        ] = "flush"

        def unread(self, config: Config) -> Iterator[tuple[frozenset[str], str]]:
            if self.relaunch != "resume":
                yield frozenset({"max_staleness"}), f"rollout.tail_batching.relaunch is {self.relaunch}"

    name = title = "tail batching"
    option = "rollout.tail_batching"
    decides = frozenset({UNFINISHED})
    changes = frozenset({PROMPTS_OF_ROUNDS})
    races = True
    searched = Searched(("prompt_factor", "response_factor"), (1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4), period=_period)

    @classmethod
    def problem(cls, config: Config, racing: Sequence[str]) -> str | None:
        if config.rollout.tail_batching.relaunch == "resume" and config.reward.score_when == "rollout":
            return (
                "rollout.tail_batching.relaunch=resume scores a prompt's samples when all of them have ended, even if "
                "the round continues: reward.score_when must be 'sample' or 'group' (which mean the same there), found "
                "'rollout'"
            )
        return None

    @classmethod
    def drops_slowest(cls, config: Config) -> bool:
        return config.rollout.tail_batching.response_factor > 1

    @classmethod
    def page_part(cls) -> PagePart:
        from jaxrl.report.curves import PagePart

        return PagePart(_charts)

    @classmethod
    def batch_rule(cls, config: Config, batch: BatchSettings) -> Self:
        return cls(batch, config.rollout.tail_batching)

    def __init__(self, batch: BatchSettings, options: Options) -> None:
        resumes = options.relaunch == "resume"
        if resumes:
            batch = replace(batch, score_when="group")
        num_prompts, num_responses = launched(options.prompt_factor, options.response_factor, batch)
        self.options, self.at_end, self.draws_anew = options, options.at_end, options.relaunch == "new"
        self.num_spare = num_prompts - batch.num_prompts
        super().__init__(batch, RaceLimits(batch, num_responses, self.num_spare, resumes), batch.group_size)
        if resumes and 0 <= options.max_staleness < batch.version_lag:
            raise ValueError(
                f"rollout.tail_batching.max_staleness ({options.max_staleness} versions) must be >= "
                f"{batch.version_lag}, or -1 for no cap: one-step-off adds one version to every token"
            )

    def _plan(self, time: RoundTime) -> RoundPlan:
        kind, num_spare = self._choose(time)
        num_responses = self.limits.num_responses if kind == "short" else self.batch.group_size
        if kind == "long":
            cap = self.options.max_staleness
            self.queue = deque(self._restart(group, lambda s: last_step(s, cap) < time.step) for group in self.queue)
        num_kept = len(self.queue) if kind == "short" else 0
        room = room_until_end(self.at_end, self.batch.num_prompts, time, num_kept) if kind == "short" else None
        limits = replace(self.limits, num_responses=num_responses, num_spare=num_spare, max_left_over=room)
        return RoundPlan(limits, kind, num_kept)

    def _choose(self, time: RoundTime) -> tuple[RoundKind, int]:
        """The kind of the next round, and how many prompts it launches beyond P0."""
        num_prompts, num_waiting = self.batch.num_prompts, len(self.queue)
        enough = self.filter.under_way(num_prompts) if self.filter else num_prompts
        if num_waiting >= enough:
            return "long", 0
        room = room_until_end(self.at_end, num_prompts, time, num_waiting)
        num_spare = self.num_spare if room is None else min(self.num_spare, room)
        # a race cannot wait for all of the prompts that dynamic sampling launches ahead, and must not lose any
        crowded = self.filter and room is not None and room < enough - num_prompts + num_spare
        return ("long", 0) if num_spare < 0 or crowded else ("short", num_spare)

    def _own_metrics(self, current: Round, groups: Sequence[Group], num_left_over: int) -> dict[str, float]:
        kept = self._kept_metrics(current, groups) if self.limits.keep_unfinished else {}
        return {"rollout/deferred_prompts": float(num_left_over), **kept}


def _charts(run: RecordedRun) -> list[Chart]:
    """Charts of rollout time and longest response by kind of round, and of the queue; none without long rounds."""
    from jaxrl.record.metrics import ROUND_PHASES, seconds_of
    from jaxrl.report.charts import Chart, Curve

    is_long = dict(run.series("rollout/long_round"))
    if not any(is_long.values()):
        return []

    def dots(series: list[Point]) -> list[Curve]:
        kinds = ((0.0, "short", "c1"), (1.0, "long", "c2"))
        points = {kind: [(step, y) for step, y in series if is_long.get(step) == kind] for kind, *_ in kinds}
        return [Curve(label, points[kind], colour, dots=True, line=False) for kind, label, colour in kinds]

    rollout_s = [(row["step"], seconds_of(ROUND_PHASES, row)) for row in run.metrics if "timing_s/gen" in row]
    queue = [
        Curve("prompts that wait", run.series("rollout/queue_length")),
        Curve("longest wait, steps", run.series("rollout/queue_age_steps/max"), "c2"),
    ]
    longest, wait = dots(run.series("response_length/max")), "Slow prompts wait for the next long round."
    return [
        Chart("Rollout time by round", "seconds", dots(rollout_s), "Short ones should be equally fast."),
        Chart("Longest response by round", "tokens", longest, "Long rounds have the slow ones."),
        Chart("Long-prompt queue", "prompts, steps", queue, wait),
    ]
