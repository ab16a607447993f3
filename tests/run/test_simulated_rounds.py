"""Rounds on simulated devices."""

from __future__ import annotations

from sim_machine import Machine, key, prompt

from jaxrl.config import SimulatedLengths, SimulatedTask
from jaxrl.scheduling.rounds.events import Abort, Launch, SampleAborted, SampleFinished
from jaxrl.sim.workload import ModelledWorkload


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
