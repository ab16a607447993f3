"""The backend over replayed lengths and a pool that answers when it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from replayed_backend import LENGTHS, PARAMS, PROMPTS, Pool, begin, key, next_finished, opened

from jaxrl.run.backend import RolloutBackend
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.events import Abort, Interrupted, SampleAborted, Score, Verdict
from jaxrl.scheduling.rounds.round import Round
from jaxrl.types import Sample


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def num_workers(request: Any) -> int:
    return request.param


@pytest.fixture
def houses(tmp_path: Path, num_workers: int) -> Iterator[Any]:
    with opened(tmp_path, num_workers) as build:
        yield build


def test_a_stop_is_heard_while_no_event_comes(houses: Any):
    """A response may take as long as all others together: a stop must not wait for its end."""
    house = houses({key(0): 40}, Pool())
    house.run.stop = lambda: len(house.progress) >= 3
    round = Round.of([PROMPTS[0]], 1)
    house.backend.begin(RoundInfo(1), PARAMS)
    house.backend.apply(round.handle(house.backend.wait()))
    with pytest.raises(Interrupted):
        house.backend.wait()
    assert len(house.progress) == 3, "it ran on after the stop"
    house.backend.cancel()
    assert house.engine.is_idle


def next_aborted(backend: RolloutBackend) -> Sample:
    event = backend.wait()
    assert isinstance(event, SampleAborted)
    return event.sample


@pytest.mark.parametrize("num_workers", [1], indirect=True)  # which plan brings what is that of one
def test_abort_is_told_once_for_each_also_for_those_whose_end_was_still_to_be_told(houses: Any):
    house = houses({key(0, 0): 2, key(0, 1): 2, key(0, 2): 30}, Pool())
    keys = (key(0, 0), key(0, 1), key(0, 2))
    backend = begin(house, keys)
    first = next_finished(backend)
    assert first.key == keys[0]
    backend.apply([Abort(keys[1:])])  # the first of them has finished in the same plan
    untold, running = next_aborted(backend), next_aborted(backend)
    assert [(s.key, s.finish_reason) for s in (untold, running)] == [(k, "abort") for k in keys[1:]]
    assert (len(untold), len(running)) == (2, 5), "the tokens of the plan in flight are not waited for"
    house.engine.drain()
    assert house.engine.is_idle
    backend.apply([Score(PROMPTS[0], first)])
    verdict = backend.wait()
    assert isinstance(verdict, Verdict)
    assert verdict.key == keys[0]
    with pytest.raises(RuntimeError, match="nothing is running or being scored"):
        backend.wait()


def test_weights_and_memory_come_and_go(houses: Any):
    """Weights that no round has used are not brought again: a run compiles its programs with the first ones."""
    house = houses(LENGTHS, Pool())
    first = [("sync", "weights", 0), "allocate"]
    house.backend.enter_rollout(0)
    assert house.worker.calls == first
    house.run_round(PROMPTS, 2)
    house.backend.end()
    house.backend.enter_rollout(0)
    assert house.worker.calls == [*first, *first], "a round has begun with them"
    house.worker.calls.clear()
    house.backend.leave_rollout()
    house.backend.leave_rollout()
    house.backend.enter_rollout(1)
    house.backend.enter_rollout(2)
    second = [("sync", "weights", 1), "allocate", ("sync", "weights", 2), "allocate"]
    assert house.worker.calls == [("release", True), *second]
    round, _ = house.run_round(PROMPTS, 2, step=3)
    assert {v for g in round.groups() for s in g.samples for v in s.versions.tolist()} == {2}
