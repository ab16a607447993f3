"""One sequence of events over several workers: what may be delivered, and when; who gets which request."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.scheduling.tokens.event_merger import (
    Completion,
    Deal,
    EventMerger,
    RequestPlacements,
    SortKey,
    WorkerProgress,
)


def completion(request_id: int, tick: int, worker: int, dispatch: int = 0, slot: int = 0) -> Completion:
    return Completion(request_id, SortKey(tick, worker, dispatch, 0, slot), 5, "stop")


def build(
    num_workers: int = 2, num_requests: int = 0, lookahead: int = 10, deal: Deal = "tokens"
) -> tuple[RequestPlacements, EventMerger]:
    """Requests with as many tokens each, dealt to the workers in turn."""
    placements = RequestPlacements(num_workers, lookahead, deal)
    merger = EventMerger(placements)
    for request_id in range(num_requests):
        launch(placements, merger, request_id)
    return placements, merger


def launch(
    placements: RequestPlacements, merger: EventMerger, request_id: int, limit: int = 7, prompt: int | None = None
) -> int:
    placement = placements.launch(request_id, (0, request_id if prompt is None else prompt), limit)
    merger.launched(request_id)
    return placement.worker


def deliver(placements: RequestPlacements, merger: EventMerger, one: Completion | None) -> int | None:
    """Handles a completion as a round does."""
    if one is None:
        return None
    placements.now = one.sort_key.tick
    if placements.remove(one.request_id) is not None:
        merger.became_idle(one.sort_key.worker)
    return one.request_id


def test_requests_are_dealt_by_the_tokens_that_they_may_take():
    placements, merger = build(3)
    workers = [launch(placements, merger, i, limit) for i, limit in enumerate((40, 10, 20, 5, 10, 1))]
    assert workers == [0, 1, 2, 1, 1, 2]
    assert [placements.outstanding(worker) for worker in range(3)] == [40, 25, 21]
    placements.remove(0)
    assert launch(placements, merger, 9) == 0


def test_a_prompts_requests_stay_together():
    placements, merger = build(2, deal="prompts")
    assert [launch(placements, merger, i, prompt=i // 3) for i in range(6)] == [0, 0, 0, 1, 1, 1]


def test_a_completion_is_delivered_once_nothing_earlier_may_come():
    placements, merger = build(2, 4)
    assert merger.low_watermark() == 10, "both begin at the tick of their first request"
    merger.add(WorkerProgress(0, 0, 30, (completion(0, 20, 0), completion(2, 30, 0))))
    assert merger.next() is None
    assert (merger.low_watermark(), merger.slowest()) == (10, 1)
    merger.add(WorkerProgress(1, 0, 19))
    assert merger.next() is None
    merger.add(WorkerProgress(1, 0, 20, (completion(1, 20, 1),)))
    assert deliver(placements, merger, merger.next()) == 0, "of one tick, the lower worker's comes first"
    assert deliver(placements, merger, merger.next()) == 1
    assert merger.next() is None
    assert merger.low_watermark() == 20
    merger.add(WorkerProgress(1, 0, 31, (completion(3, 31, 1),)))
    assert [deliver(placements, merger, merger.next()) for _ in range(3)] == [2, 3, None]
    assert (placements.num_live, merger.slowest(), merger.low_watermark()) == (0, None, 31)


def test_a_worker_that_begins_again_is_waited_for_from_its_first_request_on():
    """Worker 1 is done at 20. What is launched then may end there after 30, and not before."""
    placements, merger = build(2, 3)
    merger.add(WorkerProgress(1, 0, 20, (completion(1, 20, 1),)))
    merger.add(WorkerProgress(0, 0, 41, (completion(0, 25, 0), completion(2, 41, 0))))
    assert deliver(placements, merger, merger.next()) == 1
    assert launch(placements, merger, 7) == 1
    assert deliver(placements, merger, merger.next()) == 0
    assert merger.next() is None
    merger.add(WorkerProgress(1, 0, 99, (completion(7, 99, 1),)))
    assert merger.next() is None, "that report was sent before the busy period ended"
    merger.add(WorkerProgress(1, 1, 40, (completion(7, 40, 1),)))
    assert [deliver(placements, merger, merger.next()) for _ in range(3)] == [7, 2, None]


def test_what_was_aborted_is_not_delivered():
    placements, merger = build(2, 4)
    merger.add(WorkerProgress(0, 0, 30, (completion(0, 20, 0),)))
    merger.aborted(0, 0)
    assert placements.remove(0) is None
    merger.add(WorkerProgress(1, 0, 50, (completion(1, 40, 1), completion(3, 50, 1))))
    merger.aborted(3, 1)
    placements.remove(3)
    merger.add(WorkerProgress(0, 0, 60, (completion(2, 60, 0),)))
    assert [deliver(placements, merger, merger.next()) for _ in range(3)] == [1, 2, None]


@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_progress_in_any_order_gives_one_order(rng: random.Random):
    """Each worker's progress comes in its order, those of different workers in any."""
    _, merger = build(4, 60)
    mine = {worker: [i for i in range(60) if i % 4 == worker] for worker in range(4)}
    messages: dict[int, list[WorkerProgress]] = {}
    for worker, ids in mine.items():
        tick, messages[worker] = 10, []
        for dispatch in range(len(ids)):
            tick += rng.randrange(1, 9)
            ended = completion(ids[dispatch], tick, worker, dispatch)
            messages[worker].append(WorkerProgress(worker, 0, tick, (ended,)))
    delivered: list[Completion] = []
    while any(messages.values()):
        worker = rng.choice([worker for worker, left in messages.items() if left])
        merger.add(messages[worker].pop(0))
        while (one := merger.next()) is not None:
            delivered.append(one)
    assert len(delivered) == 60
    assert [one.sort_key for one in delivered] == sorted(one.sort_key for one in delivered)


@pytest.mark.parametrize("sizes", [(0, 5), (2, 0)])
def test_refusals(sizes: tuple[int, int]):
    with pytest.raises(ValueError, match=r"workers \(\d\) and lookahead \(\d ticks\) must be >= 1"):
        RequestPlacements(*sizes)
