"""A simulated run from its configuration: the loop, engine, batcher and rules of a real run on modelled devices.

Purpose: `jaxrl simulate`. The training YAML says what is run, its section `simulate` on what and with which lengths;
`build` puts the pieces together (scripts may hand it a cost model and a workload of their own), `simulate` runs them in
a run directory of the same form as a real run's. Never imports jax.

Source: design §3 (two seams). Departures from a real run: prompts have lengths but no text, and their order is not
grain's; losses and gradients do not exist; the state at a step boundary is one JSON file; evaluation draws prompts
beside the training ones, `data.val_size` of them; weights that go to devices of the rollout's own are charged as if
they had been there, split.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config import Config, ConfigError
from jaxrl.loop import Hooks
from jaxrl.record.files import write_whole
from jaxrl.record.run_dir import SIMULATED, RunDir
from jaxrl.record.run_record import open_record
from jaxrl.record.state import dump_state, load_state
from jaxrl.report.page import write_report
from jaxrl.runtime.rules import carried
from jaxrl.runtime.simulation import Simulation, build, rare_collections
from jaxrl.sim.configured import (
    cost_model,
    layout_sizes,
    machine_sizes,
    model_sizes,
    num_devices_of,
    workload_of,
)
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.executor import MachineSizes
from jaxrl.sim.workload import Workload
from jaxrl.types import Group

STATE_FILE = "state.json"


@dataclass(slots=True)
class Outcome:
    """How a simulated run ended: the last step, the summary shown, the report, and wall-clock seconds per step."""

    step: int
    summary: dict[str, Any]
    report: Path
    wall_s: list[float]


def simulate(config: Config, say: Callable[[str], None] = print) -> Outcome:
    """Runs (or resumes) the simulation that `config` describes; raises ValueError for what a user can mend."""
    folder = config.simulate.run_dir or (config.trainer.run_dir and config.trainer.run_dir.rstrip("/") + "-simulated")
    if not folder:
        raise ConfigError("simulate.run_dir is missing (as is trainer.run_dir): give the folder to write to")
    cost, cost_source = cost_model(config)
    workload, workload_source = workload_of(config)
    sizes = machine_sizes(config, cost, model_sizes(config))
    layouts = layout_sizes(config, cost, model_sizes(config))
    sources = {"cost_model": cost_source, "workload": workload_source, "host_s": config.simulate.host_s}
    with closing(RunDir(folder)) as run_dir:
        run_dir.refuse_other_kind(simulated=True, option="simulate.run_dir")
        say(f"simulating {num_devices_of(config)} × {config.simulate.hardware}: all seconds below are simulated ones")
        for name in ("cost_model", "workload"):
            say(f"  {name.replace('_', ' ')}: {sources[name]}")
        return _Run(config, run_dir, sources, say).go(cost, workload, sizes, layouts)


@dataclass(slots=True)
class _Run:
    """A simulated run in its directory."""

    config: Config
    run_dir: RunDir
    sources: dict[str, Any]
    say: Callable[[str], None]

    def go(
        self, cost: CostModel, workload: Workload, sizes: MachineSizes, layouts: Mapping[int, MachineSizes]
    ) -> Outcome:
        file = self.run_dir.file(STATE_FILE)
        state = load_state(file.read_text(), str(file)) if file.exists() else None
        step = 0 if state is None else int(state["step"])
        if state is not None:
            for line in self.run_dir.resuming(self.run_dir.changes(self.config), step):
                self.say(line)
        self._record_start(sizes, step)
        # no total: what it would say of the time to go are simulated seconds
        opened = open_record(self.config, self.run_dir, -1 if state is None else step, simulated=True)
        with rare_collections(), opened as record:

            def on_step(step: int, measured: dict[str, float], groups: Sequence[Group]) -> None:
                record.on_step(step, measured, groups)
                ended_s.append(time.perf_counter())

            def save(step: int, state: Mapping[str, Any]) -> None:
                if simulation.layouts is not None:
                    state = {**state, "layouts": simulation.layouts.state_dict()}
                write_whole(file, dump_state(state))

            simulation = build(
                self.config,
                cost,
                workload,
                Hooks(record.on_phase, on_step, record.on_eval, save, stop=lambda: False),
                sizes=sizes,
                layouts=layouts,
                timeline=self.run_dir.file("timeline.json"),
                layout_log=record.layouts,
            )
            with closing(simulation.phases):
                if state is not None:
                    if simulation.layouts is not None:
                        simulation.layouts.load_state_dict(state.get("layouts", {}))
                    simulation.loop.load_host_state(state)
                ended_s = [time.perf_counter()]  # the start, then each step's end
                simulation.loop.run()
        report = write_report(self.run_dir.path)
        wall_s = np.diff(ended_s).tolist()
        summary = self._summary(simulation, wall_s, report)
        record.view.final_table(summary)
        return Outcome(simulation.loop.step, summary, report, wall_s)

    def _summary(self, simulation: Simulation, wall_s: list[float], report: Path) -> dict[str, Any]:
        seconds = f"{np.median(wall_s):.2f} s median, {max(wall_s):.2f} s at most" if wall_s else "none run"
        return {
            "simulated run": str(self.run_dir.path),
            "steps": f"{simulation.loop.step} of {simulation.loop.total_steps}",
            **carried(simulation.loop.rule.name, simulation.loop.num_carried),
            "simulated time": f"{simulation.clock.now_s:.0f} s",
            "wall clock per step": seconds,
            "report": str(report),
        }

    def _record_start(self, sizes: MachineSizes, step: int) -> None:
        """As for a real run, and which models the numbers come from."""
        name = self.config.trainer.experiment_name or self.run_dir.path.name
        if SIMULATED not in name:
            name += f" ({SIMULATED})"
        shown = replace(self.config, trainer=replace(self.config.trainer, experiment_name=name))
        kind = f"{self.config.simulate.hardware} ({SIMULATED})"
        devices = {"platform": SIMULATED, "kind": kind, "count": num_devices_of(self.config)}
        sources = self.sources | {"machine": dataclasses.asdict(sizes)}
        self.run_dir.record_start(shown, devices, step, simulation=sources)
