"""`jaxrl profile`: measures a model's latencies on this machine and keeps them in a table that a run can use.

The table (JSON, of one model, machine, jax version and dtype) is written after every measurement, so an interrupted run
resumes where it stopped. A table of anything else is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from jaxrl.config import Config, ConfigError
from jaxrl.config.options import HostsSection
from jaxrl.record.files import file_problem, write_whole
from jaxrl.record.run_dir import inputs_of, refuse_overwriting
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.profiler import Profiler, identity_of, load_profile
from jaxrl.run.build import (
    build_executor,
    read_tokenizer_and_model,
    refuse_too_large,
    use_compilation_cache,
)
from jaxrl.run.devices import prepare_jax, with_types
from jaxrl.run.memory import layout_degrees
from jaxrl.run.weights import load_weights
from jaxrl.scheduling.layouts.latency_profile import (
    Profile,
    ProfilePoint,
    RowSizes,
    missing_points,
    prefill_points,
    profile_points,
    verify_points,
)
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.memory import memory_of
from jaxrl.sharding.mesh import make_mesh, platform_of, submeshes


def profile(
    config: Config,
    out: str | Path,
    sizes: Sequence[int],
    repeats: int,
    progress: Callable[[int, int], None],
) -> Profile:
    """Measures the points that `out` lacks, and writes them there. Raises ValueError where that is a table of something
    else.

    `sizes`: the most live rows and the most live tokens of all dp groups together, and the most tokens of a row; 0: as
    many as the layouts have rows, as the smallest pools hold, and as the configuration's longest sequence has.
    """
    if (problem := file_problem(out)) is not None:
        raise ValueError(f"--out {problem}")
    refuse_overwriting(out, "--out", inputs_of(config))
    config = adaptive(config)
    devices = prepare_jax(config)[-config.rollout.num_devices :]  # the rollout's own, or all of them
    config = with_types(config, platform_of(devices[0]), command="")
    mesh = submeshes(make_mesh(devices), config.workers_per_group)[0]
    rollout = config.rollout.replace(num_devices=0, num_workers=1, hosts_per_worker=1)
    config = config.replace(rollout=rollout, hosts=HostsSection())
    _, model = read_tokenizer_and_model(config)
    refuse_too_large(config, model, mesh.size, memory_of(mesh.devices.ravel().tolist()), trains=False)
    path = Path(out).expanduser()
    table = _continued(path, Profile(identity_of(config, model, mesh)))
    params = load_weights(config, model, mesh)
    executor = build_executor(config, model, Layout(mesh, config.rollout.tp), lambda: params)
    degrees = layout_degrees(config, mesh.size)
    row_sizes = {tp: executor.row_sizes(tp) for tp in degrees}
    widths = {tp: executor.verify_widths(tp) for tp in degrees}
    table = _for_programs(path, table, row_sizes, widths)
    points = _points(config, executor, row_sizes, sizes)
    use_compilation_cache(config)
    executor.sync_weights(params, 0)
    executor.allocate()
    steps = _steps(table, Profiler(executor, repeats), points, verify_points(points, widths), degrees)
    total = len(points) + len(verify_points(points, widths)) + len(prefill_points(points)) + math.comb(len(degrees), 2)
    for done, (field, measure) in enumerate(steps, total - len(steps)):
        progress(done, total)
        table = replace(table, **{field: (*getattr(table, field), *measure())})
        write_whole(path, json.dumps(table.to_json(), indent=1) + "\n")
    progress(total, total)
    return table


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
    layout = config.rollout.layout.replace(planner=True, switch=False)
    if not config.is_tp_open:
        return config.replace(rollout=config.rollout.replace(layout=layout))
    layout = layout.replace(scale_rows=False)
    return config.replace(rollout=config.rollout.replace(layout=layout)).with_tp(min(layout.degrees, default=1))


def _for_programs(
    path: Path, table: Profile, row_sizes: dict[int, tuple[int, ...]], widths: dict[int, dict[int, int]]
) -> Profile:
    """The table with the numbers of rows of the programs. Raises ConfigError if it was measured with others."""
    measured = {tp: table.verify_widths(tp) for tp in widths}
    if any(measured[tp].items() - widths[tp].items() for tp in widths):
        raise ConfigError(
            f"{path} was measured with steps that verify other numbers of tokens (by the options of their mechanism): "
            f"{measured} there, {widths} here: name another file with --out"
        )
    rows = tuple(RowSizes(tp, sizes) for tp, sizes in row_sizes.items())
    if table.row_sizes not in ((), rows):
        raise ConfigError(
            f"{path} was measured with programs for other numbers of rows (rollout.max_num_seqs): {table.row_sizes} "
            f"there, {rows} here: name another file with --out"
        )
    return replace(table, row_sizes=rows)


def _points(
    config: Config, executor: MeshExecutor, row_sizes: dict[int, tuple[int, ...]], sizes: Sequence[int]
) -> tuple[ProfilePoint, ...]:
    degrees = tuple(row_sizes)
    capacities = [executor.capacity(tp) for tp in degrees]
    rows = min(c.num_groups * c.num_slots for c in capacities)
    tokens = min(c.num_groups * c.stacks.num_tokens(c.num_blocks - 1, c.block_size) for c in capacities)
    chosen = []
    for name, size, most in zip(
        ("max-batch", "token-budget", "max-context"), sizes, (rows, tokens, config.max_model_length), strict=True
    ):
        if size > most or not most:
            raise ConfigError(f"--{name} ({size or most}) must be from 1 to {most}, for which the rollout is built")
        chosen.append(size or most)
    batch, budget, context = chosen
    num_devices = capacities[0].num_groups * degrees[0]
    return profile_points(batch, budget, degrees, num_devices, context, row_sizes=row_sizes)


def _steps(
    table: Profile,
    profiler: Profiler,
    points: tuple[ProfilePoint, ...],
    verified: tuple[ProfilePoint, ...],
    degrees: tuple[int, ...],
) -> list[tuple[str, Callable[[], Sequence[Any]]]]:
    """The points that the table lacks, one layout after another: the field that it is added to, and what measures
    it."""
    kinds = (
        ("decode", profiler.decode, missing_points(table.decode, points)),
        ("verify", profiler.verify, missing_points(table.verify, verified)),
        ("prefill", profiler.prefill, missing_points(table.prefill, prefill_points(points))),
    )
    steps: list[tuple[str, Callable[[], Sequence[Any]]]] = []
    for tp in degrees:
        for kind, measure, missing in kinds:
            own = (point for point in missing if point.tp == tp)
            steps += [(kind, lambda measure=measure, point=point: [measure(point)]) for point in own]
    known = {(cost.from_tp, cost.to_tp) for cost in table.switches}
    pairs = [pair for pair in combinations(degrees, 2) if pair not in known]
    steps += [("switches", partial(profiler.switches, *pair)) for pair in pairs]
    return steps
