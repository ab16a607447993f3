"""The thread that owns the engine, taken a plan at a time."""

from __future__ import annotations

import asyncio
import threading

import pytest
from served import WAITING

from jaxrl.scheduling.tokens.plan import Request
from jaxrl.serving.driver import Driver, Piece
from jaxrl.text import TextEngine
from jaxrl.types import SampleKey, SamplingParams


def request(number: int, max_tokens: int) -> Request:
    return Request(number, SampleKey(0, number, 0), (5, 6, 7), SamplingParams(temperature=0, max_tokens=max_tokens))


def num_ended(driver: Driver) -> int:
    """In one plan."""
    assert not driver._engine.is_idle
    return sum(isinstance(piece, Piece) and piece.finish_reason is not None for piece in driver._step().values())


@pytest.mark.parametrize("follow", [1, 2])
def test_the_next_plan_waits_a_moment_for_those_whose_answers_have_ended(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch, follow: int
):
    """For as many as have ended, and no longer than the moment is."""
    monkeypatch.setattr(Driver, "_run", lambda driver: None)  # this thread takes its place

    async def inside() -> None:
        driver = Driver(engine.engine, WAITING)
        driver.submit([request(0, 3), request(1, 3), request(9, 60)])
        assert driver._take_in()
        while num_ended(driver) < 2:
            pass
        assert driver._expected == 2
        driver._plan_s = 0.1 if follow == 1 else 1e4  # with one who does not come, the moment is soon over
        late = threading.Timer(0.05, driver.submit, [[request(3, 3)]])
        driver.submit([request(2, 3)])
        if follow == 2:
            late.start()
        assert driver._take_in()
        assert engine.engine.unfinished() == (9, 2, 3)[: 1 + follow]
        engine.engine.abort(engine.engine.unfinished())
        engine.engine.drain()

    asyncio.run(inside())
    assert engine.engine.is_idle


def test_the_first_plan_waits_a_moment_for_those_who_ask_at_once(engine: TextEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Driver, "_run", lambda driver: None)

    async def inside() -> None:
        driver = Driver(engine.engine, WAITING)
        driver._plan_s = 1e4
        requests = [request(number, 3) for number in range(driver.num_rows)]
        driver.submit(requests[:-1])
        threading.Timer(0.05, driver.submit, [requests[-1:]]).start()
        assert driver._take_in()
        assert len(engine.engine.unfinished()) == driver.num_rows
        engine.engine.abort(engine.engine.unfinished())
        engine.engine.drain()

    asyncio.run(inside())
