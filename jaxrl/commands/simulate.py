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
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config import Config, ConfigError
from jaxrl.loop import Hooks
from jaxrl.record.layouts import FILE_NAME as LAYOUTS_FILE
from jaxrl.record.layouts import LayoutLog
from jaxrl.record.live import LiveView
from jaxrl.record.metrics import MetricsWriter
from jaxrl.record.run_dir import SIMULATED, RunDir
from jaxrl.record.samples import SampleLog
from jaxrl.record.state import dump_state, load_state
from jaxrl.report.page import write_report
from jaxrl.runtime.layout_session import LayoutSession
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
    run_dir = RunDir(folder)
    try:
        run_dir.refuse_other_kind(simulated=True, option="simulate.run_dir")
        say(f"simulating {num_devices_of(config)} × {config.simulate.hardware}: all seconds below are simulated ones")
        for name in ("cost_model", "workload"):
            say(f"  {name.replace('_', ' ')}: {sources[name]}")
        return _Run(config, run_dir, sources, say).go(cost, workload, sizes, layouts)
    finally:
        run_dir.close()


@dataclass(slots=True)
class _Run:
    """A simulated run in its directory; the methods are hooks of the loop."""

    config: Config
    run_dir: RunDir
    sources: dict[str, Any]
    say: Callable[[str], None]
    wall_s: list[float] = field(default_factory=list)
    evaluated: dict[str, float] = field(default_factory=dict)  # of the step that is running
    began_s: float = 0.0

    def go(
        self, cost: CostModel, workload: Workload, sizes: MachineSizes, layouts: Mapping[int, MachineSizes]
    ) -> Outcome:
        state = self._read_state()
        step = 0 if state is None else int(state["step"])
        if state is not None:
            self.say(f"resuming {self.run_dir.path} after step {step}")
            for change in self.run_dir.changes(self.config):
                self.say(f"  changed since: {change}")
        self._record_start(sizes, step)
        resume_step = -1 if state is None else step
        with ExitStack() as stack:
            stack.enter_context(rare_collections())
            # no total: what it would say of the time to go are simulated seconds
            view = stack.enter_context(closing(LiveView(0, sys.stdout)))
            writer = stack.enter_context(closing(MetricsWriter(self.run_dir.path, resume_step=resume_step)))
            samples = stack.enter_context(closing(SampleLog(self.run_dir.file("samples.jsonl"), resume_step)))
            hooks = Hooks(
                on_phase=lambda _, name: view.phase(name),
                on_step=lambda step, measured, groups: self._on_step(step, measured, groups, writer, samples, view),
                on_eval=lambda step, measured, groups: self._on_eval(step, measured, writer),
                save=lambda step, state: self._save(step, state, simulation.layouts),
                stop=lambda: False,
            )
            simulation = build(
                self.config,
                cost,
                workload,
                hooks,
                sizes=sizes,
                layouts=layouts,
                timeline=self.run_dir.file("timeline.json"),
                layout_log=LayoutLog(self.run_dir.file(LAYOUTS_FILE), resume_step),
            )
            stack.enter_context(closing(simulation.phases))
            if state is not None:
                if simulation.layouts is not None:
                    simulation.layouts.load_state_dict(state.get("layouts", {}))
                simulation.loop.load_host_state(state)
            self.began_s = time.perf_counter()
            simulation.loop.run()
            report = write_report(self.run_dir.path)
            summary = self._summary(simulation, report)
            view.final_table(summary)
        return Outcome(simulation.loop.step, summary, report, self.wall_s)

    def _summary(self, simulation: Simulation, report: Path) -> dict[str, Any]:
        seconds = (
            f"{np.median(self.wall_s):.2f} s median, {max(self.wall_s):.2f} s at most" if self.wall_s else "none run"
        )
        return {
            "simulated run": str(self.run_dir.path),
            "steps": f"{simulation.loop.step} of {simulation.loop.total_steps}",
            **carried(simulation.loop.rule.name, simulation.loop.num_carried),
            "simulated time": f"{simulation.clock.now_s:.0f} s",
            "wall clock per step": seconds,
            "report": str(report),
        }

    def _on_step(
        self,
        step: int,
        measured: dict[str, float],
        groups: Sequence[Group],
        writer: MetricsWriter,
        samples: SampleLog,
        view: LiveView,
    ) -> None:
        measured = measured | self.evaluated | {"simulated": 1}
        self.evaluated = {}
        writer.write(step, measured)
        samples.write(step, groups)
        view.step(step, measured)
        now = time.perf_counter()
        self.wall_s.append(now - self.began_s)
        self.began_s = now

    def _on_eval(self, step: int, measured: dict[str, float], writer: MetricsWriter) -> None:
        if step == 0:
            writer.write(0, measured | {"simulated": 1})
        else:
            self.evaluated = measured

    def _record_start(self, sizes: MachineSizes, step: int) -> None:
        """As for a real run, and which models the numbers come from."""
        name = self.config.trainer.experiment_name or self.run_dir.path.name
        if SIMULATED not in name:
            name += f" ({SIMULATED})"
        shown = replace(self.config, trainer=replace(self.config.trainer, experiment_name=name))
        kind = f"{self.config.simulate.hardware} ({SIMULATED})"
        self.run_dir.record_start(
            shown, {"platform": SIMULATED, "kind": kind, "count": num_devices_of(self.config)}, step
        )
        file = self.run_dir.file("run.json")
        record = json.loads(file.read_text()) | {"simulation": self.sources | {"machine": dataclasses.asdict(sizes)}}
        _write(file, json.dumps(record, indent=1))

    def _save(self, step: int, state: Mapping[str, Any], layouts: LayoutSession | None) -> None:
        if layouts is not None:
            state = {**state, "layouts": layouts.state_dict()}
        _write(self.run_dir.file(STATE_FILE), dump_state(state))

    def _read_state(self) -> dict[str, Any] | None:
        file = self.run_dir.file(STATE_FILE)
        return load_state(file.read_text(), str(file)) if file.exists() else None


def _write(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    os.replace(draft, path)
