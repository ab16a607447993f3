"""The trainer's weights to the rollout, on the same devices: cast, padded and brought into the rollout's layout.

    python scripts/bench.py sync [--shape Qwen2.5-1.5B] [--tp 1] [--workers 1] [--dtypes bfloat16] [--json]

- seconds: `WorkerSet.sync_weights` from float32 master weights, from arrays that are ready to arrays that are ready;
  the rollout's old weights are dropped first, as in every step of a run. Several `--workers` take turns; each has its
  part of the devices, and as all weights are made by one program, their number should not show.
- moved_bytes: master weights read and rollout weights written, once each, however many workers or replicas there are.
- over_copy: seconds over what these bytes take at the measured copy bandwidth. 1 is the best there is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import jax

from bench.engines import build_params, layout_of
from bench.harness import Bench, Case, Values, model_of
from jaxrl.rollout.executor import MeshExecutor
from jaxrl.rollout.layout_programs import ExecutorConfig
from jaxrl.rollout.worker_set import WorkerSet
from jaxrl.sharding.layout import Layout
from jaxrl.sharding.mesh import submeshes


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    model, mesh = model_of(options), layout_of(options).mesh
    config = model.config()
    params = build_params(model, config, mesh, "float32", options.seed)
    for dtype in options.dtypes:
        sizes = ExecutorConfig(num_slots=1, dtype=dtype, max_tp=options.tp)
        group = []
        for count in options.workers:
            parts = submeshes(mesh, count)
            workers = WorkerSet(mesh, [MeshExecutor(config, Layout(part, options.tp), sizes) for part in parts])
            facts = {"case": "weights", "dtype": dtype, "workers": count}
            group.append(Case(facts, lambda turn, workers=workers: _sync(workers, params), _figures))
        yield group


def _sync(workers: WorkerSet, params: Any) -> Values:
    jax.block_until_ready(jax.live_arrays())
    before, began = _live_bytes(), time.perf_counter()
    workers.sync_weights(params, 1)
    jax.block_until_ready(jax.live_arrays())  # the executors' are among them
    seconds = time.perf_counter() - began
    written = (_live_bytes() - before) / len(workers.executors)  # each has all weights
    for executor in workers.executors:  # before another case's
        executor.drop_weights()
    return {"seconds": seconds, "moved_bytes": written + sum(leaf.nbytes for leaf in jax.tree.leaves(params))}


def _live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def _figures(average: Values, ceilings: Any, runs: Any) -> dict:
    rate = average["moved_bytes"] / average["seconds"]
    return {"bytes_per_s": rate, "over_copy": ceilings.copy / rate}


OPTIONS = {"tp": (1, "tensor parallelism of the rollout"), "workers": ([1], "that have the devices")}
BENCH = Bench(__doc__, cases, OPTIONS, has_ceilings=True)
