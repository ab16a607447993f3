#!/usr/bin/env python3
"""What the device does at best, beside its data sheet; and products as thin as those of a decode step.

    python scripts/bench_ceilings.py [--shape Qwen2.5-1.5B] [--rows 16 64 256] [--dtypes bfloat16] [--json]

- copy, read, square products: the ceilings that all benchmarks divide by (`scripts/bench/ceilings.py` defines them),
  and their share of the data sheet's rates where the device is known: memory bandwidth, and dense bfloat16 products.
- thin products: x [rows, in] @ w [in, out] for the matrices of a layer (q, k and v together, gate and up together) and
  the vocabulary head, over so many weights in turn that no cache holds them. GB/s counts each weight once; of copy, of
  FLOP/s: over the measured ceilings. They say what a decode step's products reach on this device, alone.

Data are random, calls are queued and waited for once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from bench import records
from bench.ceilings import Ceilings, measure_ceilings, queued_s, random_array
from bench.frame import Benchmark, Record, Session
from bench.measure import Summary, Values, say

from jaxrl.models.config import ModelConfig

QUICK = {"rows": [2], "repetitions": 2, "dtypes": ["float32"]}
ENOUGH_BYTES = {"cpu": 256 << 20, "other": 1 << 30}
QUICK_BYTES = 1 << 20


def _options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256], help="rows of x (16 64 256)")


def _measure(options: argparse.Namespace, session: Session) -> Record:
    model = records.model_of(options)
    devices = records.prepare_devices(options.devices)
    enough = QUICK_BYTES if options.quick else ENOUGH_BYTES.get(devices[0].platform, ENOUGH_BYTES["other"])
    sizes: dict[str, dict[str, Any]] = {}
    with session.on(records.describe_devices(devices), partial(measure_ceilings, len(devices), options.quick)):
        for dtype in options.dtypes:
            for name, (inner, outer) in products(model.config()).items():
                count = max(2, enough // (inner * outer * jnp.dtype(dtype).itemsize))
                weights = [random_array((inner, outer), dtype, i) for i in range(count)]
                cases = {}
                for rows in options.rows:
                    label = f"{name} {inner}x{outer}, {rows} rows, {dtype}"
                    sizes[label] = {"case": name, "inner": inner, "outer": outer, "rows": rows, "dtype": dtype}
                    cases[label] = _thin(rows, weights)
                session.bench.interleave(cases, options.repetitions)
                for weight in weights:
                    weight.delete()
    _print_ceilings(session.ceilings)
    cases = _cases(session.summaries(), sizes, session.ceilings)
    return session.record({"cases": cases}, model=model.name, devices=len(devices))


def products(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of a decode step's products by name."""
    width, mlp = config.hidden_size, config.intermediate_size
    queries, both = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    return {
        "qkv": (width, queries + both),
        "o": (queries, width),
        "gate_up": (width, 2 * mlp),
        "down": (mlp, width),
        "head": (width, config.vocab_size),
    }


def _thin(rows: int, weights: list[jax.Array]) -> Callable[[], Values]:
    """A product with each of the weights; an x for each, because XLA would merge products of one x."""
    inner, dtype = weights[0].shape[0], weights[0].dtype
    xs = [random_array((rows, inner), dtype, len(weights) + i) for i in range(len(weights))]
    run = jax.jit(lambda xs, weights: [x @ w for x, w in zip(xs, weights, strict=True)])
    return lambda: {"seconds": queued_s(lambda: run(xs, weights), tries=3) / len(weights)}


def _cases(summaries: dict[str, Summary], sizes: dict[str, dict[str, Any]], ceilings: Ceilings) -> list[Any]:
    cases = []
    for label, summary in summaries.items():
        size, seconds = sizes[label], summary.medians["seconds"]
        weight_bytes = size["inner"] * size["outer"] * jnp.dtype(size["dtype"]).itemsize
        flops = 2 * size["rows"] * size["inner"] * size["outer"] / seconds
        figures = {
            "seconds": seconds,
            "bytes_per_s": weight_bytes / seconds,
            "copy_fraction": weight_bytes / seconds / ceilings.copy,
            "flops_per_s": flops,
            "flops_fraction": flops / ceilings.flops[size["dtype"]],
        }
        say(
            f"{label:<44}{figures['bytes_per_s'] / 1e9:>9.1f} GB/s{figures['copy_fraction']:>8.1%} of copy"
            f"{flops / 1e9:>11.1f} GFLOP/s{figures['flops_fraction']:>8.1%}{summary.mark}"
        )
        cases.append(size | figures | summary.judged)
    return cases


def _print_ceilings(ceilings: Ceilings) -> None:
    sheet = "no data sheet is known" if ceilings.nominal is None else f"data sheet of {ceilings.nominal.name}"
    say(f"{'ceiling':<16}{'measured':>12}         {sheet}")
    for name, value, unit, share in ceilings.table():
        say(f"{name:<16}{value:>12.1f} {unit:<8}{'' if share is None else f'{share:.1%}'}")


BENCHMARK = Benchmark("ceilings", __doc__, _measure, _options, QUICK, ("rows",))
main, parser = BENCHMARK.main, BENCHMARK.parser

if __name__ == "__main__":
    sys.exit(main())
