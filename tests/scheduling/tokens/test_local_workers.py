"""Several workers that look like one, over replayed lengths with a shadow of the KV cache
(`tests/support/checking.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from checked_workers import SMALL, asked, build, by_worker, requests_of, run, started
from checking import assert_empty, assert_whole, make_engine, make_request
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.scheduling.layouts.relayout import SwitchFailed
from jaxrl.scheduling.tokens.engine import Finished
from jaxrl.scheduling.tokens.local_workers import PREFILL_TOKENS_PER_STEP, Deal, LocalWorkers
from jaxrl.scheduling.tokens.plan import Request
from jaxrl.scheduling.tokens.progress import PlanTimes

# ---------------------------------------------------------------- dealing


@pytest.mark.parametrize(
    ("deal", "expected"), [("tokens", [(0, 2, 4), (1, 3, 5)]), ("prompts", [(0, 1, 4, 5), (2, 3)])]
)
def test_requests_are_dealt(deal: Deal, expected: list[tuple[int, ...]]):
    requests = [make_request(i, prompt=i // 2, sample=i % 2, share=True) for i in range(6)]
    workers = started(requests, [5] * 6, deal=deal)
    assert by_worker(workers) == expected
    assert workers.unfinished() == (0, 1, 2, 3, 4, 5)
    assert [[i for i in range(6) if workers.worker_of(i) == worker] for worker in (0, 1)] == list(map(list, expected))
    assert workers.worker_of(6) is None


def test_what_a_request_may_still_take_is_what_counts():
    """A request of 3 + 40 tokens outweighs two of 3 + 15; once it has run for long, a waiting one outweighs it."""
    sizes = [40, 15, 15, 15, 15]
    requests = [make_request(i, max_tokens=most, prompt=i) for i, most in enumerate(sizes)]
    workers, _ = build(requests, sizes, num_slots=1)
    for request in requests[:4]:
        workers.add(request)
    assert by_worker(workers) == [(0,), (1, 2, 3)]
    assert [workers.outstanding(i) for i in range(2)] == [43, 54]
    while workers.engines[0].batcher.counters.steps < 28:
        workers.step()
    assert workers.outstanding(0) < 15 < 3 + 15 <= workers.outstanding(1)
    workers.add(requests[4])
    assert workers.engines[0].unfinished() == (0, 4)


# ---------------------------------------------------------------- logical time


def test_the_worker_whose_plan_should_end_first_is_served():
    """Plans of worker 0 cost 3, those of worker 1 cost 1: three of the one for each of the other. Each gets its next
    plan right after one of its own has been waited for."""
    requests = [make_request(i, max_tokens=90, prompt=i) for i in range(2)]
    of = {request.key: 90 for request in requests}
    engines = [make_engine(of)[0] for _ in range(2)]
    workers = LocalWorkers(engines, ticks=lambda worker, times: (3, 1)[worker] * times.num_steps)
    for request in requests:
        workers.add(request)
    waited, planned = list[int | None](), list[int | None]()
    while len(waited) < 12:
        turn = workers.next_worker()
        assert turn is not None
        (waited if workers.waits(turn) else planned).append(turn)
        workers.step()
    assert planned[:4] == [0, 1, 1, 0], "its devices run dry first"
    assert waited == [1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1]
    assert planned[4:] == waited[:-1]


def test_an_end_is_held_until_no_worker_can_bring_an_earlier_one():
    """Worker 1 is served less often: what ends in worker 0 waits until worker 1 has come as far."""
    workers = started(asked(2), [6, 11])
    delivered: list[tuple[int, int, int]] = []
    while not workers.is_idle:
        delivered += [(one.request_id, workers.tick(0), workers.tick(1)) for one in workers.step()]
    assert [one[0] for one in delivered] == [0, 1]
    (_, own, other), *_ = delivered
    assert other >= own == 3 + 4 * PREFILL_TOKENS_PER_STEP + 1 * PREFILL_TOKENS_PER_STEP


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3), st.integers(1, 45)), min_size=2, max_size=12))
def test_ends_are_told_by_tick_then_worker(drawn: list[tuple[int, int, int]]):
    """Workers whose steps cost 3, 2 and 1 ticks: the order is that of the sums of their plans' costs."""
    requests, lengths = requests_of(drawn)
    of = {request.key: length for request, length in zip(requests, lengths, strict=True)}
    costs: list[dict[int, int]] = [{}, {}, {}]

    def ticks(worker: int, times: PlanTimes) -> int:
        costs[worker][times.index] = (3, 2, 1)[worker] * times.num_steps + times.prefill_tokens
        return costs[worker][times.index]

    workers = LocalWorkers([make_engine(of, **SMALL)[0] for _ in costs], ticks=ticks)
    for request in requests:
        workers.add(request)
    home = {request_id: worker for worker, own in enumerate(by_worker(workers)) for request_id in own}
    order = [
        (sum(max(costs[worker][i], 1) for i in range(one.dispatch + 1)), worker, one.dispatch, one.dp_group, one.slot)
        for one in run(workers)
        for worker in (home[one.request_id],)
    ]
    assert len(order) == len(requests)
    assert order == sorted(order)


def test_an_idle_worker_starts_where_the_others_are():
    requests = asked(3)
    workers, _ = build(requests, [50, 2, 40])
    workers.add(requests[0])
    workers.add(requests[1])
    delivered: list[Finished] = []
    while not delivered or not workers.engines[1].is_idle:
        delivered += workers.step()
    behind, ahead = workers.tick(1), workers.tick(0)
    while workers.tick(0) < ahead + 2000:
        workers.step()
    assert workers.tick(1) == behind < workers.tick(0)
    workers.add(requests[2])
    assert workers.tick(1) == workers.tick(0)
    assert by_worker(workers) == [(0,), (2,)]
    run(workers)
    workers.add(make_request(9, prompt=0))
    assert [workers.tick(i) for i in range(2)] == [0, 0], "all were idle: a new beginning"


# ---------------------------------------------------------------- aborts, moves, closing


def check_rest(workers: LocalWorkers, requests: Sequence[Request], length: int) -> None:
    """All requests end once, whole."""
    delivered = run(workers)
    assert sorted(one.request_id for one in delivered) == list(range(len(requests)))
    for one in delivered:
        assert_whole(one.sample, requests[one.request_id], length)
    for engine in workers.engines:
        assert_empty(engine)


def test_requests_of_workers_that_leave_together_move_once():
    requests = asked(8)
    workers = started(requests, [40] * 8, steps=5, num_workers=4)
    assert by_worker(workers) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    num_rows = workers.num_rows
    assert [workers.close(worker, leaving=(0, 1)) for worker in (0, 1)] == [0, 0], "tokens alone"
    assert (workers.num_open, workers.num_rows, workers.is_open(1)) == (2, num_rows // 2, False)
    assert by_worker(workers)[:2] == [(), ()], "nothing of the first went to the second, and on from there"
    check_rest(workers, requests, 40)


def test_a_worker_whose_requests_cannot_move_stays_open(monkeypatch: pytest.MonkeyPatch):
    """The copy to worker 2 fails: what moved to worker 0 stays there, and all goes on."""
    requests = asked(9)
    workers = started(requests, [40] * 9, steps=6, num_workers=3)

    def fail(*_: Any) -> None:
        raise SwitchFailed("the link is down", is_usable=True)

    with monkeypatch.context() as patch:
        patch.setattr(workers.engines[2].executor, "accept_migration", fail)
        with pytest.raises(SwitchFailed, match="the link is down"):
            workers.close(1, "migrate")
    assert workers.is_open(1)
    assert by_worker(workers) == [(0, 3, 6, 1, 7), (4,), (2, 5, 8)]
    check_rest(workers, requests, 40)


def test_an_end_that_was_not_told_is_aborted():
    requests = asked(2)
    workers = started(requests, [2, 50])
    while 0 in workers.engines[0].unfinished():
        assert workers.step() == []
    assert workers.unfinished() == (1,)
    samples = workers.abort([1, 0])
    assert [sample.key for sample in samples] == [requests[1].key, requests[0].key]
    assert [sample.finish_reason for sample in samples] == ["abort", "abort"]
    assert len(samples[1]) == 2
    assert run(workers) == []
