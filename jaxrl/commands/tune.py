"""`jaxrl tune`: which factors of a rule are fastest for a run, by simulation from lengths that the run has recorded.

It simulates the run's configuration with each value of a grid and with plain batches over several seeds. What is
searched and how results compare: `jaxrl.sim.tuning`. Never imports jax.

Source: RollPacker §6.3. Departures: lengths are a bootstrap of `samples.jsonl` (`jaxrl.sim.recorded`), resampled for
each seed, so the spread over the seeds includes the uncertainty of a short record. Seconds come from the run's latency
profile if it names one (`rollout.layout.profile`), else from the cost model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from jaxrl.config import Config
from jaxrl.config import files as config_files
from jaxrl.mechanisms import MECHANISMS, batch_rule, enabled
from jaxrl.record.metrics import read_metrics
from jaxrl.record.run_dir import CONFIG_FILE, RUN_FILE, SIMULATED, recorded_start
from jaxrl.run.simulation import build, rare_collections
from jaxrl.run.stop import end_with_parent, ignored_by_children
from jaxrl.scheduling.mechanism import UNFINISHED
from jaxrl.sim.configured import (
    cost_model,
    machine,
    num_devices_of,
    with_degree,
    with_simulated_hosts,
    workload_of,
)
from jaxrl.sim.hardware import HARDWARE
from jaxrl.sim.recorded import RecordedWorkload
from jaxrl.sim.tuning import PLAIN, RuleSearch, Table, Trial, Tried, label, trial
from jaxrl.sim.workload import ModelledWorkload

LEAST_RESPONSES = 20  # with fewer, the longest is a matter of chance
_RULES = [each for each in MECHANISMS if UNFINISHED in each.decides]
SEARCHES: Mapping[str, RuleSearch] = {
    each.option.removeprefix("rollout."): RuleSearch(
        each.option, each.searched, tuple(other.option for other in _RULES if other is not each)
    )
    for each in _RULES
    if each.searched is not None
}
"""By the name of a rule's section."""
_FIXED = ("trainer.test_freq=0", "trainer.val_before_train=false", "trainer.save_freq=0")


def tune(
    run_dir: str,
    overrides: Sequence[str],
    rule: str = "tail_batching",
    *,
    values: Sequence[float] = (),
    seeds: int = 5,
    steps: int | None = None,
    processes: int = 1,
    say: Callable[[str], None] = print,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Table:
    """Searches, and prints what it found. Raises ValueError for what a user can mend. `rule`: a name in `SEARCHES`;
    `values`: of all options of the rule together, empty for the default grid."""
    search = SEARCHES[rule]
    grid = search.together(values or search.of.values)
    if steps is not None and steps <= search.of.warm_up:
        raise ValueError(
            f"--steps ({steps}) must be above {search.of.warm_up}, which are left out while a buffer fills"
        )
    start = recorded_start(run_dir)
    if start is None:
        raise ValueError(f"{run_dir} is not a run directory: it holds no {RUN_FILE}")
    devices = start["devices"]
    given = [*_options_of_run(run_dir, devices, overrides), *overrides]
    config = _load(run_dir, given)
    prompts, n = config.data.train_batch_size, config.rollout.n
    tried = search.distinct((PLAIN, *grid), prompts, n)
    if len(tried) == 1:
        raise ValueError(f"no value ({', '.join(map(label, grid))}) launches more than plain batches do")
    steps = steps or search.num_steps(tried[1:], prompts)
    fixed = [*given, *_FIXED, f"trainer.total_training_steps={steps}"]
    configs = [_load(run_dir, [*fixed, *search.alone(factors)]) for factors in tried]
    for each in configs:
        batch_rule(each)
        machine(each)  # what cannot be simulated is refused before anything is
    workload, lengths = workload_of(config)
    if isinstance(workload, RecordedWorkload):
        _check_lengths(workload)
    costs = cost_model(config)[1]
    say(
        f"{search.name} on {run_dir}: {seeds} seeds × {steps} simulated steps of {prompts} prompts × {n} samples on "
        f"{num_devices_of(config)} × {config.simulate.hardware}"
    )
    say(f"  costs: {costs}")
    say(f"  lengths: {lengths}")
    left_out = [label(factors) for factors in grid if factors not in tried]
    for note in _notes(config, workload, run_dir, devices, left_out):
        say(f"  note: {note}")

    drawn = [
        workload.resampled(config.trainer.seed + seed)
        if isinstance(workload, RecordedWorkload)
        else workload_of(_seeded(config, seed))[0]
        for seed in range(seeds)
    ]
    runs = [(_seeded(each, i), own, search.of.warm_up) for i, own in enumerate(drawn) for each in configs]
    trials = _run(runs, processes, progress)
    plain, *others = (
        Tried(factors, search.launched(factors, prompts, n), tuple(trials[i :: len(tried)]))
        for i, factors in enumerate(tried)
    )
    table = Table(search, plain, tuple(others))
    for line in ("", *table.rows(), "", *table.verdict(), f"options: {' '.join(table.chosen)}"):
        say(line)
    return table


def _load(run_dir: str, overrides: Sequence[str]) -> Config:
    """The run's configuration with other options; a degree that these leave open (auto) is the modelled fastest."""
    config = config_files.load(Path(run_dir) / CONFIG_FILE, overrides)
    return with_degree(with_simulated_hosts(config))[0]


def _options_of_run(run_dir: str, devices: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Options of section `simulate` that a run's record answers: lengths; of a real run the devices as well, and
    latencies if it, or an override, names a profile."""
    lengths = f"simulate.recorded_run={json.dumps(str(run_dir))}"
    found = [lengths]
    if devices["platform"] == SIMULATED:
        return found
    found.append(f"simulate.num_devices={devices['count']}")
    found += [f"simulate.hardware={name}" for name in HARDWARE if re.search(rf"\b{name}\b", devices["kind"])]
    if profile := _load(run_dir, overrides).rollout.layout.profile:
        found += [f"simulate.profile={json.dumps(profile)}"]
    return found


def _check_lengths(workload: RecordedWorkload) -> None:
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


def _notes(
    config: Config, workload: ModelledWorkload, run_dir: str, devices: Mapping[str, Any], left_out: Sequence[str]
) -> Iterator[str]:
    if left_out:
        yield f"left out, since they launch what another value launches: {', '.join(left_out)}"
    if isinstance(workload, RecordedWorkload):
        longest = workload.lengths[-1]
        if any(each.drops_slowest(config) for each in enabled(config)):
            yield "the run itself ended its slowest responses early, so long ones are missing from its record"
        known = max((row.get("response_length/max", 0.0) for row in read_metrics(run_dir)), default=0.0)
        if known > 1.25 * longest:
            yield (
                f"the run's longest response had {known:.0f} tokens, the longest in its record {longest}: more steps "
                "help"
            )
    if not config.simulate.profile and devices["platform"] != SIMULATED:
        yield (
            f"the run was on {devices['count']} × {devices['kind']}, and these seconds are modelled: name a file of "
            "`jaxrl profile` as rollout.layout.profile for measured ones"
        )


def _seeded(config: Config, seed: int) -> Config:
    data, trainer = config.data, config.trainer
    return config.replace(data=data.replace(seed=data.seed + seed), trainer=trainer.replace(seed=trainer.seed + seed))


def _simulated(config: Config, workload: ModelledWorkload, warm_up: int) -> Trial:
    """One simulated run, which may take place in another process; it writes nothing. `warm_up`: steps that its means
    leave out."""
    steps: list[dict[str, float]] = []

    def on_step(step: int, measured: dict[str, float], groups: Any) -> None:
        steps.append(measured)

    cost, layouts = machine(config)
    with rare_collections():
        build(config, cost, workload, layouts=layouts, on_step=on_step).loop.run()
    return trial(steps, config.data.train_batch_size, warm_up)


def _run(
    runs: Sequence[tuple[Config, ModelledWorkload, int]], processes: int, progress: Callable[[int, int], None]
) -> list[Trial]:
    done: list[Trial] = []
    with ExitStack() as stack:
        in_order: Callable[..., Iterable[Trial]] = map
        processes = min(processes, len(runs))
        if processes > 1:
            # not by fork: the calling process may have threads
            pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=end_with_parent)
            in_order = stack.enter_context(pool).map
        with ignored_by_children():
            trials = in_order(_simulated, *zip(*runs, strict=True))  # starts the processes
        for found in trials:
            done.append(found)
            progress(len(done), len(runs))
    return done
