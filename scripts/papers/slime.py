"""APRIL's rollouts in closed form, as its authors' code makes them: GRPO, DAPO, and both with partial rollout.

Purpose: tokens and seconds of rollouts without engine, batcher and lockstep: for the calibration (baselines) and for
the check of the simulator (`papers.what_if`). `Engine` is one SGLang server: a dp group that decodes with the rows it
has, at a pace of its own.

Source: https://github.com/RLsys-Foundation/APRIL at a72b585. `slime/rollout/sglang_example.py`: while fewer than
`rollout_batch_size` groups may still be kept, `over_sampling_batch_size` more are submitted, kept ones from the buffer
first; groups whose rewards are all equal are dropped (DAPO) and count as gone, so a DAPO baseline launches a second
batch as soon as its first group is dropped; the first 32 groups end the rollout, and the tokens of aborted requests
count. `slime/backends/megatron_utils/data.py`: throughput is those tokens over the seconds of the rollout, and the
off-policy ratio is defined on a resumed request's last segment. `slime/ray/rollout.py`: SGLang's router with
`balance_abs_threshold=0`, which sends each request to the least loaded of four servers of two devices.

Departures: rewards take no time; a server prefills what arrives before it decodes on; a group is dropped by a draw that
does not depend on its lengths.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from jaxrl.scheduling.layouts.latency import causal_pairs
from jaxrl.sim.cost_model import CostModel
from papers.closed_form import PROMPT_TOKENS


@dataclass(slots=True)
class Row:
    """A response: its group, tokens in all, tokens so far, and those of its last request."""

    group: Group
    length: int
    done: int = 0
    segment: int = 0
    carried: int = 0  # tokens before this rollout
    begun: float = 0.0  # decode steps of its engine when it arrived


@dataclass(slots=True, eq=False)
class Group:
    """A prompt's responses; `num_open` of them are under way. `dropped`: its rewards are all equal."""

    index: int
    dropped: bool
    rows: list[Row] = field(default_factory=list)
    num_open: int = 0


def group_of(index: int, dropped: bool, lengths: Sequence[int]) -> Group:
    """A new group with responses of these lengths."""
    group = Group(index, dropped)
    group.rows = [Row(group, length) for length in lengths]
    return group


@dataclass(slots=True)
class Rollout:
    """What a rollout measured.

    Attributes:
      tokens: generated in it, those of aborted requests included.
      seconds: until the last group that it needed.
      resumed: tokens of the last segments of the requests that it resumed (the authors' off-policy tokens).
      trained, stale: tokens of its batch, and those of them from earlier rollouts.
      samples, stale_samples: the same counts in responses.
    """

    tokens: int = 0
    seconds: float = 0.0
    resumed: int = 0
    trained: int = 0
    stale: int = 0
    samples: int = 0
    stale_samples: int = 0


def throughput(found: Sequence[Rollout]) -> float:
    """Tokens per second of rollout."""
    return sum(each.tokens for each in found) / math.fsum(each.seconds for each in found)


class Engine:
    """One server: rows that decode together, one step after another."""

    def __init__(self, cost: CostModel, tp: int) -> None:
        self._cost, self._tp = cost, tp
        self.now_s, self._steps, self._context = 0.0, 0.0, 0.0
        self._rows: list[tuple[float, int, Row]] = []  # a heap by the step in which a row ends
        self._added = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Sequence[Row], at_s: float) -> None:
        """Rows arrive, and are prefilled at once."""
        self.advance(at_s)
        self.now_s = max(self.now_s, at_s)
        tokens = [PROMPT_TOKENS + row.done for row in rows]
        self.now_s += self._cost.prefill_s(self._tp, sum(tokens), sum(causal_pairs(count) for count in tokens))
        self._context += sum(tokens)
        for row in rows:
            row.begun = self._steps
            heapq.heappush(self._rows, (self._steps + row.length - row.done, self._added, row))
            self._added += 1

    def next_end_s(self) -> float:
        """When the next row ends; never, if there is none."""
        return self.now_s + self._decode_s(self._rows[0][0] - self._steps) if self._rows else math.inf

    def end(self) -> list[Row]:
        """Decodes until a row ends; all that end with it."""
        steps, ended = self._rows[0][0], []
        self._decode(steps - self._steps)
        while self._rows and self._rows[0][0] == steps:
            ended.append(heapq.heappop(self._rows)[2])
            self._context -= PROMPT_TOKENS + ended[-1].length
        return ended

    def advance(self, to_s: float) -> None:
        """Decodes until a time before the next end."""
        if self._rows and to_s > self.now_s:
            left = self._rows[0][0] - self._steps
            self._decode(left * min((to_s - self.now_s) / self._decode_s(left), 1.0))

    def abort(self, at_s: float) -> list[Row]:
        """Takes out what is left, with the tokens that it has."""
        self.advance(at_s)
        for _, _, row in self._rows:
            row.segment = min(int(self._steps - row.begun), row.length - row.done - 1)
            row.done += row.segment
        return [row for _, _, row in self._rows]

    def _decode(self, steps: float) -> None:
        self.now_s += self._decode_s(steps)
        self._steps += steps
        self._context += len(self._rows) * steps

    def _decode_s(self, steps: float) -> float:
        """Seconds of decode steps with the rows that there are: exact where the cost is linear in the context."""
        rows = len(self._rows)
        middle = self._context + rows * max(steps - 1, 0) / 2
        return steps * self._cost.decode_step_s(self._tp, rows, middle) if steps > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How rollouts are made.

    Attributes:
      cost, tp, num_engines: of the servers.
      batch, submit: groups that a rollout needs, and groups of one submission.
      partial: unfinished groups are kept for the next rollout, not thrown away.
      spread: each response goes to the server with the fewest, not all of a group to one.
    """

    cost: CostModel
    tp: int
    num_engines: int
    batch: int
    submit: int
    partial: bool = False
    spread: bool = True


def rollouts(plan: Plan, fresh: Callable[[], Group], count: int) -> Iterator[Rollout]:
    """Rollouts one after another; `fresh` makes the next new group."""
    kept: list[Group] = []
    for _ in range(count):
        measured, left = _rollout(plan, fresh, kept)
        kept = left if plan.partial else []
        yield measured


def _rollout(plan: Plan, fresh: Callable[[], Group], kept: list[Group]) -> tuple[Rollout, list[Group]]:
    """One rollout; what it measured, and the groups that it did not finish."""
    engines = [Engine(plan.cost, plan.tp) for _ in range(plan.num_engines)]
    found, waiting = Rollout(), list(kept)
    under_way: dict[int, Group] = {}
    now, num_kept, might_be_kept = 0.0, 0, 0
    while num_kept < plan.batch:
        while might_be_kept < plan.batch:
            chosen = waiting[: plan.submit]
            del waiting[: plan.submit]
            chosen += [fresh() for _ in range(plan.submit - len(chosen))]
            _submit(plan, engines, chosen, now, found)
            under_way |= {group.index: group for group in chosen}
            might_be_kept += plan.submit
        engine = min(engines, key=Engine.next_end_s)
        ended = engine.end()
        now = engine.now_s
        for row in ended:
            found.tokens += row.length - row.done
            row.done = row.length
            row.group.num_open -= 1
            if row.group.num_open:
                continue
            del under_way[row.group.index]
            if row.group.dropped:
                might_be_kept -= 1
            elif num_kept < plan.batch:
                num_kept += 1
                _count(found, row.group)
    found.seconds = now
    for engine in engines:
        for row in engine.abort(now):
            found.tokens += row.segment
    return found, list(under_way.values()) + waiting


def _submit(plan: Plan, engines: Sequence[Engine], groups: Sequence[Group], at_s: float, found: Rollout) -> None:
    """Sends the open rows of groups to the servers."""
    loads = [len(engine) for engine in engines]
    arriving: list[list[Row]] = [[] for _ in engines]
    for group in groups:
        rows = [row for row in group.rows if row.done < row.length]
        found.resumed += sum(row.segment for row in rows)
        group.num_open = len(rows)
        for row in group.rows:
            row.carried = row.done
        for part in [[row] for row in rows] if plan.spread else [rows]:
            best = loads.index(min(loads))
            arriving[best] += part
            loads[best] += len(part)
    for engine, rows in zip(engines, arriving, strict=True):
        if rows:
            engine.add(rows, at_s)


def _count(found: Rollout, group: Group) -> None:
    """A group enters the batch."""
    found.trained += sum(row.length for row in group.rows)
    found.stale += sum(row.carried for row in group.rows)
    found.samples += len(group.rows)
    found.stale_samples += sum(row.carried > 0 for row in group.rows)
