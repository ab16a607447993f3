"""`jaxrl simulate`: the loop, engine, batcher and rules of a real run on modelled devices.

The training YAML says what is run; its section `simulate` names the machine and the lengths. The run directory has the
form of a real run's. Never imports jax. Departures from a real run: `jaxrl.run.simulation`; besides, the state at a
step boundary is one JSON file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np

from jaxrl.config import Config, ConfigError
from jaxrl.config.inputs import reading
from jaxrl.mechanisms import batch_rule, page_parts
from jaxrl.record.files import read_lines, write_whole
from jaxrl.record.run_dir import SIMULATED, RunDir, recorded_config
from jaxrl.record.run_record import RunOutcome, RunRecord
from jaxrl.record.state import dump_state, load_state
from jaxrl.run.run import carried
from jaxrl.run.simulation import build, rare_collections
from jaxrl.run.stop import Stop
from jaxrl.sim.configured import (
    cost_model,
    machine,
    num_devices_of,
    with_degree,
    with_simulated_hosts,
    worker_devices_of,
    workload_of,
)
from jaxrl.types import Group

STATE_FILE = "state.json"


def simulate(config: Config, say: Callable[[str], None] = print, stop: Stop | None = None) -> RunOutcome:
    """Runs (or resumes) the simulation that `config` describes; raises ValueError for what a user can mend. `stop`:
    the program's signals, if it has any: one ends the process, but not in the middle of a file."""
    stop = stop or Stop()
    config = with_simulated_hosts(config)
    batch_rule(config)  # its settings may be refused, and nothing is written then
    folder = folder_of(config)
    with closing(RunDir(folder, "simulate.run_dir", kind="simulate")) as run_dir:
        run_dir.refuse_other_kind()
        state = _earlier_state(run_dir)
        config, of_degree = _with_degree(config, folder)
        seconds = cost_model(config)[1]
        workload, lengths = workload_of(config)
        cost, layouts = machine(config)
        of_worker = {"num_devices": worker_devices_of(config), "tp": config.rollout.tp}
        of_worker |= asdict(layouts[config.rollout.tp])
        sources = {"cost_model": seconds, "workload": lengths}
        step = -1 if state is None else state["step"]
        on_hosts = f" on {config.hosts.num} hosts" if config.hosts.num > 1 else ""
        devices = f"{num_devices_of(config)} × {config.simulate.hardware}{on_hosts}"
        said = [f"simulating {devices}: all seconds below are simulated ones"]
        said += [f"  {note}" for note in (f"cost model: {seconds}", f"workload: {lengths}", of_degree) if note]
        said += _dropped(run_dir) if state is None else run_dir.resuming(run_dir.changes(config), step)
        with rare_collections(), RunRecord(config, run_dir, step, simulated=True) as record:  # no time to go

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
                with stop.held():  # the first writes: nothing about the start is refused any more
                    _record_start(config, run_dir, max(step, 0), sources | {"machine": of_worker})
                    for line in said:
                        say(line)
                    record.begin()
                    simulation.phases.begin()
                ended_s = [time.perf_counter()]  # the start, then each step's end
                finished = loop.run()
        from jaxrl.report.page import write_report

        with stop.held():
            report = write_report(run_dir.path, parts=page_parts())
        took_s = np.diff(ended_s)
        spread = f"{np.median(took_s):.2f} s median, {max(took_s):.2f} s at most" if len(took_s) else "none run"
        summary = {
            "simulated run": str(run_dir.path),
            "steps": f"{loop.step} of {loop.total_steps}",
            **carried(loop.rule.name, loop.num_carried),
            "simulated time": f"{simulation.clock.now_s:.0f} s",
            "wall clock per step": spread,
            "report": str(report),
        }
        record.view.final_table(summary)
        return RunOutcome(loop.step, finished, summary)


def folder_of(config: Config) -> str:
    """The folder to write. Raises ConfigError if there is none."""
    folder = config.simulate.run_dir or (config.trainer.run_dir and config.trainer.run_dir.rstrip("/") + "-simulated")
    if not folder:
        raise ConfigError("simulate.run_dir is missing (as is trainer.run_dir): give the folder to write to")
    return folder


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


def _dropped(run_dir: RunDir) -> list[str]:
    """The message when an earlier simulation's metrics are there, and not its state."""
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
    name = config.trainer.experiment_name or run_dir.path.name
    if SIMULATED not in name:
        name += f" ({SIMULATED})"
    shown = config.replace(trainer=config.trainer.replace(experiment_name=name))
    kind = f"{config.simulate.hardware} ({SIMULATED})"
    devices = {"platform": SIMULATED, "kind": kind, "count": num_devices_of(config)}
    run_dir.record_start(shown, devices, step, checkpoint=step or None, simulation=sources)
