"""Runs of `papers.cases.Case`, their measurements, and results as dated files.

Purpose: `run_together` simulates cases with jaxrl's own loop, engine, batcher, block manager and rules
(`jaxrl.run.simulation.build`) and keeps a few numbers of each step. Pure but for the wall clock it took.

A stream trainer changes no group, and does nothing in short rounds. So a case without it runs once, and of the same
with it all other rounds, each from the state that the first had left; what the rule has learned of lengths is kept from
one to the next.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from jaxrl.config import Config
from jaxrl.mechanisms.stream_trainer import StreamTrainer
from jaxrl.record import run_dir
from jaxrl.record.state import dump_state, load_state
from jaxrl.run.simulation import Simulation, build
from jaxrl.sim.clock import nanoseconds
from jaxrl.sim.trainer import SimulatedStream
from jaxrl.types import Group, Sample
from papers.calibration import Calibration
from papers.cases import Case, configuration, models


@dataclass(slots=True)
class Steps:
    """What was measured: `values[name]` has one value per step (`_measured` names them)."""

    case: Case
    values: dict[str, list[Any]] = field(default_factory=dict)
    wall_s: float = 0.0
    preemptions: int = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """One more step."""
        for name, value in row.items():
            self.values.setdefault(name, []).append(value)

    def step(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self.values.items()}


def _measured(case: Case, found: Mapping[str, float], groups: Sequence[Group], drawn_tokens: int) -> dict[str, Any]:
    """Of a step, from its metrics, its groups, and the tokens that were drawn in it."""
    samples = [sample for group in groups for sample in group.samples]
    newest = max(int(sample.versions[-1]) for sample in samples)
    names = {"step_s": "step", "start_s": "sync", "gen_s": "gen", "reward_s": "reward"}
    seconds = {name: found.get(f"timing_s/{metric}", 0.0) for name, metric in names.items()}
    return {
        **seconds,  # start_s: of weights and of waking before a rollout
        "train_s": seconds["step_s"] - seconds["gen_s"] - seconds["reward_s"] - seconds["start_s"],
        "long": bool(found.get("rollout/long_round", 0.0)),
        "longest": found["response_length/max"],
        "mean_tokens": found["response_length/mean"],
        "drawn_tokens": drawn_tokens,  # by the engine, whatever becomes of them
        "trained_tokens": sum(map(len, samples)),
        "stale_share": found["training/off_policy/share"],  # of the batch's tokens: from earlier rollouts
        "stale_samples": sum(int(sample.versions[0]) < newest for sample in samples) / len(samples),
        "preempted": int(found.get("rollout/preemptions", 0.0)),
        "switches": int(found.get("rollout/layout/switches", 0.0)),
        "degrees": found.get("rollout/layout/final_tp", float(case.degree)),  # that rounds ended in
        "streamed": found.get("actor/streamed_share", 0.0),  # of prompts: gradients beside the rollout
        "freed_at": found.get("rollout/scale_down/done_share", 0.0),  # share of samples done then; 0: nothing was freed
        "moved": found.get("rollout/ranking/moved_share", 0.0),  # of responses, to another worker
        "idle": found.get("rollout/ranking/idle_share", 0.0),  # of the workers' time
        "accepted": found.get("rollout/spec/accept_rate", 0.0),  # of drafted tokens
        "drafted": found.get("rollout/spec/drafted_share", 0.0),  # of all tokens
        "per_step": found.get("rollout/spec/tokens_per_step", 1.0),  # tokens that a row gains
        "cut_off": found.get("reward/code/cut_off", 0.0),  # test cases that their time limit ended
        "scoring_s": found.get("reward/seconds", 0.0),  # of all scoring, added up
    }


# ---------------------------------------------------------------- simulating


def run_together(cases: Sequence[Case], calibration: Calibration) -> list[Steps]:
    """Simulates cases that differ in their stream trainer alone, the first without any."""
    first, *others = cases
    states: dict[int, str] = {}
    config, found = configuration(first, calibration), Steps(first)
    if others:
        config = config.replace(trainer=config.trainer.replace(save_freq=1))
    began = time.perf_counter()
    _built(config, calibration, found, lambda step, state: states.update({step: dump_state(state)})).loop.run()
    found.wall_s = time.perf_counter() - began
    return [found, *(_with_stream(case, found, states, calibration) for case in others)]


def _with_stream(case: Case, base: Steps, states: Mapping[int, str], calibration: Calibration) -> Steps:
    """The steps of `base`, all but its short rounds run again with a stream trainer. `states`: after each step."""
    found, learned, began = Steps(case), dict[str, Any](), time.perf_counter()
    config = configuration(case, calibration)
    for index, is_long in enumerate(base.values["long"]):
        if case.rule == "tail" and not is_long:
            found.add(base.step(index))
            continue
        only = config.replace(trainer=config.trainer.replace(total_training_steps=index + 1))
        simulation = _built(only, calibration, found)
        if index:
            simulation.loop.load_host_state(load_state(states[index], "what this run has left") | learned)
        simulation.loop.run()
        learned = {"stream": simulation.run.mechanism(StreamTrainer).state_dict()}
        trained = (steps.values["trained_tokens"][index] for steps in (found, base))
        assert len(set(trained)) == 1, "a stream trainer changes no group"
    found.wall_s = time.perf_counter() - began
    return found


def _built(
    config: Config,
    calibration: Calibration,
    found: Steps,
    save: Callable[[int, dict[str, Any]], object] = lambda *_: None,
) -> Simulation:
    """A simulation whose steps go to `found`."""
    case, drawn = found.case, 0

    def on_step(step: int, measured: dict[str, float], groups: Sequence[Group]) -> None:
        nonlocal drawn
        executors: Any = simulation.run.executors
        found.add(_measured(case, measured, groups, executors.num_tokens - drawn))
        found.preemptions += int(measured.get("rollout/preemptions", 0.0))
        drawn = executors.num_tokens

    feeding = partial(_feeding, case)
    simulation = build(config, *models(case, calibration), feeding=feeding, on_step=on_step, save=save)
    if abort_s := calibration[case.problem].get("abort_s", 0.0):
        _charge_aborts(simulation, abort_s)
    return simulation


def _charge_aborts(simulation: Simulation, seconds: float) -> None:
    """Each response that is aborted stops the engines, and holds the controller up."""
    workers, clock, executors = simulation.run.workers, simulation.clock, cast(Any, simulation.run.executors)
    abort = workers.abort

    def charged(request_ids: Iterable[int]) -> list[Sample]:
        samples = abort(request_ids)
        executors.occupy(clock.now_ns, nanoseconds(seconds * len(samples)))
        clock.advance(seconds * len(samples))
        return samples

    workers.abort = charged


def _feeding(case: Case, stream: SimulatedStream) -> Any:
    """What stands for a stream trainer in this case."""
    return SingleFetch(stream, max(round(case.fetch * case.num_prompts), 1)) if case.fetch else stream


class SingleFetch:
    """A stream that begins the gradients of the first groups that it is given together, at most `most`, and
    of no others: what it is given later is left to the update.

    Source: RollPacker §6.6, "a single fetch of all available completed prompts", capped at 20, 30, 40 or 50 % of the
    batch; the authors' code fetches once devices are freed (Farrrrland/RollPacker, rlvr_pipeline_fixed_async.py).
    """

    def __init__(self, stream: SimulatedStream, most: int) -> None:
        self._stream, self._most, self._fetched = stream, most, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def open(self) -> None:
        self._fetched = False
        self._stream.open()

    def give(self, groups: Sequence[Group], step: int) -> None:
        if not self._fetched:
            self._stream.give(groups[: self._most], step)
        self._fetched = True

    def poll(self) -> bool:
        done = self._stream.poll()
        return done and not self._fetched


# ---------------------------------------------------------------- results as files


def header(
    began: datetime, paper: str, arguments: Sequence[str] | None, calibration: Path, tiny: bool
) -> dict[str, Any]:
    """Date, command, commit, and when the calibration file was committed: before the runs, or it is no calibration."""
    given = sys.argv[1:] if arguments is None else arguments
    shown = [Path(word).name if "/" in word else word for word in given]
    return {
        "schema": 1,
        "paper": paper,
        "date": began.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "scripts/reproduce_papers.py", *shown]),
        "commit": run_dir.commit(),
        "tiny": tiny,
        "calibration": {"file": calibration.name, "committed": _committed(calibration)},
    }


def _committed(file: Path) -> str:
    """The last commit that touched a file, and its date; empty where there is none, or the file has changed since."""

    def git(*words: str) -> str:
        asked = ["git", "-C", str(file.resolve().parent), *words, "--", file.name]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()

    return "" if git("status", "--porcelain") else git("log", "-1", "--format=%h %cI")


def write(file: Path, record: Mapping[str, Any], runs: Sequence[Steps]) -> None:
    """Writes a result: its header, and its runs."""
    entries = [
        {"case": asdict(each.case), **each.values, "wall_s": each.wall_s, "preemptions": each.preemptions}
        for each in runs
    ]
    file.write_text(json.dumps({**record, "runs": entries}) + "\n", encoding="utf-8")


def read(file: Path) -> tuple[dict[str, Any], list[Steps]]:
    """A result: its header and its runs."""
    found = json.loads(file.read_text(encoding="utf-8"))
    runs = []
    for entry in found.pop("runs"):
        case, wall_s, preemptions = (entry.pop(name) for name in ("case", "wall_s", "preemptions"))
        runs.append(Steps(Case.read(case), entry, wall_s, preemptions))
    return found, runs
