"""Workers of a simulated host: what waiting costs them, and the order of arrival."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from sim_machine import ConstantCost, key, sizes

from jaxrl.scheduling.tokens.batcher import BatcherConfig
from jaxrl.scheduling.tokens.engine import Engine
from jaxrl.scheduling.tokens.order import End, Home, Place, Report
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.workers import step_ticks
from jaxrl.sim.clock import SimulatedClock
from jaxrl.sim.executor import SimulatedExecutor
from jaxrl.sim.paced import ArrivalOrder, ArrivingWorkers, TimedWorkers
from jaxrl.types import SamplingParams

LOOKAHEAD = 2 * 256 * 2  # two plans of two steps
LENGTHS = {key(0, 0): 40, key(0, 1): 40, key(0, 2): 40}


class Heard:
    """A listener that notes what it hears."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = []

    def on_launch(self, home: Home, request: Request, now: int) -> None:
        self.all.append(("launched", home.worker, request.request_id, now))

    def on_abort(self, homes: Mapping[int, Home], keep: bool, now: int) -> None:
        self.all.append(("aborted", {i: home.worker for i, home in homes.items()}, keep, now))

    def on_end(self, end: End) -> None:
        self.all.append(("told", end.request_id))


def workers_of(made: type[TimedWorkers], listener: Heard | None = None, slowness: float = 1.0) -> TimedWorkers:
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


def run_dry(workers: TimedWorkers) -> float:
    """Acts until it waits; the time."""
    while act(workers):
        pass
    return workers._clock.now_s


def test_a_wait_for_the_floor_counts_from_when_the_devices_ran_dry():
    workers = workers_of(TimedWorkers)
    workers.launch(request(0), 0)
    at_s = run_dry(workers)
    assert at_s > 0, "it runs ahead by the lookahead"
    assert workers.turn is None
    wanted = workers.wanted_floor()
    assert wanted is not None
    assert wanted > workers.floor
    free_s = workers.engines[0].executor.free_ns / 1e9  # type: ignore[attr-defined]
    workers._clock.reach(round((free_s + 3) * 1e9))
    assert workers.turn is None, "it waits, and none of that counts before it goes on"
    assert workers.waited_ns == {0: 0}
    workers.raise_floor(wanted)
    assert act(workers)
    assert workers.waited_ns == {0: 3_000_000_000}


def test_a_wait_that_the_devices_do_not_notice_is_none():
    workers = workers_of(TimedWorkers)
    workers.launch(request(0), 0)
    run_dry(workers)
    wanted = workers.wanted_floor()
    assert wanted is not None
    assert workers.engines[0].num_in_flight == 1, "a plan is behind"
    workers.raise_floor(wanted)
    assert act(workers)
    assert workers.waited_ns == {0: 0}


def test_a_slow_host_takes_longer_by_its_share():
    times: list[float] = []
    for slowness in (1.0, 1.25):
        workers = workers_of(TimedWorkers, slowness=slowness)
        workers.launch(request(0), 0)
        times.append(run_dry(workers))
    assert times[1] == pytest.approx(1.25 * times[0])


@pytest.mark.parametrize("made", [TimedWorkers, ArrivingWorkers])
def test_a_listener_hears_of_what_is_commanded_and_told(made: type[TimedWorkers]):
    heard = Heard()
    workers = workers_of(made, heard)
    workers.launch(request(0), 0)
    workers.launch(request(1), 1)
    workers.abort([1], keep=False)
    while not (ends := [end for report in workers.take_reports() for end in report.ends]):
        if not act(workers):
            workers.raise_floor(workers.wanted_floor() or 0)
    workers.told(ends[0])
    assert heard.all == [
        ("launched", 0, 0, 0),
        ("launched", 1, 1, 0),
        ("aborted", {1: 1}, False, 0),
        ("told", 0),
    ]


def test_workers_in_order_of_arrival_wait_for_nobody_and_hear_at_once():
    workers = workers_of(ArrivingWorkers)
    workers.launch(request(0), 0)
    for _ in range(12):
        assert act(workers), "it never waits for a floor"
    workers.launch(request(1), 0)
    for _ in range(2):
        act(workers)
    assert workers.engines[0].unfinished() == (0, 1), "it starts with the next plan"
    while not (reports := [report for report in workers.take_reports() if report.ends]):
        assert act(workers)
    (end,) = reports[0].ends
    assert (end.request_id, end.length) == (0, 40)
    workers.told(end)
    ((answer, sample),) = workers.abort([1], keep=True)
    assert answer.reason == "abort"
    assert answer.length == len(sample) > 0, "all that was collected"
    assert workers.waited_ns == {0: 0}
    workers.drain()
    assert workers.counted()[0].steps > 0


def test_ends_are_told_as_they_arrive():
    workers = workers_of(ArrivingWorkers)
    order = workers.new_order()
    assert isinstance(order, ArrivalOrder)
    for number, worker in ((0, 0), (1, 1), (2, 1)):
        workers.launch(request(number), worker)
        order.launched(number)
    assert order.slowest() in (0, 1)
    late = End(1, Place(9000, 1, 3, 0, 0), 40, "stop")
    order.report(Report(1, 0, 9000, (late, End(2, Place(9000, 1, 3, 0, 1), 40, "stop"))))
    order.gone(2, 1)
    order.report(Report(0, 0, 10, (End(0, Place(10, 0, 0, 0, 0), 40, "stop"),)))
    assert order.next() == late, "though the other has the smaller tick"
    found = order.next()
    assert found is not None
    assert found.request_id == 0
    assert order.next() is None, "one was aborted"
    assert order.floor() == 0
