"""The simulated executor, for tests of what stands above it: lengths by sample, and time only where a test says so; and
the workers that have some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxrl.scheduling.layouts.latency_profile import SwitchCost
from jaxrl.scheduling.layouts.relayout import Relayout, TimeTaken
from jaxrl.scheduling.tokens.plan import Capacity, Plan
from jaxrl.scheduling.tokens.stacks import WHOLE, KvStacks
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.executor import SimulatedExecutor, SimulatedTicket
from jaxrl.types import SampleKey

Cost = Callable[[Plan, int], float]
"""(plan, decode steps really taken) -> seconds."""


class FreeCost:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_: 0.0

    def switch_cost(self, tp: int, new_tp: int) -> SwitchCost:
        return SwitchCost(tp, new_tp, 0.0, 0.0, 0.0)


class ReplayExecutor(SimulatedExecutor):
    """Replays response lengths.

    Args:
      lengths: tokens of each response, kept ones included; cut at its request's max_tokens.
      num_groups, num_slots, num_blocks, block_size, max_prefill_tokens: see `plan.Executor`.
      cost: seconds that a plan is said to take; nothing by default.
      layouts: by degree, what each layout that it can change to offers; `tp`: the one in use.
      stacks: see `plan.Executor`.

    `policy_version` may be set between plans, as a weight sync would. `switch_cost`, where a test sets it, says what a
    change of layout takes.
    """

    def __init__(
        self,
        lengths: Mapping[SampleKey, int],
        num_groups: int = 1,
        num_slots: int = 4,
        num_blocks: int = 99,
        block_size: int = 4,
        max_prefill_tokens: int = 64,
        cost: Cost | None = None,
        *,
        tp: int = 1,
        layouts: Mapping[int, Capacity] | None = None,
        stacks: KvStacks = WHOLE,
    ) -> None:
        self.cost = cost
        self.switch_cost: Callable[[Relayout], TimeTaken] | None = None
        own = Capacity(num_groups, num_slots, num_blocks, block_size, max_prefill_tokens, stacks)
        free: Any = FreeCost()
        super().__init__(own, tp, lambda key, _: lengths[key], free, SimulatedClock(), layouts=layouts)

    def submit(self, plan: Plan) -> SimulatedTicket:
        ticket = super().submit(plan)
        if self.cost is None:
            return ticket
        result = replace(ticket.result, duration_s=self.cost(plan, ticket.result.num_steps))
        self._tickets[-1] = replace(ticket, result=result)
        return self._tickets[-1]

    def switch(self, move: Relayout) -> TimeTaken:
        taken = super().switch(move)
        return taken if self.switch_cost is None else self.switch_cost(move)


class ReplayWorkers:
    """Executors with the memory phases of real ones, which are noted in `calls`."""

    def __init__(self, executors: Sequence[ReplayExecutor] = ()) -> None:
        self.executors, self.recompiles, self.calls = executors, 0, list[Any]()

    def sync_weights(self, train_params: Any, policy_version: int) -> None:
        self.calls.append(("sync", train_params, policy_version))
        for each in self.executors:
            each.policy_version = policy_version

    def allocate(self) -> None:
        self.calls.append("allocate")

    def release(self, *, weights: bool = False) -> None:
        self.calls.append(("release", weights))
