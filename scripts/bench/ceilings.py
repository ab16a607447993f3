"""What the device does at best, beside its data sheet; and products as thin as a decode step's.

    python scripts/bench.py ceilings [--shape Qwen2.5-1.5B] [--rows 16 64 256] [--dtypes bfloat16] [--json]

- copy, read, FLOP/s: `bench/machine.py` defines them. Where the device is known, its data sheet's rates stand beside.
- thin products: x of `--rows` rows by the model's weights (qkv, o, gate_up, down of a layer, and the vocabulary head),
  over so many weights in turn that no cache holds them. GB/s counts each weight once; of copy, of FLOP/s: over the
  measured ceilings. They say what a decode step's products reach on this device, alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from bench.harness import Bench, Case, model_of
from bench.machine import queued_s, random_array
from jaxrl.models.config import ModelConfig


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


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    enough = 1 << 20 if options.quick else 256 << 20 if jax.default_backend() == "cpu" else 1 << 30
    for dtype in options.dtypes:
        for name, (inner, outer) in products(model_of(options).config()).items():
            count = max(2, enough // (inner * outer * jnp.dtype(dtype).itemsize))
            weights = [random_array((inner, outer), dtype, i) for i in range(count)]
            sizes = {"case": name, "inner": inner, "outer": outer, "dtype": dtype}
            yield [_thin(sizes | {"rows": rows}, weights) for rows in options.rows]
            for weight in weights:
                weight.delete()


def _thin(facts: dict, weights: list[jax.Array]) -> Case:
    """A product with each of the weights; an x for each, because XLA would merge products of one x."""
    rows, inner, dtype = facts["rows"], facts["inner"], facts["dtype"]
    xs = [random_array((rows, inner), dtype, len(weights) + i) for i in range(len(weights))]
    run = jax.jit(lambda xs, weights: [x @ w for x, w in zip(xs, weights, strict=True)])

    def figures(average, ceilings, runs) -> dict:
        flops = 2 * rows * inner * facts["outer"] / average["seconds"]
        rates = ceilings.of_bytes(weights[0].nbytes / average["seconds"])
        return rates | {"flops_per_s": flops, "flops_fraction": flops / ceilings.flops[dtype]}

    return Case(facts, lambda turn: {"seconds": queued_s(lambda: run(xs, weights)) / len(weights)}, figures)


BENCH = Bench(__doc__, cases, {"rows": ([16, 64, 256], "rows of x")}, quick={"rows": [2]}, has_ceilings=True)
