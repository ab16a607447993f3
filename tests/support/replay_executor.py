"""An executor without a model: it replays the length of each response, and charges time for it.

Purpose: tests of everything above the executor, and of `jaxrl.sim.executor`, which jumps from stop to stop. Engine,
batcher and block accounting are the real ones. So are the depth (one plan ahead) and, step by step, the decode loop's
rule for leaving early.

Source: vidur (Agrawal et al. 2024) for replacing the model by a cost; docs/architecture.md.

Departures: lengths go by the sample's identity, not by order of arrival, so a schedule may change without changing what
is generated. Tokens are fillers that depend on identity and position alone. A response that a stop string ended is
replayed as if the device had ended it, so the plan in which it ends may be left earlier than in the recorded run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from plan_rows import DecodeRow, decode_rows, result_of

from jaxrl.scheduling.layouts.kv_plan import KvPlan
from jaxrl.scheduling.layouts.relayout import Relayout, ResidentRow, TimeTaken
from jaxrl.scheduling.tokens.plan import (
    Capacity,
    Plan,
    PlanResult,
    PrefillChunk,
    Request,
    Ticket,
    VerifyCounts,
)
from jaxrl.scheduling.tokens.stacks import WHOLE, KvStacks
from jaxrl.sim.executor import VOCABULARY
from jaxrl.sim.verification import Proposals
from jaxrl.types import SampleKey

Cost = Callable[[Plan, int], float]
"""(plan, decode steps really taken) -> seconds."""


@dataclass(frozen=True, slots=True)
class ReplayTicket:
    """A plan: its outcome is known already, and handed out when it is collected."""

    index: int


@dataclass(slots=True)
class _Slot:
    """The row state that the device would hold."""

    request: Request
    length: int  # of the whole response
    num_generated: int
    window: int = 0

    @property
    def is_active(self) -> bool:
        return self.num_generated < self.length


class ReplayExecutor:
    """Replays response lengths.

    Args:
      lengths: tokens of each response, kept ones included; cut at its request's max_tokens.
      num_groups, num_slots, num_blocks, block_size, max_prefill_tokens: see `plan.Executor`.
      cost: seconds that a plan takes; nothing by default.
      layouts: by degree, what each layout that it can change to offers; `tp`: the one in use.
      switch_cost: seconds that a change of layout takes; nothing by default.
      proposals: that plans verify; None: none do.
      stacks: see `plan.Executor`.

    `policy_version` may be set between plans, as a weight sync would.
    """

    def __init__(
        self,
        lengths: Mapping[SampleKey, int],
        num_groups: int,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        max_prefill_tokens: int,
        cost: Cost | None = None,
        *,
        tp: int = 1,
        layouts: Mapping[int, Capacity] | None = None,
        switch_cost: Callable[[Relayout], TimeTaken] | None = None,
        proposals: Proposals | None = None,
        stacks: KvStacks = WHOLE,
    ) -> None:
        self.stacks = stacks
        self.num_groups = num_groups
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_prefill_tokens = max_prefill_tokens
        self.policy_version = 0
        self.tp = tp
        self._layouts = layouts or {}
        self._switch_cost = switch_cost
        self._lengths = lengths
        self._cost = cost
        self._proposals = proposals
        self._slots: dict[tuple[int, int], _Slot] = {}
        self._results: deque[PlanResult] = deque()  # submitted and not yet collected

    def check(self, request: Request) -> None:
        """Takes everything: a request without a recorded length may still be aborted before it runs."""

    def submit(self, plan: Plan) -> ReplayTicket:
        """Runs a plan on the replayed rows; its outcome is seen when it is collected."""
        named = decode_rows(plan)
        gained: dict[int, list[int]] = {row.request_id: [] for row in named}
        stopped: set[int] = set()
        for chunk in plan.prefill:
            if chunk.is_last:
                request_id = chunk.request.request_id  # where it was preempted, a switch would find it twice
                self._slots = {at: s for at, s in self._slots.items() if s.request.request_id != request_id}
                slot = self._slots[chunk.dp_group, chunk.slot] = self._activate(chunk)
                self._advance(slot, gained.setdefault(chunk.request.request_id, []), stopped)
        rows = [self._slots[row.dp_group, row.slot] for row in named]
        assert all(s.request.request_id == r.request_id for s, r in zip(rows, named, strict=True)), plan
        verified = dict.fromkeys((row.request_id for row in named), VerifyCounts()) if plan.verifies else {}
        limits = [slot.num_generated + row.max_new for slot, row in zip(rows, named, strict=True)]
        num_steps = 0
        while num_steps < plan.num_steps and len(stopped) < plan.leave_after:
            active = [i for i, slot in enumerate(rows) if slot.is_active and slot.num_generated < limits[i]]
            if not active:
                break
            for i in active:
                slot, request_id = rows[i], rows[i].request.request_id
                counts = VerifyCounts(steps=1)
                if plan.verifies and named[i].history is not None:
                    counts = self._propose(slot, limits[i], named)
                for _ in range(counts.accepted + 1):
                    self._advance(slot, gained[request_id], stopped)
                if plan.verifies:
                    verified[request_id] += counts
            num_steps += 1
        result = result_of(
            plan.rows,
            plan.index,
            gained,
            stopped,
            verified if plan.verifies else None,
            num_steps=num_steps,
            policy_version=self.policy_version,
            duration_s=self._cost(plan, num_steps) if self._cost is not None else 0.0,
        )
        self._results.append(result)
        return ReplayTicket(plan.index)

    def collect(self, ticket: Ticket) -> PlanResult:
        """The outcome of the oldest plan not yet collected."""
        result = self._results.popleft()
        assert ticket.index == result.index, f"plan {result.index} is due, not plan {ticket.index}"
        return result

    def capacity(self, tp: int) -> Capacity:
        """What a layout offers. Raises ValueError for one that was not given."""
        if tp not in self._layouts:
            raise ValueError(f"replay: no layout with tp {tp}, only {sorted(self._layouts)}")
        return self._layouts[tp]

    def start_in(self, tp: int) -> None:
        self._use(tp, self.capacity(tp))

    def _use(self, tp: int, capacity: Capacity) -> None:
        self.tp, self.num_groups = tp, capacity.num_groups
        self.num_slots, self.num_blocks = capacity.num_slots, capacity.num_blocks

    def switch(self, move: Relayout) -> TimeTaken:
        """Takes the rows to their new slots."""
        assert not self._results, "a layout changes while plans are in flight"
        slots = {slot.request.request_id: slot for slot in self._slots.values() if slot.is_active}
        self._slots = {(row.dp_group, row.slot): slots[row.request.request_id] for row in move.rows}
        self._use(move.to_tp, move.capacity)
        return TimeTaken() if self._switch_cost is None else self._switch_cost(move)

    def accept_migration(self, source: Any, kv: KvPlan, rows: Sequence[ResidentRow]) -> None:
        """As `MeshExecutor.accept_migration`."""
        assert isinstance(source, ReplayExecutor), "rows come from a replay"
        assert not self._results, "rows arrive while plans are in flight"
        found = sorted((*source._slots.values(), *self._slots.values()), key=lambda slot: slot.num_generated)
        slots = {slot.request.request_id: slot for slot in found}  # a row that left stays as it was; the newest counts
        self._slots = {(row.dp_group, row.slot): replace(slots[row.request.request_id]) for row in rows}

    def _activate(self, chunk: PrefillChunk) -> _Slot:
        request = chunk.request
        if request.key not in self._lengths:
            raise ValueError(f"no length is recorded for {request.key}: the replay launches what the recording did not")
        length = min(self._lengths[request.key], request.params.max_tokens)
        if length <= chunk.num_generated:
            raise ValueError(
                f"{request.key}: the recorded length ({length}) must exceed the tokens kept ({chunk.num_generated})"
            )
        window = 0 if self._proposals is None else self._proposals.first_window
        return _Slot(request, length, chunk.num_generated, window)

    def _propose(self, slot: _Slot, limit: int, named: list[DecodeRow]) -> VerifyCounts:
        """What is proposed for a row and accepted in a step; its window moves."""
        assert self._proposals is not None, "a plan verifies, and nothing is proposed"
        acceptance = self._proposals.acceptance(slot.request.key, slot.length)
        right = int(acceptance.right[slot.num_generated])
        fullest = max(Counter(row.dp_group for row in named).values())
        room = min(limit, slot.length) - slot.num_generated - 1
        proposed = min(slot.window, self._proposals.width(fullest), room) if right >= 0 else 0
        if not proposed:
            return VerifyCounts(steps=1)
        accepted = min(proposed, right)
        slot.window = int(self._proposals.next_window(np.asarray(slot.window), proposed, accepted))
        return VerifyCounts(1, proposed, accepted, 1, int(acceptance.matched[slot.num_generated]))

    def _advance(self, slot: _Slot, tokens: list[int], stopped: set[int]) -> None:
        """Samples one token of an active row."""
        tokens.append(filler(slot.request, slot.num_generated, slot.length))
        slot.num_generated += 1
        if not slot.is_active:
            stopped.add(slot.request.request_id)


def filler(request: Request, position: int, length: int) -> int:
    """Token `position` of a replayed response of `length` tokens: a stop token exactly where it ends early."""
    params = request.params
    if position == length - 1 and length < params.max_tokens and params.stop_token_ids:
        return params.stop_token_ids[0]
    key = request.key
    token = (key.prompt_index * 7919 + key.sample_index * 104_729 + key.attempt * 31 + position * 17) % VOCABULARY
    while token in params.stop_token_ids:
        token += 1
    return token
