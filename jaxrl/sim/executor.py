"""The simulated devices under the engine: plans in, lengths replayed, time charged by a cost model.

`SimulatedExecutor` replaces `rollout.executor` on a modelled machine of any size. It jumps from stop to stop instead of
going token by token.

Source: vidur (Agrawal et al. 2024) for replacing the model by a cost; the depth (one plan ahead) and the rule for
leaving a plan early: docs/architecture.md.

Time: a plan starts when it has been submitted and the previous plan has ended, so the host works on the next plan while
the device runs this one; `collect` waits for a plan's end. In each dp group a plan costs its prefill chunks in one
pass, then each decode step with the rows still active; it takes as long as its slowest group.

Departures: between two stops in a group the context grows linearly, and one evaluation in the middle represents all
steps between them. That is exact where the cost is linear in the context. A plan that prefills nothing and finds no row
active takes no time.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.scheduling.layouts.kv_plan import KvPlan
from jaxrl.scheduling.layouts.latency import causal_pairs
from jaxrl.scheduling.layouts.relayout import Relayout, ResidentRow, TimeTaken
from jaxrl.scheduling.tokens.plan import Capacity, Plan, PlanResult, PrefillChunk, Request, Ticket
from jaxrl.sim.clock import SimulatedClock, nanoseconds
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.drafts import Acceptance, SimulatedDrafts, verify
from jaxrl.types import SampleKey

VOCABULARY = 30_011  # a prime: fillers of neighbouring positions and samples differ
_SEQUENCE = np.tile((np.arange(VOCABULARY) * 17 % VOCABULARY).astype(np.int32), 4)  # for all but very long responses
_PLACE_OF_ONE = pow(17, -1, VOCABULARY)  # a token t is at t * _PLACE_OF_ONE, modulo VOCABULARY


@dataclass(frozen=True, slots=True)
class SimulatedTicket:
    """A submitted plan: its outcome, and when that will be known."""

    result: PlanResult
    end_ns: int

    @property
    def index(self) -> int:
        return self.result.index


class _Rows:
    """The state that devices would hold of their rows: arrays by seat, which is dp group * num_slots + slot. A new row
    in a seat has a window of `first_window` tokens."""

    def __init__(self, num_seats: int, first_window: int = 0) -> None:
        self.first_window = first_window
        self.ids = np.full(num_seats, -1, np.int64)
        self.responses = np.empty(num_seats, object)  # int32 [tokens] each, from the first token to the last
        self.lengths, self.ends = np.zeros((2, num_seats), np.int64)  # when it stops: without and with the prompt
        self.left = np.zeros(num_seats, np.int64)  # tokens until it stops
        self.keys = np.empty(num_seats, object)  # `SampleKey` of each
        self.acceptance = np.empty(num_seats, object)  # of the response; None: not asked for yet
        self.windows = np.full(num_seats, first_window)  # the most tokens of its next proposal

    def take(self, seat: int, other: _Rows, other_seat: int) -> None:
        for mine, theirs in zip(self._arrays(), other._arrays(), strict=True):
            mine[seat] = theirs[other_seat]

    def seat_of(self, row: ResidentRow) -> int:
        seats = np.flatnonzero((self.ids == row.request.request_id) & (self.ends - self.left == row.position + 1))
        return int(seats[0]) if len(seats) else -1

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.ids, self.responses, self.lengths, self.ends, self.left, self.keys, self.acceptance


class SimulatedExecutor:
    """Implements `jaxrl.scheduling.tokens.plan.Executor`, and `jaxrl.scheduling.layouts.relayout.LayoutExecutor` with
    `layouts`.

    Args:
      length_of: (a response, its step: 1 + the version of its first token) -> its tokens, kept ones included;
        cut at its request's max_tokens. So a response that is resumed later keeps its length. Asked when its prefill
        ends: a response that is aborted before it runs needs no length.
      on_plan: called with (plan, its result, start, end in nanoseconds) when a plan is submitted.
      layouts: sizes by TP degree, of the layouts that it can change to.
      sync_s: seconds of a weight sync.
      wake_s: seconds until the devices can draw again after an update had them.
      drafts: that plans verify; None: none do.
      turn_end: of responses over several turns, in place of `length_of`: (a response, its step, the tokens that it has)
        -> its tokens at the end of the next turn.
      slowness: factor by which plans take longer than the cost model says.
      call_s, latency_s: where the devices are on another host, seconds for which a call holds the controller up, and
        until a call is there or its answer is back.

    Attributes:
      num_tokens: generated so far, over all groups.
      policy_version: of the weights.
      recompiles: 0, because there are no programs.
      free_ns: when the devices are done with everything submitted.
    """

    def __init__(
        self,
        sizes: Capacity,
        tp: int,
        length_of: Callable[[SampleKey, int], int],
        cost: CostModel,
        clock: SimulatedClock,
        on_plan: Callable[[Plan, PlanResult, int, int], None] = lambda *_: None,
        layouts: Mapping[int, Capacity] | None = None,
        sync_s: float = 0.0,
        wake_s: float = 0.0,
        drafts: SimulatedDrafts | None = None,
        turn_end: Callable[[SampleKey, int, int], int] | None = None,
        slowness: float = 1.0,
        call_s: float = 0.0,
        latency_s: float = 0.0,
    ) -> None:
        self._drafts, self._slowness = drafts, slowness
        self._call_s, self._latency_ns = call_s, nanoseconds(latency_s)
        self._use(sizes, tp)
        self.policy_version = self.recompiles = 0
        self.num_tokens = 0
        self._length_of, self._turn_end = length_of, turn_end
        self._cost, self._clock, self._on_plan, self._layouts = cost, clock, on_plan, layouts or {}
        self._sync_s, self._wake_s = sync_s, wake_s
        self._tickets: deque[SimulatedTicket] = deque()
        self.free_ns = 0

    def check(self, request: Request) -> None:
        """Takes everything: a request without a length may still be aborted before it runs."""

    def submit(self, plan: Plan) -> SimulatedTicket:
        """Runs a plan; its outcome is seen when it is collected."""
        self._clock.advance(self._call_s)
        rows, seats = self._rows, plan.rows.seats
        prefill, num_stops, verified = self._prefill(plan), plan.leave_after, None
        assert (rows.ids[seats] == plan.rows.request_ids).all(), plan
        before = rows.left[seats]
        if prefill:
            filled = seats[plan.rows.is_new]
            rows.left[filled] -= 1
            num_stops -= int((rows.left[filled] == 0).sum())
        if plan.verifies:
            verified, num_steps, seconds_G = self._verify(plan, num_stops)
        else:
            num_steps, seconds_G = self._decode(plan, num_stops)
        for group, (tokens, pairs) in prefill.items():
            seconds_G[group] += self._cost.prefill_s(self.tp, tokens, pairs)
        seconds = float(seconds_G.max()) * self._slowness  # the slowest dp group's
        left = rows.left[seats]
        counts = before - left
        self.num_tokens += int(counts.sum())
        start_ns = max(self._clock.now_ns + self._latency_ns, self.free_ns)
        self.free_ns = start_ns + nanoseconds(seconds)
        result = PlanResult(
            plan.index,
            plan.rows.request_ids,
            counts,
            left == 0,
            num_steps=num_steps,
            policy_version=self.policy_version,
            duration_s=seconds,
            verified=verified,
            responses=rows.responses[seats],
        )
        self._on_plan(plan, result, start_ns, self.free_ns)
        ticket = SimulatedTicket(result, self.free_ns + self._latency_ns)
        self._tickets.append(ticket)
        return ticket

    def collect(self, ticket: Ticket) -> PlanResult:
        due = self._tickets.popleft()
        assert ticket.index == due.index, f"plan {due.index} is due, not plan {ticket.index}"
        self._clock.advance(self._call_s)
        self._clock.reach(due.end_ns)
        return due.result

    def occupy(self, from_ns: int, duration_ns: int) -> int:
        """Something else runs on the devices, once they are done with everything submitted; when it ends."""
        self.free_ns = max(self.free_ns, from_ns) + duration_ns
        return self.free_ns

    def sync_weights(self, train_params: Any, policy_version: int) -> None:
        self._clock.advance(self._sync_s)
        self.policy_version = policy_version

    def allocate(self) -> None:
        """The devices wake up; `sizes` says how large the KV pool is."""
        self._clock.advance(self._wake_s)

    def release(self, *, weights: bool = False) -> None:
        """Nothing: see `allocate`."""

    def capacity(self, tp: int) -> Capacity:
        """A layout's sizes. Raises ValueError for an unknown layout."""
        if tp not in self._layouts:
            raise ValueError(f"simulated devices: no layout with tp {tp}, only {sorted(self._layouts)}")
        return self._layouts[tp]

    def start_in(self, tp: int) -> None:
        """Chooses the layout of a rollout phase while no row is live: its weights come from training anyway."""
        assert not self._tickets, "a layout is chosen while plans are in flight"
        if tp != self.tp:
            self._use(self._layouts[tp], tp)

    def switch(self, move: Relayout) -> TimeTaken:
        """Takes the rows to their new seats, in the time that the cost model gives.

        KV that is computed again costs nothing here, because the plans that prefill it are charged.
        """
        assert not self._tickets, "a layout changes while plans are in flight"
        old, groups = self._rows, dict[int, list[int]]()
        seat_of = {request_id: seat for seat, request_id in enumerate(old.ids.tolist()) if request_id >= 0}
        for row in move.rows:
            seat = seat_of[row.request.request_id]
            groups.setdefault(seat // self.sizes.num_slots, []).append(int(old.ends[seat] - old.left[seat]))
        fullest = max(groups.values(), key=sum, default=[])
        cost = self._cost.switch_cost(self.tp, move.to_tp)
        times = TimeTaken(cost.weights_s, cost.kv_s_per_token * sum(fullest), cost.fixed_s)
        self._use(self._layouts[move.to_tp], move.to_tp)
        for row in move.rows:
            self._rows.take(row.dp_group * self.sizes.num_slots + row.slot, old, seat_of[row.request.request_id])
        self._clock.advance(times.total_s)
        return times

    def accept_migration(self, source: SimulatedExecutor, kv: KvPlan, rows: Sequence[ResidentRow]) -> None:
        """Takes rows and their KV from another worker (`jaxrl.scheduling.layouts.relayout`), in the time that
        the cost model gives; `rows` are then all rows of this worker."""
        assert not [*self._tickets, *source._tickets], "rows move while plans are in flight"
        old, sent = self._rows, Counter(copy.source_group for copy in kv.copies)
        self._use(self.sizes, self.tp)
        for row in rows:  # a row that left stays as it was, so that its tokens tell which is meant
            found = [(rows_of, rows_of.seat_of(row)) for rows_of in (old, source._rows)]
            held, seat = next(each for each in found if each[1] >= 0)
            self._rows.take(row.dp_group * self.sizes.num_slots + row.slot, held, seat)
        both = source.sizes.num_groups * source.tp + self.sizes.num_groups * self.tp
        token_s = self._cost.move_s_per_token(source.tp, self.tp, both)
        self._clock.advance(token_s * max(sent.values(), default=0) * self.sizes.block_size / len(self.sizes.stacks))

    def _use(self, sizes: Capacity, tp: int) -> None:
        """Continues with blank rows."""
        self.sizes, self.tp = sizes, tp
        first_window = 0 if self._drafts is None else self._drafts.config.window.least
        self._rows = _Rows(sizes.num_groups * sizes.num_slots, first_window)

    def _prefill(self, plan: Plan) -> dict[int, tuple[int, float]]:
        """Tokens and pairs of attention of the plan's chunks, by dp group."""
        work: dict[int, tuple[int, float]] = {}
        for chunk in plan.prefill:
            count = len(chunk.tokens)
            tokens, pairs = work.get(chunk.dp_group, (0, 0.0))
            work[chunk.dp_group] = tokens + count, pairs + causal_pairs(count, chunk.start)
            if chunk.is_last:
                self._activate(chunk)
        return work

    def _activate(self, chunk: PrefillChunk) -> None:
        request, kept = chunk.request, chunk.num_generated
        first_version = int(request.kept.versions[0]) if kept and request.kept else self.policy_version
        of = request.key, first_version + 1
        length = self._length_of(*of) if self._turn_end is None else self._turn_end(*of, kept)
        length = min(length, request.params.max_tokens)
        assert length > kept, f"{request.key}: its length ({length}) must exceed the tokens kept ({kept})"
        seat, rows = chunk.dp_group * self.sizes.num_slots + chunk.slot, self._rows
        rows.ids[rows.ids == request.request_id] = -1  # its old row, if it was preempted: a switch looks rows up by id
        rows.ids[seat], rows.responses[seat] = request.request_id, fillers(request, length)
        rows.keys[seat], rows.acceptance[seat] = request.key, None
        rows.windows[seat] = rows.first_window
        rows.lengths[seat], rows.ends[seat], rows.left[seat] = length, len(request.prompt_ids) + length, length - kept

    def _decode(self, plan: Plan, num_stops: int) -> tuple[int, np.ndarray]:
        """Runs the decode steps, a token each, until `num_stops` rows have stopped; the steps, and their seconds by dp
        group."""
        rows, seats = self._rows, plan.rows.seats
        left = rows.left[seats]
        if not left.all():
            seats, left = seats[left > 0], left[left > 0]
        num_steps = _num_steps(plan.num_steps, num_stops, left)
        seconds_G = self._decode_s(seats, left, num_steps) if num_steps else np.zeros(self.sizes.num_groups)
        rows.left[seats] = np.maximum(left - num_steps, 0)
        return num_steps, seconds_G

    def _verify(self, plan: Plan, num_stops: int) -> tuple[np.ndarray, int, np.ndarray]:
        """`_decode` in a plan that verifies; also the counts of its rows, [5, R]."""
        assert self._drafts is not None, "a plan verifies, and nothing is drafted"
        drafts, rows, group_size = self._drafts.config, self._rows, self.sizes.num_slots
        scheduled, histories = plan.rows, plan.rows.histories or ()
        is_live = rows.left[scheduled.seats] > 0
        seats = scheduled.seats[is_live]
        acceptance = [
            self._acceptance(seat) if histories[row] is not None else None
            for row, seat in zip(np.flatnonzero(is_live).tolist(), seats.tolist(), strict=True)
        ]
        fullest = int(np.bincount(scheduled.dp_groups).max())
        left, width = rows.left[seats], drafts.width(fullest)
        before_R = rows.ends[seats] - left
        found = verify(
            acceptance,
            rows.lengths[seats] - left,
            left,
            scheduled.max_new[is_live],
            rows.windows[seats],
            next_window=drafts.window.after,
            width=width,
            num_steps=plan.num_steps,
            num_stops=num_stops,
        )
        rows.windows[seats] = found.windows
        rows.left[seats] = left - found.gained
        seconds_G = np.zeros(self.sizes.num_groups)
        for group in np.unique(seats // group_size).tolist():
            own = seats // group_size == group
            active_SR = found.active[:, own]
            context_S = ((found.before[:, own] + before_R[own]) * active_SR).sum(1)
            batch_S = active_SR.sum(1)
            busy = batch_S > 0
            seconds_G[group] = self._cost.verify_steps_s(self.tp, batch_S[busy], width, context_S[busy]).sum()
        counts = np.zeros((len(found.counts), len(scheduled)), np.int64)
        counts[:, is_live] = found.counts
        return counts, found.num_steps, seconds_G

    def _acceptance(self, seat: int) -> Acceptance:
        assert self._drafts is not None
        rows = self._rows
        if rows.acceptance[seat] is None:
            rows.acceptance[seat] = self._drafts.acceptance(rows.keys[seat], len(rows.responses[seat]))
        return rows.acceptance[seat]

    def _decode_s(self, seats: np.ndarray, left: np.ndarray, num_steps: int) -> np.ndarray:
        """Seconds of the decode steps, [dp groups]. If no row stops on the way, one evaluation is enough."""
        tp, of_group, context = self.tp, seats // self.sizes.num_slots, self._rows.ends[seats] - left
        batch_G = np.bincount(of_group, minlength=self.sizes.num_groups)
        context_G = np.bincount(of_group, context, minlength=self.sizes.num_groups)
        splits_G = np.bincount(of_group[left < num_steps], minlength=self.sizes.num_groups) > 0
        seconds_G = np.zeros(self.sizes.num_groups)
        whole = np.flatnonzero((batch_G > 0) & ~splits_G)
        middle = context_G[whole] + batch_G[whole] * (num_steps - 1) / 2
        seconds_G[whole] = num_steps * self._cost.decode_steps_s(tp, batch_G[whole], middle)
        ends_G = np.cumsum(batch_G)
        for group in np.flatnonzero(splits_G).tolist():
            own = slice(ends_G[group] - batch_G[group], ends_G[group])
            rows = zip(left[own].tolist(), context[own].tolist(), strict=True)
            seconds_G[group] = decode_s(self._cost, tp, rows, num_steps)
        return seconds_G


def decode_s(cost: CostModel, tp: int, rows: Iterable[tuple[int, int]], num_steps: int) -> float:
    """Seconds of up to `num_steps` decode steps of a dp group; `rows` are (tokens left, context in the first step)."""
    rows = sorted(rows)
    batch, context = len(rows), sum(context for _, context in rows)
    seconds, done = 0.0, 0
    for left, first_context in rows:
        steps = min(left, num_steps) - done
        if steps:
            seconds += steps * cost.decode_step_s(tp, batch, context + batch * (steps - 1) / 2)
            done += steps
            context += batch * steps
        if done == num_steps:
            break
        batch -= 1
        context -= first_context + left
    return seconds


def _num_steps(most: int, num_stops: int, left: np.ndarray) -> int:
    """Decode steps until `num_stops` rows have stopped, or all."""
    if not len(left) or num_stops <= 0:
        return 0
    if num_stops > len(left):
        return min(most, int(left.max()))
    return min(most, int(np.partition(left, num_stops - 1)[num_stops - 1]))


def fillers(request: Request, length: int) -> np.ndarray:
    """The tokens of a response, int32 [length], read-only: different ones at neighbouring positions and in other
    samples, and a stop token at the end of one that stops before its limit."""
    key, stops = request.key, request.params.stop_token_ids
    first = key.prompt_index * 7919 + key.sample_index * 104_729 + key.attempt * 31
    entry = first * _PLACE_OF_ONE % VOCABULARY
    sequence = _SEQUENCE
    if entry + length > len(sequence):
        sequence = np.resize(sequence, entry + length)
    tokens = sequence[entry : entry + length].copy()
    for stop in stops:
        if 0 <= stop < VOCABULARY:
            instead = next(token for token in itertools.count(stop + 1) if token not in stops)
            tokens[(stop * _PLACE_OF_ONE - entry) % VOCABULARY :: VOCABULARY] = instead
    if stops and length < request.params.max_tokens:
        tokens[-1] = stops[0]
    tokens.flags.writeable = False
    return tokens
