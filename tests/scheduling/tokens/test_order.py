"""One order over several workers: what may be told, and when; who gets which request."""

from __future__ import annotations

import random

import pytest

from jaxrl.scheduling.tokens.order import Deal, End, Ledger, Order, Place, Report, merged


def end(request_id: int, tick: int, worker: int, dispatch: int = 0, slot: int = 0) -> End:
    return End(request_id, Place(tick, worker, dispatch, 0, slot), 5, "stop")


def build(
    num_workers: int = 2, num_requests: int = 0, lookahead: int = 10, deal: Deal = "tokens"
) -> tuple[Ledger, Order]:
    """Requests with as many tokens each, dealt to the workers in turn."""
    ledger = Ledger(num_workers, lookahead, deal)
    order = Order(ledger)
    for request_id in range(num_requests):
        launch(ledger, order, request_id)
    return ledger, order


def launch(ledger: Ledger, order: Order, request_id: int, limit: int = 7, prompt: int | None = None) -> int:
    home = ledger.launch(request_id, (0, request_id if prompt is None else prompt), limit)
    order.launched(request_id)
    return home.worker


def tell(ledger: Ledger, order: Order, one: End | None) -> int | None:
    """Handles an end as a round does."""
    if one is None:
        return None
    ledger.now = one.place.tick
    if ledger.leave(one.request_id) is not None:
        order.cleared(one.place.worker)
    return one.request_id


def test_requests_are_dealt_by_the_tokens_that_they_may_take():
    ledger, order = build(3)
    assert [launch(ledger, order, i, limit) for i, limit in enumerate((40, 10, 20, 5, 10, 1))] == [0, 1, 2, 1, 1, 2]
    assert [ledger.outstanding(worker) for worker in range(3)] == [40, 25, 21]
    ledger.leave(0)
    assert launch(ledger, order, 9) == 0


def test_a_prompts_requests_stay_together():
    ledger, order = build(2, deal="prompts")
    assert [launch(ledger, order, i, prompt=i // 3) for i in range(6)] == [0, 0, 0, 1, 1, 1]


def test_an_end_is_told_once_nothing_earlier_may_come():
    ledger, order = build(2, 4)
    assert order.floor() == 10, "both begin at the tick of their first request"
    order.report(Report(0, 0, 30, (end(0, 20, 0), end(2, 30, 0))))
    assert order.next() is None
    assert (order.floor(), order.slowest()) == (10, 1)
    order.report(Report(1, 0, 19))
    assert order.next() is None
    order.report(Report(1, 0, 20, (end(1, 20, 1),)))
    assert tell(ledger, order, order.next()) == 0, "of one tick, the lower worker's comes first"
    assert tell(ledger, order, order.next()) == 1
    assert order.next() is None
    assert order.floor() == 20
    order.report(Report(1, 0, 31, (end(3, 31, 1),)))
    assert [tell(ledger, order, order.next()) for _ in range(3)] == [2, 3, None]
    assert (ledger.num_live, order.slowest(), order.floor()) == (0, None, 31)


def test_a_worker_that_begins_again_is_waited_for_from_its_first_request_on():
    """Worker 1 is done at 20. What is launched then may end there after 30, and not before."""
    ledger, order = build(2, 3)
    order.report(Report(1, 0, 20, (end(1, 20, 1),)))
    order.report(Report(0, 0, 41, (end(0, 25, 0), end(2, 41, 0))))
    assert tell(ledger, order, order.next()) == 1
    assert launch(ledger, order, 7) == 1
    assert tell(ledger, order, order.next()) == 0
    assert order.next() is None
    order.report(Report(1, 0, 99, (end(7, 99, 1),)))
    assert order.next() is None, "that report was written before the stretch ended"
    order.report(Report(1, 1, 40, (end(7, 40, 1),)))
    assert [tell(ledger, order, order.next()) for _ in range(3)] == [7, 2, None]


def test_what_was_aborted_is_told_no_more():
    ledger, order = build(2, 4)
    order.report(Report(0, 0, 30, (end(0, 20, 0),)))
    order.gone(0, 0)
    assert ledger.leave(0) is None
    order.report(Report(1, 0, 50, (end(1, 40, 1), end(3, 50, 1))))
    order.gone(3, 1)
    ledger.leave(3)
    order.report(Report(0, 0, 60, (end(2, 60, 0),)))
    assert [tell(ledger, order, order.next()) for _ in range(3)] == [1, 2, None]


@pytest.mark.parametrize("seed", range(30))
def test_reports_in_any_order_give_one_order(seed: int):
    """Each worker's reports come in its order, those of different workers in any."""
    rng = random.Random(seed)
    _, order = build(4, 60)
    mine = {worker: [i for i in range(60) if i % 4 == worker] for worker in range(4)}
    reports: dict[int, list[Report]] = {}
    for worker, ids in mine.items():
        tick, reports[worker] = 10, []
        for dispatch in range(len(ids)):
            tick += rng.randrange(1, 9)
            reports[worker].append(Report(worker, 0, tick, (end(ids[dispatch], tick, worker, dispatch),)))
    told: list[End] = []
    while any(reports.values()):
        worker = rng.choice([worker for worker, left in reports.items() if left])
        told += merged(order, [reports[worker].pop(0)])
    assert len(told) == 60
    assert [one.place for one in told] == sorted(one.place for one in told)


@pytest.mark.parametrize("sizes", [(0, 5), (2, 0)])
def test_refusals(sizes: tuple[int, int]):
    with pytest.raises(ValueError, match=r"workers \(\d\) and lookahead \(\d ticks\) must be >= 1"):
        Ledger(*sizes)
