"""Turns of simulated runs: how many there are, how long tools take, and what rules make of slow ones."""

from __future__ import annotations

import math
from statistics import mean, median
from typing import Any

import numpy as np
import pytest

from jaxrl.config.simulation import SimulatedTool
from jaxrl.sim.clock import SimulatedClock, SimulatedPhases
from jaxrl.sim.turns import SimulatedTools, TurnModel
from jaxrl.types import Prompt, SampleKey

KEYS = [SampleKey(0, i, j) for i in range(400) for j in range(5)]
PROMPT = Prompt(0, 0, (1,), "", "x")


def model_of(longest: int = 10_000, **tool: Any) -> TurnModel:
    return TurnModel(SimulatedTool(**tool), 3, lambda key, step: 100 + 10 * key.sample_index + step, longest)


def ends_of(model: TurnModel, key: SampleKey, step: int = 1) -> list[int]:
    kept, ends = 0, []
    for _ in range(model.num_turns(key)):
        ends.append(model.end(key, step, kept))
        kept = ends[-1] + model.tool.answer_tokens
    return ends


@pytest.mark.parametrize("turns", [1.0, 3.0, 20.0])
def test_responses_are_cut_into_so_many_turns(turns: float):
    model = model_of(turns=turns, answer_tokens=7)
    counts = [model.num_turns(key) for key in KEYS]
    assert mean(counts) == pytest.approx(turns, rel=0.05)
    assert np.var(counts) == pytest.approx(turns - 1, rel=0.15, abs=1e-9), "Poisson, and the first"
    for key, count in zip(KEYS[:50], counts, strict=False):
        ends = ends_of(model, key)
        assert ends[-1] == 101 + 10 * key.sample_index + 7 * (count - 1), "its tokens and its answers'"
        own = np.diff([0, *ends]) - [0, *[7] * (count - 1)]
        assert own.min() >= own.max() - 1
        assert [model.end(key, 1, end - 1) for end in ends] == ends, "cut off within a turn, it ends where it would"


def tools_of(num_workers: int = 1000, **tool: Any) -> tuple[SimulatedTools, SimulatedClock, list[int | None]]:
    clock, verdict = SimulatedClock(), [None]
    model = model_of(**tool)
    tools = SimulatedTools(model, num_workers, clock, SimulatedPhases(clock, None), lambda: verdict[0])
    return tools, clock, verdict  # pyright: ignore[reportReturnType]


def test_answers_take_lognormal_seconds():
    tools, clock, _ = tools_of(num_workers=len(KEYS), median_s=0.2, sigma=1.98, turns=2.0)
    for key in KEYS:
        tools.submit(key, PROMPT, "", None)
    came: list[float] = []
    done = []
    while len(came) < len(KEYS):
        found = tools.completed(1.0)
        assert found
        assert all(each.seconds == pytest.approx(clock.now_s) for each in found)
        came += [clock.now_s] * len(found)
        done += [each.done for each in found]
    assert median(came) == pytest.approx(0.2, rel=0.1)
    assert np.quantile(came, 0.99) == pytest.approx(20, rel=0.4)
    assert np.mean(done) == pytest.approx(math.exp(-1), abs=0.04), "those with one turn"


def test_a_worker_answers_one_turn_at_a_time_and_a_verdict_ends_a_wait():
    tools, clock, verdict = tools_of(num_workers=1, median_s=1.0)
    for key in KEYS[:3]:
        tools.submit(key, PROMPT, "", b"1")
    tools.cancel(KEYS[1:2])
    verdict[0] = 500_000_000
    assert tools.completed(1.0) == []
    assert clock.now_s == 0.5
    verdict[0] = None
    assert [each.key for each in tools.completed(1.0)] == [KEYS[0]]
    assert tools.completed(1.0) == []
    assert [each.key for each in tools.completed(1.0)] == [KEYS[2]]
    assert clock.now_s == 3.0
