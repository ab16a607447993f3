"""The order of arrival is written down, and repeated from the journal."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from checked_workers import asked, build, run

from jaxrl.record.journal import Journal
from jaxrl.run.arrival import ArrivalOrder
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.tokens.engine import Finished
from jaxrl.scheduling.tokens.local_workers import LocalWorkers
from jaxrl.scheduling.tokens.plan import Ticket

LENGTHS = [5, 30, 12, 44, 9, 60, 3, 21]


def delivered(order: ArrivalOrder, step: int) -> list[tuple[int, int]]:
    """Requests and dispatch numbers as they are delivered in a round."""
    workers, _ = build(asked(len(LENGTHS)), LENGTHS, num_workers=3)
    workers = LocalWorkers(workers.engines, arrival=order)
    order.round_begins(RoundInfo(step))
    for request in asked(len(LENGTHS)):
        workers.add(request)
    found: list[Finished] = []
    while not workers.is_idle:
        found += workers.step()
    run(workers)
    return [(one.request_id, one.dispatch) for one in found]


def test_a_round_that_runs_again_has_the_order_of_the_journal(tmp_path: Path):
    draw, file = random.Random(1), tmp_path / "journal.jsonl"

    def first_done(tickets: Mapping[int, Ticket]) -> int:
        return draw.choice(list(tickets))

    journal = Journal(file, 0)
    first, second = (delivered(ArrivalOrder(first_done, journal), step) for step in (1, 2))
    assert first != second, "another clock, another order"
    journal.close()
    again = Journal(file, 0)
    assert delivered(ArrivalOrder(lambda tickets: 1 // 0, again), 1) == first, "no clock is asked"
    assert delivered(ArrivalOrder(lambda tickets: 1 // 0, again), 2) == second
    assert delivered(ArrivalOrder(first_done, again), 3) != first
    again.close()


def test_what_the_journal_has_not_is_decided_and_written(tmp_path: Path):
    """Cut off in the middle of a round: the part that is there is repeated, and the rest follows the clock."""
    journal, half = Journal(tmp_path / "whole.jsonl", 0), Journal(tmp_path / "half.jsonl", 0)
    whole = delivered(ArrivalOrder(min, journal), 1)
    entries = journal.entries(1, "arrival")
    for number, entry in enumerate(entries[: len(entries) // 2]):
        half.append(1, "arrival", (0, number), {"worker": entry["worker"]})
    assert delivered(ArrivalOrder(min, half), 1) == whole
    assert half.entries(1, "arrival") == entries
    journal.close()
    half.close()
