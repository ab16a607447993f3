"""Executors on other hosts: plans go there, results come back, and the engine notices no difference.

Where a worker spans several hosts each runs the plan, and the first one's result counts. The engine submits a plan
ahead, so the time of a call is hidden behind the plan before. Source: docs/architecture.md (a run on several hosts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from jaxrl.rollout.executor import check_params
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.scheduling.layouts.relayout import Relayout, SwitchFailed, TimeTaken
from jaxrl.scheduling.tokens.plan import Capacity, Plan, PlanResult, Request, Ticket


@dataclass(frozen=True, slots=True)
class LayoutFacts:
    capacity: Capacity
    row_sizes: tuple[int, ...]
    verify_widths: dict[int, int]


@dataclass(frozen=True, slots=True)
class ExecutorFacts:
    """The controller's view of an executor; `tp`: the degree that it begins with."""

    config: ExecutorConfig
    tp: int
    by_tp: dict[int, LayoutFacts]


class Channel(Protocol):
    """Calls to the hosts of one worker, in order."""

    def send(self, method: str, *arguments: Any) -> Any:
        """Begins a call, and returns what `receive` takes."""
        ...

    def receive(self, sent: Any) -> Any:
        """Waits for the answer to a call."""
        ...

    def first(self, sent: Sequence[Any]) -> int:
        """Waits for the answer to one of several calls; which one it is."""
        ...

    def share(self, kind: type) -> None:
        """From here on, an object of this class is sent once, and arrives as the same object each time."""
        ...


@dataclass(slots=True)
class RemoteTicket:
    """`collected`: the call that brings its result, once there is one."""

    index: int
    sent: Any
    collected: Any = None


class RemoteExecutor:
    """Implements `jaxrl.scheduling.tokens.plan.Executor` for worker `worker` of another host."""

    def __init__(self, channel: Channel, worker: int, facts: ExecutorFacts, platform: str) -> None:
        self._channel, self._worker, self._facts = channel, worker, facts
        self.platform, self.config = platform, facts.config
        self._use(facts.tp)

    def _use(self, tp: int) -> None:
        self.tp, self.sizes = tp, self.capacity(tp)

    def capacity(self, tp: int) -> Capacity:
        return self._facts.by_tp[tp].capacity

    def row_sizes(self, tp: int) -> tuple[int, ...]:
        return self._facts.by_tp[tp].row_sizes

    def verify_widths(self, tp: int) -> dict[int, int]:
        return self._facts.by_tp[tp].verify_widths

    def check(self, request: Request) -> None:
        check_params(self.config, request)

    def submit(self, plan: Plan) -> RemoteTicket:
        return RemoteTicket(plan.index, self._channel.send("submit", self._worker, plan))

    def collect(self, ticket: Ticket) -> PlanResult:
        assert isinstance(ticket, RemoteTicket), "a ticket of another executor"
        collected = self.ask(ticket)
        self._channel.receive(ticket.sent)  # raises what the submission has raised
        return self._channel.receive(collected)

    def ask(self, ticket: RemoteTicket) -> Any:
        """The call that brings the result of the oldest plan in flight; begins it where there is none."""
        if ticket.collected is None:
            ticket.collected = self._channel.send("collect", self._worker)
        return ticket.collected

    def start_in(self, tp: int) -> None:
        self._call("start_in", tp)
        self._use(tp)

    def switch(self, move: Relayout) -> TimeTaken:
        try:
            taken = self._call("switch", move)
        except SwitchFailed:
            self._use(move.from_tp)
            raise
        self._use(move.to_tp)
        return taken

    def take_buffered(self) -> None:
        self._channel.receive(self._channel.send("take_buffered", self._worker))

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._channel.receive(self._channel.send("executor", self._worker, method, *arguments))


class RemoteWorkers:
    """The executors of all hosts (`Run.executors`). Answers to calls of `everywhere` come as a list."""

    def __init__(self, everywhere: Channel, executors: Sequence[RemoteExecutor], num_devices: int) -> None:
        self._everywhere, self.executors, self.num_devices = everywhere, tuple(executors), num_devices

    def first_done(self, tickets: Mapping[int, Ticket]) -> int:
        asked = [self.executors[worker].ask(cast(RemoteTicket, ticket)) for worker, ticket in tickets.items()]
        return list(tickets)[self._everywhere.first(asked)]

    @property
    def recompiles(self) -> int:
        return sum(self._all("get", "workers.recompiles"))

    def sync_weights(self, train_params: Any, policy_version: int) -> None:
        del train_params
        self._all("sync_weights", policy_version)

    def buffer_weights(self, train_params: Any, policy_version: int) -> None:
        del train_params
        self._all("buffer_weights", policy_version)

    @property
    def is_buffered(self) -> bool:
        return all(self._all("is_buffered"))

    def take_buffered(self, worker: int) -> None:
        self.executors[worker].take_buffered()

    def allocate(self) -> None:
        self._all("call", "workers.allocate")

    def release(self, *, weights: bool = False) -> None:
        self._everywhere.receive(self._everywhere.send("release", weights))

    def wait_quiet(self) -> None:
        self._all("call", "workers.wait_quiet")

    def warm_up(self, progress: Callable[[str], None] = lambda state: None, first: Sequence[Any] = ()) -> int:
        """Compiles the programs of all hosts; returns how many one of them has."""
        assert not first, "programs of the hosts are compiled by them"
        return self._all("warm_up")[0]

    def compile_ahead(self, degrees: Iterable[int], first: Sequence[Any] = ()) -> None:
        assert not first, "programs of the hosts are compiled by them"
        self._all("compile_ahead", tuple(degrees))

    def share(self, kind: type) -> None:
        self._everywhere.share(kind)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return self._everywhere.receive(self._everywhere.send(method, *arguments))
