#!/usr/bin/env python3
"""The trainer's weights to the rollout, on the same devices: cast, padded and brought into the rollout's layout.

    python scripts/bench_sync.py [--shape Qwen2.5-1.5B] [--tp 1] [--workers 1] [--dtypes bfloat16] [--json]

- seconds: `WorkerSet.sync_weights` from float32 master weights, from arrays that are ready to arrays that are ready;
  the rollout's old weights are dropped first, as in every step of a run. Several `--workers` take turns; each has its
  part of the devices, and as all weights are made by one program, their number should not show.
- bytes: master weights read and rollout weights written, once each, however many workers or replicas there are.
- over copy: seconds over what these bytes take at the measured copy bandwidth. 1 is the best there is.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from bench import records
from bench.ceilings import Ceilings, measure_ceilings
from bench.frame import Benchmark, Record, Session
from bench.jax_cases import build_params
from bench.measure import Summary, Values, say

from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.rollout.worker_set import WorkerSet
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import make_mesh, submeshes

QUICK = {"repetitions": 2, "dtypes": ["float32"]}


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--tp", type=int, default=1, help="tensor parallelism of the rollout (1)")
    made.add_argument("--workers", type=int, nargs="+", default=[1], help="workers that have the devices (1)")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    model = records.model_of(options)
    config = model.config()
    devices = records.prepare_devices(options.devices)
    mesh = make_mesh(devices)
    layouts = {count: [Layout(part, options.tp) for part in submeshes(mesh, count)] for count in options.workers}
    moved: dict[str, int] = {}
    with session.on(records.describe_devices(devices), partial(measure_ceilings, len(devices), options.quick)):
        params = build_params(model, config, mesh, "float32", options.seed)
        read = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        for dtype in options.dtypes:
            sizes = ExecutorConfig(num_slots=1, dtype=dtype, max_tp=options.tp)
            cases = {}
            for count, own in layouts.items():
                workers = WorkerSet(mesh, [MeshExecutor(config, layout, sizes) for layout in own])
                case = cases[f"weights {dtype} {count}"] = _case(workers, params)
                moved[f"weights {dtype} {count}"] = read + round(case()["written_bytes"])  # compiles
            session.bench.interleave(cases, options.repetitions)
    cases = _cases(session.summaries(), moved, session.ceilings)
    return session.record({"cases": cases}, model=model.name, devices=len(devices), tp=options.tp)


def _case(workers: WorkerSet, params: Any) -> Callable[[], Values]:
    def sync() -> Values:
        jax.block_until_ready(jax.live_arrays())
        before, began = _live_bytes(), time.perf_counter()
        workers.sync_weights(params, 1)
        jax.block_until_ready(jax.live_arrays())  # the executors' are among them
        seconds = time.perf_counter() - began
        written = (_live_bytes() - before) / len(workers.executors)  # each has all weights
        for executor in workers.executors:  # before another case's
            executor.drop_weights()
        return {"seconds": seconds, "written_bytes": written}

    return sync


def _live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def _cases(summaries: dict[str, Summary], moved: dict[str, int], ceilings: Ceilings) -> list[dict[str, Any]]:
    cases = []
    for label, summary in summaries.items():
        name, dtype, count = label.split()
        seconds = summary.medians["seconds"]
        figures = {
            "seconds": seconds,
            "moved_bytes": moved[label],
            "bytes_per_s": moved[label] / seconds,
            "over_copy": seconds * ceilings.copy / moved[label],
        }
        say(
            f"{name}, {dtype}, {count} worker(s): {seconds * 1e3:.2f} ms for {moved[label] / 1e9:.3f} GB, "
            f"{figures['over_copy']:.2f} times what a copy takes{summary.mark}"
        )
        cases.append({"case": name, "dtype": dtype, "workers": int(count)} | figures | summary.judged)
    return cases


BENCHMARK = Benchmark("sync", __doc__, _measure, _options, QUICK, ("tp", "workers"))
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
