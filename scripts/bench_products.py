#!/usr/bin/env python3
"""Matrix products of a decode step, written in several ways: the reason for the layout of rollout weights.

    python scripts/bench_products.py [--rows 1 8 32 256] [--dtypes float32 bfloat16] [--json]

For each product of a layer and for the vocabulary head (x [rows, in] with weights of `in` x `out`), with enough weights
in turn that no cache holds them:

- right: x [rows, in] @ w [in, out].
- right-transposed: x [rows, in] and w [out, in], as Hugging Face files have them.
- left: w [out, in] @ x [in, rows]: features first, what `features_first` stands for.
- left-turned: the same, the result brought back to [rows, out].

GFLOP/s = 2 * rows * in * out per product / seconds; GB/s counts each weight once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from bench import records
from bench.measure import Bench, Gauge, Values, say, summarise, verdict

FORMS: dict[str, tuple[str, bool, bool]] = {  # einsum, weights [out, in], activations [in, rows]
    "right": ("mk,kn->mn", False, False),
    "right-transposed": ("mk,nk->mn", True, False),
    "left": ("nk,km->nm", True, True),
    "left-turned": ("nk,km->nm", True, True),
}
ENOUGH_BYTES = 64 << 20
QUICK = {"rows": [2], "repetitions": 2, "dtypes": ["float32"]}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    records.common_options(made)
    made.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256], help="rows of x (1 8 32 256)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 2 if it was asked for nonsense."""
    return records.run("bench_products", arguments, _parsed, _run)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    return records.parse(parser(), arguments, QUICK, ("rows",))


def _run(options: argparse.Namespace, called: str) -> dict[str, Any]:
    config = records.model_of(options).config()
    devices = records.prepare_devices(options.devices)
    head = records.header("products", records.describe_devices(devices), records.versions(), called)
    records.print_header(head, say)
    bench = Bench(Gauge() if devices[0].platform == "cpu" else None, say)
    width, mlp = config.hidden_size, config.intermediate_size
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes = {
        "qkv": (width, heads),
        "gate": (width, mlp),
        "down": (mlp, width),
        "logits": (width, config.vocab_size),
    }
    sizes: dict[str, tuple[str, int, str, str, int, int]] = {}
    for dtype in options.dtypes:
        for rows in options.rows:
            for name, (inner, outer) in shapes.items():
                cases = {}
                for form in FORMS:
                    case = f"{name} {inner}x{outer}, {rows} rows, {dtype}, {form}"
                    sizes[case] = (name, rows, dtype, form, inner, outer)
                    cases[case] = _case(form, rows, inner, outer, dtype)
                bench.interleave(cases, options.repetitions)
    if bench.gauge:
        bench.gauge.close()
    say(verdict(bench))
    found = []
    for case, summary in summarise(bench.runs).items():
        name, rows, dtype, form, inner, outer = sizes[case]
        seconds = summary.medians["seconds"] / summary.medians["products"]
        figures = {
            "gflop_per_s": 2 * rows * inner * outer / seconds / 1e9,
            "gb_per_s": inner * outer * jnp.dtype(dtype).itemsize / seconds / 1e9,
        }
        found.append(
            {"product": name, "rows": rows, "dtype": dtype, "form": form, "kept": summary.kept}
            | {"dropped": summary.dropped, "disturbed": summary.disturbed}
            | figures
        )
        mark = "  DISTURBED" if summary.disturbed else ""
        say(f"{case:<58}{figures['gflop_per_s']:>8.1f} GFLOP/s{figures['gb_per_s']:>7.1f} GB/s{mark}")
    kept, dropped = bench.counts()
    return head | {"kept": kept, "dropped": dropped, "results": {"products": found}}


def _case(form: str, rows: int, inner: int, outer: int, dtype: str) -> Callable[[], Values]:
    spec, outputs_first, features_first = FORMS[form]
    count = max(1, min(30, ENOUGH_BYTES // (inner * outer * jnp.dtype(dtype).itemsize)))
    shape = (outer, inner) if outputs_first else (inner, outer)

    @jax.jit
    def run(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        # the factor keeps a turned result from being returned as a view
        return [1.5 * (y.T if form == "left-turned" else y) for y in (_product(spec, x, w) for w in weights)]

    keys = jax.random.split(jax.random.key(0), count + 1)
    x = jax.random.normal(keys[0], (inner, rows) if features_first else (rows, inner), dtype)
    weights = [jax.random.normal(key, shape, dtype) for key in keys[1:]]
    jax.block_until_ready(run(x, weights))

    def once() -> Values:
        began = time.perf_counter()
        jax.block_until_ready(run(x, weights))
        return {"seconds": time.perf_counter() - began, "products": float(count)}

    return once


def _product(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *((weight, x) if spec.startswith("nk") else (x, weight)))


if __name__ == "__main__":
    sys.exit(main())
