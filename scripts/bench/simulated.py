"""Simulated runs in memory, as `jaxrl simulate` makes them from the same options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxrl.config import Config
from jaxrl.runtime.simulation import Simulation, build, rare_collections
from jaxrl.sim.configured import cost_model, machine_sizes, model_sizes, workload_of

OnStep = Callable[[int, dict[str, float], Any], None]


def simulate(config: Config, on_step: OnStep, before: Callable[[Simulation], None] = lambda _: None) -> None:
    """Runs all steps. `on_step`: called with (step, metrics, groups); `before`: with what is about to run."""
    cost, _ = cost_model(config)
    workload, _ = workload_of(config)
    sizes = machine_sizes(config, cost, model_sizes(config))
    simulation = build(config, cost, workload, on_step=on_step, sizes=sizes)
    before(simulation)
    with rare_collections():
        simulation.loop.run()
