"""The engine: schedule, submit, collect the previous plan, update. The device is always one plan ahead of the host.

Purpose: requests in, finished samples out, over any `Executor`: the model on a mesh or a simulation
(docs/architecture.md).

Source: nano-vllm's `LLMEngine.step`; the overlap of host and device as in mini-sglang's overlap scheduler.

Departures: requests can be aborted and added again with their tokens (`plan.resume`); finished requests come in logical
order (dispatch, dp group, slot), never in a clock's order.

Example::

    engine = Engine(executor, BatcherConfig(decode_steps=16))
    samples = engine.generate(requests)  # in the order of the requests

    engine.add(request)
    while not engine.is_idle:
        for finished in engine.step():
            print(finished.sample)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxrl.scheduling.tokens.batcher import Batcher, BatcherConfig
from jaxrl.scheduling.tokens.plan import Executor, Plan, PlanResult, Request, Ticket
from jaxrl.scheduling.tokens.progress import Counters, Finished, PlanTimes, TraceEvent
from jaxrl.scheduling.tokens.rows import StopCheck
from jaxrl.types import Sample

if TYPE_CHECKING:
    from jaxrl.scheduling.layouts.relayout import How, Relayout

MAX_IN_FLIGHT = 2
"""Plans of an engine that its devices may have at once: one that they run, and the next."""


class Engine:
    """One worker: an executor, and the batcher that keeps it busy.

    Args:
      executor: runs plans; its sizes are the batcher's.
      config: options of continuous batching.
      stop_check: `(request, response tokens) -> how many to keep, or None`: looks for stop strings on the host; called
        for requests with stop strings whenever they gained tokens.
      trace: called with every admission, preemption and completion, in order (`list.append` records them).
    """

    def __init__(
        self,
        executor: Executor,
        config: BatcherConfig,
        stop_check: StopCheck | None = None,
        trace: Callable[[TraceEvent], None] | None = None,
    ) -> None:
        self.executor = executor
        self.stop_check = stop_check
        self.batcher = Batcher(config, executor.sizes, trace)
        self.watchers: list[Callable[[PlanTimes], None]] = []  # called for every plan that was collected
        self.keepers: list[Callable[[PlanResult], None]] = []  # the same, once the batcher has taken in its result
        self._tickets: deque[Ticket] = deque()
        self._loads: deque[PlanTimes] = deque()  # of the same plans, where they are watched: if they take all steps
        self._paused = False  # since the last plan was submitted
        self._undelivered: list[Finished] = []  # ended while plans in flight were collected without a step

    @property
    def counters(self) -> Counters:
        return self.batcher.counters

    @property
    def is_idle(self) -> bool:
        """No request is unfinished, no plan is in flight, and every finished request has been returned."""
        return self.batcher.is_idle and not self._undelivered

    @property
    def num_in_flight(self) -> int:
        return len(self._tickets)

    @property
    def oldest(self) -> Ticket | None:
        return self._tickets[0] if self._tickets else None

    def next_times(self) -> PlanTimes | None:
        """The load of the oldest plan in flight, should it take all of its steps; in no time. None where no plan is in
        flight, or nothing watches."""
        return self._loads[0] if self._loads else None

    def unfinished(self) -> tuple[int, ...]:
        """Ids of the requests that are waiting or running, in the order in which they were added."""
        return self.batcher.live()

    def add(self, request: Request) -> None:
        """Takes a request; it waits behind those added before. Raises ValueError if it can never run."""
        self.check(request)
        self.batcher.add(request)

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that can never run."""
        if request.params.stop_strings and self.stop_check is None:
            raise ValueError(
                f"request {request.request_id} ({request.key}): stop_strings {request.params.stop_strings} need an "
                "engine with a stop_check, which takes a tokenizer"
            )
        self.executor.check(request)
        self.batcher.check(request)

    def abort(self, request_ids: Iterable[int]) -> list[Sample]:
        """Ends requests at once and returns their samples so far, in the order of the ids.

        Tokens of plans in flight are lost; `drain` first to keep them. `resume` makes a new request from such a sample.
        Raises ValueError, with nothing changed, if an id is not live.
        """
        return [response.sample("abort") for response in self.batcher.abort(request_ids)]

    def step(self) -> list[Finished]:
        """Submits the next plan, collects the one before, and returns the requests that finished in that one."""
        num_ahead = int(self.submit())
        finished = self.take_ended()
        return finished + (self._collect() if len(self._tickets) > num_ahead else [])

    def submit(self) -> bool:
        """Submits the next plan and waits for nothing; returns whether there was one to make. At most one plan may be
        in flight: more are not planned for (`jaxrl.scheduling.tokens.batcher`)."""
        assert len(self._tickets) < MAX_IN_FLIGHT, "a third plan at once"
        plan = self.batcher.schedule()
        if plan is None:
            return False
        if self.watchers:
            self._loads.append(self._load(plan))
        self._paused = False
        self._tickets.append(self.executor.submit(plan))
        return True

    def paused(self) -> None:
        """The devices have ended all plans in flight, and then done other work: of several in flight none's own time is
        known, and the next plan has no other before it."""
        self._paused = True
        if len(self._loads) > 1:
            self._loads = deque(replace(load, was_queued=False) for load in self._loads)

    def collect(self) -> list[Finished]:
        """Waits for the oldest plan in flight, if there is one; returns the requests that finished in it, and those of
        `take_ended`."""
        finished = self.take_ended()
        return finished + (self._collect() if self._tickets else [])

    def take_ended(self) -> list[Finished]:
        """The requests that ended while plans were collected and not returned (`settle`)."""
        undelivered, self._undelivered = self._undelivered, []
        return undelivered

    def drain(self) -> list[Finished]:
        """Collects everything in flight without a new plan; afterwards the host knows the state of the device."""
        finished = self.take_ended()
        while self._tickets:
            finished.extend(self._collect())
        return finished

    def settle(self) -> None:
        """Like `drain`, but the next `step` or `drain` returns the requests that ended."""
        self._undelivered = self.drain()

    def switch(self, tp: int, by: How = "migrate") -> Relayout:
        """Continues with another tensor-parallel degree, in the middle of a batch (`layouts.relayout.switch`)."""
        from jaxrl.scheduling.layouts.relayout import switch

        return switch(self, tp, by)

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Runs requests to their ends; returns samples in the order of the requests. The engine must be idle."""
        self._add_all(requests)
        samples: dict[int, Sample] = {}
        while not self.is_idle:
            samples.update((finished.request_id, finished.sample) for finished in self.step())
        return [samples[request.request_id] for request in requests]

    def stream(self, requests: Sequence[Request]) -> Generator[Sample]:
        """Adds requests to an idle engine; the iterator runs them and yields samples as they finish.

        Closing the iterator aborts the rest.
        """
        self._add_all(requests)
        return self._stream()

    def _stream(self) -> Generator[Sample]:
        try:
            while not self.is_idle:
                for finished in self.step():
                    yield finished.sample
        except GeneratorExit:
            self.batcher.abort(self.unfinished())
            self.drain()
            raise

    def _add_all(self, requests: Sequence[Request]) -> None:
        """Adds all requests or none. The engine must be idle: ends of earlier requests would go unreported."""
        if not self.is_idle:
            raise ValueError(
                f"generate and stream need an idle engine, and {len(self.unfinished())} requests are unfinished: "
                "use add and step, or drain and abort first"
            )
        added: list[int] = []
        try:
            for request in requests:
                self.add(request)
                added.append(request.request_id)
        except ValueError:
            self.batcher.abort(added)
            raise

    def _collect(self) -> list[Finished]:
        result = self.executor.collect(self._tickets.popleft())
        if self._loads and self._loads[0].index == result.index:
            load, steps = self._loads.popleft(), result.num_steps
            context = load.context + load.batch * (steps - load.num_steps) / 2
            of_plan = load.prefill_tokens, load.batch, context, load.was_queued, load.verified
            times = PlanTimes(result.index, steps, result.duration_s, *of_plan)
            for watcher in self.watchers:
                watcher(times)
        finished = self.batcher.update(result, self.stop_check)
        for keeper in self.keepers:
            keeper(result)
        return finished

    def _load(self, plan: Plan) -> PlanTimes:
        batch, tokens = self.batcher.fullest(plan)
        return PlanTimes(
            index=plan.index,
            num_steps=plan.num_steps,
            duration_s=0.0,
            prefill_tokens=sum(len(chunk.tokens) for chunk in plan.prefill),
            batch=batch,
            context=tokens + batch * plan.num_steps / 2,
            was_queued=bool(self._tickets) and not self._paused,
            verified=plan.verifies,
        )
