"""Workers of a simulated host: what waiting costs them, and the order of arrival."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from sim_machine import ConstantCost, key, sizes

from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.event_merger import Completion, Placement, SortKey, WorkerProgress
from jaxrl.scheduling.tokens.local_workers import step_ticks
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.sim.timed_workers import ArrivalMerger, TimedWorkers, UnsynchronizedWorkers
from jaxrl.types import SamplingParams

LOOKAHEAD = 2 * 256 * 2  # two plans of two steps
LENGTHS = {key(0, 0): 40, key(0, 1): 40, key(0, 2): 40}


class Calls:
    """A listener that notes how it is called."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = []

    def on_launch(self, placement: Placement, request: Request, now: int) -> None:
        self.all.append(("launched", placement.worker, request.request_id, now))

    def on_abort(self, placed: Mapping[int, Placement], keep: bool, now: int) -> None:
        self.all.append(("aborted", {i: placement.worker for i, placement in placed.items()}, keep, now))

    def on_completion(self, completion: Completion) -> None:
        self.all.append(("completed", completion.request_id))


def workers_of(made: type[TimedWorkers], listener: Calls | None = None, slowness: float = 1.0) -> TimedWorkers:
    clock = SimulatedClock()
    executor = SimulatedExecutor(sizes(), lambda of, _: LENGTHS[of], ConstantCost(), clock, slowness=slowness)
    engine = Engine(executor, BatcherConfig(decode_steps=2))
    workers = made({0: engine}, LOOKAHEAD, 2, "tokens", step_ticks, clock, listener)
    workers.begin()
    return workers


def request(number: int) -> Request:
    return Request(number, key(0, number), (1, 2, 3), SamplingParams(max_tokens=60))


def act(workers: TimedWorkers) -> bool:
    """The next act, if there is one."""
    worker = workers.turn
    if worker is None:
        return False
    if workers.makes_plan(worker):
        workers.prepare(worker)
    workers.step(worker)
    return True


def waiting(slowness: float = 1.0) -> tuple[TimedWorkers, int]:
    """Workers that have run ahead by the lookahead, and the low watermark that they wait for."""
    workers = workers_of(TimedWorkers, slowness=slowness)
    workers.launch(request(0), 0)
    while act(workers):
        pass
    wanted = workers.needed_low_watermark()
    assert wanted is not None
    assert wanted > workers.low_watermark
    return workers, wanted


def test_a_wait_for_the_low_watermark_counts_from_when_the_devices_ran_dry():
    workers, wanted = waiting()
    free_s = workers.engines[0].executor.free_ns / 1e9  # type: ignore[attr-defined]
    workers._clock.reach(round((free_s + 3) * 1e9))
    assert workers.turn is None, "it waits, and none of that counts before it goes on"
    assert workers.waited_ns == {0: 0}
    workers.raise_low_watermark(wanted)
    assert act(workers)
    assert workers.waited_ns == {0: 3_000_000_000}


def test_a_wait_that_the_devices_do_not_notice_is_none():
    workers, wanted = waiting()
    assert workers.engines[0].num_in_flight == 1, "a plan is behind"
    workers.raise_low_watermark(wanted)
    assert act(workers)
    assert workers.waited_ns == {0: 0}


def test_a_slow_host_takes_longer_by_its_share():
    times = [waiting(slowness)[0]._clock.now_s for slowness in (1.0, 1.25)]
    assert 0 < times[1] == pytest.approx(1.25 * times[0])


@pytest.mark.parametrize("made", [TimedWorkers, UnsynchronizedWorkers])
def test_a_listener_is_called_with_what_is_commanded_and_completes(made: type[TimedWorkers]):
    calls = Calls()
    workers = workers_of(made, calls)
    workers.launch(request(0), 0)
    workers.launch(request(1), 1)
    workers.abort([1], keep=False)
    while not (completions := [one for message in workers.take_progress() for one in message.completions]):
        if not act(workers):
            workers.raise_low_watermark(workers.needed_low_watermark() or 0)
    workers.deliver(completions[0])
    assert calls.all == [("launched", 0, 0, 0), ("launched", 1, 1, 0), ("aborted", {1: 1}, False, 0), ("completed", 0)]


def test_unsynchronized_workers_wait_for_nobody_and_obey_at_once():
    workers = workers_of(UnsynchronizedWorkers)
    workers.launch(request(0), 0)
    for _ in range(12):
        assert act(workers), "it never waits for a low watermark"
    workers.launch(request(1), 0)
    for _ in range(2):
        act(workers)
    assert workers.engines[0].unfinished() == (0, 1), "it starts with the next plan"
    while not (messages := [message for message in workers.take_progress() if message.completions]):
        assert act(workers)
    (completion,) = messages[0].completions
    assert (completion.request_id, completion.length) == (0, 40)
    workers.deliver(completion)
    ((result, sample),) = workers.abort([1], keep=True)
    assert result.reason == "abort"
    assert result.length == len(sample) > 0, "all that was collected"
    assert workers.waited_ns == {0: 0}
    workers.drain()
    assert workers.counted()[0].steps > 0


def test_completions_are_delivered_as_they_arrive():
    workers = workers_of(UnsynchronizedWorkers)
    merger = workers.new_merger()
    assert isinstance(merger, ArrivalMerger)
    for number, worker in ((0, 0), (1, 1), (2, 1)):
        workers.launch(request(number), worker)
        merger.launched(number)
    assert merger.slowest() in (0, 1)
    late = Completion(1, SortKey(9000, 1, 3, 0, 0), 40, "stop")
    merger.add(WorkerProgress(1, 0, 9000, (late, Completion(2, SortKey(9000, 1, 3, 0, 1), 40, "stop"))))
    merger.aborted(2, 1)
    merger.add(WorkerProgress(0, 0, 10, (Completion(0, SortKey(10, 0, 0, 0, 0), 40, "stop"),)))
    assert merger.next() == late, "though the other has the smaller tick"
    found = merger.next()
    assert found is not None
    assert found.request_id == 0
    assert merger.next() is None, "one was aborted"
    assert merger.low_watermark() == 0
