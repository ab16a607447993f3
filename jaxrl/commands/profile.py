"""`jaxrl profile`: measures a model's latencies on this machine and keeps them in a table that a run can use.

The table (JSON, versioned, of one model, machine, jax version and dtype) is written after every measurement, so a run
that was interrupted goes on where it stopped. A table there of anything else is refused, with the reason.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from jaxrl.commands.arguments import MAX_REPEATS
from jaxrl.config import Config, ConfigError
from jaxrl.config.hosts import HostsSection
from jaxrl.record.files import Removing, refuse_file, write_whole
from jaxrl.record.run_dir import inputs_of, refuse_overwriting
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.profiler import Profiler, pairs
from jaxrl.rollout.profiles import identity_of, load_profile
from jaxrl.runtime.build import (
    build_executor,
    read_tokenizer_and_model,
    refuse_too_large,
    use_compilation_cache,
)
from jaxrl.runtime.devices import prepare_jax, with_types
from jaxrl.runtime.memory import layout_degrees
from jaxrl.runtime.weights import load_weights
from jaxrl.scheduling.layouts.latency_profile import (
    Profile,
    ProfilePoint,
    RowSizes,
    missing_points,
    prefill_points,
    profile_points,
    verify_points,
)
from jaxrl.schema.declared import Cap, fields_problem
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.memory import memory_of
from jaxrl.sharding.mesh import make_mesh, platform_of, submeshes

OnProgress = Callable[[int, int, str], None]
"""(measurements done, of how many, what comes next)"""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What to measure. Raises ValueError for a number beyond its bounds."""

    max_batch: Annotated[
        int, Ge(0), "The most live rows of all dp groups together; 0: as many as the layouts have rows."
    ] = 0
    token_budget: Annotated[
        int, Ge(0), "The most live tokens of all dp groups together; 0: as many as the smallest pools hold."
    ] = 0
    max_context: Annotated[int, Ge(0), "Tokens of a row; 0: the longest sequence of the configuration."] = 0
    repeats: Annotated[
        int,
        Ge(1),
        Cap(MAX_REPEATS, "every point takes that many times as long"),
        "How often a fast point is measured; the median counts.",
    ] = 3

    def __post_init__(self) -> None:
        problem = fields_problem(self)
        if problem is not None:
            raise ValueError(problem)


def profile(
    config: Config,
    out: str | Path,
    options: ProfileOptions,
    progress: OnProgress | None = None,
    removing: Removing = nullcontext,
) -> Profile:
    """Measures the points that `out` lacks, and writes them there. Raises ValueError for a table of something else."""
    refuse_file(out, "--out")
    refuse_overwriting(out, "--out", inputs_of(config))
    config = adaptive(config)
    devices = prepare_jax(config)[-config.rollout.num_devices :]  # the rollout's own, or all of them
    config = with_types(config, platform_of(devices[0]), command="")
    mesh = submeshes(make_mesh(devices), config.workers_per_group)[0]
    rollout = replace(config.rollout, num_devices=0, num_workers=1, hosts_per_worker=1)
    config = replace(config, rollout=rollout, hosts=HostsSection())
    degrees = layout_degrees(config, mesh.size)
    _, model = read_tokenizer_and_model(config)
    refuse_too_large(config, model, mesh.size, memory_of(mesh.devices.ravel().tolist()), trains=False)
    path = Path(out).expanduser()
    table = _continued(path, Profile(identity_of(config, model, mesh)))
    params = load_weights(config, model, mesh)
    layout = Layout(mesh, config.rollout.tp)
    executor = build_executor(config, model, layout, lambda: params)
    row_sizes = {tp: executor.row_sizes(tp) for tp in degrees}
    rows = tuple(RowSizes(tp, sizes) for tp, sizes in row_sizes.items())
    widths = {tp: executor.verify_widths(tp) for tp in degrees}
    measured = {tp: table.verify_widths(tp) for tp in degrees}
    if any(measured[tp].items() - widths[tp].items() for tp in degrees):
        raise ConfigError(
            f"{path} was measured with steps that verify other numbers of tokens (by the options of their mechanism): "
            f"{measured} there, {widths} here: name another file with --out"
        )
    if table.row_sizes not in ((), rows):
        raise ConfigError(
            f"{path} was measured with programs for other numbers of rows (rollout.max_num_seqs): {table.row_sizes} "
            f"there, {rows} here: name another file with --out"
        )
    table = replace(table, row_sizes=rows)
    points = _points(config, executor, row_sizes, options)
    use_compilation_cache(config)
    executor.sync_weights(params, 0)
    executor.allocate()
    verify = verify_points(points, widths)
    return _measure(table, Profiler(executor, options.repeats), points, verify, degrees, path, progress, removing)


def _continued(path: Path, table: Profile) -> Profile:
    """The table that is at `path` already, or the new one. Raises ConfigError if something else is there."""
    if not path.exists():
        return table
    earlier = load_profile(path)
    try:
        earlier.check(table.identity)
    except ValueError as error:
        raise ConfigError(f"{path} is there, and {error}; or name another file with --out") from None
    if earlier.source != table.source:
        raise ConfigError(f"{path} was made up (source: {earlier.source}): name another file with --out")
    return earlier


def adaptive(config: Config) -> Config:
    """The configuration with layouts to choose from, whether or not it has them already. Where the degree to begin with
    is to be chosen from the profile (auto), every degree is measured with rollout.max_num_seqs rows per dp group."""
    layout = replace(config.rollout.layout, planner=True, switch=False)
    if not config.is_tp_open:
        return replace(config, rollout=replace(config.rollout, layout=layout))
    layout = replace(layout, scale_rows=False)
    return replace(config, rollout=replace(config.rollout, layout=layout)).with_tp(min(layout.degrees, default=1))


def _points(
    config: Config, executor: MeshExecutor, row_sizes: dict[int, tuple[int, ...]], options: ProfileOptions
) -> tuple[ProfilePoint, ...]:
    degrees = tuple(row_sizes)
    capacities = [executor.capacity(tp) for tp in degrees]
    rows = min(c.num_groups * c.num_slots for c in capacities)
    tokens = min(c.num_groups * c.stacks.num_tokens(c.num_blocks - 1, c.block_size) for c in capacities)
    longest = config.max_model_length
    asked = (options.max_batch or rows, options.token_budget or tokens, options.max_context or longest)
    for name, value, most in zip(
        ("max-batch", "token-budget", "max-context"), asked, (rows, tokens, longest), strict=True
    ):
        if not 0 < value <= most:
            raise ConfigError(
                f"--{name} ({value}) must be at least 1 and at most {most}, for which the rollout is built"
            )
    num_devices = capacities[0].num_groups * degrees[0]
    return profile_points(asked[0], asked[1], degrees, num_devices, asked[2], row_sizes=row_sizes)


def _measure(
    table: Profile,
    profiler: Profiler,
    points: tuple[ProfilePoint, ...],
    verified: tuple[ProfilePoint, ...],
    degrees: tuple[int, ...],
    path: Path,
    progress: OnProgress | None,
    removing: Removing,
) -> Profile:
    decode, prefill = missing_points(table.decode, points), missing_points(table.prefill, prefill_points(points))
    verify = missing_points(table.verify, verified)
    known = {(cost.from_tp, cost.to_tp) for cost in table.switches}
    changes = [pair for pair in pairs(degrees) if pair not in known]
    total = len(points) + len(verified) + len(prefill_points(points)) + len(pairs(degrees))
    done = total - len(decode) - len(verify) - len(prefill) - len(changes)

    def steps() -> Iterator[tuple[str, Callable[[Profile], Profile]]]:
        for tp in degrees:  # one layout after another
            for point in (p for p in decode if p.tp == tp):
                text = f"decode, tp {tp}, {point.batch} rows of {point.context}"
                yield text, lambda t, p=point: replace(t, decode=(*t.decode, profiler.decode(p)))
            for point in (p for p in verify if p.tp == tp):
                text = f"verify, tp {tp}, {point.batch} rows of {point.context}"
                yield text, lambda t, p=point: replace(t, verify=(*t.verify, profiler.verify(p)))
            for point in (p for p in prefill if p.tp == tp):
                text = f"prefill, tp {tp}, {point.batch} rows of {point.context}"
                yield text, lambda t, p=point: replace(t, prefill=(*t.prefill, profiler.prefill(p)))
        for one, other in changes:
            text = f"switch, tp {one} and {other}"
            yield text, lambda t, a=one, b=other: replace(t, switches=(*t.switches, *profiler.switches(a, b)))

    for text, measure in steps():
        if progress is not None:
            progress(done, total, text)
        table = measure(table)
        write_whole(path, json.dumps(table.to_json(), indent=1) + "\n", removing=removing)
        done += 1
    if progress is not None:
        progress(done, total, "done")
    return table


def run(config: Config, out: str | Path, options: ProfileOptions, removing: Removing = nullcontext) -> Profile:
    """`profile` with a progress bar on a terminal, and elsewhere with a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console()
    counts = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    last_s = 0.0
    with Bar(*counts, TextColumn("{task.description}"), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading the model")

        def show(done: int, total: int, text: str) -> None:
            nonlocal last_s
            bar.update(task, completed=done, total=total, description=text)
            if not console.is_terminal and (done == total or time.monotonic() - last_s > 10):
                last_s = time.monotonic()
                print(f"{done}/{total} {text}", flush=True)

        return profile(config, out, options, show, removing)
