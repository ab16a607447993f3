"""`jaxrl tune`: which factors of a rule are fastest for a run, by simulation from lengths that the run has recorded.

Purpose: reads a run directory, simulates the run's own configuration with each value of a grid and with plain batches
over several seeds, and says what came out. What is searched and how results compare: `jaxrl.sim.tuning`. Never imports
jax.

Source: RollPacker §6.3. Departures: lengths are a bootstrap of `samples.jsonl` (`jaxrl.sim.recorded`), new for each
seed, so the spread over the seeds includes how little a short record says; seconds are those of the run's latency
profile if it names one (`rollout.layout.profile`), else modelled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from jaxrl.commands.arguments import MAX_PROCESSES, MAX_SEEDS, MAX_STEPS
from jaxrl.config import Config
from jaxrl.config import files as config_files
from jaxrl.mechanisms import MECHANISMS, batch_rule, enabled
from jaxrl.record.files import Removing, refuse_file, to_json, write_whole
from jaxrl.record.metrics import read_metrics
from jaxrl.record.run_dir import RUN_FILE, SIMULATED, recorded_start, refuse_overwriting
from jaxrl.runtime.simulation import build, rare_collections
from jaxrl.runtime.stop import end_with_parent, ignored_by_children
from jaxrl.scheduling.mechanism import UNFINISHED
from jaxrl.schema.declared import Cap, fields_problem
from jaxrl.schema.limits import MAX_FACTOR
from jaxrl.sim.configured import (
    cost_model,
    layout_sizes,
    machine_sizes,
    model_sizes,
    num_devices_of,
    with_degree,
    with_simulated_hosts,
    workload_of,
)
from jaxrl.sim.hardware import HARDWARE
from jaxrl.sim.recorded import RecordedWorkload
from jaxrl.sim.tuning import PLAIN, Factors, Search, Table, Trial, Tried, label, trial
from jaxrl.sim.workload import Workload

LEAST_RESPONSES = 20  # with fewer, the longest is a matter of chance
_RULES = [each for each in MECHANISMS if UNFINISHED in each.decides]
SEARCHES: Mapping[str, Search] = {
    each.option.removeprefix("rollout."): Search(
        each.option, each.searched, tuple(other.option for other in _RULES if other is not each)
    )
    for each in _RULES
    if each.searched is not None
}
"""By the name of a rule's section."""
_STEPS = "trainer.total_training_steps"
_FIXED = ("trainer.test_freq=0", "trainer.val_before_train=false", "trainer.save_freq=0")


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What `jaxrl tune` is asked for.

    Attributes:
      rule: a name in `SEARCHES`.
      values: of all options of the rule together; empty: the default grid.
      prompt_factors, response_factors: each option's own grid, of which all pairs are tried; the one left out is 1.
      seeds: simulated runs of each value. steps: of each run; None: as many as show the longest period twice.
      processes: runs at the same time.
      out: a file for the results as JSON; empty: none.
    """

    rule: str = next(iter(SEARCHES))
    values: Annotated[tuple[float, ...], Ge(1), MAX_FACTOR, "Of all options of the rule together."] = ()
    prompt_factors: Annotated[tuple[float, ...], Ge(1), MAX_FACTOR, "Of prompts."] = ()
    response_factors: Annotated[tuple[float, ...], Ge(1), MAX_FACTOR, "Of samples per prompt."] = ()
    seeds: Annotated[int, Ge(1), Cap(MAX_SEEDS, "each is a run of its own"), "Runs of each value."] = 5
    steps: Annotated[int | None, Ge(1), Cap(MAX_STEPS, "every run makes that many"), "Steps of each run."] = None
    processes: Annotated[int, Ge(1), Cap(MAX_PROCESSES, "each has a Python of its own"), "Runs at the same time."] = 1
    out: str = ""

    def __post_init__(self) -> None:
        problem = fields_problem(self)
        if problem is not None:
            raise ValueError(problem)
        if self.out:
            refuse_file(self.out, "--out")
            refuse_overwriting(self.out, "--out")
        if self.rule not in SEARCHES:
            raise ValueError(f"--rule ({self.rule}) must be one of {', '.join(SEARCHES)}")
        search = SEARCHES[self.rule]
        warm_up = search.of.warm_up
        if self.steps is not None and self.steps <= warm_up:
            raise ValueError(f"--steps ({self.steps}) must be above {warm_up}, which are left out while a buffer fills")
        split = self.prompt_factors or self.response_factors
        if split and len(search.of.options) == 1:
            both = " or ".join(name for name, each in SEARCHES.items() if len(each.of.options) == 2)
            raise ValueError(f"--prompt-factors and --response-factors belong to --rule {both}, not {self.rule}")
        if split and self.values:
            raise ValueError(
                f"--values sets both factors of {search.name}: leave out --prompt-factors and --response-factors"
            )

    def grid(self, search: Search) -> list[Factors]:
        if self.prompt_factors or self.response_factors:
            return list(product(self.prompt_factors or (1.0,), self.response_factors or (1.0,)))
        return search.together(self.values or search.of.values)


@dataclass(frozen=True, slots=True)
class Job:
    """One simulated run: its configuration, its lengths, and the steps that its means leave out."""

    config: Config
    workload: Workload
    warm_up: int


def tune(
    run_dir: str,
    overrides: Sequence[str],
    options: TuneOptions,
    say: Callable[[str], None] = print,
    progress: Callable[[int, int], None] = lambda done, total: None,
    removing: Removing = nullcontext,
) -> Table:
    """Searches, and says what was found; raises ValueError for what a user can mend."""
    search = SEARCHES[options.rule]
    grid = options.grid(search)
    given = [*_of_the_run(run_dir, overrides), *overrides]
    config = _load(run_dir, given)
    batch = config.data.train_batch_size, config.rollout.n
    values = search.distinct((PLAIN, *grid), *batch)
    if len(values) == 1:
        raise ValueError(f"no value ({', '.join(map(label, grid))}) launches more than plain batches do")
    steps = options.steps or search.num_steps(values[1:], batch[0])
    configs = [_load(run_dir, [*given, *_FIXED, f"{_STEPS}={steps}", *search.alone(each)]) for each in values]
    for each in configs:
        _check(each)
    workload, lengths = workload_of(config)
    if isinstance(workload, RecordedWorkload):
        _check_lengths(workload)
    facts = {"costs": cost_model(config)[1], "lengths": lengths}
    say(f"{search.name} on {run_dir}: {options.seeds} seeds × {steps} simulated steps of {_size(config)}")
    for name, text in facts.items():
        say(f"  {name}: {text}")
    for line in (*_left_out(grid, values), *_doubts(config, workload, run_dir)):
        say(f"  note: {line}")

    drawn = [_drawn(config, workload, seed) for seed in range(options.seeds)]
    jobs = [Job(_seeded(each, i), own, search.of.warm_up) for i, own in enumerate(drawn) for each in configs]
    trials = _run(jobs, options.processes, progress)
    by_value = [tuple(trials[i :: len(values)]) for i in range(len(values))]
    tried = [Tried(each, search.launched(each, *batch), own) for each, own in zip(values, by_value, strict=True)]
    table = Table(search, tried[0], tuple(tried[1:]))
    for line in ("", *table.rows(), "", *table.verdict(), f"options: {' '.join(table.chosen)}"):
        say(line)
    if options.out:
        size = {"seeds": options.seeds, "steps": steps}
        _write(options.out, {"run": run_dir, "given": list(overrides), **size, **facts, **table.to_json()}, removing)
    return table


# ---------------------------------------------------------------- what a run says about itself


def _load(run_dir: str, overrides: Sequence[str]) -> Config:
    """The run's configuration with other options; a degree that these leave open (auto) is the modelled fastest."""
    config = config_files.load(Path(run_dir) / "config.yaml", overrides)
    return with_degree(with_simulated_hosts(config))[0]


def _devices(run_dir: str) -> dict[str, Any]:
    """The devices that the run was on."""
    last = recorded_start(run_dir)
    if last is None:
        raise ValueError(f"{run_dir} is not a run directory: it holds no {RUN_FILE}")
    return last["devices"]


def _of_the_run(run_dir: str, overrides: Sequence[str]) -> list[str]:
    """Options of section `simulate` that its record answers: lengths; of a real run the devices as well, and latencies
    if it, or an override, names a profile."""
    lengths = f"simulate.recorded_run={json.dumps(str(run_dir))}"
    found = ["simulate.workload=recorded", "simulate.recorded_rule=by_rank", lengths]
    devices = _devices(run_dir)
    if devices["platform"] == SIMULATED:
        return found
    found.append(f"simulate.num_devices={devices['count']}")
    found += [f"simulate.hardware={name}" for name in HARDWARE if re.search(rf"\b{name}\b", devices["kind"])]
    profile = _load(run_dir, overrides).rollout.layout.profile
    return [*found, "simulate.cost=table", f"simulate.profile={json.dumps(profile)}"] if profile else found


def _check_lengths(workload: RecordedWorkload) -> None:
    """Raises ValueError for a record from which nothing can be learnt."""
    lengths = workload.lengths
    if len(lengths) < LEAST_RESPONSES:
        raise ValueError(
            f"samples.jsonl holds {len(lengths)} finished responses, and a search needs at least "
            f"{LEAST_RESPONSES}: let the run make more steps"
        )
    if lengths[0] == lengths[-1]:
        limit = ", the run's limit" if workload.num_truncated else ""
        raise ValueError(
            f"all {len(lengths)} recorded responses have {lengths[0]} tokens{limit}, so there is no tail "
            "for a rule to cut"
        )


def _left_out(grid: Sequence[Factors], values: Sequence[Factors]) -> Iterator[str]:
    if left_out := [label(factors) for factors in grid if factors not in values]:
        yield f"left out, since they launch what another value launches: {', '.join(left_out)}"


def _doubts(config: Config, workload: Workload, run_dir: str) -> Iterator[str]:
    """Why the figures may be off."""
    if isinstance(workload, RecordedWorkload):
        yield from _missing(config, workload, run_dir)
    devices = _devices(run_dir)
    if config.simulate.cost == "roofline" and devices["platform"] != SIMULATED:
        yield (
            f"the run was on {devices['count']} × {devices['kind']}, and these seconds are modelled: name a file of "
            "`jaxrl profile` as rollout.layout.profile for measured ones"
        )


def _missing(config: Config, workload: RecordedWorkload, run_dir: str) -> Iterator[str]:
    """Long responses that the record lacks."""
    longest = workload.lengths[-1]
    if any(each.drops_slowest(config) for each in enabled(config)):
        yield "the run itself ended its slowest responses early, so long ones are missing from its record"
    known = max((row.get("response_length/max", 0.0) for row in read_metrics(run_dir)), default=0.0)
    if known > 1.25 * longest:
        yield f"the run's longest response had {known:.0f} tokens, the longest in its record {longest}: more steps help"


def _size(config: Config) -> str:
    devices = f"{num_devices_of(config)} × {config.simulate.hardware}"
    return f"{config.data.train_batch_size} prompts × {config.rollout.n} samples on {devices}"


# ---------------------------------------------------------------- the runs


def _check(config: Config) -> None:
    """Raises ValueError for a configuration that cannot be simulated, before any is."""
    batch_rule(config)
    cost, _ = cost_model(config)
    machine_sizes(config, cost, model_sizes(config))
    layout_sizes(config, cost, model_sizes(config))


def _seeded(config: Config, seed: int) -> Config:
    data, trainer = config.data, config.trainer
    return replace(
        config, data=replace(data, seed=data.seed + seed), trainer=replace(trainer, seed=trainer.seed + seed)
    )


def _drawn(config: Config, workload: Workload, seed: int) -> Workload:
    """The lengths of one seed."""
    if isinstance(workload, RecordedWorkload):
        return workload.resampled(config.trainer.seed + seed)
    return workload_of(_seeded(config, seed))[0]


def _simulate(job: Job) -> Trial:
    """Runs one simulation; nothing is written."""
    steps: list[dict[str, float]] = []

    def on_step(step: int, measured: dict[str, float], groups: Any) -> None:
        steps.append(measured)

    config = job.config
    cost, _ = cost_model(config)
    sizes = machine_sizes(config, cost, model_sizes(config))
    layouts = layout_sizes(config, cost, model_sizes(config))
    with rare_collections():
        build(config, cost, job.workload, sizes=sizes, layouts=layouts, on_step=on_step).loop.run()
    return trial(steps, config.data.train_batch_size, job.warm_up)


def _run(jobs: Sequence[Job], processes: int, progress: Callable[[int, int], None]) -> list[Trial]:
    """The trials in the order of the jobs, several at a time."""
    done: list[Trial] = []
    with ExitStack() as stack:
        in_order: Callable[..., Iterable[Trial]] = map
        processes = min(processes, len(jobs))
        if processes > 1:
            # not by fork: the calling process may have threads
            pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=end_with_parent)
            in_order = stack.enter_context(pool).map
        with ignored_by_children():
            trials = in_order(_simulate, jobs)  # starts the processes
        for found in trials:
            done.append(found)
            progress(len(done), len(jobs))
    return done


def _write(out: str, record: Mapping[str, Any], removing: Removing) -> None:
    written = {"written": datetime.now(UTC).isoformat(timespec="seconds")}
    write_whole(Path(out), to_json(written | dict(record), indent=1) + "\n", removing=removing)
