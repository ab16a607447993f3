"""Rounds on simulated devices: exact times done by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sim_machine import STOP, TINY, Machine, key, play, prompt, told

from jaxrl.config import SimulatedLengths, SimulatedTask
from jaxrl.scheduling.mechanism import RoundInfo
from jaxrl.scheduling.rounds.events import (
    Abort,
    Event,
    Launch,
    SampleAborted,
    SampleFinished,
    Verdict,
)
from jaxrl.scheduling.rounds.round import Round
from jaxrl.sim.workload import ModelledWorkload
from jaxrl.types import Prompt, SamplingParams


def play_round(machine: Machine, prompts: Sequence[Prompt] = (prompt(0), prompt(1))) -> list[Event]:
    """A round of two samples for each prompt."""
    machine.backend.enter_rollout(0)
    machine.backend.begin(RoundInfo(1), SamplingParams(max_tokens=50, stop_token_ids=(STOP,)))
    return play(Round(prompts, 2), machine.backend)


def test_a_tiny_round_by_hand():
    """Plan 0 prefills (10 s), which samples each first token, and decodes two steps: until 12. Plan 1, submitted at 0,
    runs two more until 14; plan 2, submitted at 12 when the host has seen plan 0, one until 15. The one reward worker
    starts at 12, as soon as the first response has been told."""
    machine = Machine(TINY)
    events = play_round(machine)
    assert told(events) == [
        (12.0, "finished", key(0, 0)),
        (12.0, "finished", key(1, 0)),
        (14.0, "finished", key(0, 1)),
        (15.0, "finished", key(1, 1)),
        (15.0, "verdict", key(0, 0)),
        (16.0, "verdict", key(1, 0)),
        (20.0, "verdict", key(0, 1)),
        (22.0, "verdict", key(1, 1)),
    ]
    assert [event.duration_s for event in events if isinstance(event, Verdict)] == [3.0, 1.0, 4.0, 2.0]
    measured = machine.backend.end()
    assert measured["rollout/decode_steps"] == 5
    assert measured["rollout/bubble_ratio"] == pytest.approx(1 - 12 / 20)
    assert (measured["reward/num_scored"], measured["reward/seconds"]) == (4, 10.0)
    assert machine.executor.num_tokens == 16


def test_a_response_resumed_later_keeps_the_length_it_had():
    growing = ModelledWorkload(
        0, (SimulatedTask(name="t", response=SimulatedLengths(median=8, sigma=0.0, growth=0.5)),), 50
    )
    assert (growing.length(key(0), 1), growing.length(key(0), 3)) == (12, 27)
    machine = Machine(growing)
    backend = machine.begin()
    backend.apply([Launch(prompt(0), (key(0),))])
    backend.apply([Launch(prompt(1), (key(1),))])
    for _ in range(3):
        backend._serve()
    backend.apply([Abort((key(0), key(1)), keep=True)])
    kept = [event.sample for event in (backend.wait(), backend.wait()) if isinstance(event, SampleAborted)]
    assert len(kept) == 2
    backend.end()
    backend = machine.begin(version=2)
    backend.apply([Launch(prompt(0), (key(0),), resumed=(kept[0],))])
    backend.apply([Launch(prompt(1), (key(1),))])
    events = [backend.wait(), backend.wait()]
    assert {e.sample.key: len(e.sample) for e in events if isinstance(e, SampleFinished)} == {key(0): 12, key(1): 27}
