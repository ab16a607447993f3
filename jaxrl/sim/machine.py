"""The simulated devices under the engine: plans in, lengths replayed, time charged by a cost model.

Purpose: `SimulatedExecutor` is what `rollout.executor` is on a real mesh, for a machine of any size: dp groups of `tp`
devices each, a KV pool and rows per group. It jumps from stop to stop instead of going token by token.

Source: vidur (Agrawal et al. 2024) for replacing the model by a cost; the depth (one plan ahead) and the rule for
leaving a plan early are design §3 and §6. `jaxrl.sim.executor.ReplayExecutor` does the same step by step and is what
this one is tested against: rows, tokens, steps and stops are equal.

Time. A plan starts when it has been submitted and the plan before it is over, so the host's work on the next plan
overlaps with the device's on this one; `collect` waits for a plan's end. In each dp group a plan costs its prefill
chunks in one pass, then each decode step with the rows still active; it takes as long as its slowest group.

Departures: between two stops in a group the context grows linearly, and one evaluation in the middle stands for the
steps between: exact wherever the cost is linear in the context there. A plan that prefills nothing and finds no row
active takes no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from jaxrl.scheduling.plan import Plan, PlanResult, PrefillChunk, Request, RowResult, Ticket
from jaxrl.sim.clock import SimulatedClock, nanoseconds
from jaxrl.sim.cost_model import CostModel, causal_pairs
from jaxrl.sim.executor import VOCABULARY
from jaxrl.sim.workload import Workload
from jaxrl.types import SampleKey

_ZEROS = np.zeros((4096,), np.float32)
_ZEROS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class MachineSizes:
    """What the machine is made of; see `jaxrl.scheduling.plan.Executor`."""

    num_devices: int
    tp: int
    num_slots: int
    num_blocks: int
    block_size: int
    max_prefill_tokens: int

    def __post_init__(self) -> None:
        if self.tp < 1 or self.num_devices < 1 or self.num_devices % self.tp:
            raise ValueError(
                f"rollout.tensor_model_parallel_size ({self.tp}) must divide the number of devices "
                f"({self.num_devices}; simulate.num_devices)"
            )

    @property
    def num_groups(self) -> int:
        """dp groups."""
        return self.num_devices // self.tp


class Launched:
    """What the workload says of the responses that have been launched, each as of the step of its first launch.

    That is the step whose rollout the weights of its first token are for: version + 1, so that a response that is
    resumed later keeps its length.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._steps: dict[SampleKey, int] = {}

    def add(self, key: SampleKey, policy_version: int) -> None:
        self._steps[key] = policy_version + 1

    def remove(self, key: SampleKey) -> None:
        del self._steps[key]

    def clear(self) -> None:
        self._steps.clear()

    def __contains__(self, key: SampleKey) -> bool:
        return key in self._steps

    def length(self, key: SampleKey) -> int:
        """Response tokens."""
        if key not in self._steps:
            raise ValueError(f"no length is known for {key}: it runs and was not launched by the simulation")
        return self._workload.length(key, self._steps[key])

    def reward(self, key: SampleKey) -> float:
        return self._workload.reward(key, self._steps[key])

    def reward_s(self, key: SampleKey) -> float:
        """Seconds of scoring."""
        return self._workload.reward_s(key, self._steps[key])


@dataclass(frozen=True, slots=True)
class SimulatedTicket:
    """A submitted plan: its outcome, and when that will be known."""

    result: PlanResult
    end_ns: int

    @property
    def index(self) -> int:
        return self.result.index


@dataclass(slots=True)
class _Slot:
    """The state that the device would hold of a row."""

    request_id: int
    tokens: np.ndarray  # int32, the whole response
    context: int  # prompt and response tokens so far
    num_generated: int
    left: int  # tokens until it stops

    def advance(self, count: int) -> None:
        self.context += count
        self.num_generated += count
        self.left -= count


@dataclass(slots=True)
class _Work:
    """What a plan asks of one dp group."""

    prefill_tokens: int = 0
    pairs: float = 0.0
    rows: list[tuple[int, int]] = field(default_factory=list)  # (tokens left, context) of each active row


class SimulatedExecutor:
    """Implements `jaxrl.scheduling.plan.Executor`.

    Args:
      length_of: tokens of a response, kept ones included; cut at its request's max_tokens. Asked when its prefill ends,
        so a response that is aborted before it runs needs none.
      on_plan: called with (plan, its result, start, end in nanoseconds) when a plan is submitted.
      host_s: seconds that the host works on each plan before it submits it.

    Attributes:
      num_tokens, num_prefill_tokens: tokens generated and prefilled so far, over all groups.
      policy_version: of the weights; set by whoever syncs them.
    """

    def __init__(
        self,
        sizes: MachineSizes,
        length_of: Callable[[SampleKey], int],
        cost: CostModel,
        clock: SimulatedClock,
        host_s: float = 0.0,
        on_plan: Callable[[Plan, PlanResult, int, int], None] = lambda *_: None,
    ) -> None:
        self.sizes = sizes
        self.num_groups = sizes.num_groups
        self.num_slots = sizes.num_slots
        self.num_blocks = sizes.num_blocks
        self.block_size = sizes.block_size
        self.max_prefill_tokens = sizes.max_prefill_tokens
        self.policy_version = 0
        self.num_tokens = self.num_prefill_tokens = 0
        self._length_of = length_of
        self._cost = cost
        self._clock = clock
        self._host_s = host_s
        self._on_plan = on_plan
        self._slots: dict[tuple[int, int], _Slot] = {}
        self._tickets: deque[SimulatedTicket] = deque()
        self._free_ns = 0  # when the devices are done with everything submitted

    def check(self, request: Request) -> None:
        """Takes everything: a request without a length may still be aborted before it runs."""

    def submit(self, plan: Plan) -> SimulatedTicket:
        """Runs a plan; its outcome is seen when it is collected."""
        self._clock.advance(self._host_s)
        work: dict[int, _Work] = {}
        ended_prefill = self._prefill(plan, work)
        num_stopped = sum(not slot.left for slot in ended_prefill.values())
        active: list[_Slot] = []
        for row in plan.decode:
            slot = self._slots[row.dp_group, row.slot]
            assert slot.request_id == row.request_id, plan
            if slot.left:
                active.append(slot)
                group = work.get(row.dp_group)
                if group is None:
                    group = work[row.dp_group] = _Work()
                group.rows.append((slot.left, slot.context))
        num_steps = _num_steps(plan, num_stopped, [slot.left for slot in active])
        rows = self._decode(active, num_steps, ended_prefill)
        seconds = max((self._group_s(group, num_steps) for group in work.values()), default=0.0)
        start_ns = max(self._clock.now_ns, self._free_ns)
        self._free_ns = start_ns + nanoseconds(seconds)
        result = PlanResult(plan.index, rows, num_steps, self.policy_version, seconds)
        self._on_plan(plan, result, start_ns, self._free_ns)
        ticket = SimulatedTicket(result, self._free_ns)
        self._tickets.append(ticket)
        return ticket

    def collect(self, ticket: Ticket) -> PlanResult:
        """Waits for the oldest plan not yet collected."""
        due = self._tickets.popleft()
        assert ticket.index == due.index, f"plan {due.index} is due, not plan {ticket.index}"
        self._clock.reach(due.end_ns)
        return due.result

    def _prefill(self, plan: Plan, work: dict[int, _Work]) -> dict[int, _Slot]:
        """Counts the chunks and activates the rows whose prefill ends, with their first token; these by request id."""
        ended: dict[int, _Slot] = {}
        for chunk in plan.prefill:
            group = work.setdefault(chunk.dp_group, _Work())
            group.prefill_tokens += len(chunk.tokens)
            group.pairs += causal_pairs(len(chunk.tokens), chunk.start)
            self.num_prefill_tokens += len(chunk.tokens)
            if chunk.is_last:
                slot = self._activate(chunk)
                self._slots[chunk.dp_group, chunk.slot] = ended[slot.request_id] = slot
                slot.advance(1)
        return ended

    def _decode(self, active: list[_Slot], num_steps: int, ended_prefill: dict[int, _Slot]) -> dict[int, RowResult]:
        """Advances the active rows; who gained what, by request id."""
        rows: dict[int, RowResult] = {}
        for slot in active if num_steps else ():
            first = slot.num_generated - (slot.request_id in ended_prefill)
            slot.advance(min(slot.left, num_steps))
            rows[slot.request_id] = self._row(slot, first)
        for request_id, slot in ended_prefill.items():
            if request_id not in rows:
                rows[request_id] = self._row(slot, slot.num_generated - 1)
        return rows

    def _row(self, slot: _Slot, first: int) -> RowResult:
        count = slot.num_generated - first
        self.num_tokens += count
        zeros = _ZEROS[:count] if count <= len(_ZEROS) else np.zeros((count,), np.float32)
        return RowResult(slot.tokens[first : slot.num_generated], zeros, zeros, not slot.left)

    def _activate(self, chunk: PrefillChunk) -> _Slot:
        request = chunk.request
        length = min(self._length_of(request.key), request.params.max_tokens)
        if length <= chunk.num_generated:
            raise ValueError(
                f"{request.key}: its length ({length}) must exceed the tokens kept ({chunk.num_generated})"
            )
        kept = chunk.num_generated
        context = len(request.prompt_ids) + kept
        return _Slot(request.request_id, fillers(request, length), context, kept, length - kept)

    def _group_s(self, work: _Work, num_steps: int) -> float:
        """Seconds of a plan in one dp group."""
        seconds = self._cost.prefill_s(self.sizes.tp, work.prefill_tokens, work.pairs) if work.prefill_tokens else 0.0
        return seconds + decode_s(self._cost, self.sizes.tp, work.rows, num_steps) if num_steps else seconds


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


def _num_steps(plan: Plan, num_stopped: int, lefts: list[int]) -> int:
    """Decode steps until the plan is left; `num_stopped` rows have stopped in its prefill."""
    wanted = plan.leave_after - num_stopped  # more stops
    if not lefts or wanted <= 0:
        return 0
    if wanted > len(lefts):
        return min(plan.num_steps, max(lefts))
    return min(plan.num_steps, sorted(lefts)[wanted - 1])


def fillers(request: Request, length: int) -> np.ndarray:
    """The tokens of a response, int32 [length]: `jaxrl.sim.executor.filler` of every position at once."""
    key, stops = request.key, request.params.stop_token_ids
    first = key.prompt_index * 7919 + key.sample_index * 104_729 + key.attempt * 31
    tokens = (first % VOCABULARY + np.arange(length, dtype=np.int64) * 17) % VOCABULARY
    for stop in sorted(stops):
        tokens[tokens == stop] += 1
    if stops and length < request.params.max_tokens:
        tokens[-1] = stops[0]
    return tokens.astype(np.int32)
