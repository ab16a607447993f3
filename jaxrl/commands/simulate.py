"""A simulated run from its configuration: the loop, engine, batcher and rules of a real run on modelled devices.

Purpose: `jaxrl simulate`. The training YAML says what is run; its section `simulate` names the machine and the lengths.
`jaxrl.runtime.simulation.build` puts the pieces together, and `simulate` runs them in a run directory of the same form
as a real run's. Never imports jax.

Source: docs/architecture.md. Departures from a real run: prompts have lengths but no text, and their order is not
grain's; losses and gradients do not exist; the state at a step boundary is one JSON file; evaluation draws prompts
beside the training ones, `data.val_size` of them; weights for devices of the rollout's own are charged as if they lay
there already, split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from jaxrl.config import Config, ConfigError
from jaxrl.config.inputs import reading
from jaxrl.mechanisms import batch_rule, page_parts
from jaxrl.record.files import read_lines, write_whole
from jaxrl.record.run_dir import SIMULATED, RunDir, recorded_config
from jaxrl.record.run_record import RunOutcome, RunRecord
from jaxrl.record.state import dump_state, load_state
from jaxrl.runtime.rules import carried
from jaxrl.runtime.simulation import build, rare_collections
from jaxrl.runtime.stop import Stop
from jaxrl.sim.configured import (
    cost_model,
    layout_sizes,
    machine_sizes,
    model_sizes,
    num_devices_of,
    with_degree,
    with_simulated_hosts,
    worker_devices_of,
    workload_of,
)
from jaxrl.sim.cost_model import CostModel
from jaxrl.sim.executor import MachineSizes
from jaxrl.sim.workload import Workload
from jaxrl.types import Group

STATE_FILE = "state.json"


def simulate(config: Config, say: Callable[[str], None] = print, stop: Stop | None = None) -> RunOutcome:
    """Runs (or resumes) the simulation that `config` describes; raises ValueError for what a user can mend.

    Args:
      stop: the program's signals, if it has any: one ends the process, but not in the middle of a file.
    """
    stop = stop or Stop()
    config = with_simulated_hosts(config)
    batch_rule(config)  # its settings may be refused, and nothing is written then
    folder = config.simulate.run_dir or (config.trainer.run_dir and config.trainer.run_dir.rstrip("/") + "-simulated")
    if not folder:
        raise ConfigError("simulate.run_dir is missing (as is trainer.run_dir): give the folder to write to")
    with closing(RunDir(folder, "simulate.run_dir", kind="simulate")) as run_dir:
        run_dir.refuse_other_kind()
        state = _earlier_state(run_dir)
        config, of_degree = _with_degree(config, folder)
        cost, cost_source = cost_model(config)
        workload, workload_source = workload_of(config)
        sizes = machine_sizes(config, cost, model_sizes(config))
        layouts = layout_sizes(config, cost, model_sizes(config))
        sources = {"cost_model": cost_source, "workload": workload_source, "host_s": config.simulate.host_s}
        step = 0 if state is None else state["step"]
        machine = f"{num_devices_of(config)} × {config.simulate.hardware}"
        machine += f" on {config.hosts.num} hosts" if config.hosts.num > 1 else ""
        said = [
            f"simulating {machine}: all seconds below are simulated ones",
            *(f"  {name.replace('_', ' ')}: {sources[name]}" for name in ("cost_model", "workload")),
            *([f"  {of_degree}"] if of_degree else []),
            *(_started_again(run_dir) if state is None else run_dir.resuming(run_dir.changes(config), step)),
        ]

        def begin() -> None:
            _record_start(config, run_dir, step, sources | {"machine": asdict(sizes)})
            for line in said:
                say(line)

        return _run(config, run_dir, state, cost, workload, sizes, layouts, begin, stop)


def _earlier_state(run_dir: RunDir) -> dict[str, Any] | None:
    """Where an earlier start in the directory has come to; None: there was none."""
    file = run_dir.file(STATE_FILE)
    if not file.exists():
        return None
    with reading(file):
        state = load_state(file.read_text(encoding="utf-8"), str(file))
    if not isinstance(state.get("step"), int):
        raise ValueError(f"{file}: a simulation's state without its step; remove it to start again")
    return state


def _started_again(run_dir: RunDir) -> list[str]:
    """What to say where an earlier simulation's metrics are there, and not its state."""
    steps = len(read_lines(run_dir.file("metrics.jsonl")))
    return [f"{run_dir.path} has no {STATE_FILE}: its {steps} lines of metrics are dropped"] if steps else []


def _with_degree(config: Config, folder: str) -> tuple[Config, str]:
    """The configuration with a number in place of rollout.tensor_model_parallel_size=auto, and what to say of it: that
    of an earlier start in `folder`, or the fastest."""
    if not config.is_tp_open:
        return config, ""
    kept = config.with_tp_of(recorded_config(folder), worker_devices_of(config.with_tp(1)))
    if kept.is_tp_open:
        return with_degree(config)
    return kept, f"rollout.tensor_model_parallel_size: auto stays {kept.rollout.tp}, as this run began"


def _record_start(config: Config, run_dir: RunDir, step: int, sources: Mapping[str, Any]) -> None:
    """Records what a real run records, and which models the numbers come from."""
    name = config.trainer.experiment_name or run_dir.path.name
    if SIMULATED not in name:
        name += f" ({SIMULATED})"
    shown = replace(config, trainer=replace(config.trainer, experiment_name=name))
    kind = f"{config.simulate.hardware} ({SIMULATED})"
    devices = {"platform": SIMULATED, "kind": kind, "count": num_devices_of(config)}
    run_dir.record_start(shown, devices, step, checkpoint=step or None, simulation=sources)


def _run(
    config: Config,
    run_dir: RunDir,
    state: Mapping[str, Any] | None,
    cost: CostModel,
    workload: Workload,
    sizes: MachineSizes,
    layouts: Mapping[int, MachineSizes],
    begin: Callable[[], None],
    stop: Stop,
) -> RunOutcome:
    """The simulation; `begin` writes what a start writes, when nothing can be refused any more."""
    opened = RunRecord(config, run_dir, -1 if state is None else state["step"], simulated=True)  # no time to go
    with rare_collections(), opened as record:

        def on_step(step: int, measured: dict[str, float], groups: Sequence[Group]) -> None:
            record.on_step(step, measured, groups)
            ended_s.append(time.perf_counter())

        def save(step: int, state: Mapping[str, Any]) -> None:
            with stop.held():
                write_whole(run_dir.file(STATE_FILE), dump_state(state))
                run_dir.record_checkpoint(step)

        simulation = build(
            config,
            cost,
            workload,
            sizes=sizes,
            layouts=layouts,
            timeline=run_dir.file("timeline.json"),
            layout_log=record.layouts,
            on_phase=record.on_phase,
            on_step=on_step,
            on_eval=record.on_eval,
            save=save,
        )
        loop = simulation.loop
        with closing(simulation.phases):
            if state is not None:
                loop.load_host_state(state)
            with stop.held():
                begin()
                record.begin()
                simulation.phases.begin()
            ended_s = [time.perf_counter()]  # the start, then each step's end
            finished = loop.run()
    from jaxrl.report.page import write_report

    with stop.held():
        report = write_report(run_dir.path, parts=page_parts())
    summary = {
        "simulated run": str(run_dir.path),
        "steps": f"{loop.step} of {loop.total_steps}",
        **carried(loop.rule.name, loop.num_carried),
        "simulated time": f"{simulation.clock.now_s:.0f} s",
        "wall clock per step": _spread(np.diff(ended_s)),
        "report": str(report),
    }
    record.view.final_table(summary)
    return RunOutcome(loop.step, finished, summary, report)


def _spread(seconds: np.ndarray) -> str:
    return f"{np.median(seconds):.2f} s median, {max(seconds):.2f} s at most" if len(seconds) else "none run"
