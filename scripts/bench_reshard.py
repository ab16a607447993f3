#!/usr/bin/env python3
"""Moving rollout weights and live KV between layouts of one mesh: every ordered pair of degrees, beside a plain copy.

    python scripts/bench_reshard.py [--devices 8] [--layers 4] [--dtypes float32] [--json]

- seconds: from arrays that are ready to arrays that are ready, programs compiled before.
- copy_s: a compiled copy of the same bytes on the same devices in the same repetition: for weights, of the leaves that
  moved, as they lie in the new layout; for KV, of the packed lanes, as they lie in the new layout.
- crossed: bytes that devices had to get from others, over all devices.
- extra: the most that a device holds beyond the larger of before and after, from the sizes of buffers, the compiled
  programs' temporaries included (`ReshardReport`). The tests hold it against the buffers that are alive.
- checks, of every transition: that bound within 10 %, or a single leaf needs more; no array read by the host (counted);
  no involuntary rematerialisation (the compiler's warnings, counted, its cache off); no collective where weights go to
  a larger tp. The exit status is 1 if one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from bench import records
from bench.ceilings import measure_ceilings
from bench.jax_cases import build_params
from bench.measure import Bench, Gauge, Summary, Values, say, summarise, verdict

from jaxrl.models.config import ModelConfig
from jaxrl.rollout import kv_cache
from jaxrl.scheduling.layouts.batch_state import LiveRow
from jaxrl.scheduling.layouts.kv_plan import LiveBlocks, plan_migration
from jaxrl.scheduling.layouts.regroup import regroup
from jaxrl.scheduling.tokens.blocks import BlockManager
from jaxrl.sharding import kv_migration
from jaxrl.sharding.layout import Layout, tp_degrees
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.reshard import precompile, rollout_to_rollout
from jaxrl.sharding.rules import padded_config, rollout_shardings, to_rollout

QUICK = {"devices": 4, "rows": 4, "context": 40, "repetitions": 2, "dtypes": ["float32"], "max_extra_kib": 64}
SLACK = 1.1
_COLLECTIVE = re.compile(r"= .*?(all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\(")


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What is known about a transition besides its time."""

    crossed_bytes: int
    extra_bytes: int
    oversized: int
    chunks: int
    programs: int
    collectives: dict[str, int]
    rematerialisations: int
    host_reads: int
    compile_s: float

    def failures(self, is_weights_up: bool, bound: int) -> Iterator[str]:
        if self.extra_bytes > SLACK * bound and not self.oversized:
            yield f"extra memory {self.extra_bytes} exceeds the bound {bound} by more than 10 %"
        if self.host_reads:
            yield f"the host read {self.host_reads} arrays"
        if self.rematerialisations:
            yield f"{self.rematerialisations} involuntary rematerialisations"
        if is_weights_up and self.collectives:
            yield f"collectives {self.collectives}, where slices would do"


@dataclasses.dataclass(slots=True)
class Setting:
    """What the cases share. `max_tp` is what weights are padded for."""

    options: argparse.Namespace
    config: ModelConfig
    layouts: dict[int, Layout]
    max_tp: int
    bound: int

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [*itertools.permutations(self.layouts, 2)]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    records.common_options(made)
    made.set_defaults(devices=8)
    made.add_argument("--layers", type=int, default=0, help="of the model, to fit into memory (all)")
    made.add_argument("--rows", type=int, default=16, help="live requests (16)")
    made.add_argument("--context", type=int, default=512, help="tokens of each (512)")
    made.add_argument("--block-size", type=int, default=16, help="positions per KV block (16)")
    made.add_argument("--max-extra-kib", type=int, default=64 << 10, help="bound of extra memory per device (65536)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; returns the exit status."""
    try:
        names = ("rows", "context", "block_size", "max_extra_kib")
        options = records.parse(parser(), arguments, QUICK, names)
        if options.layers < 0:
            raise ValueError(f"--layers ({options.layers}) must be at least 0, which means all")
        record = _run(options, records.command(arguments))
    except ValueError as error:
        print(f"bench_reshard: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        print(f"appended to {records.append_record(options.json, record).name}")
    for failure in record["results"]["failures"]:
        print(f"bench_reshard: {failure}", file=sys.stderr)
    return 1 if record["results"]["failures"] else 0


def _run(options: argparse.Namespace, called: str) -> dict[str, Any]:
    model = records.model_of(options)
    devices = records.prepare_devices(options.devices)
    # What comes from the cache was not compiled: no warning, and no honest time.
    jax.config.update("jax_enable_compilation_cache", False)
    mesh = make_mesh(devices)
    degrees = tp_degrees(mesh)
    if len(degrees) < 2:
        raise ValueError(f"--devices ({options.devices}) must be at least 2: one device has one layout")
    config = model.config()
    config = dataclasses.replace(config, num_layers=options.layers or config.num_layers)
    layouts = {tp: Layout(mesh, tp) for tp in degrees}
    setting = Setting(options, config, layouts, degrees[-1], options.max_extra_kib << 10)
    head = records.header("reshard", records.describe_devices(devices), records.versions(), called)
    records.print_header(head, say)
    bench = Bench(Gauge() if devices[0].platform == "cpu" else None, say)
    ceilings = measure_ceilings(len(devices), options.quick)
    facts: dict[str, Facts] = {}
    for dtype in options.dtypes:
        facts |= _measure(Weights(setting, build_params(model, config, mesh, dtype, options.seed), dtype), bench)
        facts |= _measure(Cache(setting, dtype), bench)
    ceilings = ceilings.best(measure_ceilings(len(devices), options.quick))
    if bench.gauge:
        bench.gauge.close()
    print(f"ceilings  {ceilings}")
    print(verdict(bench))
    kept, dropped = bench.counts()
    shape = {"model": model.name, "devices": len(devices), "layers": config.num_layers}
    results = _results(setting, summarise(bench.runs), facts)
    return head | shape | {"ceilings": ceilings.record(), "kept": kept, "dropped": dropped, "results": results}


# -- what moves --------------------------------------------------------------------------------------------------------


class Weights:
    """One tree of rollout weights, wherever it is at the moment."""

    name = "weights"

    def __init__(self, setting: Setting, params: Any, dtype: str) -> None:
        self.setting, self.dtype = setting, dtype
        self._features_first = jax.default_backend() == "cpu"  # as the engine's programs have them
        self._tp = 1
        first = setting.layouts[1]
        self._params = to_rollout(
            params, setting.config, first, dtype, setting.max_tp, features_first=self._features_first
        )

    def compiled(self, before: int, after: int) -> list[Any]:
        """The programs of a transition."""
        config, max_tp = self.setting.config, self.setting.max_tp
        source, target = (
            rollout_shardings(config, self.setting.layouts[tp], max_tp, features_first=self._features_first)
            for tp in (before, after)
        )
        abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self._params, source)
        return precompile(abstract, target, max_extra_bytes=self.setting.bound)[1]

    def move(self, before: int, after: int) -> tuple[float, Any, Callable[[], float]]:
        """(seconds, report, a copy to time)."""
        if self._tp != before:
            self._go(before)
        old = jax.tree.leaves(self._params)
        seconds, report = self._go(after)
        moved = [new for new, own in zip(jax.tree.leaves(self._params), old, strict=True) if new is not own]
        return seconds, report, lambda: _copy(moved, self.setting.bound)

    def _go(self, tp: int) -> tuple[float, Any]:
        layouts = self.setting.layouts[self._tp], self.setting.layouts[tp]
        jax.block_until_ready(self._params)
        began = time.perf_counter()
        self._params, report = rollout_to_rollout(
            self._params,
            self.setting.config,
            *layouts,
            self.setting.max_tp,
            self._features_first,
            max_extra_bytes=self.setting.bound,
        )
        jax.block_until_ready(self._params)
        self._tp = tp
        return time.perf_counter() - began, report

    def close(self) -> None:
        for leaf in jax.tree.leaves(self._params):
            leaf.delete()


class Cache:
    """A KV pool with live requests, dealt evenly over the dp groups; pools hold half as much again as is live."""

    name = "kv"

    def __init__(self, setting: Setting, dtype: str) -> None:
        self.setting, self.dtype = setting, dtype
        self._plans: dict[tuple[int, int], Any] = {}

    def _num_blocks(self, tp: int) -> int:
        options = self.setting.options
        rows = -(-options.rows // self.setting.layouts[tp].dp)
        return 2 + rows * -(-options.context // options.block_size) * 3 // 2

    def _plan(self, before: int, after: int) -> Any:
        """Lanes, as a switch in the middle of a batch would have them; every request of a prompt of its own."""
        if (before, after) not in self._plans:
            options = self.setting.options
            dp = self.setting.layouts[before].dp
            blocks = BlockManager(dp, self._num_blocks(before), options.block_size)
            live, rows = [], [[] for _ in range(dp)]
            for request in range(options.rows):
                group, length = request % dp, options.context
                blocks.allocate(request, group, length)
                live.append(LiveBlocks(request, group, blocks.table(request), length, length))
                rows[group].append(LiveRow(request, length, length))
            groups = regroup([tuple(each) for each in rows], self.setting.layouts[after].dp)
            ids = [[row.request_id for row in each] for each in groups]
            self._plans[before, after] = plan_migration(live, dp, ids, self._num_blocks(after), options.block_size)
        return self._plans[before, after]

    def _shape(self, tp: int) -> kv_cache.CacheShape:
        config, options = self.setting.config, self.setting.options
        heads = padded_config(config, self.setting.max_tp).num_kv_heads
        return kv_cache.CacheShape(
            config.num_layers, heads, config.head_dim, self._num_blocks(tp), options.block_size, jnp.dtype(self.dtype)
        )

    def compiled(self, before: int, after: int) -> list[Any]:
        layouts, shape = (self.setting.layouts[before], self.setting.layouts[after]), self._shape(before)
        dims = (layouts[0].dp, shape.num_kv_heads, shape.num_blocks, shape.block_size, shape.head_dim)
        array = jax.ShapeDtypeStruct(dims, shape.dtype, sharding=kv_cache.pool_sharding(layouts[0], shape))
        sizes = [self._plan(before, after).lanes().sizes]
        pool = [(array, array)] * shape.num_layers
        return kv_migration.precompile(
            *layouts, pool, self._num_blocks(after), sizes, max_extra_bytes=self.setting.bound
        )

    def move(self, before: int, after: int) -> tuple[float, Any, Callable[[], float]]:
        layouts = self.setting.layouts[before], self.setting.layouts[after]
        pool = kv_cache.allocate(layouts[0], self._shape(before))
        lanes = self._plan(before, after).lanes()
        jax.block_until_ready(pool)
        began = time.perf_counter()
        pool, report = kv_migration.migrate(
            pool, *layouts, lanes, self._num_blocks(after), max_extra_bytes=self.setting.bound
        )
        jax.block_until_ready(pool)
        seconds = time.perf_counter() - began
        for array in jax.tree.leaves(pool):
            array.delete()
        places = report.lane_blocks * max(layout.dp for layout in layouts) // layouts[1].dp
        return seconds, report, lambda: self._copy_lanes(layouts[1], places)

    def _copy_lanes(self, layout: Layout, places: int) -> float:
        """A dp group's lanes have the dims of a pool with as many blocks as they have places."""
        lanes = dataclasses.replace(self._shape(layout.tp), num_blocks=places)
        packed = kv_cache.allocate(layout, lanes)
        seconds = _copy(jax.tree.leaves(packed), self.setting.bound)
        for array in jax.tree.leaves(packed):
            array.delete()
        return seconds

    def close(self) -> None:
        self._plans.clear()


@jax.jit
def _copied(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


def _copy(arrays: list[jax.Array], bound: int) -> float:
    """Seconds to copy arrays where they are, as many at a time as the bound allows; compiled beforehand."""
    chunks: list[list[jax.Array]] = [[]]
    room = bound
    for array in arrays:
        size = array.addressable_shards[0].data.nbytes
        if size > room and chunks[-1]:
            chunks.append([])
            room = bound
        chunks[-1].append(array)
        room -= size
    for is_timed in (False, True):
        jax.block_until_ready(arrays)
        began = time.perf_counter()
        for chunk in chunks:
            results = _copied(chunk)
            jax.block_until_ready(results)
            for result in results:
                result.delete()
        if is_timed:
            return time.perf_counter() - began
    raise AssertionError("the second turn returns")


# -- what is counted ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def host_reads() -> Iterator[list[Any]]:
    """Collects every array that the host reads; jax does that in one place."""
    from jax._src.array import ArrayImpl

    read: list[Any] = []
    original: Any = ArrayImpl._value

    def value(array: Any) -> Any:
        read.append(array.shape)
        return original.fget(array)

    setattr(ArrayImpl, "_value", property(value))  # noqa: B010 (a type checker knows it as read-only)
    try:
        yield read
    finally:
        setattr(ArrayImpl, "_value", original)  # noqa: B010


@contextlib.contextmanager
def compiler_output() -> Iterator[list[str]]:
    """What is written on file descriptor 2, the compiler's own words included, added to the list at the end."""
    said: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said.append(file.read().decode(errors="replace"))


def _measure(case: Weights | Cache, bench: Bench) -> dict[str, Facts]:
    """Compiles and checks every transition, then times them in turns."""
    facts: dict[str, Facts] = {}
    runs: dict[str, Callable[[], Values]] = {}
    compiled: dict[tuple[int, int], tuple[list[Any], str, float]] = {}
    for pair in case.setting.pairs:  # all of them first: moving to where a pair begins must not compile another one
        began = time.perf_counter()
        with compiler_output() as said:
            programs = case.compiled(*pair)
        compiled[pair] = (programs, said[0], time.perf_counter() - began)
    for (before, after), (programs, words, compile_s) in compiled.items():
        label = f"{case.name} {before}>{after} {case.dtype}"
        with host_reads() as read:
            _, report, copy = case.move(before, after)
        copy()
        found = Counter(name for program in programs for name in _COLLECTIVE.findall(program.as_text()))
        facts[label] = Facts(
            crossed_bytes=report.moved_bytes,
            extra_bytes=report.peak_extra_bytes,
            oversized=len(getattr(report, "oversized", ())),
            chunks=report.num_chunks,
            programs=len(programs),
            collectives=dict(found),
            rematerialisations=words.count("Involuntary full rematerialization"),
            host_reads=len(read),
            compile_s=compile_s,
        )

        def run(before: int = before, after: int = after) -> Values:
            seconds, _, copy = case.move(before, after)
            return {"seconds": seconds, "copy_s": copy()}

        runs[label] = run
    bench.interleave(runs, case.setting.options.repetitions)
    case.close()
    return facts


def _results(setting: Setting, summaries: dict[str, Summary], facts: dict[str, Facts]) -> dict[str, Any]:
    cases: list[dict[str, Any]] = []
    failures: list[str] = []
    print(f"{'what':<9}{'tp':<6}{'dtype':<9}{'crossed MB':>11}{'ms':>9}{'copy ms':>9}{'ratio':>7}", end="")
    print(f"{'extra MB':>10}{'programs':>9}{'dispatches':>11}{'compile s':>10}{'kept':>5}{'dropped':>8}  collectives")
    for label, summary in summaries.items():
        what, transition, dtype = label.split()
        before, after = map(int, transition.split(">"))
        known, medians = facts[label], summary.medians
        ratio = medians["seconds"] / medians["copy_s"]
        collectives = ", ".join(f"{count} {name}" for name, count in known.collectives.items())
        print(
            f"{what:<9}{transition:<6}{dtype:<9}{known.crossed_bytes / 1e6:>11.2f}{medians['seconds'] * 1e3:>9.2f}"
            f"{medians['copy_s'] * 1e3:>9.2f}{ratio:>7.2f}{known.extra_bytes / 1e6:>10.2f}{known.programs:>9}"
            f"{known.chunks:>11}{known.compile_s:>10.2f}{summary.kept:>5}{summary.dropped:>8}  {collectives or 'none'}"
            f"{'  DISTURBED' if summary.disturbed else ''}"
        )
        failures += [
            f"{label}: {failure}" for failure in known.failures(what == "weights" and after > before, setting.bound)
        ]
        case = {"case": what, "from_tp": before, "to_tp": after, "dtype": dtype, **medians, "ratio": ratio}
        judged = {"kept": summary.kept, "dropped": summary.dropped, "disturbed": summary.disturbed}
        cases.append(case | dataclasses.asdict(known) | judged)
    print(
        f"checks: {len(facts)} transitions, {sum(f.host_reads for f in facts.values())} host reads, "
        f"{sum(f.rematerialisations for f in facts.values())} involuntary rematerialisations, bound "
        f"{setting.bound / 1e6:.2f} MB, {len(failures)} failures"
    )
    options = setting.options
    sizes = {"rows": options.rows, "context": options.context, "block_size": options.block_size}
    return sizes | {"max_extra_bytes": setting.bound, "cases": cases, "failures": failures}


if __name__ == "__main__":
    sys.exit(main())
