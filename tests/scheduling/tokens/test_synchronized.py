"""Workers that run ahead of the round, over replayed lengths."""

from __future__ import annotations

from typing import Any

import pytest
from checked_workers import asked as requests
from checking import assert_whole, make_engine

from jaxrl.scheduling.tokens.event_merger import Completion, EventMerger
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.progress import PlanTimes
from jaxrl.scheduling.tokens.synchronized import SynchronizedWorkers
from jaxrl.sim.replay import filler

AHEAD = 12


def ticks(worker: int, times: PlanTimes) -> int:
    return times.num_steps + times.prefill_tokens


class Crew:
    """Workers in one process, with the merger of their completions."""

    def __init__(self, lengths: dict[Request, int], num_workers: int = 2, ahead: int = AHEAD, **more: Any) -> None:
        of = {request.key: length for request, length in lengths.items()}
        self.workers = SynchronizedWorkers([make_engine(of, **more)[0] for _ in range(num_workers)], ahead, ticks=ticks)
        self.merger = EventMerger(self.workers.placements)
        self.workers.begin()

    def launch(self, *requests: Request) -> list[int]:
        placed = [self.workers.launch(request).worker for request in requests]
        for request in requests:
            self.merger.launched(request.request_id)
        return placed

    def abort(self, *ids: int, keep: bool = False) -> list[tuple[int, str, int]]:
        placed = {i: self.workers.placements.find(i) for i in ids}
        results = self.workers.abort(ids, keep=keep)
        for request_id, placement in placed.items():
            assert placement is not None
            self.merger.aborted(request_id, placement.worker)
            if not self.workers.placements.num_live_in(placement.worker):
                self.merger.became_idle(placement.worker)
        assert all(len(sample) == result.length for result, sample in results)
        return [(result.request_id, result.reason, result.length) for result, _ in results]

    def next(self) -> Completion | None:
        """The next completion; None where all wait."""
        while True:
            for progress in self.workers.take_progress():
                self.merger.add(progress)
            completion = self.merger.next()
            if completion is not None:
                finished = self.workers.deliver(completion)
                assert finished is not None
                if not self.workers.placements.num_live_in(completion.sort_key.worker):
                    self.merger.became_idle(completion.sort_key.worker)
                return completion
            self.workers.raise_low_watermark(self.merger.low_watermark())
            if self.workers.turn is None:
                return None
            self.act()

    def next_one(self) -> Completion:
        completion = self.next()
        assert completion is not None
        return completion

    def act(self) -> None:
        """What the worker whose turn it is does next."""
        worker = self.workers.turn
        assert worker is not None
        if self.workers.makes_plan(worker):
            self.workers.prepare(worker)
        self.workers.step(worker)

    def run(self) -> list[Completion]:
        found: list[Completion] = []
        while (completion := self.next()) is not None:
            found.append(completion)
        return found


def test_completions_are_delivered_in_logical_order_with_all_their_tokens():
    asked = requests(7)
    crew = Crew({request: 3 + 5 * request.request_id % 17 for request in asked}, 3, num_slots=2)
    assert crew.launch(*asked) == [0, 1, 2, 0, 1, 2, 0]
    delivered = crew.run()
    assert sorted(one.request_id for one in delivered) == list(range(7))
    assert [one.sort_key for one in delivered] == sorted(one.sort_key for one in delivered)
    assert [one.length for one in delivered] == [3 + 5 * one.request_id % 17 for one in delivered]
    crew.workers.drain()
    assert crew.workers.is_idle
    assert all(each.plans for each in crew.workers.counted())


def test_a_request_starts_a_lookahead_after_the_event_that_it_follows():
    """Worker 1 has nothing to do from tick 17 on; what is launched then begins there at 17 + 12. In worker 0, which has
    a free row, it begins with the first plan that is made at that tick or later."""
    asked = requests(4)
    crew = Crew({asked[0]: 50, asked[1]: 3, asked[2]: 2, asked[3]: 2})
    crew.launch(asked[0], asked[1])
    first = crew.next_one()
    assert (first.request_id, first.sort_key.tick) == (1, AHEAD + 3 + 2)
    assert crew.launch(asked[2]) == [1]
    second = crew.next_one()
    assert (second.request_id, second.sort_key.tick) == (2, 17 + AHEAD + 3 + 1)
    assert crew.workers.launch(asked[3], 0).effect == 33 + AHEAD
    crew.merger.launched(3)
    third = crew.next_one()
    assert third.request_id == 3
    tick = third.sort_key.tick
    assert 33 + AHEAD < tick <= 33 + AHEAD + 4 + (3 + 4) + 4, "the plans that were made before it, and its"


def test_a_worker_waits_for_the_floor_and_collects_nothing_meanwhile():
    """While the round stands at tick 0, as where a verdict is awaited, plans are made up to the lookahead."""
    asked = requests(2)
    crew = Crew({asked[0]: 60, asked[1]: 60})
    crew.launch(*asked)
    while crew.workers.turn is not None:
        crew.act()
    assert [crew.workers.tick(worker) for worker in range(2)] == [AHEAD + 3 + 4] * 2, "made at tick 12, and no more"
    assert [engine.num_in_flight for engine in crew.workers.engines] == [1, 1]
    assert not any(crew.workers.makes_plan(worker) and crew.workers.turn is not None for worker in range(2))
    crew.workers.raise_low_watermark(7)
    assert crew.workers.turn == 0
    crew.act()
    assert [engine.num_in_flight for engine in crew.workers.engines] == [2, 1]


@pytest.mark.parametrize("keep", [False, True])
def test_an_abort_cuts_back_to_the_event_that_it_follows(keep: bool):
    """Request 1 ends at tick 12 + 3 + 8. The first plan of worker 0, which prefills two prompts, ends at 12 + 6 + 4,
    and the second four ticks later: what it has brought is dropped."""
    asked = requests(3)
    crew = Crew({asked[0]: 50, asked[1]: 9, asked[2]: 7})
    crew.launch(*asked)
    first = crew.next_one()
    assert (first.request_id, first.sort_key.tick) == (1, 23)
    while crew.workers.tick(0) < 26:
        crew.act()
    assert crew.workers.unfinished() == (0, 2), "the second has ended, and was not delivered"
    assert crew.abort(0, 2, keep=keep) == [(0, "abort", 5), (2, "abort", 5)]
    assert crew.run() == []


def test_what_had_ended_by_then_is_told_where_tokens_are_kept():
    """Requests 0 and 1 end in one tick, in two workers."""
    asked = requests(4)
    lengths = {asked[0]: 5, asked[1]: 5, asked[2]: 50, asked[3]: 50}
    for keep, reason in ((False, "abort"), (True, "stop")):
        crew = Crew(lengths, num_slots=1)
        crew.launch(*asked)
        first = crew.next_one()
        assert (first.request_id, first.sort_key.tick) == (0, 19)
        assert crew.abort(1, keep=keep) == [(1, reason, 5)]
        assert crew.abort(2, 3, keep=keep) == [(2, "abort", 0), (3, "abort", 0)], "they wait for a row"
        assert crew.run() == []
        crew.workers.drain()
        assert crew.workers.is_idle


def test_counts_are_those_of_the_plans_that_ended_by_the_last_event():
    """Worker 0 has gone on beyond the abort; what it did there is counted nowhere, and it begins again as before."""
    asked = requests(3)
    crew = Crew({asked[0]: 50, asked[1]: 9, asked[2]: 9})
    crew.launch(asked[0], asked[1])
    completion = crew.next_one()
    assert (completion.request_id, completion.sort_key.tick) == (1, AHEAD + 3 + 8)
    for _ in range(20):  # as far as the lookahead lets it
        if crew.workers.turn is not None:
            crew.act()
    assert crew.workers.tick(0) > completion.sort_key.tick
    assert crew.abort(0) == [(0, "abort", 9)]
    assert [(each.plans, each.steps) for each in crew.workers.counted()] == [(2, 8), (2, 8)]
    assert [crew.workers.tick(worker) for worker in range(2)] == [completion.sort_key.tick] * 2
    assert crew.launch(asked[2]) == [0]
    again = crew.next_one()
    assert (again.sort_key.tick, again.sort_key.dispatch) == (completion.sort_key.tick + AHEAD + 3 + 8, 3)
    assert [(each.plans, each.steps) for each in crew.workers.counted()] == [(4, 16), (2, 8)]


def test_kept_tokens_are_the_first_of_the_response():
    """Four plans of worker 0 have ended at tick 12 + 3 + 19: a token of the prefill, and four of each."""
    asked = requests(2)
    crew = Crew({asked[0]: 50, asked[1]: 20})
    crew.launch(*asked)
    assert crew.next() is not None
    (_, sample) = crew.workers.abort([0], keep=True)[0]
    assert sample.token_ids.tolist() == [filler(asked[0], i, 50) for i in range(17)]
    assert (len(sample.versions), len(sample.rollout_logprobs), sample.finish_reason) == (17, 17, "abort")


def test_a_round_begins_anew_and_a_cancelled_one_leaves_nothing():
    asked = requests(4)
    crew = Crew(dict.fromkeys(asked, 30))
    crew.launch(*asked)
    for _ in range(6):
        crew.act()
    crew.workers.cancel()
    assert crew.workers.is_idle
    crew.workers.begin()
    crew.merger.begin()
    crew.launch(*asked)
    delivered = crew.run()
    assert [one.sort_key.dispatch for one in delivered] == [7] * 4
    assert {one.sort_key.tick for one in delivered} == {AHEAD + 6 + 29}
    crew.workers.drain()
    for engine in crew.workers.engines:
        assert engine.is_idle


def test_refusals():
    asked = requests(1)
    crew = Crew({asked[0]: 5})
    with pytest.raises(ValueError, match=r"abort\(\[3\]\): every id must be live and named once; not live: \[3\]"):
        crew.workers.abort([3], keep=False)
    with pytest.raises(ValueError, match=r"numbers .* must be of the 1 workers"):
        SynchronizedWorkers({1: make_engine({})[0]}, AHEAD, 1)
    with pytest.raises(ValueError, match="there must be at least one engine"):
        SynchronizedWorkers([], AHEAD)


def test_stop_strings_leave_the_count_before_the_plan_that_cut_them():
    """A response that ended after now is cut back by what its plans brought, not by what was kept."""
    asked = requests(2)
    crew = Crew({asked[0]: 18, asked[1]: 9}, ahead=100)
    crew.launch(*asked)
    completion = crew.next_one()
    assert completion.request_id == 1
    while not crew.workers._workers[0].ended:
        crew.act()
    (_, finished) = crew.workers._workers[0].ended[0]
    assert_whole(finished.sample, asked[0], 18)
    assert crew.abort(0, keep=True) == [(0, "abort", 9)]
