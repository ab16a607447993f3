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
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config import Config, ConfigError
from jaxrl.layout_log import FILE_NAME as LAYOUTS_FILE
from jaxrl.layout_log import LayoutLog
from jaxrl.layout_session import LayoutSession
from jaxrl.live import LiveView
from jaxrl.loop import Hooks, Loop, Together
from jaxrl.metrics import MetricsWriter
from jaxrl.report import write_report
from jaxrl.rules import batch_rule, carried, layout_control
from jaxrl.run_dir import SIMULATED, RunDir
from jaxrl.samples import SampleLog
from jaxrl.scheduling.batcher import BatcherConfig
from jaxrl.scheduling.engine import Engine
from jaxrl.sim.backend import RewardWorkers, SimulatedBackend
from jaxrl.sim.clock import SimulatedClock, SimulatedPhases, nanoseconds
from jaxrl.sim.configured import (
    cost_model,
    layout_predictor,
    layout_sizes,
    machine_sizes,
    model_sizes,
    num_devices_of,
    workload_of,
)
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.lockstep import LockstepBatcher
from jaxrl.sim.machine import Launched, MachineSizes, SimulatedExecutor
from jaxrl.sim.prompts import SimulatedPrompts
from jaxrl.sim.trainer import SimulatedTrainer
from jaxrl.sim.workload import Workload
from jaxrl.types import Group

STATE_FILE = "state.json"
STOP_TOKEN = 1  # what a response that is shorter than the limit ends with
_STATE_SCHEMA = 1


# ---------------------------------------------------------------- the pieces together


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated run, ready to go: `loop.run()`."""

    loop: Loop
    engine: Engine
    executor: SimulatedExecutor
    clock: SimulatedClock
    phases: SimulatedPhases
    layouts: LayoutSession | None = None


def build(
    config: Config,
    cost: CostModel,
    workload: Workload,
    hooks: Hooks,
    *,
    sizes: MachineSizes | None = None,
    layouts: Mapping[int, MachineSizes] | None = None,
    timeline: Path | None = None,
    layout_log: LayoutLog | None = None,
    on_progress: Callable[[int, int, int, int, int], None] = lambda *_: None,
) -> Simulation:
    """Puts a simulated run together.

    Args:
      cost, workload: the models.
      sizes: of the machine; by default those of the configuration, with nothing but weights beside the KV pool.
      layouts: sizes by TP degree, where `rollout.layout` adapts; by default in the same way.
      timeline: where to draw; None: nowhere. layout_log: where switches are kept; None: nowhere.
    """
    sizes = machine_sizes(config, cost) if sizes is None else sizes
    adapts = config.rollout.layout.adapts
    layouts = (layout_sizes(config, cost) if layouts is None else layouts) if adapts else {}
    clock = SimulatedClock()
    phases = SimulatedPhases(clock, timeline)
    launched = Launched(workload)

    def on_plan(plan: Any, result: Any, start_ns: int, end_ns: int) -> None:
        phases.complete("engine", "plan", start_ns, end_ns, rows=len(plan.decode), steps=result.num_steps)

    executor = SimulatedExecutor(sizes, launched.length, cost, clock, config.simulate.host_s, on_plan, layouts)
    batcher = BatcherConfig(decode_steps=config.rollout.decode_steps, max_model_len=config.max_model_length)
    engine = Engine(executor, batcher, batcher=LockstepBatcher)
    session = None
    if adapts:
        predictor = layout_predictor(config, cost, tuple(layouts))
        control = layout_control(config, engine, tuple(layouts), predictor)
        session = LayoutSession(control, lambda: clock.now_s, _SecondsDrawn(phases), layout_log, None, predictor)
    own = config.rollout.num_devices
    total = num_devices_of(config) if own else sizes.num_devices
    trainer = SimulatedTrainer(cost, total - own, clock)
    backend = SimulatedBackend(
        engine,
        executor,
        launched,
        RewardWorkers(config.reward.num_workers, config.reward.timeout_s),
        clock,
        cost.weight_sync_s(sizes.tp, sizes.num_devices),
        phases,
        on_sync=trainer.synced,
        on_progress=on_progress,
        interrupted=hooks.stop,
        layouts=session,
    )
    together = clock.together if own else None
    loop = _loop(config, workload, backend, trainer, phases, hooks, total, together)
    return Simulation(loop, engine, executor, clock, phases, session)


def _loop(
    config: Config,
    workload: Workload,
    backend: SimulatedBackend,
    trainer: SimulatedTrainer,
    phases: SimulatedPhases,
    hooks: Hooks,
    num_devices: int,
    together: Together | None,
) -> Loop:
    """The loop over prompts of `workload`, on a machine of so many devices."""
    data, trained = config.data, config.trainer
    num_prompts = config.simulate.num_prompts or data.task_size
    prompts = SimulatedPrompts(workload, num_prompts, data.max_prompt_length, data.seed, data.shuffle)
    return Loop(
        # stop strings need text, and there is none
        replace(config, rollout=replace(config.rollout, stop=[])),
        prompts,
        prompts.held_out(data.val_size) if trained.test_freq or trained.val_before_train else (),
        backend,
        trainer,
        phases,
        hooks,
        rule=batch_rule(config),
        stop_token_ids=(STOP_TOKEN,),
        total_steps=trained.total_training_steps or max(trained.total_epochs * num_prompts // data.train_batch_size, 1),
        num_devices=num_devices,
        together=together,
    )


@dataclass(frozen=True, slots=True)
class _SecondsDrawn:
    """`SimulatedPhases` for who tells the time in seconds."""

    phases: SimulatedPhases

    def complete(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        self.phases.complete(track, name, nanoseconds(start_s), nanoseconds(end_s), **args)

    def counter(self, track: str, **values: float) -> None:
        self.phases.counter(track, **values)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Lets Python look for garbage in cycles less often: a simulation holds many small objects for long, and looking
    through them takes a tenth of its time (2026-11-22, 128 devices, 1,600 requests a step)."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)


# ---------------------------------------------------------------- in a run directory


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


def dump_state(state: Mapping[str, Any]) -> str:
    """`Loop.host_state` as JSON, arrays included."""

    def array(value: Any) -> dict[str, Any]:
        if isinstance(value, np.ndarray):
            return {"array": value.dtype.str, "shape": value.shape, "values": value.ravel().tolist()}
        raise TypeError(f"host state: {type(value).__name__} is neither a JSON value nor an array")

    return json.dumps({"simulation": _STATE_SCHEMA, "state": state}, default=array)


def load_state(text: str, where: str) -> dict[str, Any]:
    """What `dump_state` wrote. Raises ValueError for anything else."""

    def array(value: dict[str, Any]) -> Any:
        if value.keys() == {"array", "shape", "values"}:
            return np.asarray(value["values"], np.dtype(value["array"])).reshape(value["shape"])
        return value

    try:
        found = json.loads(text, object_hook=array)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a simulation's state ({error})") from None
    if not isinstance(found, dict) or found.get("simulation") != _STATE_SCHEMA:
        raise ValueError(f"{where}: not a simulation's state of schema {_STATE_SCHEMA}; remove it to start again")
    return found["state"]


def _write(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    os.replace(draft, path)
